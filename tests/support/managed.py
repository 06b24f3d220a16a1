"""Models that a stack manages: a release file with training, channels and retraining, and a source to register."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from support.command_server import CommandServer
from support.processes import clean_environment

_DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@dataclass(frozen=True)
class Managed:
    """A model of a release file. The module data.py beside the file has the held-out data.

    `training` is the program of somebody who trains models, with nothing of tvmflow: it registers a model of moderate
    quality as NAME-source. `better` and `worse` are arguments of retrainings. Each release but the worse is right about
    the share `right` of the held-out data, or more.
    """

    name: str
    file: Path
    training: str
    better: str
    worse: str
    right: float

    @property
    def source(self) -> str:
        """The registered model that releases are made of."""
        return f"{self.name}-source"

    def train_and_register(self, mlflow_server: str, commands: CommandServer) -> None:
        """Run the training against the MLflow server at this address, in a process that has imported MLflow."""
        folder = self.file.parent
        (folder / "training.py").write_text(self.training)
        settings = {"MLFLOW_TRACKING_URI": mlflow_server, "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONPATH": str(folder)}
        ended = commands.run(["-m", "training"], clean_environment(**settings), folder, 240)
        assert ended.returncode == 0, ended.stderr


# Points on two sides of a line. What is "trained" is the direction of the line, off by some degrees.
_SIDES = {
    "data.py": """
import math
import numpy as np


def held_out():
    points = np.random.default_rng(0).normal(size=(256, 2)).astype(np.float32)
    return {"points": points}, (points[:, 0] > 0).astype(np.int64)


def weights(degrees):
    side = [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]
    return np.array([[-side[0], side[0]], [-side[1], side[1]]], np.float32)
""",
    "model.py": """
import torch
from data import weights


def create():
    return torch.nn.Linear(2, 2, bias=False)


def train(output, *, degrees):
    torch.save({"weight": torch.from_numpy(weights(degrees).T.copy())}, output)
""",
}
_LOG_SIDES = """
import mlflow.onnx
from onnx import helper, numpy_helper
from data import weights
points, scores = (helper.make_tensor_value_info(name, 1, [64, 2]) for name in ("points", "scores"))
nodes = [helper.make_node("MatMul", ["points", "weights"], ["scores"])]
graph = helper.make_graph(nodes, "sides", [points], [scores], [numpy_helper.from_array(weights(60), "weights")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
mlflow.onnx.log_model(model, name="model", registered_model_name="sides-source", pip_requirements=["onnx"])
"""


def sides(folder: Path) -> Managed:
    """A layer of 2 x 2 weights that tells the two sides of a line apart; its source is an ONNX model."""
    for name, text in _SIDES.items():
        (folder / name).write_text(text)
    document = {
        "name": "sides",
        "model": {"factory": "model:create"},
        "train": {"function": "model:train", "arguments": {"degrees": 60}},
        "inputs": [{"name": "points", "shape": [64, 2]}],
        "outputs": ["scores"],
        "validate": {"task": {"dataset": "data:held_out", "metric": "accuracy"}},
        "benchmark": {"repeats": 2, "rounds": 1, "warmup": 0, "peers": []},
        "channels": {"staging": {"automatic": True}, "production": {"automatic": True, "after": "staging"}},
        "retrain": {"channel": "production"},
    }
    return Managed("sides", _save(folder, document), _LOG_SIDES, "degrees=0", "degrees=180", 0.6)


_LOG_DIGITS = """
from pathlib import Path
import mlflow, torch
from data import held_out
from model import create
from train import train
train(Path("weights.pt"), epochs=2)
net = create()
net.load_state_dict(torch.load("weights.pt", weights_only=True))
example = held_out()[0]["image"][:2]
mlflow.pytorch.log_model(net.eval(), name="model", registered_model_name="digits-source", input_example=example)
"""


def digits(folder: Path) -> Managed:
    """The digits example; its source is a PyTorch model that was trained for two epochs."""
    example = Path(shutil.copytree(_DIGITS, folder / "digits", ignore=shutil.ignore_patterns("__pycache__")))
    document = yaml.safe_load((example / "release.yaml").read_text())
    document["benchmark"] = {"repeats": 5, "rounds": 2, "peers": []}
    return Managed("digits", _save(example, document), _LOG_DIGITS, "epochs=8", "label_noise=0.9", 0.8)


def _save(folder: Path, document: object) -> Path:
    path = folder / "release.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
