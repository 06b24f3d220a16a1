"""`benchmarks/functions.py`: the time of each function of a model."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from support.processes import refusal
from tvmflow import compiler, npz
from tvmflow.errors import ExportError
from tvmflow.hardware.target import resolve

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


def test_free_dimensions_count_with_the_sizes_of_the_run(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    model = save_model(
        tmp_path / "product.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", ["n", 64])],
        ["y"],
        {"w": np.ones((64, 32), "float32")},
    )
    built = compiler.build(compiler.import_onnx(model), resolve("native"), compiler.BuildOptions())
    sample = tmp_path / "sample.npz"
    npz.write(sample, {"x": np.ones((48, 64), "float32")})
    profile = module("functions").time_functions(built, sample, 2)
    assert sum(function.flops for function in profile.functions) == pytest.approx(2 * 48 * 64 * 32, rel=0.1)


def test_sizes_of_free_dimensions_are_some_at_which_the_model_runs(
    module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    nodes = [helper.make_node("Concat", ["x", "a"], ["z"], axis=0), helper.make_node("Reshape", ["z", "shape"], ["y"])]
    constants = {"a": np.ones((3, 2), "float32"), "shape": np.array([-1, 8])}
    model = save_model(tmp_path / "groups.onnx", nodes, [("x", ["n", 2])], ["y"], constants)
    assert npz.read(module("prepare").sample_for(model, tmp_path))["x"].shape[0] % 4 == 1
    constants["shape"] = np.array([7, 11])
    save_model(model, nodes, [("x", ["n", 2])], ["y"], constants)
    with pytest.raises(ExportError, match="at none of the sizes"):
        module("prepare").sample_for(model, tmp_path)


@pytest.mark.parametrize("name", ["resnet81", "nowhere.onnx"])
def test_a_name_that_is_no_model_is_one_sentence(call: Command, name: str) -> None:
    process = call("functions", name)
    assert f"{name!r}" in refusal(process)
