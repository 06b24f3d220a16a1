"""The channel moves: the new version takes over under load, a bad one never does."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from support.channels import move_channel
from support.releases import describe_bundle, make_release
from support.steps import compile_by_steps
from tvmflow import runtime
from tvmflow.bundle import extract, keygen, pack, sha256_file, sign
from tvmflow.errors import BundleError
from tvmflow.serving import Options, Source, release_source, server
from tvmflow.serving.app import Service
from tvmflow.serving.batching import Batcher
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.server import Watcher
from tvmflow.serving.source import ServedModel, channel_source, load
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.keys import channel_key

CLIENTS = 8
# Each client ends after so many answers of the new version.
ENOUGH = 5
Serve = Callable[..., Any]
Point = Callable[[str, str], None]


def _body(arrays: dict[str, Any]) -> dict[str, Any]:
    datatypes = {"float32": "FP32", "int64": "INT64"}
    return {
        "inputs": [
            {"name": name, "datatype": datatypes[array.dtype.name], "shape": list(array.shape), "data": array.tolist()}
            for name, array in arrays.items()
        ]
    }


def _until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a condition; the wait ends with a failure after `seconds`."""
    expired = threading.Event()
    timer = threading.Timer(seconds, expired.set)
    timer.daemon = True
    timer.start()
    while not condition():
        assert not expired.is_set(), "the condition did not come about"
    timer.cancel()


def test_a_channel_that_moves_under_load_loses_no_request(
    serve: Serve, point: Point, inputs: Any, reference: Any
) -> None:
    point("live", "1")
    start, move = threading.Barrier(CLIENTS + 1), threading.Event()

    def ask(client_number: int, url: str) -> list[str]:
        """Send requests and check every answer until the new version is answering; return the versions."""
        versions: list[str] = []
        arrays = inputs(1 + client_number % 3, client_number)
        expected = {version: reference(version, arrays)["sum"] for version in ("1", "2")}
        body = _body(arrays)
        with httpx.Client(timeout=60, trust_env=False) as client:
            while versions[-ENOUGH:] != ["2"] * ENOUGH:
                response = client.post(url, json=body)
                assert response.status_code == 200, response.text
                document = response.json()
                version = document["model_version"]
                actual = np.array(document["outputs"][0]["data"]).reshape(-1, 4)
                np.testing.assert_allclose(actual, expected[version], rtol=1e-5, atol=1e-6)
                versions.append(version)
                if len(versions) == 1:
                    start.wait(60)
        assert move.is_set()
        return versions

    with serve("small@live", "--poll", 0.1) as running, ThreadPoolExecutor(CLIENTS) as pool:
        url = f"{running.address}/v2/models/small/infer"
        clients = [pool.submit(ask, number, url) for number in range(CLIENTS)]
        start.wait(60)
        move.set()
        point("live", "2")
        histories = [each.result(180) for each in clients]
        assert all(versions == sorted(versions) for versions in histories)
        assert all({"1", "2"} == set(versions) for versions in histories)
        assert running.metric("tvmflow_swaps_total") == 1
        assert running.metric("tvmflow_failed_swaps_total") == 0
        assert running.metric("tvmflow_inference_seconds_count") == sum(map(len, histories))
        assert 'tvmflow_model_info{name="small",version="2"} 1.0' in running.client.get("/metrics").text
        assert 'version="1"' not in running.client.get("/metrics").text
        assert running.client.get("/v2/models/small").json()["versions"] == ["2"]
        assert running.client.get("/v2/models/small/versions/1").status_code == 404


def test_a_release_that_fails_verification_does_not_take_over_and_a_rollback_does(
    serve: Serve, point: Point, inputs: Any, reference: Any
) -> None:
    point("canary", "1")
    arrays = inputs(2)
    with serve("small@canary", "--poll", 0.1) as running:
        point("canary", "3")
        _until(lambda: running.metric("tvmflow_failed_swaps_total") == 1)
        ready = running.client.get("/v2/health/ready")
        assert ready.status_code == 200
        assert "version 3 is refused" in ready.json()["problem"]
        assert "differs from the original's" in ready.json()["problem"]
        document = running.client.post("/v2/models/small/infer", json=_body(arrays)).json()
        assert document["model_version"] == "1"
        actual = np.array(document["outputs"][0]["data"]).reshape(-1, 4)
        np.testing.assert_allclose(actual, reference("1", arrays)["sum"], rtol=1e-5, atol=1e-6)
        # The refused version is not retried, and the next good version takes over.
        point("canary", "2")
        _until(lambda: running.client.get("/v2/models/small").json()["versions"] == ["2"])
        assert running.metric("tvmflow_failed_swaps_total") == 1
        assert running.client.get("/v2/health/ready").json() == {"ready": True}
        # A rollback is a swap as well.
        point("canary", "1")
        _until(lambda: running.client.get("/v2/models/small").json()["versions"] == ["1"])
        assert running.metric("tvmflow_swaps_total") == 2


def test_a_version_that_this_machine_cannot_check_is_tried_again_after_a_pause_that_grows(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_setting_of_workers: None
) -> None:
    source = Source("small", lambda: "2", lambda version: iter([bundle]), is_channel=True)
    batcher = Batcher(max_batch=1, max_delay=0, on_batch=lambda rows: None)
    service = Service([ServedModel("small", "1", runtime.load(bundle))], batcher, Metrics(), Options().limits)
    seconds = 0.0
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: seconds))

    async def follow() -> None:
        nonlocal seconds
        watcher, attempts = Watcher(service, source, Options(poll=5), asyncio.get_running_loop()), []
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
            for seconds in range(20):
                before = service.metrics.failed_swaps._value.get()
                watcher.poll()
                attempts += [seconds] * int(service.metrics.failed_swaps._value.get() - before)
        assert attempts == [0, 5, 15]
        assert "version 2 cannot be checked now" in service.problems["small"]
        seconds = 35
        await asyncio.to_thread(watcher.poll)
        assert not service.problems

    asyncio.run(follow())
    assert service.models["small"].version == "2"
    service.models["small"].model.close()
    batcher.close()


def _swap_through(paths: list[Path]) -> None:
    """Serve the bundle at each path in turn, as a channel moves from one to the next."""
    versions = iter(range(len(paths)))
    source = Source("small", lambda: str(next(versions)), lambda version: iter([paths[int(version)]]), is_channel=True)
    options = Options()
    batcher = Batcher(max_batch=1, max_delay=0, on_batch=lambda rows: None)
    service = Service([load(source, source.desired_version(), None)], batcher, Metrics(), options.limits)

    async def follow() -> None:
        watcher = Watcher(service, source, options, asyncio.get_running_loop())
        for _ in paths[1:]:
            assert all(path.is_file() for path in paths)
            await asyncio.to_thread(watcher.poll)

    asyncio.run(follow())
    assert service.models["small"].version == str(len(paths) - 1)
    service.models["small"].model.close()
    batcher.close()


@pytest.fixture
def one_setting_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have started this process's workers, with other settings."""
    monkeypatch.setenv("TVM_THREAD_POOL_SPIN_COUNT", "0")


@pytest.mark.usefixtures("one_setting_of_workers")
def test_the_last_two_bundles_stay_in_the_cache(bundle: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{version}.tar.gz" for version in range(3)]
    for path in paths:
        shutil.copyfile(bundle, path)
    _swap_through(paths)
    assert [path.is_file() for path in paths] == [False, True, True]


@pytest.fixture(scope="module")
def bundle_apart(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 with its weights in a file of their own."""
    document = {"name": "small", "model": {"onnx": str(models["1"])}, "build": {"weights": "apart"}}
    return compile_by_steps(document, models["1"].parent, tmp_path_factory.mktemp("state"))


@pytest.mark.usefixtures("one_setting_of_workers")
@pytest.mark.parametrize("is_shared", [False, True])
def test_weights_stay_as_long_as_a_bundle_that_stays_needs_them(
    bundle: Path, bundle_apart: Path, tmp_path: Path, is_shared: bool
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    manifest = extract(bundle_apart, files)
    cache = tmp_path / "cache"
    cache.mkdir()
    weights = cache / manifest.files["mod.params"].sha256
    shutil.copyfile(files / "mod.params", weights)
    paths = [cache / f"{version}.tar.gz" for version in range(3)]
    for path in paths:
        shutil.copyfile(bundle, path)
    for path in paths[: 2 if is_shared else 1]:
        pack(path, manifest, {item.name: item for item in files.iterdir()}, leave_weights_out=True)
    _swap_through(paths)
    assert (paths[0].exists(), weights.exists()) == (False, is_shared)


def test_a_bundle_of_another_model_is_not_served(store: ReleaseStore, tmp_path: Path) -> None:
    """Somebody who can write the store has published another model's bundle, which may well be signed."""
    store.publish(store.get_release("small", "1").model_copy(update={"name": "foreign"}), [])
    with pytest.raises(BundleError, match="the release of 'foreign' holds a bundle of 'small'"):
        load(release_source(store, "foreign", "1", tmp_path), "1", None)


def test_a_channel_that_is_put_back_to_an_older_one_is_not_followed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_THREAD_POOL_SPIN_COUNT", "0")
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", str(keygen(tmp_path / "key")))
    signed, memory = tmp_path / "signed.tar.gz", tmp_path / "seen"
    sign(bundle, tmp_path / "key", signed)
    config = StoreConfig("releases", folder=tmp_path / "releases", signing_key=tmp_path / "key", memory=memory)
    store, key = ReleaseStore(config), channel_key("small", "production")
    older = {}
    for version in ("1", "2"):
        store.publish(make_release("small", version, describe_bundle(signed)), [(signed, sha256_file(signed))])
        move_channel(store, "small", "production", version)
        older[version] = store.objects.get(key) or b""
    source = channel_source(store, "small", "production", tmp_path / "cache")
    batcher = Batcher(max_batch=1, max_delay=0, on_batch=lambda rows: None)
    service = Service([load(source, source.desired_version(), None)], batcher, Metrics(), Options().limits)

    async def follow() -> None:
        watcher = Watcher(service, source, Options(), asyncio.get_running_loop())
        store.objects.put(key, older["1"], "putting an older channel in its place")
        await asyncio.to_thread(watcher.poll)
        assert "somebody has put an older one in its place" in str(service.problems["small"])
        store.objects.put(key, older["2"], "putting the newer channel back")
        await asyncio.to_thread(watcher.poll)

    asyncio.run(follow())
    assert service.models["small"].version == "2"
    service.models["small"].model.close()
    batcher.close()
