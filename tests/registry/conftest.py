"""Registries to test against: SQLite files, one real MLflow server, and small real bundles."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests

from tvmflow.bundle import Manifest, TensorSpec, installed_versions, pack
from tvmflow.registry import Registry, RegistryConfig, embedded_registry
from tvmflow.target import host

BuildBundle = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet_client() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.delenv("MLFLOW_REGISTRY_URI", raising=False)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server, started as `mlflow/README.md` says."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = Path(__file__).parents[2] / "mlflow" / "server.env.example"
    environment = dict(
        line.split("=", 1) for line in settings.read_text().splitlines() if line and not line.startswith("#")
    )
    environment |= {
        "MLFLOW_PORT": str(port),
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "artifacts"),
    }
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server"],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _await_health(f"http://127.0.0.1:{port}", process, folder / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        # The command's own child serves and may outlive it: the whole group ends.
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _await_health(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"{address}/health", timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.1)
    pytest.fail(f"the MLflow server did not start:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return Registry(embedded_registry(tmp_path_factory.mktemp("embedded")))


@pytest.fixture(params=["embedded", "server"])
def registry(request: pytest.FixtureRequest) -> Registry:
    """A registry in a SQLite file, then one behind a server."""
    if request.param == "embedded":
        found = request.getfixturevalue("embedded")
        assert isinstance(found, Registry)
        return found
    return Registry(RegistryConfig(request.getfixturevalue("server")))


@pytest.fixture
def client(registry: Registry) -> Any:
    """MLflow's own client of the same registry, to look at what was written."""
    from mlflow import MlflowClient

    return MlflowClient(registry.config.tracking_uri, registry_uri=registry.config.tracking_uri)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Compiled models by their number of outputs: `double = x + x`, and `square = x * x` as the second."""
    from tvm import compile as tvm_compile
    from tvm import relax, tirx

    folder = tmp_path_factory.mktemp("libraries")
    libraries = {}
    for count in (1, 2):
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 4), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                values = [builder.emit(relax.op.add(x, x)), builder.emit(relax.op.multiply(x, x))][:count]
                result = builder.emit_output(values[0] if count == 1 else relax.Tuple(values))
            builder.emit_func_output(result)
        libraries[count] = folder / f"{count}.so"
        tvm_compile(builder.get(), target="llvm").export_library(str(libraries[count]))
    return libraries


@pytest.fixture(scope="session")
def build_bundle(tmp_path_factory: pytest.TempPathFactory, libraries: dict[int, Path]) -> BuildBundle:
    """A function that packs a bundle of one of the libraries: `build_bundle(outputs=1, **manifest_fields)`."""
    folder = tmp_path_factory.mktemp("bundles")
    (folder / "mod.json").write_text("{}")
    sample = np.arange(8, dtype=np.float32).reshape(2, 4)
    arrays: dict[str, Any] = {"input:x": sample, "output:double": 2 * sample}
    np.savez(folder / "sample.npz", **arrays)

    def build(outputs: int = 1, **fields: Any) -> Path:
        names = ("double", "square")[:outputs]
        manifest = Manifest(
            **{
                "name": "tiny",
                "target": "native",
                "tvm_target": {"kind": "llvm"},
                "arch": host().arch,
                "cpu_features": (),
                "threads": 1,
                "inputs": (TensorSpec("x", ("n", 4), "float32"),),
                "outputs": tuple(TensorSpec(name, ("n", 4), "float32") for name in names),
                "dimensions": {"n": (1, None)},
                "weights": "inside",
                "versions": installed_versions("test"),
                **fields,
            }
        )
        destination = folder / f"{len(list(folder.iterdir()))}.tar.gz"
        files = {"mod.so": libraries[outputs], "mod.json": folder / "mod.json", "sample.npz": folder / "sample.npz"}
        pack(destination, manifest, files)
        return destination

    return build


@pytest.fixture
def fields() -> SimpleNamespace:
    """The signature of the models of `build_bundle`."""
    return SimpleNamespace(
        inputs=[TensorSpec("x", ("n", 4), "float32")],
        outputs=[TensorSpec("double", ("n", 4), "float32")],
    )
