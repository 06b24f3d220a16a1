"""Models that others registered, as the source of a release."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from support.command_server import CommandServer
from tasks.original import Original, find_original
from tvmflow.errors import ExportError, RegistryError
from tvmflow.registry import Registry
from tvmflow.spec import parse
from tvmflow.workspace import Workspace

# A training job as its author writes it, in a process of its own, which has MLflow already: MLflow's fluent API and
# flavors.
TRAINING = """
import sys
import mlflow, onnx, torch
from onnx import TensorProto, helper
mlflow.set_experiment("training")
with mlflow.start_run():
    mlflow.pytorch.log_model(
        torch.nn.Linear(4, 2), name="net", registered_model_name=sys.argv[1], pip_requirements=["torch"],
        serialization_format="pickle",
    )
    node = helper.make_node("Relu", ["x"], ["y"])
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = helper.make_graph([node], "relu", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    mlflow.onnx.log_model(model, name="graph", registered_model_name=sys.argv[2], pip_requirements=["onnx"])
"""


@pytest.fixture(scope="module")
def trained(server: str, commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("training")
    (folder / "training.py").write_text(TRAINING)
    environment = {**os.environ, "MLFLOW_TRACKING_URI": server, "PYTHONPATH": str(folder)}
    ended = commands.run(["-m", "training", "net", "graph"], environment, folder, 180)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def registry(server: str) -> Registry:
    from tvmflow.registry import RegistryConfig

    return Registry(RegistryConfig(server))


@pytest.mark.long
@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    ("name", "flavor", "file"), [("net", "pytorch", "data/model.pth"), ("graph", "onnx", "model.onnx")]
)
def test_a_model_of_another_flavor_is_found_by_version_and_alias(
    registry: Registry, name: str, flavor: str, file: str, tmp_path: Path
) -> None:
    registry.set_alias(name, "candidate", "1")
    source = registry.resolve_source(f"models:/{name}@candidate")
    assert flavor in source.flavors
    assert (source.name, source.version) == (name, "1")
    assert source.run_id is not None
    assert registry.run_exists(source.run_id)
    assert registry.resolve_source(f"models:/{name}/1") == source
    folder = registry.download_source(f"models:/{name}@candidate", tmp_path / "download")
    assert folder.is_relative_to(tmp_path / "download")
    assert (folder / file).is_file()


@pytest.mark.usefixtures("trained")
def test_a_registered_pickle_needs_the_users_trust(registry: Registry, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "state")

    def original(**model: str) -> Callable[..., Original]:
        inputs = [{"name": "x", "shape": [1, 4]}]
        spec = parse({"name": "net", "model": model, "inputs": inputs}, tmp_path)
        return partial(find_original, spec, workspace, registry=registry)

    with pytest.raises(ExportError, match="'models:/net/1' is a pickle"):
        original(mlflow="models:/net/1")()
    assert original(mlflow="models:/net/1", trust="pickle")().source.trusts_pickle
    assert original(mlflow="models:/net/1")(trusts_pickle=True).source.trusts_pickle
    assert original(mlflow="models:/graph/1")().source.framework == "onnx"


class Watched(Registry):
    """A registry that calls `meanwhile` before a download."""

    def __init__(self, registry: Registry, meanwhile: Callable[[], object]) -> None:
        super().__init__(registry.config)
        self.meanwhile = meanwhile

    def download_source(self, uri: str, destination: Path) -> Path:
        self.meanwhile()
        return super().download_source(uri, destination)


@pytest.mark.usefixtures("trained")
def test_two_runs_may_download_a_model_at_the_same_time(registry: Registry, tmp_path: Path) -> None:
    inputs = [{"name": "x", "shape": [1, 4]}]
    spec = parse({"name": "net", "model": {"mlflow": "models:/graph/1"}, "inputs": inputs}, tmp_path)
    workspace = Workspace(tmp_path / "state")
    first: list[Original] = []
    registry_of_second = Watched(registry, lambda: first.append(find_original(spec, workspace, registry=registry)))
    assert find_original(spec, workspace, registry=registry_of_second) == first[0]


@pytest.mark.usefixtures("trained")
def test_a_download_is_of_the_version_that_the_alias_named_first(registry: Registry, tmp_path: Path) -> None:
    inputs = [{"name": "x", "shape": [1, 4]}]
    spec = parse({"name": "net", "model": {"mlflow": "models:/graph@moving"}, "inputs": inputs}, tmp_path)
    registry.set_alias("graph", "moving", "1")
    moving = Watched(registry, lambda: registry.delete_alias("graph", "moving"))
    assert find_original(spec, Workspace(tmp_path / "state"), registry=moving).registered == "graph/1"


@pytest.mark.usefixtures("trained")
def test_a_registered_model_with_code_needs_the_users_trust_whatever_lies_in_its_folder(
    registry: Registry, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path / "state")

    def find(name: str, *, trusts_pickle: bool = False) -> Original:
        inputs = [{"name": "x", "shape": [1, 4]}]
        spec = parse({"name": "net", "model": {"mlflow": f"models:/{name}/1"}, "inputs": inputs}, tmp_path)
        return find_original(spec, workspace, registry=registry, trusts_pickle=trusts_pickle)

    def describe(folder: Path, flavor: str, **values: str) -> None:
        description = yaml.safe_load((folder / "MLmodel").read_text())
        description["flavors"][flavor].update(values)
        (folder / "MLmodel").write_text(yaml.safe_dump(description))

    module, graph = (find(name, trusts_pickle=True).source.path for name in ("net", "graph"))
    assert module is not None
    assert graph is not None
    # MLflow loads the pickle where both are there.
    (module / "data" / "model.pt2").touch()
    with pytest.raises(ExportError, match="'models:/net/1' is a pickle"):
        find("net")
    (module / "data" / "model.pth").unlink()
    assert find("net").source.path == module
    describe(module, "pytorch", code="code")
    with pytest.raises(ExportError, match="'models:/net/1' has Python modules of its own"):
        find("net")
    assert find("net", trusts_pickle=True).source.trusts_pickle
    describe(module, "pytorch", model_data="../elsewhere")
    describe(graph.parent, "onnx", data="../model.onnx")
    for name in ("net", "graph"):
        with pytest.raises(ExportError, match=f"'models:/{name}/1' names the file .* outside of its folder"):
            find(name)
    (module / "MLmodel").write_text("flavors: [pytorch]")
    with pytest.raises(ExportError, match="'models:/net/1' has no MLmodel that can be read"):
        find("net")


@pytest.mark.usefixtures("trained")
def test_two_models_have_two_identities(registry: Registry) -> None:
    identities = {registry.resolve_source(f"models:/{name}/1").identity for name in ("net", "graph")}
    assert len(identities) == 2


@pytest.mark.parametrize(
    "uri", ["models:/net", "models:/net/latest", "runs:/1/net", "models:/net/1/data", "net@candidate"]
)
def test_a_uri_of_another_form_is_refused(registry: Registry, uri: str) -> None:
    with pytest.raises(RegistryError, match="models:/NAME@ALIAS"):
        registry.resolve_source(uri)


def test_a_version_that_is_not_there_is_named(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="could not read 'models:/nobody/7'"):
        registry.resolve_source("models:/nobody/7")
