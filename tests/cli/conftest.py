"""The command, called in this process or run in one of its own, and a bundle that it compiled."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.models import save_model
from support.processes import CommandResult, clean_environment
from support.steps import steps_in_this_process
from tvmflow.cli import main

Command = Callable[..., CommandResult]


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def environment(state: Path) -> dict[str, str]:
    """An environment in which nothing but the state folder is said."""
    return clean_environment(TVMFLOW_HOME=str(state))


@pytest.fixture
def tvmflow(
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    children_in_forks: None,
) -> Command:
    """Call the command in this process, with its steps, in an empty folder; `bundle` goes through their processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVMFLOW_HOME", str(state))
    # Said here, or `run` would leave this whole process, and the tests after, with TVM's runtime alone.
    monkeypatch.setenv("TVM_USE_RUNTIME_LIB", "0")
    monkeypatch.setenv("TVM_NUM_THREADS", "2")

    def call(*arguments: object) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["tvmflow", *map(str, arguments)])
        handler, code = signal.getsignal(signal.SIGTERM), 0
        try:
            with steps_in_this_process():
                main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
        return CommandResult(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def executable() -> str:
    """The installed command."""
    return str(Path(sys.executable).parent / "tvmflow")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small.onnx: sum = x @ weights + y, positive = relu(sum), above = sum > 0."""
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["product"]),
        helper.make_node("Add", ["product", "y"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["positive"]),
        helper.make_node("Greater", ["sum", "zero"], ["above"]),
    ]
    inputs = [("x", ["batch", 8]), ("y", ["batch", 4])]
    outputs = [("sum", ["batch", 4]), ("positive", ["batch", 4]), ("above", ["batch", 4], TensorProto.BOOL)]
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "small.onnx", nodes, inputs, outputs, {"weights": weights, "zero": np.zeros((), np.float32)})
    return folder


@pytest.fixture(scope="session")
def bundle(models: Path, executable: str, environment: dict[str, str]) -> Path:
    """The small model, compiled by the command itself."""
    path = models / "small.tar.gz"
    arguments = [executable, "compile", str(models / "small.onnx"), "-o", str(path)]
    process = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "largest difference from ONNX Runtime" in process.stdout
    return path
