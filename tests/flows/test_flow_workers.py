"""Work spread over workers: targets made on work pools, found by the machine that releases, reused after a crash."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import requests
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.automations import register_automations
from flows.deployments import register
from flows.remote import pools_of
from flows.runs import connect, limit_name, start
from mlflow import MlflowClient
from support import scale
from support.databases import Databases
from support.machines import other_preset
from support.rclone import rclone_s3
from support.servers import free_port, mlflow_server, prefect_server
from support.waits import wait_until
from tvmflow.errors import SettingsError
from tvmflow.hardware.target import resolve
from tvmflow.services import open_workspace
from tvmflow.settings import Settings
from tvmflow.store import ReleaseStore, StoreConfig


@dataclass(frozen=True)
class Cluster:
    """A Prefect server, an S3 store, and the machines that share them."""

    api: str
    store: ReleaseStore
    folder: Path
    machine: Any

    def named(self, home: str, **settings: str) -> Any:
        """A machine with a state folder of its own."""
        return replace(self.machine, home=self.folder / home, settings={**self.machine.settings, **settings})

    def releasing(self, pools: dict[str, str], home: str = "releasing", **settings: str) -> Any:
        """A machine that has these targets made on pools."""
        return self.named(home, TVMFLOW_TARGET_POOLS=json.dumps(pools), **settings)

    def ask(self, path: str, **body: Any) -> Any:
        """What the Prefect server answers."""
        answer = requests.post(f"{self.api}{path}", json=body, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def runs(self, name: str) -> list[dict[str, Any]]:
        """The runs on pools of a release's targets."""
        return list(self.ask("/flow_runs/filter", flow_runs={"tags": {"all_": [name]}}))

    def online(self, pool: str) -> list[str]:
        """The workers of a pool that are up."""
        workers = self.ask(f"/work_pools/{pool}/workers/filter")
        return [worker["name"] for worker in workers if worker["status"] == "ONLINE"]


@contextmanager
def working(cluster: Cluster, pool: str, home: str) -> Iterator["subprocess.Popen[str]"]:
    """A process worker of a pool with a state folder of its own; it and all that it started end with the body."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", home]
    with (cluster.folder / f"{home}.log").open("w") as log:
        worker = subprocess.Popen(
            command,
            env=cluster.named(home).environment,
            cwd=cluster.folder,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        wait_until(lambda: home in cluster.online(pool), message=f"the worker {home} is online", process=worker)
        yield worker
    finally:
        kill(worker)


def kill(process: "subprocess.Popen[str]") -> None:
    """As when the machine is lost: the process and all that it started are gone at once."""
    if process.poll() is None:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()
    process.wait(30)


def shared_settings(api: str, s3: ReleaseStore, folder: Path) -> dict[str, str]:
    """The settings of machines that share these servers; MLflow's database is in `folder`."""
    return {
        "TVMFLOW_PREFECT_API_URL": api,
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(folder),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "TVMFLOW_SHARED_WORKSPACE": "true",
        "TVMFLOW_S3_ENDPOINT": s3.config.endpoint or "",
        "TVMFLOW_S3_BUCKET": s3.config.bucket,
        "TVMFLOW_S3_PREFIX": "workers",
        "TVMFLOW_S3_ACCESS_KEY": s3.config.access_key or "",
        "TVMFLOW_S3_SECRET_KEY": s3.config.secret_key or "",
        "TVMFLOW_S3_SINGLE_WRITER": "true",
        "TVMFLOW_MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
    databases: Databases,
    s3: ReleaseStore,
    machine: Any,
    request: pytest.FixtureRequest,
) -> Iterator[Cluster]:
    """The servers and work pools with their deployments; `bare` has none.

    With `--long`, when workers run, Prefect's server is one of its own, on PostgreSQL.
    """
    folder = tmp_path_factory.mktemp("cluster")
    databases.mlflow(folder / "mlflow.db")
    with ExitStack() as servers:
        if scale.is_long():
            address = request.getfixturevalue("postgres")("workers").replace("postgresql:", "postgresql+asyncpg:")
            own = prefect_server(folder, services=True, PREFECT_API_DATABASE_CONNECTION_URL=address)
            api = servers.enter_context(own)
        else:
            api = request.getfixturevalue("prefect_server")
        shared = shared_settings(api, s3, folder)
        store = ReleaseStore(replace(s3.config, prefix="workers"))
        created = Cluster(api, store, folder, replace(machine, home=folder / "nobody", settings=shared))
        for pool in ("first", "second", "idle", "bare"):
            created.ask("/work_pools/", name=pool, type="process")
        with temporary_settings({PREFECT_API_URL: api}):
            register([], "first", ["first", "second", "idle"])
        yield created


@pytest.fixture(scope="module")
def first(cluster: Cluster) -> Iterator["subprocess.Popen[str]"]:
    with working(cluster, "first", "worker-a") as worker:
        yield worker


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator["subprocess.Popen[str]"]:
    with working(cluster, "second", "worker-b") as worker:
        yield worker


@pytest.mark.long
@pytest.mark.usefixtures("first", "second")
def test_a_release_is_fanned_out_over_two_workers_and_found_by_every_machine(
    cluster: Cluster, make: Any, tmp_path: Path
) -> None:
    make.onnx(tmp_path)
    preset = other_preset()
    file = make.file(tmp_path, name="fanned", targets=[preset, "native"])
    machine = cluster.releasing({preset: "first", "native": "second"})
    result = machine.release(file)
    assert result.code == 0, result.stderr
    assert f"fanned-build-{preset}" in logs(cluster.folder / "worker-a")
    assert "fanned-build-native" in logs(cluster.folder / "worker-b")
    assert not [name for name in logs(machine.home) if "-build-" in name]
    pools = {run["name"]: run["work_pool_name"] for run in cluster.runs("fanned")}
    assert pools == {f"make fanned for {preset}": "first", "make fanned for native": "second"}
    released = {item.target: item for item in cluster.store.verify_release("fanned", "1").targets}
    assert set(released) == {preset, "native"}
    for item in result.document["targets"]:
        assert item["bundle_sha256"] == released[item["target"]].bundle.sha256
        assert item["measurements"]
        assert machine.run("verify", cluster.folder / item["bundle_path"]).code == 0

    # A machine that makes everything itself, with another copy of the folder, finds all of it done.
    copied = shutil.copytree(tmp_path, tmp_path / "copied", ignore=shutil.ignore_patterns("copied"))
    other = cluster.named("other").release(copied / file.name)
    assert other.code == 0, other.stderr
    assert {step["status"] for item in other.document["targets"] for step in item["steps"].values()} == {"cached"}
    assert [item["bundle_sha256"] for item in other.document["targets"]] == [
        item["bundle_sha256"] for item in result.document["targets"]
    ]
    # And the first starts no more runs.
    assert machine.release(file).document["version"] == "1"
    assert len(cluster.runs("fanned")) == 2


@pytest.mark.long
def test_an_interrupt_of_the_release_cancels_its_runs(
    cluster: Cluster, first: "subprocess.Popen[str]", make: Any, tmp_path: Path
) -> None:
    file = make.waiting(tmp_path, "cancelled")
    process = cluster.releasing({"native": "first"}).start("release", file, "--json")
    wait_until((tmp_path / "reached").exists, message="the worker scores the bundle", process=process)
    scoring = psutil.Process(first.pid).children(recursive=True)
    assert scoring
    os.kill(process.pid, signal.SIGINT)
    assert cluster.machine.finish(process).code == 130
    wait_until(
        lambda: [run["state_type"] for run in cluster.runs("cancelled")] == ["CANCELLED"],
        message="it is cancelled",
        process=first,
    )
    _, alive = psutil.wait_procs(scoring, timeout=30)
    assert not [child.cmdline() for child in alive]


@pytest.mark.long
@pytest.mark.usefixtures("first")
def test_what_a_worker_says_arrives(cluster: Cluster, make: Any, tmp_path: Path) -> None:
    make.onnx(tmp_path)
    file = make.file(tmp_path, name="refused", targets=["aarch64-generic"])
    result = cluster.releasing({"aarch64-generic": "first"}).release(file)
    assert result.code == 1
    # The run's error comes back as it was raised on the worker, and names the pool.
    assert result.document["error"]["type"] == "MachineError"
    assert [name for name in ("'aarch64-generic'", "x86_64", "pool 'first'") if name not in result.sentence] == []


@pytest.mark.long
@pytest.mark.usefixtures("first")
def test_what_a_killed_worker_had_done_is_reused_by_another(
    cluster: Cluster, second: "subprocess.Popen[str]", make: Any, tmp_path: Path
) -> None:
    file = make.waiting(tmp_path, "killed")
    with ThreadPoolExecutor(1) as executor:
        releasing = cluster.releasing({"native": "second"}, TVMFLOW_WORKER_TIMEOUT_SECONDS="10")
        release = executor.submit(releasing.release, file)
        wait_until(lambda: (tmp_path / "reached").exists() or release.done(), message="the worker scores the bundle")
        kill(second)
        result = release.result()
    assert result.code == 1
    assert result.document["error"]["type"] == "StepError"
    assert all(word in result.sentence for word in ("'second'", "'native'", "heartbeat"))
    assert [run["state_type"] for run in cluster.runs("killed")] == ["CRASHED"]
    assert cluster.store.list_versions("killed") == []

    (tmp_path / "go").touch()
    again = cluster.releasing({"native": "first"}).release(file)
    assert again.code == 0, again.stderr
    assert {name: again.steps[name] for name in ("tune", "build", "package", "validate")} == {
        "tune": "cached",
        "build": "cached",
        "package": "cached",
        "validate": "ran",
    }
    assert "killed-build-native" in logs(cluster.folder / "worker-b")
    assert "killed-build-native" not in logs(cluster.folder / "worker-a")


@contextmanager
def listening() -> Iterator[tuple[str, "queue.Queue[str]"]]:
    """The address of a server that takes notifications, and the queue of their texts."""
    texts: queue.Queue[str] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts.put(json.loads(self.rfile.read(int(self.headers["content-length"])))["text"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", texts
        server.shutdown()


@pytest.mark.long
def test_a_run_whose_worker_died_is_ended_and_reported(cluster: Cluster) -> None:
    """The run is one that a worker took and left: it says that it lives once, and then nothing any more."""
    with temporary_settings({PREFECT_API_URL: cluster.api}), listening() as (address, texts):
        block = CustomWebhookNotificationBlock(name="oncall", url=address, json_data={"text": "{{body}}"})
        block.save("oncall", overwrite=True)
        names = register_automations("custom-webhook/oncall", silence=10)
        assert len(names) == 2
        assert register_automations("custom-webhook/oncall", silence=10) == names
        assert sorted(item["name"] for item in cluster.ask("/automations/filter")) == sorted(names)
        with pytest.raises(SettingsError, match="'slack-webhook/nobody'"):
            register_automations("slack-webhook/nobody")
        # No worker of this pool is up.
        job = {"sha256": "0" * 64, "size": 0, "name": "job.json"}
        run = start("make/idle", {"name": "x", "target": "y", "store": {}, "key": "", "job": job}, tags=["lost"])
        cluster.ask(f"/flow_runs/{run}/set_state", state={"type": "RUNNING"}, force=True)
        (tags,) = (each["tags"] for each in cluster.runs("lost"))
        heartbeat = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": "prefect.flow-run.heartbeat",
            "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
            "related": [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in tags],
        }
        requests.post(f"{cluster.api}/events", json=[heartbeat], timeout=30).raise_for_status()
        wait_until(lambda: [each["state_type"] for each in cluster.runs("lost")] == ["CRASHED"], message="it is ended")
        assert "sends no heartbeat any more" in texts.get(timeout=60)


@pytest.mark.long
def test_a_release_lives_through_a_restart_of_prefect(
    machine: Any, s3: ReleaseStore, make: Any, tmp_path: Path
) -> None:
    port, folder = free_port(), tmp_path / "servers"
    folder.mkdir()
    api = f"http://127.0.0.1:{port}/api"
    cluster = Cluster(api, s3, folder, replace(machine, home=folder, settings=shared_settings(api, s3, folder)))
    file = make.waiting(tmp_path, "outlasting")
    with ExitStack() as stack:
        with prefect_server(folder, services=True, port=port), temporary_settings({PREFECT_API_URL: api}):
            cluster.ask("/work_pools/", name="only", type="process")
            register([], "only", ["only"])
            worker = stack.enter_context(working(cluster, "only", "worker"))
            process = cluster.releasing({"native": "only"}).start("release", file, "--json")
            wait_until((tmp_path / "reached").exists, message="the worker scores the bundle", process=process)
        wait_until(lambda: "heartbeat did not reach Prefect" in (folder / "worker.log").read_text(), process=worker)
        # Both meet a server that is away: the worker as it ends its step, the release as it polls.
        (tmp_path / "go").touch()
        stack.enter_context(prefect_server(folder, services=True, port=port))
        result = machine.finish(process)
    assert result.code == 0, result.stderr


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_release_on_a_pool_lives_through_two_minutes_without_any_server(
    machine: Any, databases: Databases, make: Any, tmp_path: Path
) -> None:
    """S3, MLflow and Prefect go while the worker scores the bundle, which ends while they are away."""
    data, folder, models = tmp_path / "s3", tmp_path / "servers", tmp_path / "model"
    for path in (data, folder, models):
        path.mkdir()
    databases.mlflow(folder / "mlflow.db")
    databases.prefect(folder / "prefect.db")
    prefect_port, mlflow_port = free_port(), free_port()
    file = make.waiting(models, "two-minutes")

    def start_servers(stack: ExitStack, before: StoreConfig | None = None) -> StoreConfig:
        config = stack.enter_context(rclone_s3(data, bucket="models", before=before))
        stack.enter_context(prefect_server(folder, services=True, port=prefect_port))
        stack.enter_context(mlflow_server(folder, port=mlflow_port))
        return config

    api = f"http://127.0.0.1:{prefect_port}/api"
    with ExitStack() as stack, temporary_settings({PREFECT_API_URL: api}):
        with ExitStack() as servers:
            config = start_servers(servers)
            settings = {
                **shared_settings(api, ReleaseStore(config), folder),
                "TVMFLOW_MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow_port}",
            }
            store = ReleaseStore(replace(config, prefix="workers"))
            cluster = Cluster(api, store, folder, replace(machine, home=folder, settings=settings))
            cluster.ask("/work_pools/", name="only", type="process")
            register([], "only", ["only"])
            with connect("limit the runs of the model") as client:
                client.upsert_global_concurrency_limit_by_name(limit_name("two-minutes"), 1)
            worker = stack.enter_context(working(cluster, "only", "worker"))
            process = cluster.releasing({"native": "only"}).start("release", file, "--json")
            wait_until((models / "reached").exists, message="the worker scores the bundle", process=process)
        (models / "go").touch()
        ends_at = time.monotonic() + 120
        wait_until(lambda: time.monotonic() > ends_at, 180, message="two minutes are over", process=process)
        assert worker.poll() is None
        start_servers(stack, config)
        result = cluster.machine.finish(process)
        assert result.code == 0, result.stderr
        assert store.verify_release("two-minutes", "1").mlflow_run_id == result.document["mlflow_run_id"]
        mlflow = MlflowClient(settings["TVMFLOW_MLFLOW_TRACKING_URI"])
        assert [item.version for item in mlflow.search_model_versions("name = 'two-minutes'")] == ["1"]
        runs = mlflow.search_runs([mlflow.get_experiment_by_name("tvmflow").experiment_id])
        assert {run.info.status for run in runs} == {"FINISHED"}
        assert [run["state_type"] for run in cluster.runs("two-minutes")] == ["COMPLETED"]


def test_a_pool_without_workers_is_reported_before_any_work(cluster: Cluster, make: Any, tmp_path: Path) -> None:
    make.onnx(tmp_path)
    result = cluster.releasing({"native": "idle"}, home="to-idle").release(make.file(tmp_path))
    assert result.code == 2
    names = ("'native'", "'idle'", "`prefect worker start --pool idle`")
    assert [name for name in names if name not in result.sentence] == []
    assert "export" not in result.stderr


@pytest.mark.parametrize(
    ("pool", "names"),
    [("none", ["'none'", "'native'"]), ("bare", ["make/bare", "`tvmflow deploy`"])],
)
def test_a_pool_that_cannot_take_its_target_is_reported(cluster: Cluster, pool: str, names: list[str]) -> None:
    with temporary_settings({PREFECT_API_URL: cluster.api}), pytest.raises(SettingsError) as caught:
        pools_of(settings(prefect_api_url=cluster.api, target_pools={"native": pool}), (resolve("native"),))
    assert [name for name in names if name not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("without", "name"),
    [
        ({"shared_workspace": False, "prefect_api_url": "http://127.0.0.1:1/api"}, "shared_workspace"),
        ({"prefect_api_url": None}, "prefect_api_url"),
    ],
)
def test_a_setting_that_pools_need_is_reported(without: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        pools_of(settings(target_pools={"native": "first"}, **without), (resolve("native"),))


def test_a_workspace_is_not_shared_through_a_store_that_no_other_machine_reaches(s3: ReleaseStore) -> None:
    with pytest.raises(SettingsError, match=r"s3_endpoint.*s3_bucket"):
        open_workspace(settings(), s3)


def settings(**fields: Any) -> Settings:
    """Settings of a machine that shares its workspace, whatever the environment says."""
    return Settings.model_construct(**{**Settings.model_construct().__dict__, "shared_workspace": True, **fields})


def logs(home: Path) -> set[str]:
    """The steps with targets whose processes ran on the machine with this state folder."""
    return {f"{path.parent.name}-{path.stem}" for path in (home / "logs").glob("*/*.log")}
