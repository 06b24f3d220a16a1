"""Registries to test against: SQLite files, one real MLflow server, and small real bundles."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.databases import Databases
from support.servers import mlflow_command
from tvmflow.bundle import Manifest, TensorSpec, installed_versions, pack
from tvmflow.hardware.target import host
from tvmflow.registry import Registry, RegistryConfig, embedded_registry

BuildBundle = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet_client() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.delenv("MLFLOW_REGISTRY_URI", raising=False)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, databases: Databases) -> Iterator[str]:
    """The address of an MLflow server, started as `mlflow/README.md` says."""
    text = (Path(__file__).parents[2] / "mlflow" / "server.env.example").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))
    folder = tmp_path_factory.mktemp("server")
    databases.mlflow(folder / "mlflow.db")
    with mlflow_command(folder, **settings) as address:
        yield address


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory, databases: Databases) -> Registry:
    folder = tmp_path_factory.mktemp("embedded")
    databases.mlflow(folder / "mlflow.db")
    return Registry(embedded_registry(folder))


@pytest.fixture(params=["embedded", "server"])
def registry(request: pytest.FixtureRequest) -> Registry:
    """A registry in a SQLite file, then one behind a server."""
    if request.param == "embedded":
        embedded = request.getfixturevalue("embedded")
        assert isinstance(embedded, Registry)
        return embedded
    return Registry(RegistryConfig(request.getfixturevalue("server")))


@pytest.fixture
def client(registry: Registry) -> Any:
    """MLflow's own client of the same registry, to inspect the registry's entries."""
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
