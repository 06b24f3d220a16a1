"""Three releases of a small model, in a real store, and servers in processes of their own."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper

from support.channels import move_channel
from support.models import save_model
from support.processes import TVMFLOW, clean_environment
from support.rclone import rclone_s3
from support.releases import describe_bundle, make_release
from support.steps import compile_by_steps
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import extract, pack
from tvmflow.store import ReleaseStore, StoreConfig

NAME = "small"


@dataclass(frozen=True)
class Running:
    """A server, and a client for it."""

    process: "subprocess.Popen[str]"
    client: httpx.Client
    address: str
    rpc_address: str | None = None

    def metric(self, name: str) -> float:
        """The sum of a metric's samples of this name, over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        assert values, f"no metric {name}"
        return sum(map(float, values))


Serve = Callable[..., AbstractContextManager[Running]]


def _save(path: Path, seed: int) -> None:
    """sum = x @ weights + y, doubled = rounded = 2 * count; weights by seed."""
    weights = np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["product"]),
        helper.make_node("Add", ["product", "y"], ["sum"]),
        helper.make_node("Mul", ["count", "two"], ["doubled"]),
    ]
    inputs = [("x", ["batch", 8]), ("y", ["batch", 4]), ("count", ["batch"], TensorProto.INT64)]
    outputs = [("sum", ["batch", 4]), ("doubled", ["batch"], TensorProto.INT64)]
    save_model(path, nodes, inputs, outputs, {"weights": weights, "two": np.array([2], np.int64)})


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The ONNX files of versions 1 and 2."""
    folder = tmp_path_factory.mktemp("models")
    for version in ("1", "2"):
        _save(folder / f"{version}.onnx", int(version))
    return {version: folder / f"{version}.onnx" for version in ("1", "2")}


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, Path]:
    """The bundles of versions 1 and 2, built by the real steps, and of 3, whose golden sample is another model's."""
    state = tmp_path_factory.mktemp("state")
    paths = {}
    for version, model in models.items():
        document = {"name": NAME, "model": {"onnx": str(model)}, "dimensions": {"batch": {"min": 1, "max": 64}}}
        paths[version] = compile_by_steps(document, model.parent, state)

    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    manifest = extract(paths["1"], first)
    extract(paths["2"], second)
    members = {path.name: path for path in first.iterdir()}
    paths["3"] = tmp_path_factory.mktemp("wrong") / "wrong.tar.gz"
    pack(paths["3"], manifest, {**members, "sample.npz": second / "sample.npz"})
    return paths


@pytest.fixture(scope="session")
def bundle(bundles: dict[str, Path]) -> Path:
    return bundles["1"]


@pytest.fixture
def inputs() -> Callable[[int, int], NamedArrays]:
    """Inputs of a batch size, different for each seed."""

    def make(batch: int, seed: int = 0) -> NamedArrays:
        generator = np.random.default_rng(seed)
        return {
            "x": generator.normal(size=(batch, 8)).astype(np.float32),
            "y": generator.normal(size=(batch, 4)).astype(np.float32),
            "count": generator.integers(-(2**40), 2**40, size=batch),
        }

    return make


@pytest.fixture(scope="session")
def reference(models: dict[str, Path]) -> Callable[[str, NamedArrays], NamedArrays]:
    """ONNX Runtime's outputs of a version, by name."""
    import onnxruntime

    sessions = {
        version: onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for version, path in models.items()
    }
    names = ["sum", "doubled"]
    return lambda version, arrays: dict(zip(names, sessions[version].run(names, arrays), strict=True))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory, bundles: dict[str, Path]) -> Iterator[StoreConfig]:
    """A store with the three releases."""
    from tvmflow.bundle import sha256_file

    with rclone_s3(tmp_path_factory.mktemp("s3"), bucket="releases") as config:
        store = ReleaseStore(config)
        for version, path in bundles.items():
            store.publish(make_release(NAME, version, describe_bundle(path)), [(path, sha256_file(path))])
        yield config


@pytest.fixture
def store(s3: StoreConfig) -> ReleaseStore:
    return ReleaseStore(s3)


@pytest.fixture
def point(store: ReleaseStore) -> Callable[[str, str], None]:
    """Move a channel of the model to a version, from wherever it is."""

    def move(channel: str, version: str) -> None:
        move_channel(store, NAME, channel, version)

    return move


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, s3: StoreConfig) -> dict[str, str]:
    """An environment in which nothing but the store is said."""
    return clean_environment(
        TVMFLOW_HOME=str(tmp_path_factory.mktemp("home")),
        TVMFLOW_S3_ENDPOINT=str(s3.endpoint),
        TVMFLOW_S3_BUCKET=s3.bucket,
        TVMFLOW_S3_ACCESS_KEY=str(s3.access_key),
        TVMFLOW_S3_SECRET_KEY=str(s3.secret_key),
    )


@pytest.fixture(scope="session")
def command(environment: dict[str, str]) -> Callable[..., "subprocess.Popen[str]"]:
    """Start `tvmflow serve` in a process of its own."""

    def start(*arguments: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [TVMFLOW, "serve", *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def serve(command: Callable[..., "subprocess.Popen[str]"]) -> Serve:
    """Serve something at a free port until the body ends."""

    @contextmanager
    def serving(model: object, *arguments: object) -> Iterator[Running]:
        with command(model, "--port", 0, "--json", *arguments) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                line = process.stdout.readline()
                assert line, process.stderr.read()
                document = json.loads(line)
                address = document["address"]
                with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
                    yield Running(process, client, address, document["grpc"])
            finally:
                process.kill()

    return serving


@pytest.fixture(scope="session")
def server(serve: Serve, bundle: Path) -> Iterator[Running]:
    """One server of version 1's bundle for the tests that only ask it."""
    with serve(bundle, "--max-body-mb", 1) as running:
        yield running
