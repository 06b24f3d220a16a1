"""`benchmarks/symbolic.py`: a model with free dimensions beside one whose sizes are fixed."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from tvmflow.errors import InputError
from tvmflow.hardware.target import resolve

Command = Callable[..., subprocess.CompletedProcess[str]]


def _product(path: Path, rows: int | str) -> Path:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return save_model(path, [node], [("x", [rows, 64])], ["y"], {"w": np.ones((64, 32), "float32")})


@pytest.mark.long
@pytest.mark.usefixtures("children_in_forks")
def test_both_builds_of_a_file_are_timed_at_the_given_size(call: Command, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    model = str(_product(tmp_path / "product.onnx", "n"))
    process = call("symbolic", model, "--size", "n=48", "--rounds", "1", "--repeats", "2", "--json", str(figures))
    assert process.returncode == 0, process.stderr
    (result,) = json.loads(figures.read_text())
    assert result["sizes"] == {"n": 48}
    assert result["ratio"] == pytest.approx(result["free"] / result["fixed"])


def test_a_model_without_free_dimensions_is_refused(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    sample = tmp_path / "sample.npz"
    np.savez(sample, x=np.ones((4, 64), "float32"))
    symbolic = module("symbolic")
    onnx = _product(tmp_path / "product.onnx", 4)
    job = symbolic.SymbolicJob(onnx=onnx, sample=sample, target=resolve("native"), rounds=1, repeats=1)
    with pytest.raises(InputError, match=r"product\.onnx has a free dimension"):
        symbolic.work(job, lambda _: None)


@pytest.mark.usefixtures("children_in_forks")
def test_a_model_that_cannot_be_measured_is_one_sentence(call: Command, tmp_path: Path) -> None:
    process = call("symbolic", str(_product(tmp_path / "product.onnx", 4)))
    assert (process.returncode, process.stdout) == (1, "")
    assert re.search(r"no input of .*product\.onnx has a free dimension", process.stderr)


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ("m=48", r"product\.onnx has no free dimension 'm'; it has n"),
        ("48", "'48' is no size of a dimension, such as batch=8"),
    ],
)
def test_a_wrong_size_is_refused(call: Command, tmp_path: Path, size: str, sentence: str) -> None:
    process = call("symbolic", str(_product(tmp_path / "product.onnx", "n")), "--size", size)
    assert process.returncode != 0
    assert re.search(sentence, process.stderr)
