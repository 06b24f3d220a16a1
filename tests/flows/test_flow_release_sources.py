"""Every kind of model that a release can start from, and the ways to build it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import scale

_INPUTS = [{"name": "x", "shape": ["batch", 4]}]
_DIMENSIONS = {"batch": {"min": 1, "max": 8, "tune": 2, "measure": [2]}}

_TRAIN = """
import sys

import torch
from network import create

folder = sys.argv[1]
torch.manual_seed(0)
module = create().eval()
example = torch.zeros(2, 4)
"""

# What a user's own training does: a model into a file, and its weights apart.
_SAVE = f"""{_TRAIN}
torch.save(module.state_dict(), f"{{folder}}/weights.pt")
batch = torch.export.Dim("batch", min=1, max=8)
torch.export.save(torch.export.export(module, (example,), dynamic_shapes=({{0: batch}},)), f"{{folder}}/network.pt2")
"""

# Models into the registry.
_REGISTER = f"""{_TRAIN}
import mlflow
import onnx

mlflow.set_experiment("training")
with mlflow.start_run():
    for name, form, weight in (("trained", "pickle", None), ("traced", "pt2", None), ("trained", "pickle", 0.5)):
        if weight is not None:
            torch.nn.init.constant_(module[0].weight, weight)
        mlflow.pytorch.log_model(
            module,
            name=name,
            registered_model_name=name,
            serialization_format=form,
            input_example=example.numpy(),
            pip_requirements=["torch"],
        )
    onnx_model = onnx.load(f"{{folder}}/model.onnx")
    mlflow.onnx.log_model(onnx_model, name="graph", registered_model_name="graph", pip_requirements=["onnx"])
client = mlflow.MlflowClient()
for name in ("trained", "traced", "graph"):
    client.set_registered_model_alias(name, "candidate", 1)
"""

_NETWORK = """
from torch import nn


def create(width=6):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
"""


@pytest.fixture(scope="module")
def folder(machine: Any, make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of every kind of file; those of PyTorch are for the tests of `--long`."""
    folder = tmp_path_factory.mktemp("sources")
    make.onnx(folder)
    make.onnx(folder, name="unnamed.onnx", shape=(-1, 4))
    (folder / "network.py").write_text(_NETWORK)
    if scale.is_long():
        _run(folder, _SAVE, machine.environment)
    return folder


@pytest.fixture(scope="module")
def _registered(machine: Any, folder: Path) -> None:
    """Models of PyTorch in two forms, one of them in two versions, and one of ONNX, in the machine's registry."""
    assert machine.versions("trained") == []  # which makes the registry's file as tvmflow does
    address = {"MLFLOW_TRACKING_URI": f"sqlite:///{machine.home}/mlflow/mlflow.db"}
    _run(folder, _REGISTER, {**machine.environment, **address, "GIT_PYTHON_REFRESH": "quiet"})


def _run(folder: Path, program: str, environment: dict[str, str]) -> None:
    (folder / "make.py").write_text(program)
    command = [sys.executable, str(folder / "make.py"), str(folder)]
    process = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert process.returncode == 0, process.stderr


# The example of digits, whose release many tests share, is a factory's model too.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("factory", {"factory": "network:create", "arguments": {"width": 6}, "weights": "weights.pt"}),
        ("exported", {"pt2": "network.pt2"}),
    ],
)
def test_a_pytorch_model_is_released(machine: Any, folder: Path, make: Any, name: str, model: dict[str, Any]) -> None:
    _assert_released(machine, make.file(folder, name=name, model=model, inputs=_INPUTS, dimensions=_DIMENSIONS))


@pytest.mark.long
@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("registered-module", {"mlflow": "models:/trained@candidate", "trust": "pickle"}),
        ("registered-program", {"mlflow": "models:/traced@candidate"}),
    ],
)
def test_a_registered_pytorch_model_is_released(
    machine: Any, folder: Path, make: Any, name: str, model: dict[str, Any]
) -> None:
    _assert_released(machine, make.file(folder, name=name, model=model, inputs=_INPUTS, dimensions=_DIMENSIONS))


def _assert_released(machine: Any, file: Path) -> None:
    result = machine.release(file)
    assert result.code == 0, result.stderr
    (release,) = machine.releases(file.stem)
    assert [item["against"] for item in release["targets"][0]["verdict"]["comparisons"]] == ["pytorch", "onnxruntime"]
    assert release["inputs"][0]["shape"] == ["batch", 4]


@pytest.mark.long
@pytest.mark.usefixtures("_registered")
def test_a_registered_onnx_model_is_released(machine: Any, folder: Path, make: Any) -> None:
    result = machine.release(make.file(folder, name="registered-graph", model={"mlflow": "models:/graph@candidate"}))
    assert result.code == 0, result.stderr
    (release,) = machine.releases("registered-graph")
    assert release["inputs"][0]["shape"] == ["batch", 4]


@pytest.mark.long
@pytest.mark.usefixtures("_registered")
def test_a_moved_alias_is_another_model(machine: Any, folder: Path, make: Any) -> None:
    client = machine.mlflow
    client.set_registered_model_alias("trained", "next", 1)
    file = make.file(
        folder,
        name="followed",
        model={"mlflow": "models:/trained@next", "trust": "pickle"},
        inputs=_INPUTS,
        dimensions=_DIMENSIONS,
    )
    first = machine.release(file)
    assert first.code == 0, first.stderr
    client.set_registered_model_alias("trained", "next", 2)
    second = machine.release(file)
    assert second.code == 0, second.stderr
    assert (first.document["version"], second.document["version"]) == ("1", "2")
    assert second.steps["export"] == "ran"


@pytest.mark.parametrize(
    ("weights", "exec_mode"),
    scale.choose(normal=[("apart", "bytecode")], long=[("apart", "bytecode"), ("inside", "compiled")]),
)
def test_an_onnx_model_is_released_however_it_is_built(
    machine: Any, folder: Path, make: Any, weights: str, exec_mode: str
) -> None:
    """The first dimension has no name in the model."""
    from tvmflow import runtime

    name, build = f"built-{weights}-{exec_mode}", {"weights": weights, "exec_mode": exec_mode}
    result = machine.release(make.file(folder, name=name, model={"onnx": "unnamed.onnx"}, build=build))
    assert result.code == 0, result.stderr
    (release,) = machine.releases(name)
    assert [item["against"] for item in release["targets"][0]["verdict"]["comparisons"]] == ["onnxruntime"]
    assert release["inputs"][0]["shape"] == ["x_0", 4]
    with runtime.load(machine.home.parent / result.document["targets"][0]["bundle_path"]) as model:
        inputs, expected = model.sample
        np.testing.assert_allclose(model(**inputs)["y"], expected["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_two_folders_with_the_same_release_file_are_two_models(machine: Any, make: Any, tmp_path: Path) -> None:
    released = []
    for width in (6, 7):
        folder = tmp_path / str(width)
        folder.mkdir()
        (folder / "network.py").write_text(_NETWORK.replace("width=6", f"width={width}"))
        file = make.file(
            folder, name="copied", model={"factory": "network:create"}, inputs=_INPUTS, dimensions=_DIMENSIONS
        )
        released.append(machine.release(file))
    assert [result.code for result in released] == [0, 0]
    assert released[1].steps["export"] == "ran"
