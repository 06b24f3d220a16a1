"""Lines of images of free width: what is copied around padding, and tiles for the last pixels of a line."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from onnx.helper import make_node
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from support.arrays import normal
from tvmflow.compiler import CompiledModel, build, import_onnx, lower, workloads
from tvmflow.compiler.borders import split_lines
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.lowering import lower_functions
from tvmflow.compiler.machine import machine
from tvmflow.compiler.operators.common import buffer
from tvmflow.compiler.schedules import schedule
from tvmflow.hardware.target import Target, resolve
from tvmflow.tuning.traces import normalize

_WIDTHS = (1, 2, 4, 5, 7, 9, 10, 13, 19)


def _convolution(make_model: Any, channels: tuple[int, int], size: int, **attributes: Any) -> Path:
    outputs, inputs = channels
    weights = {"w": normal(outputs, inputs, size, size), "b": normal(outputs)}
    nodes = [make_node("Conv", ["x", "w", "b"], ["c"], **attributes), make_node("Relu", ["c"], ["y"])]
    return make_model(nodes, [("x", ["n", inputs, "h", "width"])], ["y"], weights)


def _images(channels: int) -> list[dict[str, Any]]:
    return [{"x": normal(1 + width % 2, channels, 3, width, seed=width)} for width in _WIDTHS]


_TIR = Inspection(code=("tir",))


def _code(model: CompiledModel) -> dict[str, str]:
    """The scheduled functions of a model that was built to be inspected, by name."""
    functions = re.split(r"@T\.prim_func", model.inspected.code["tir"])
    return {name[1]: text for text in functions if (name := re.search(r"def (\w+)\(", text))}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("operator", "slope"), [("LeakyRelu", ()), ("PRelu", (10, 1, 1)), ("PRelu", (1, 1, 1))], ids=["one", "each", "own"]
)
def test_a_slope_after_a_convolution_of_a_free_image_is_no_branch_for_each_element(
    operator: str, slope: tuple[int, ...], make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    slopes = {"s": normal(*slope)} if slope else {}
    weights = {"w": normal(10, 3, 3, 3), "b": normal(10), **slopes}
    nodes = [make_node("Conv", ["x", "w", "b"], ["c"]), make_node(operator, ["c", *slopes], ["y"])]
    path = make_model(nodes, [("x", ["n", 3, "h", "width"])], ["y"], weights)
    images = [{"x": normal(1, 3, 5, width)} for width in (3, 9, 20)]
    images[-1]["x"][0, :, 1, 2], images[-1]["x"][0, 0, 4, 9] = np.nan, -np.inf
    model = assert_same_as_onnxruntime(path, *images, inspect=_TIR)
    (convolution,) = (text for name, text in _code(model).items() if "conv2d" in name)
    assert "relu" in convolution or "where" in convolution
    branches = re.findall(r"if_then_else\((.*)", convolution)
    # Those that are left say whether a pixel is in the padding.
    assert not [branch for branch in branches if "conv2d" in branch]


@pytest.mark.few(2)
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
    channels: tuple[int, int], size: int, attributes: Any, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    path = _convolution(make_model, channels, size, **attributes)
    model = assert_same_as_onnxruntime(path, *_images(channels[1]), inspect=_TIR)
    (convolution,) = (text for name, text in _code(model).items() if "conv2d" in name)
    parts = re.split(r"for once(?:_\d+)? in", convolution)[1:]
    rows = [int(numbers[0]) for part in parts if (numbers := re.findall(r"T\.unroll\(T\.int64\((\d+)\)\)", part))]
    assert rows == [rows[0], (rows[0] + 1) // 2, *([1] if size == 1 else [])]


def test_the_pixels_of_images_of_known_height_have_tiles_without_conditions(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    # n * ((width - 1) // 2 + 1) * 24 pixels are whole tiles, of 6 or 8. TVM proves it where all but the 24 are one
    # size. Weights that the cache does not hold are read for all pixels before the next ones.
    nodes = [
        make_node("MaxPool", ["x"], ["m"], kernel_shape=[1, 3], strides=[1, 2], pads=[0, 1, 0, 1]),
        make_node("Conv", ["m", "w", "b"], ["y"]),
    ]
    weights = {"w": normal(480, 480, 1, 1) / 20, "b": normal(480)}
    path = make_model(nodes, [("x", ["n", 480, 24, "width"])], ["y"], weights)
    feeds = [{"x": normal(1, 480, 24, 5)}, {"x": normal(3, 480, 24, 14)}]
    model = assert_same_as_onnxruntime(path, *feeds, inspect=_TIR)
    (pointwise,) = (text for name, text in _code(model).items() if "conv2d" in name)
    assert "T.where" not in pointwise


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [3, 5], ids=str)
def test_a_whole_tile_of_a_depthwise_convolution_has_no_condition_for_each_pixel(
    size: int, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    weights = {"w": normal(32, 1, size, size), "b": normal(32)}
    nodes = [
        make_node("Conv", ["x", "w", "b"], ["c"], pads=[size // 2] * 4, group=32),
        make_node("Sigmoid", ["c"], ["s"]),
        make_node("Mul", ["c", "s"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["n", 32, "h", "width"])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, *_images(32), inspect=_TIR)
    (convolution,) = (text for name, text in _code(model).items() if "depthwise" in name)
    *_, whole, last = re.split(r"for once(?:_\d+)? in", convolution)
    assert "T.where" not in whole
    assert "T.where" in last


def _residual(first: int, second: int) -> list[Any]:
    """The nodes of relu(first(x) + second(|x|)), two convolutions with kernels of `first` and `second` taps a side."""
    return [
        make_node("Conv", ["x", "w1", "b"], ["a"], pads=[first // 2] * 4),
        make_node("Abs", ["x"], ["m"]),
        make_node("Conv", ["m", "w2"], ["s"], pads=[second // 2] * 4),
        make_node("Add", ["a", "s"], ["t"]),
        make_node("Relu", ["t"], ["y"]),
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (3, 1)], ids=["both", "the first", "the second"])
def test_all_pixels_of_free_images_are_one_line_of_a_pointwise_convolution(
    sizes: tuple[int, int], make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    weights = {f"w{place}": normal(24, 16, size, size, seed=place) for place, size in enumerate(sizes, 1)}
    path = make_model(_residual(*sizes), [("x", ["n", 16, "h", "width"])], ["y"], {**weights, "b": normal(24)})
    # What follows the two convolutions is computed with the first.
    functions = _code(assert_same_as_onnxruntime(path, *_images(16), inspect=_TIR))
    fused = [text for name, text in functions.items() if name.startswith("fused") and "add" in name]
    assert any("relu" in text or "max" in text for text in fused)
    on_a_line = [
        text for name, text in functions.items() if "conv2d" in name and re.search(r"int64\(1\), size\d*,", text)
    ]
    assert len(on_a_line) == sizes.count(1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        (["t", "n"], r"T\.int64\(1\), [^,]+"),
        (["t", 1], r"t, T\.int64\(1\)"),
        ([8, "t"], r"T\.int64\(1\), [^,]+"),
        (["n", 5], r"n, T\.int64\(5\)"),
    ],
    ids=["batch last", "one", "known batch", "known length"],
)
def test_all_rows_of_free_sizes_are_one_line_of_a_dense_layer(
    sizes: list[Any], rows: str, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        make_node("MatMul", ["x", "w"], ["a"]),
        make_node("Add", ["a", "b"], ["c"]),
        make_node("Relu", ["c"], ["d"]),
        make_node("MatMul", ["d", "v"], ["e"]),
        make_node("Add", ["e", "x"], ["y"]),
    ]
    weights = {"w": normal(24, 40), "b": normal(40), "v": normal(40, 24)}
    path = make_model(nodes, [("x", [*sizes, 24])], ["y"], weights)
    feeds = [{"x": normal(*(size if isinstance(size, int) else number for size in sizes), 24)} for number in (1, 7, 40)]
    functions = _code(assert_same_as_onnxruntime(path, *feeds, inspect=_TIR))
    layers = [text for name, text in functions.items() if "dense" in name]
    # What follows each layer is computed with it; a reshape to the line or back is a view.
    assert {name for name in functions if "dense" not in name and "reshape" not in name} == {"direct_main"}
    assert len(layers) == 2
    assert all(re.search(rf"T\.Buffer\(\({rows}, T\.int64\((24|40)\)\)", text) for text in layers)


@pytest.mark.parametrize("length", ["t", 40])
def test_what_follows_a_convolution_of_one_dimension_is_computed_with_it(
    length: Any, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1]),
        make_node("Relu", ["c"], ["d"]),
        make_node("Add", ["d", "x"], ["e"]),
        make_node("Conv", ["e", "v"], ["f"], pads=[4, 4], dilations=[4]),
        make_node("Mul", ["f", "s"], ["g"]),
        make_node("Sigmoid", ["g"], ["y"]),
    ]
    weights = {"w": normal(24, 24, 3), "b": normal(24), "v": normal(32, 24, 3), "s": normal(32, 1)}
    path = make_model(nodes, [("x", ["n", 24, length])], ["y"], weights)
    feeds = [{"x": normal(2, 24, 40)}, *([{"x": normal(1, 24, 9)}] if length == "t" else [])]
    functions = _code(assert_same_as_onnxruntime(path, *feeds, inspect=_TIR))
    others = [name for name in functions if not re.search("conv2d|transpose|reshape|expand_dims|direct_main", name)]
    assert not others
    assert any("relu" in name for name in functions)
    assert any("sigmoid" in name for name in functions)


@pytest.mark.few(3)
@pytest.mark.parametrize("height", ["h", 11])
@pytest.mark.parametrize(("size", "stride"), [(3, 1), (5, 2), (9, 1)])
def test_a_strip_of_lines_may_end_beyond_the_image(
    size: int, stride: int, height: Any, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    node = make_node("Conv", ["x", "w"], ["c"], group=24, pads=[size // 2] * 4, strides=[stride] * 2)
    path = make_model(
        [node, make_node("Relu", ["c"], ["y"])],
        [("x", ["n", 24, height, "width"])],
        ["y"],
        {"w": normal(24, 1, size, size)},
    )
    heights = (11,) if height == 11 else (1, 3, 4, 5, 11)
    assert_same_as_onnxruntime(path, *({"x": normal(1 + high % 2, 24, high, 6 + high)} for high in heights))


def test_a_gate_for_each_image_keeps_the_pixels_of_the_images_apart(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        make_node("Conv", ["x", "w"], ["c"]),
        make_node("GlobalAveragePool", ["x"], ["p"]),
        make_node("Conv", ["p", "g"], ["q"]),
        make_node("Sigmoid", ["q"], ["gate"]),
        make_node("Mul", ["c", "gate"], ["m"]),
        make_node("Conv", ["m", "v"], ["y"]),
    ]
    weights = {"w": normal(32, 16, 1, 1), "g": normal(32, 16, 1, 1), "v": normal(8, 32, 1, 1)}
    path = make_model(nodes, [("x", ["n", 16, "h", "width"])], ["y"], weights)
    assert_same_as_onnxruntime(path, *_images(16))


def test_a_line_of_known_length_has_one_tile(make_model: Any, target: Any) -> None:
    weights = {"w": normal(32, 24, 1, 1)}
    path = make_model([make_node("Conv", ["x", "w"], ["y"])], [("x", [1, 24, 5, 13])], ["y"], weights)
    model = build(import_onnx(path), target, inspect=_TIR)
    assert not any("for once in" in text for text in _code(model).values())


@pytest.mark.few(1)
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


def test_what_the_loops_of_a_line_define_is_replaced_in_all_of_them() -> None:
    width, x, c, count, column = (tirx.Var(name, "int64") for name in ("width", "x", "c", "count", "column"))
    image, padded = buffer("image", (width, width)), buffer("padded", (width + 3, width))
    value = tirx.if_then_else(column >= 0, image[column, c], tirx.const(-1, "float32"))
    store = tirx.BufferStore(padded, value, [x, c])
    numbers = tirx.For(c, 0, count, tirx.ForKind.SERIAL, store)
    pixel = tirx.SeqStmt([tirx.Bind(count, width), tirx.Bind(column, x - 3), numbers])
    body = tirx.For(x, 0, width + 3, tirx.ForKind.SERIAL, pixel)
    function = tirx.PrimFunc([image, padded], body).with_attr("global_symbol", "main")
    split = split_lines(tvm.IRModule({"main": function}))["main"]
    assert not {count, column} & set(tirx.analysis.undefined_vars(split.body, [image, padded]))
    assert "if_then_else" not in split.script()


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


def _stores(mod: tvm.IRModule) -> list[str]:
    """The lines of code that write to a buffer."""
    lines = [line for line in mod.script().splitlines() if re.match(r"\s+\w+\[.*\] = ", line)]
    assert lines
    return lines


@pytest.mark.parametrize(
    ("node", "shapes"),
    [
        (make_node("Concat", ["x", "z", "x"], ["y"], axis=-1), [(1, 1), (2, 5), (17, 3)]),
        *(
            (make_node("Pad", ["x", "pads"], ["y"], mode=mode), [(3, 1), (4, 1), (9, 1)])
            for mode in ("reflect", "edge", "wrap")
        ),
    ],
    ids=["concatenation", "reflection", "edge", "other end"],
)
def test_lines_of_free_length_ask_for_no_number_where_it_lies(
    node: Any, shapes: list[tuple[int, int]], make_model: Any, assert_same_as_onnxruntime: Any, target: Target
) -> None:
    inputs = [("x", [2, "n"]), *([("z", [2, "m"])] if "z" in node.input else [])]
    weights = {"pads": np.array([0, 2, 0, 1])} if "pads" in node.input else {}
    path = make_model([node], inputs, ["y"], weights, opset=19)
    feeds = [{"x": normal(2, n), **({"z": normal(2, m)} if "z" in node.input else {})} for n, m in shapes]
    assert_same_as_onnxruntime(path, *feeds)
    _assert_lines_have_no_condition(path, target)


def _assert_lines_have_no_condition(path: Path, target: Target) -> None:
    """Check that a model of one function has conditions for its numbers, and lowered code none."""
    (function,) = (item.func for item in workloads(lower(import_onnx(path), target)))
    scheduled = tvm.IRModule({"main": schedule(function, machine(target))[0].with_attr("global_symbol", "main")})
    assert any("if_then_else" in line for line in _stores(scheduled))
    assert not any(
        "if_then_else" in line for line in _stores(lower_functions(scheduled, tvm.target.Target(target.tvm)))
    )


@pytest.mark.parametrize("mode", ["constant", "edge"])
@pytest.mark.parametrize("widths", [(3, 2), (-1, 2)], ids=str)
def test_cores_share_a_line_of_free_length_without_a_condition_for_each_number(
    widths: tuple[int, int], mode: str, make_model: Any, assert_same_as_onnxruntime: Any, target: Target
) -> None:
    pad = make_node("Pad", ["x", "pads"], ["y"], mode=mode)
    path = make_model([pad], [("x", ["n"])], [("y", None)], {"pads": np.array(widths)})
    assert_same_as_onnxruntime(path, *({"x": normal(size)} for size in (3, 50)))
    if min(widths) >= 0:
        _assert_lines_have_no_condition(path, target)


def test_what_a_transposed_convolution_writes_is_joined_in_vectors(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    """Each element asks which of four pixels it belongs to; all channels of a pixel do so alike."""
    nodes = [
        make_node("ConvTranspose", ["x", "w"], ["a"], strides=[2, 2]),
        make_node("Conv", ["z", "u"], ["c"]),
        make_node("Concat", ["c", "a"], ["b"], axis=1),
        make_node("Conv", ["b", "v"], ["y"]),
    ]
    weights = {"w": normal(32, 32, 2, 2) / 8, "u": normal(32, 32, 1, 1) / 5, "v": normal(32, 64, 3, 3) / 20}
    path = make_model(nodes, [("x", [1, 32, 6, 6]), ("z", [1, 32, 12, 12])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 32, 6, 6), "z": normal(1, 32, 12, 12)}, inspect=_TIR)
    (joined,) = (text for name, text in _code(model).items() if "concatenate" in name)
    assert "T.vectorized" in joined


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_a_task_pads_a_whole_line_where_there_are_lines_enough_for_all_cores(level: str, make_model: Any) -> None:
    target = resolve(level)
    weights = {"w": normal(128, 16, 3, 3)}
    node = make_node("Conv", ["x", "w"], ["y"], strides=[2, 2], pads=[1] * 4)
    lowered = lower(import_onnx(make_model([node], [("x", [1, 16, 21, 21])], ["y"], weights)), target)
    (func,) = (normalize(item.func) for item in workloads(lowered) if "conv2d" in item.name)

    def count_tasks(cores: int) -> int:
        loops: list[tirx.For] = []
        numbers = replace(machine(target), cores=cores, region=0)
        tvm_ffi.structural_walk(schedule(func, numbers)[0].body, (tirx.For, loops.append))
        (task,) = (loop for loop in loops if loop.kind == tirx.ForKind.PARALLEL)
        return int(task.extent)

    # Eleven lines are six and five for two cores. Of sixteen cores, five would have none.
    assert count_tasks(2) == 11
    assert count_tasks(16) in (22, 44, 88)
