"""`benchmarks/operators.py`: the models of one operator, the machine's peaks, and the report."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from support import scale
from support.processes import refusal

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
def test_every_operator_is_a_valid_model_of_known_shapes(module: Callable[[str], ModuleType]) -> None:
    cases = module("operators").CASES
    one_of_each_kind = {case.kind: case for case in cases}.values()
    for case in scale.choose(normal=one_of_each_kind, long=cases):
        model = case.model()  # checks itself
        output = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
        assert output, case.label
        assert min(output) > 0, case.label
        assert case.bytes(model) >= 4 * math.prod(output)


def test_the_operations_of_a_convolution_are_counted(module: Callable[[str], ModuleType]) -> None:
    make = module("operators")._convolution
    assert make("conv", (4, 6), (8, 8), 3).flops == 2 * 6 * 8 * 8 * 4 * 9
    assert make("conv", (4, 6), (8, 8), 3, stride=2).flops == 2 * 6 * 4 * 4 * 4 * 9
    assert make("conv", (6, 6), (9, 9), 5, groups=6).flops == 2 * 6 * 9 * 9 * 25


@pytest.mark.long
def test_an_operator_is_measured_against_the_peaks_and_onnx_runtime(command: Command, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ("--threads", "1", "--rounds", "1", "--seconds", "0.01", "--repeats", "3", "--json", str(figures))
    process = command("operators", "instance", *options)
    assert process.returncode == 0, process.stderr
    document = json.loads(figures.read_text())
    peaks, (result,) = document["peaks"], document["operators"]
    assert peaks["gflops"] > 0
    assert set(peaks["bandwidth"]) == {"L2", "L3", "memory"}
    assert result["bytes"] == 4 * (2 * 32 * 64 * 64 + 2 * 32)
    assert result["bound"] in peaks["bandwidth"]
    floor = result["bytes"] / peaks["bandwidth"][result["bound"]] * 1e-3
    assert result["fraction"] == pytest.approx(floor / result["microseconds"])
    assert min(result["ratio"]) > 0
    assert result["error"] < 1e-4
    assert "instance norm" in process.stdout


def test_a_class_that_does_not_exist_is_one_sentence(call: Command) -> None:
    process = call("operators", "sofmax")
    sentence = refusal(process)
    assert "'sofmax'" in sentence
    assert "'softmax'" in sentence
