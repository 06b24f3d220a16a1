"""`benchmarks/functions.py`: the time of each function of a model."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import helper

from support.models import save_model
from support.processes import refusal

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
def test_every_function_of_an_onnx_file_is_timed_with_its_rule(command: Command, tmp_path: Path) -> None:
    shape = [1, 8, 64, 64]
    nodes = [
        helper.make_node("MatMul", ["x", "x"], ["p"]),
        helper.make_node("Relu", ["p"], ["s"]),
        helper.make_node("MatMul", ["s", "x"], ["y"]),
    ]
    model, figures = tmp_path / "products.onnx", tmp_path / "figures.json"
    save_model(model, nodes, [("x", shape)], ["y"])
    process = command("functions", str(model), "--threads", "1", "--repeats", "3", "--json", str(figures))
    assert process.returncode == 0, process.stderr
    (profile,) = json.loads(figures.read_text()).values()
    compiled = [function for function in profile["functions"] if function["rule"]]
    assert compiled
    assert all(function["microseconds"] > 0 and function["bytes"] > 0 for function in compiled)
    # The two products are 2 * 8 * 64^3 operations each, wherever the activation went.
    assert sum(function["flops"] for function in compiled) >= 2 * 2 * 8 * 64**3
    times = [function["microseconds"] for function in profile["functions"]]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", ["resnet81", "nowhere.onnx"])
def test_a_name_that_is_no_model_is_one_sentence(command: Command, name: str) -> None:
    process = command("functions", name)
    assert f"{name!r}" in refusal(process)
