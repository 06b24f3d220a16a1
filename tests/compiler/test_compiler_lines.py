"""Lines of images of free width: what is copied around padding, and tiles for the last pixels of a line."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx.helper import make_node
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from support.arrays import normal
from tvmflow.compiler import build, import_onnx
from tvmflow.compiler.borders import split_lines
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.operators.common import buffer

_WIDTHS = (1, 2, 4, 5, 7, 9, 10, 13, 19)


def _convolution(make_model: Any, channels: tuple[int, int], size: int, **attributes: Any) -> Path:
    outputs, inputs = channels
    weights = {"w": normal(outputs, inputs, size, size), "b": normal(outputs)}
    nodes = [make_node("Conv", ["x", "w", "b"], ["c"], **attributes), make_node("Relu", ["c"], ["y"])]
    return make_model(nodes, [("x", ["n", inputs, "h", "width"])], ["y"], weights)


def _images(channels: int) -> list[dict[str, Any]]:
    return [{"x": normal(1 + width % 2, channels, 3, width, seed=width)} for width in _WIDTHS]


def _code(path: Path, target: Any) -> dict[str, str]:
    """The scheduled functions of a model, by name."""
    inspected = build(import_onnx(path), target, inspect=Inspection(code=("tir",))).inspected.code["tir"]
    functions = re.split(r"@T\.prim_func", inspected)
    return {name[1]: text for text in functions if (name := re.search(r"def (\w+)\(", text))}


@pytest.mark.parametrize(
    ("channels", "size", "attributes"),
    [
        ((32, 24), 1, {}),
        ((32, 4), 3, {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ((48, 5), 3, {"pads": [2, 2, 2, 2], "dilations": [2, 2]}),
        ((32, 32), 3, {"pads": [1, 1, 1, 1]}),
    ],
    ids=["pointwise", "strided", "dilated", "winograd"],
)
def test_the_last_pixels_of_a_line_of_any_length_have_a_tile_that_fits(
    channels: tuple[int, int], size: int, attributes: Any, make_model: Any, assert_same_as_onnxruntime: Any, target: Any
) -> None:
    path = _convolution(make_model, channels, size, **attributes)
    assert_same_as_onnxruntime(path, *_images(channels[1]))
    (convolution,) = (text for name, text in _code(path, target).items() if "conv2d" in name)
    whole, small = re.split(r"for once in", convolution)[1:]
    rows = [int(re.findall(r"T\.unroll\(T\.int64\((\d+)\)\)", part)[0]) for part in (whole, small)]
    assert rows[1] == (rows[0] + 1) // 2


@pytest.mark.parametrize("size", [3, 5], ids=str)
def test_a_whole_tile_of_a_depthwise_convolution_has_no_condition_for_each_pixel(
    size: int, make_model: Any, assert_same_as_onnxruntime: Any, target: Any
) -> None:
    weights = {"w": normal(32, 1, size, size), "b": normal(32)}
    nodes = [
        make_node("Conv", ["x", "w", "b"], ["c"], pads=[size // 2] * 4, group=32),
        make_node("Sigmoid", ["c"], ["s"]),
        make_node("Mul", ["c", "s"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["n", 32, "h", "width"])], ["y"], weights)
    assert_same_as_onnxruntime(path, *_images(32))
    (convolution,) = (text for name, text in _code(path, target).items() if "depthwise" in name)
    whole, last = re.split(r"for once in", convolution)[1:]
    assert "T.where" not in whole
    assert "T.where" in last


def test_a_line_of_known_length_has_one_tile(make_model: Any, target: Any) -> None:
    weights = {"w": normal(32, 24, 1, 1)}
    path = make_model([make_node("Conv", ["x", "w"], ["y"])], [("x", [1, 24, 5, 13])], ["y"], weights)
    assert not any("for once in" in text for text in _code(path, target).values())


@pytest.mark.parametrize("channels", [1, 3, 5], ids=str)
def test_padded_lines_of_few_channels_of_any_length_are_right(
    channels: int, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    path = _convolution(make_model, (16, channels), 3, pads=[1, 2, 2, 1], strides=[2, 2])
    assert_same_as_onnxruntime(path, *_images(channels))


def _padded_lines(channels: int, has_lines: bool) -> tirx.PrimFunc:
    """A lowered function that pads the lines of an image by one pixel on the left and by two on the right."""
    lines, width = tirx.Var("lines", "int64"), tirx.Var("width", "int64")
    image = buffer("image", (lines, width, channels))
    padded = buffer("padded", (lines + 2, width + 3, channels))
    loops = [T.serial(0, size) for size in (lines + 2, width + 3, channels)]
    with IRBuilder() as builder, T.seq_scope(), loops[0] as y, loops[1] as x, loops[2] as c:
        inside = [x >= 1, x <= width, *([y >= 1, y <= lines] if has_lines else [])]
        line = y - 1 if has_lines else tirx.min(y, lines - 1)
        value = tirx.if_then_else(tirx.all(*inside), image[line, x - 1, c], tirx.const(-1, "float32"))
        T.buffer_store(padded, value, [y, x, c])
    return tirx.PrimFunc([image, padded], builder.get().body).with_attr("global_symbol", "main")


@pytest.mark.parametrize("has_lines", [False, True], ids=["columns", "lines and columns"])
@pytest.mark.parametrize("channels", [1, 3], ids=str)
def test_the_pixels_of_a_padded_line_are_copied_without_a_condition_for_each(channels: int, has_lines: bool) -> None:
    function = _padded_lines(channels, has_lines)
    split = split_lines(tvm.IRModule({"main": function}))
    assert "if_then_else" in function.script()
    assert "if_then_else" not in split["main"].script()
    main = tvm.tirx.build(split, target=tvm.target.Target("llvm"))["main"]
    for lines, width in ((1, 1), (2, 7), (5, 0) if has_lines else (3, 2)):
        image = normal(lines, width, channels)
        rows = np.pad(image, [(1, 1), (0, 0), (0, 0)], constant_values=-1)
        if not has_lines:
            rows = image[np.minimum(np.arange(lines + 2), lines - 1)]
        expected = np.pad(rows, [(0, 0), (1, 2), (0, 0)], constant_values=-1)
        actual = tvm.runtime.tensor(np.zeros_like(expected))
        main(tvm.runtime.tensor(image), actual)
        np.testing.assert_array_equal(actual.numpy(), expected)
