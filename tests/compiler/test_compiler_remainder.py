"""The last channels of a result, where the channels fill no whole vectors."""

import re
from typing import Any

import numpy as np
import pytest
from onnx.helper import make_node

from support.arrays import normal
from tvmflow.compiler import CompiledModel
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.machine import machine
from tvmflow.hardware.target import Target


def _code(model: CompiledModel, name: str) -> str:
    """The scheduled function of a model whose name has the part `name`."""
    functions = re.split(r"@T\.prim_func", model.inspected.code["tir"])
    (code,) = (text for text in functions if re.search(rf"def \w*{name}\w*\(", text))
    return code


def _widths(code: str) -> set[int]:
    """The lanes of the vectors that write the result, but for single numbers."""
    parts = re.split(r'T\.sblock\("silu"\)', code)[:-1]
    lanes = [re.findall(r"T\.vectorized\(T\.int64\((\d+)\)", part) for part in parts]
    return {int(numbers[-1]) for numbers in lanes if numbers}


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [7, "width"], ids=["known", "free"])
@pytest.mark.parametrize("whole", [0, 1, 10], ids=["part of a vector", "more than a vector", "many vectors"])
@pytest.mark.parametrize(
    ("kernel", "groups"), [(1, 1), (3, 1), (3, "channels")], ids=["pointwise", "winograd", "depthwise"]
)
def test_channels_that_fill_no_whole_vectors_are_written_in_vectors(
    kernel: int,
    groups: Any,
    whole: int,
    width: Any,
    make_model: Any,
    assert_same_as_onnxruntime: Any,
    target: Target,
) -> None:
    lanes = machine(target).lanes
    # The channels that are left are three quarters of a vector less one: lanes of a half, and a quarter less one.
    rest = 3 * lanes // 4 - 1
    channels = whole * lanes + rest
    inputs = channels if groups == "channels" else 12
    nodes = [
        make_node("Conv", ["x", "w", "b"], ["c"], pads=[kernel // 2] * 4, group=inputs if groups == "channels" else 1),
        make_node("Sigmoid", ["c"], ["s"]),
        make_node("Mul", ["c", "s"], ["y"]),
    ]
    weights = {"w": normal(channels, 1 if groups == "channels" else inputs, kernel, kernel), "b": normal(channels)}
    path = make_model(nodes, [("x", [1, inputs, 5, width])], ["y"], weights)
    feeds = [{"x": normal(1, inputs, 5, size)} for size in ((7,) if width == 7 else (1, 7, 18))]
    model = assert_same_as_onnxruntime(path, *feeds, inspect=Inspection(code=("tir",)))
    code = _code(model, "silu")
    assert not re.search(rf"T\.where\(.*< T\.int64\({channels}\)", code)
    smaller = [size for size in (lanes // 2, lanes // 4, lanes // 8) if size > 1 and size & rest]
    assert _widths(code) >= {*smaller, *([lanes] if whole else [])}


def test_columns_of_free_number_are_written_in_whole_vectors_without_conditions(
    make_model: Any, assert_same_as_onnxruntime: Any, target: Target
) -> None:
    # Scores of a mask that is no attention's: each is scaled, and rounded to an integer.
    nodes = [
        make_node("MatMul", ["x", "z"], ["c"]),
        make_node("QuantizeLinear", ["c", "scale", "zero"], ["q"]),
        make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        make_node("Add", ["d", "mask"], ["y"]),
    ]
    inputs = [("x", [2, "rows", 8]), ("z", [2, 8, "columns"]), ("mask", ["rows", "columns"])]
    weights = {"scale": np.array(0.03, "float32"), "zero": np.array(120, "uint8")}
    sizes = [(1, 1), (5, machine(target).lanes), (20, 3 * machine(target).lanes + 5)]
    feeds = [
        {"x": normal(2, rows, 8), "z": normal(2, 8, columns), "mask": normal(rows, columns)} for rows, columns in sizes
    ]
    model = assert_same_as_onnxruntime(
        make_model(nodes, inputs, ["y"], weights), *feeds, inspect=Inspection(code=("tir",))
    )
    code = _code(model, "batch_matmul")
    # Of each form of a tile, the result is written with a condition for the columns and without.
    *forms, _ = re.split(r"round\(", code)
    conditions = [re.findall(r"T\.where\((.*)\)", form)[-1] for form in forms]
    with_columns = [condition for condition in conditions if re.search(r"ax\w+ < columns", condition)]
    assert len(forms) == 2 * len(with_columns) > 0
