"""The comparison of recorded libraries, which `benchmarks/emulated.py` runs in an emulated machine, on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from support.machines import simple_target
from support.models import save_model
from tvmflow.compiler import build, import_onnx

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of a model that doubles a vector, and its weights, of which it has none."""
    folder = tmp_path_factory.mktemp("emulated")
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    model = build(import_onnx(save_model(folder / "model.onnx", nodes, [("x", [4])], ["y"])), simple_target())
    model.executable.export_library(str(folder / "double.so"))
    np.savez(folder / "double.weights.npz")
    return folder / "double.so"


@pytest.mark.parametrize(
    ("factor", "lines"),
    [
        (2, ["DONE 1 libraries, 0 faults"]),
        (3, ["DIFFERS a test, main: output0 differs by 3.3e-01 of its largest number", "DONE 1 libraries, 1 faults"]),
    ],
    ids=["equal", "different"],
)
def test_outputs_are_compared_with_those_that_were_recorded(
    factor: int, lines: list[str], library: Path, tmp_path: Path
) -> None:
    for path in (library, library.with_name("double.weights.npz")):
        (tmp_path / path.name).symlink_to(path)
    x = np.arange(4, dtype=np.float32)
    np.savez(tmp_path / "run.npz", input0=x, output0=factor * x)
    run = {"library": "double", "function": "main", "packs": False, "precision": "fp32", "test": "a test"}
    (tmp_path / "run.json").write_text(json.dumps(run))
    command = [sys.executable, str(ROOT / "benchmarks/emulated_guest.py"), str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.splitlines() == lines
