"""Loops are split in a second dimension where one has too few iterations for the cores."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tvm import tirx

from support.arrays import normal, onnxruntime_outputs
from tvmflow.compiler import BuildOptions, build, cost, import_onnx, lower, workloads
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import schedule
from tvmflow.hardware.target import Target


def _with_cores(target: Target, cores: int) -> Target:
    return replace(target, tvm={**target.tvm, "num-cores": cores})


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    """Seven lines of a depthwise convolution, pooling to seven lines, and a dense layer of one row."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4, group=640),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4),
        helper.make_node("GlobalAveragePool", ["b"], ["c"]),
        helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("Gemm", ["d", "v"], ["y"]),
    ]
    return make_model(nodes, [("x", [1, 640, 7, 7])], ["y"], {"w": normal(640, 1, 3, 3), "v": normal(640, 1000) / 25})


def _tasks(func: tirx.PrimFunc) -> list[int]:
    """The extents of the parallel loops."""
    return [int(extent) for extent in re.findall(r"T\.parallel\((\d+)\)", func.script())]


@pytest.mark.parametrize("cores", [16, 64])
def test_few_lines_and_few_rows_keep_many_cores_busy(cores: int, model: Path, target: Target) -> None:
    of_cores = _with_cores(target, cores)
    cpu = replace(machine(of_cores), region=0)
    tasks = {item.name: _tasks(schedule(item.func, cpu)[0]) for item in workloads(lower(import_onnx(model), of_cores))}
    for part in ("depthwise", "max_pool2d", "dense"):
        (of_part,) = (counts for name, counts in tasks.items() if part in name)
        assert all(cost.evenness(count, cpu) >= cost.EVEN for count in of_part), (part, of_part)


@pytest.mark.few(1)
@pytest.mark.parametrize("cores", [2, 64])
def test_the_answer_is_the_same_for_any_number_of_cores(
    cores: int, model: Path, target: Target, run_built: Callable[..., Any]
) -> None:
    x = normal(1, 640, 7, 7)
    (actual,) = run_built(build(import_onnx(model), _with_cores(target, cores), BuildOptions()), x)
    (expected,) = onnxruntime_outputs(model, {"x": x}).values()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
