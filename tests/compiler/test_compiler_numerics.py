import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import NodeProto, TensorProto, helper
from tvm import te

from support import scale
from support.arrays import normal
from support.builds import assert_all_same_as_onnxruntime, rule_counts, run_in_memory
from support.machines import on_two_cores, runnable_levels
from support.models import save_model
from tvmflow.compiler import BuildOptions, CompiledModel, build, import_onnx, vectormath
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.machine import machine
from tvmflow.hardware.target import Precision, Target

Check = Callable[..., CompiledModel]
MakeModel = Callable[..., Path]
RunBuilt = Callable[..., list[np.ndarray[Any, Any]]]


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


# channels in and out, groups, kernel, stride, padding, dilation, height, width
_CONVOLUTIONS = [
    (3, 32, 1, 3, 2, 1, 1, 33, 29),
    (1, 1, 1, 3, 1, 1, 1, 7, 7),
    (5, 37, 1, 3, 1, 0, 2, 19, 23),
    (16, 70, 1, 1, 1, 0, 1, 13, 11),
    (20, 24, 1, 1, 2, 0, 1, 15, 15),
    (12, 18, 3, 3, 1, 1, 1, 10, 9),
    (32, 64, 2, 3, 2, 2, 1, 9, 17),
    (7, 14, 7, 3, 1, 1, 1, 8, 8),
    (58, 116, 2, 1, 1, 0, 1, 9, 9),
    (33, 75, 3, 3, 2, 1, 1, 9, 12),
    (8, 48, 1, 5, 3, 2, 1, 20, 31),
    (64, 8, 1, 1, 1, 0, 1, 7, 7),
    (20, 40, 1, 3, 1, 12, 12, 16, 17),
    (20, 40, 1, 3, 1, 24, 24, 16, 17),
    (18, 33, 1, 5, 2, 6, 4, 19, 15),
    (24, 48, 3, 3, 1, 9, 9, 7, 12),
]


def _conv(groups: int, kernel: int, stride: int, pad: int, dilation: int) -> NodeProto:
    return helper.make_node(
        "Conv",
        ["x", "w", "b"],
        ["c"],
        group=groups,
        kernel_shape=[kernel] * 2,
        strides=[stride] * 2,
        pads=[pad] * 4,
        dilations=[dilation] * 2,
    )


def _convolution(case: tuple[int, ...]) -> tuple[Any, ...]:
    channels, out, groups, kernel, stride, pad, dilation, height, width = case
    nodes = [_conv(groups, kernel, stride, pad, dilation), helper.make_node("Relu", ["c"], ["y"])]
    weights = {"w": normal(out, channels // groups, kernel, kernel), "b": normal(out)}
    shape = [1, channels, height, width]
    return (nodes, [("x", shape)], ["y"], weights), {"x": normal(*shape)}


@pytest.mark.few(2)
@pytest.mark.parametrize("channels", [88, 136, 187, 272])
def test_channels_of_a_prime_number_of_vectors_equal_onnx_runtime(channels: int, assert_all_same: Check) -> None:
    """A vector of zeros after the last channel, of 4, 8 or 16 lanes, must be in no result."""
    weights = {"w": normal(channels, 24, 1, 1), "v": normal(channels, 24, 3, 3), "d": normal(24, channels)}
    pads = [("w", {}), ("v", {"pads": [1] * 4, "strides": [2, 2]})]
    cases: list[tuple[Any, Any]] = [
        (
            ([helper.make_node("Conv", ["x", name], ["y"], **options)], [("x", [1, 24, 13, 9])], ["y"], weights),
            {"x": normal(1, 24, 13, 9)},
        )
        for name, options in pads
    ]
    for rows in (1, 26):
        nodes = [helper.make_node("MatMul", ["x", "d"], ["p"]), helper.make_node("Exp", ["p"], ["y"])]
        cases.append(((nodes, [("x", [rows, 24])], ["y"], {"d": weights["d"] / 24}), {"x": normal(rows, 24)}))
    computed = [helper.make_node("MatMul", ["x", "z"], ["y"])]
    cases.append(
        (
            (computed, [("x", [2, 26, 24]), ("z", [2, 24, channels])], ["y"], {}),
            {"x": normal(2, 26, 24), "z": normal(2, 24, channels)},
        )
    )
    assert_all_same(cases)


def test_convolutions_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = _CONVOLUTIONS[:: scale.count(normal=3, long=1)]
    rules = rule_counts(assert_all_same(map(_convolution, cases)))
    assert rules["conv2d"] + rules["rows"] + rules["winograd"] >= len(cases) - 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_with_padding_are_left_out(
    precision: Precision, request: pytest.FixtureRequest, make_model: MakeModel, run_built: RunBuilt
) -> None:
    # Of the taps of this kernel only the one in the centre reads an image of at most 24 lines and columns.
    weight = np.full((20, 64, 3, 3), np.nan, "float32")
    weight[:, :, 1, 1] = normal(20, 64)
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[24] * 4, dilations=[24] * 2)]
    path = make_model(nodes, [("x", ["n", 64, "h", "w"])], ["y"], {"w": weight})
    target = request.getfixturevalue("bf16" if precision == "bf16" else "target")
    model = build(import_onnx(path), target, BuildOptions(precision=precision))
    for shape in ((1, 64, 1, 1), (2, 64, 11, 5), (1, 64, 24, 24)):
        x = normal(*shape)
        expected = np.einsum("nchw,oc->nohw", x, weight[:, :, 1, 1])
        atol = 1e-5 if precision == "fp32" else 1e-2 * np.abs(expected).max()
        np.testing.assert_allclose(run_built(model, x)[0], expected, atol=atol)


def test_padded_convolutions_of_free_images_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    forms = [
        (3, [1, 1], [7, 9, 8, 6], [7, 8]),
        (3, [2, 1], [9, 0, 1, 20], [6, 3]),
        (5, [1, 3], [12, 4, 12, 8], [6, 3]),
        (3, [2, 2], [1, 1, 1, 1], [1, 1]),
    ]
    for kernel, strides, pads, dilations in scale.choose(normal=forms[1::2], long=forms):
        nodes = [helper.make_node("Conv", ["x", "w"], ["y"], strides=strides, pads=pads, dilations=dilations)]
        feeds = [{"x": normal(*shape)} for shape in ((1, 5, 33, 17), (2, 5, 20, 41))]
        cases.append(((nodes, [("x", ["n", 5, "h", "w"])], ["y"], {"w": normal(37, 5, kernel, kernel)}), *feeds))
    assert rule_counts(assert_all_same(cases))["conv2d"] == len(cases)


# channels, groups, kernel, stride, padding, dilation, size
_NARROW = [
    (128, 32, 3, 1, 1, 1, 28),
    (64, 32, 3, 2, 1, 1, 15),
    (24, 3, 5, 1, 2, 1, 11),
    (40, 20, 1, 1, 0, 1, 9),
    (56, 7, 3, 1, 2, 2, 13),
]


@pytest.mark.parametrize("batch", scale.choose(normal=["any"], long=[2, "any"]))
def test_narrow_groups_equal_onnx_runtime(batch: int | str, assert_all_same: Check, target: Target) -> None:
    cases = []
    forms = scale.choose(normal=_NARROW[1:4], long=_NARROW)
    for channels, groups, kernel, stride, pad, dilation, size in forms:
        nodes = [_conv(groups, kernel, stride, pad, dilation), helper.make_node("Relu", ["c"], ["y"])]
        weights = {"w": normal(channels, channels // groups, kernel, kernel), "b": normal(channels)}
        feeds = [{"x": normal(count, channels, size, size)} for count in ((2,) if batch == 2 else (1, 3))]
        cases.append(((nodes, [("x", [batch, channels, size, size])], ["y"], weights), *feeds))
    # A group as wide as a vector is a convolution of its own.
    narrow = [channels for channels, groups, *_ in forms if channels // groups < machine(target).lanes]
    assert rule_counts(assert_all_same(cases))["depthwise"] == len(narrow) > 0


def test_narrow_groups_of_any_height_equal_onnx_runtime(assert_all_same: Check, target: Target) -> None:
    cases = []
    forms = [(64, 32, 3, 2), (24, 6, 3, 1), (40, 5, 1, 1)]
    for channels, groups, kernel, stride in forms:
        nodes = [_conv(groups, kernel, stride, kernel // 2, 1), helper.make_node("Relu", ["c"], ["y"])]
        weights = {"w": normal(channels, channels // groups, kernel, kernel), "b": normal(channels)}
        feeds = [{"x": normal(1, channels, *size)} for size in ((5, 30), (14, 17))]
        cases.append(((nodes, [("x", [1, channels, "high", "wide"])], ["y"], weights), *feeds))
    narrow = [channels for channels, groups, *_ in forms if channels // groups < machine(target).lanes]
    assert rule_counts(assert_all_same(cases))["depthwise"] == len(narrow) > 0


# channels, kernel, stride, padding, dilation, size
_DEPTHWISE = [
    (32, 3, 1, 1, 1, 14),
    (37, 3, 2, 1, 1, 15),
    (24, 5, 1, 2, 1, 11),
    (9, 3, 1, 0, 1, 30),
    (70, 7, 2, 3, 1, 13),
    (40, 3, 1, 12, 12, 20),
]


def test_depthwise_convolutions_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for channels, kernel, stride, pad, dilation, size in scale.choose(normal=_DEPTHWISE[1::2], long=_DEPTHWISE):
        nodes = [
            _conv(channels, kernel, stride, pad, dilation),
            helper.make_node("Clip", ["c", "low", "high"], ["y"]),
        ]
        bounds = {"low": np.array(0, "float32"), "high": np.array(6, "float32")}
        weights = {"w": normal(channels, 1, kernel, kernel), "b": normal(channels), **bounds}
        shape = [2, channels, size, size]
        cases.append(((nodes, [("x", shape)], ["y"], weights), {"x": normal(*shape)}))
    assert rule_counts(assert_all_same(cases))["depthwise"] == len(cases)


_NO_LEVEL = [pytest.param("", marks=pytest.mark.skip(reason="this CPU has no level of x86-64 below its best"))]


# All other tests run the code of the highest one; a normal run tries that of the one below it.
@pytest.mark.parametrize("level", scale.choose(normal=runnable_levels()[-2:-1], long=runnable_levels()) or _NO_LEVEL)
def test_the_code_of_every_level_that_this_machine_runs_equals_onnx_runtime(level: str, tmp_path: Path) -> None:
    rows = [helper.make_node("LayerNormalization", ["x", "s", "s"], ["a"]), helper.make_node("Softmax", ["a"], ["b"])]
    dense = helper.make_node("MatMul", ["b", "m"], ["y"])
    pooling = {"kernel_shape": [3, 3], "pads": [1] * 4}
    image = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4),
        helper.make_node("Conv", ["a", "d"], ["b"], group=20),
        helper.make_node("AveragePool", ["b"], ["c"], **pooling),
        helper.make_node("MaxPool", ["c"], ["y"], strides=[2, 2], **pooling),
    ]
    models = [
        *map(_convolution, (_CONVOLUTIONS[place] for place in scale.choose(normal=(3, 9), long=(2, 3, 5, 9)))),
        (([*rows, dense], [("x", [9, 37])], ["y"], {"s": normal(37), "m": normal(37, 21)}), {"x": normal(9, 37)}),
        (
            (image, [("x", [2, 9, 14, 11])], ["y"], {"w": normal(20, 9, 3, 3), "d": normal(20, 1, 3, 3)}),
            {"x": normal(2, 9, 14, 11)},
        ),
    ]
    cases = [
        (save_model(tmp_path / f"{place}.onnx", *arguments), [feed]) for place, (arguments, feed) in enumerate(models)
    ]
    assert_all_same_as_onnxruntime(cases, on_two_cores(level))


@pytest.mark.long  # What follows Winograd's algorithm is in test_compiler_winograd.py.
def test_clipping_and_residuals_fuse_into_their_convolution(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Clip", ["a", "low", "high"], ["b"]),
        helper.make_node("Conv", ["b", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "b"], ["y"]),
    ]
    bounds = {"low": np.array(0, "float32"), "high": np.array(6, "float32")}
    path = make_model(nodes, [("x", [1, 16, 12, 12])], ["y"], {"w": normal(16, 16, 3, 3), **bounds})
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 16, 12, 12)})
    assert rule_counts(model) == {"winograd": 2, "fallback": 2}  # the two others are the layout changes at both ends


def test_a_symbolic_batch_serves_every_batch(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", "w3", "b3"], ["f"], transB=1),
        helper.make_node("Softmax", ["f"], ["y"]),
    ]
    weights = {
        "w1": normal(20, 3, 3, 3),
        "w2": normal(33, 20, 1, 1) / 4,
        "w3": normal(10, 33) / 4,
        "b3": normal(10),
    }
    path = make_model(nodes, [("x", ["batch", 3, 17, 17])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, *({"x": normal(batch, 3, 17, 17)} for batch in (1, 2, 5)))
    assert not [name for name, rule in model.schedules if "conv2d" in name and rule not in ("conv2d", "rows")]


@pytest.mark.long  # Each kind of convolution of free sizes is in test_compiler_free.py or test_compiler_lines.py.
def test_symbolic_image_sizes_are_served(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["a", "w2"], ["b"], pads=[1, 1, 1, 1], group=20),
        helper.make_node("Conv", ["b", "w3"], ["y"]),
    ]
    weights = {"w1": normal(20, 3, 3, 3), "w2": normal(20, 1, 3, 3), "w3": normal(9, 20, 1, 1)}
    path = make_model(nodes, [("x", [1, 3, "h", "w"])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(1, 3, 8, 8)}, {"x": normal(1, 3, 13, 31)})


def _dense(depth: int, units: int) -> tuple[list[NodeProto], dict[str, Any]]:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Add", ["a", "b"], ["y"])]
    return nodes, {"w": normal(depth, units), "b": normal(units)}


def test_dense_layers_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for rows, depth, units in [(1, 33, 70), (7, 64, 10), (197, 48, 96), (23, 5, 1), (64, 128, 48)]:
        nodes, weights = _dense(depth, units)
        cases.append(((nodes, [("x", [rows, depth])], ["y"], weights), {"x": normal(rows, depth)}))
    assert rule_counts(assert_all_same(cases)) == {"rows": len(cases)}


# The shape of a dense layer's input, and sizes of its symbols.
_SYMBOLIC_ROWS: list[tuple[list[Any], list[tuple[int, ...]]]] = [
    (["batch", 5, 9, 20], [(1,), (3,)]),
    ([17, "batch", 20], [(1,), (4,)]),
    ([2, "batch", 20], [(1,), (9,)]),
    ([6, "batch", 7, 20], [(1,), (3,)]),
    (["batch", 7, "time", 5, 20], [(1, 1), (2, 3)]),
    (["batch", "time", 20], [(1, 5), (2, 8)]),
]


def test_dense_layers_over_known_and_symbolic_rows_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for shape, sizes in scale.choose(normal=_SYMBOLIC_ROWS[::2], long=_SYMBOLIC_ROWS):
        nodes, weights = _dense(20, 37)
        symbols = [size for size in shape if isinstance(size, str)]
        fixed = [dict(zip(symbols, values, strict=True)) for values in sizes]
        feeds = [{"x": normal(*(values.get(size, size) for size in shape))} for values in fixed]
        cases.append(((nodes, [("x", shape)], ["y"], weights), *feeds))
    # Others are reshapes to a line of rows and back, which are views.
    assert rule_counts(assert_all_same(cases))["rows"] == len(cases)


# Batch, rows, depth and columns.
_PRODUCTS = [(3, 17, 20, 33), (2, 8, 64, 64), (4, 1, 16, 5)]
# The shapes of both operands: batches that are equal, and batches one of which broadcasts.
_BATCHED = [
    *(((2, batch, rows, depth), (2, batch, depth, units)) for batch, rows, depth, units in _PRODUCTS),
    ((3, 17, 20), (2, 3, 20, 33)),
    ((2, 3, 17, 20), (3, 20, 64)),
    ((2, 1, 9, 20), (1, 3, 20, 197)),
    # 25 vectors of eight lanes, or 17 of sixteen: one more is copied.
    ((2, 40, 16), (2, 16, 200)),
    ((2, 40, 16), (2, 16, 272)),
    ((9, 20), (4, 20, 31)),
    ((1, 9, 20), (4, 20, 8)),
]


def test_products_of_activations_equal_onnx_runtime(assert_all_same: Check) -> None:
    product = helper.make_node("MatMul", ["a", "b"], ["y"])
    shapes = scale.choose(normal=_BATCHED[::2], long=_BATCHED)
    cases = [
        (([product], [("a", left), ("b", right)], ["y"]), {"a": normal(*left), "b": normal(*right)})
        for left, right in shapes
    ]
    # A single row whose columns fill no vectors adds up the rows of the other operand.
    assert rule_counts(assert_all_same(cases))["rows"] == sum(left[-2] > 1 for left, _ in shapes)


@pytest.mark.long  # Softmax and norms, each alone, are in test_compiler_norms.py.
def test_softmax_and_norms_equal_onnx_runtime(assert_all_same: Check) -> None:
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["a"]),
        helper.make_node("Softmax", ["a"], ["y"], axis=-1),
    ]
    cases = []
    for rows, size in [(5, 64), (3, 37), (4, 7), (1, 1000)]:
        weights = {"scale": normal(size), "bias": normal(size)}
        cases.append(((nodes, [("x", [rows, size])], ["y"], weights), {"x": 30 * normal(rows, size) + 100}))
    assert rule_counts(assert_all_same(cases)) == {"rowwise": 2 * len(cases)}


def test_exponentials_of_numbers_up_to_zero_are_those_of_numpy() -> None:
    x = np.concatenate([-np.geomspace(1e-30, 87.3, 1000), [0, -0.0, -87.4, -1e9, -np.inf, np.nan]]).astype("float32")
    data = te.placeholder(x.shape, "float32", name="x")
    result = te.compute(x.shape, lambda i: vectormath.exp_of_negative(data[i]), name="y")
    y = tvm.runtime.tensor(np.zeros_like(x))
    tvm.compile(tvm.IRModule({"main": te.create_prim_func([data, result])}), "llvm")["main"](tvm.runtime.tensor(x), y)
    np.testing.assert_allclose(y.numpy()[:-4], np.exp(x[:-4].astype("float64")), rtol=2e-7)
    np.testing.assert_array_equal(y.numpy()[-4:], np.array([0, 0, 0, np.nan], "float32"))


def test_attention_with_symbolic_batch_and_length_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    width, heads = 32, 4
    shape = np.array([0, 0, heads, width // heads])
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("LayerNormalization", ["e", "scale", "bias"], ["n"]),
        *(helper.make_node("MatMul", ["n", f"w{part}"], [f"{part}0"]) for part in "qkv"),
        *(helper.make_node("Reshape", [f"{part}0", "shape"], [f"{part}1"]) for part in "qkv"),
        helper.make_node("Transpose", ["q1"], ["q"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["k1"], ["k"], perm=[0, 2, 3, 1]),
        helper.make_node("Transpose", ["v1"], ["v"], perm=[0, 2, 1, 3]),
        helper.make_node("MatMul", ["q", "k"], ["s0"]),
        helper.make_node("Cast", ["mask"], ["m0"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["m0", "axes"], ["m"]),
        helper.make_node("Add", ["s0", "m"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["o0"]),
        helper.make_node("Transpose", ["o0"], ["o1"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["o1", "flat"], ["o2"]),
        helper.make_node("Add", ["o2", "e"], ["o3"]),
        helper.make_node("Gelu", ["o3"], ["y"]),
    ]
    weights = {
        "table": normal(50, width),
        "scale": normal(width),
        "bias": normal(width),
        "shape": shape,
        **{f"w{part}": normal(width, width) / 4 for part in "qkv"},
        "axes": np.array([1, 2]),
        "flat": np.array([0, 0, width]),
    }
    inputs = [("ids", ["batch", "time"], TensorProto.INT64), ("mask", ["batch", "time"], TensorProto.INT64)]
    path = make_model(nodes, inputs, ["y"], weights, opset=20)
    feeds = [
        {"ids": _rng().integers(-50, 50, size), "mask": _rng().integers(-2, 1, size)}
        for size in ((1, 16), (3, 11), (2, 1))
    ]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert rule_counts(model)["rows"] == 1  # one function for queries, keys and values
    assert rule_counts(model)["attention"] == 1


def test_vector_functions_are_accurate_over_the_whole_range(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    functions = ["Exp", "Erf", "Tanh", "Sigmoid", "Sin", "Cos", "Atan"]
    nodes = [helper.make_node(function, ["x"], [function]) for function in functions]
    path = make_model(nodes, [("x", [4001])], functions)
    x = np.linspace(-88, 88, 4001, dtype="float32")
    assert_same_as_onnxruntime(path, {"x": x}, {"x": x / 40}, rtol=1e-5)


def test_sines_of_large_angles_are_those_of_numpy(make_model: Any, target: Any, run_built: Any) -> None:
    functions = {"Sin": np.sin, "Cos": np.cos, "Atan": np.arctan}
    nodes = [helper.make_node(name, ["x"], [name]) for name in functions]
    model = build(import_onnx(make_model(nodes, [("x", [4096])], list(functions))), target)
    for largest, tolerance in ((10.0, 2e-7), (1e7, 2e-7), (1e9, 5e-7)):
        x = np.random.default_rng(0).uniform(-largest, largest, 4096).astype("float32")
        for ours, function in zip(run_built(model, x), functions.values(), strict=True):
            np.testing.assert_allclose(ours, function(x.astype("float64")), rtol=0, atol=tolerance)
    # Beyond that a sine is bounded and no more; that of infinity is none.
    x = np.resize(np.array([0, 1e20, -1e38, np.inf, -np.inf, np.nan, 1e-30], "float32"), 4096)
    sine, cosine, arctangent = run_built(model, x)
    assert np.abs([sine[:3], cosine[:3]]).max() <= 1
    assert np.isnan([sine[3:6], cosine[3:6]]).all()
    np.testing.assert_array_equal(sine[6], x[6])
    half = np.float32(np.pi / 2)
    np.testing.assert_array_equal(arctangent[:7], [0, half, -half, half, -half, np.float32(np.nan), x[6]])


def test_inverse_and_hyperbolic_functions_and_logarithms_are_those_of_numpy_in_vectors(
    make_model: Any, target: Any, run_built: Any
) -> None:
    """To a few units in the last place, from the smallest to the largest numbers."""
    functions = {
        "Tan": np.tan,
        "Asin": np.arcsin,
        "Acos": np.arccos,
        "Sinh": np.sinh,
        "Cosh": np.cosh,
        "Asinh": np.arcsinh,
        "Acosh": np.arccosh,
        "Atanh": np.arctanh,
        "Log": np.log,
    }
    sizes = np.concatenate([np.geomspace(1e-44, 3.4e38, 3000), np.linspace(0, 3, 3000), np.linspace(3, 95, 3000)])
    edges = [0, 0.5, 1, 1.0000001, 0.99999994, 89.41, 89.42, np.inf, np.nan]
    x = np.concatenate([sizes, -sizes, edges]).astype("float32")
    nodes = [helper.make_node(name, ["x"], [name]) for name in functions]
    path = make_model(nodes, [("x", [len(x)])], list(functions))
    model = build(import_onnx(path), target, inspect=Inspection(code=("tir",)))
    # The C library would be called for each number.
    assert not re.search(r"T\.(tan|asin|acos|sinh|cosh|asinh|acosh|atanh|log)\(", model.inspected.code["tir"])
    for ours, (name, function) in zip(run_built(model, x), functions.items(), strict=True):
        with np.errstate(all="ignore"):
            # The tangent of an angle beyond 1e9, whose neighbours are more than a turn away, is that of some angle.
            places = np.abs(x) < 1e7 if name == "Tan" else np.full(len(x), True)
            exact = function(x[places].astype("float64"))
            expected = exact.astype("float32")
        np.testing.assert_allclose(ours[places], expected, rtol=5e-7, atol=1e-44, err_msg=name)


def test_exponentials_of_doubles_are_those_of_numpy_in_vectors(make_model: Any, target: Any, run_built: Any) -> None:
    rng = np.random.default_rng(2)
    ends = [0.0, -0.0, np.inf, -np.inf, np.nan, 709.78, 709.79, -745.13, -745.2, 1e300, -1e300, 1e-300, -1e-300]
    x = np.concatenate([rng.uniform(-50, 50, 500), rng.uniform(-1, 1, 500), rng.uniform(-745, 709, 487), ends])
    x = x.reshape(5, 300)
    operators = ["Exp", "Tanh", "Sigmoid", "Softmax", "LogSoftmax"]
    nodes = [helper.make_node(operator, ["x"], [operator]) for operator in operators]
    # The last dimension of the first results has infinities, and that of the last ones none.
    nodes += [
        helper.make_node(operator, ["z"], [f"{operator}{axis}"], axis=axis)
        for operator in operators[3:]
        for axis in (0, 1)
    ]
    outputs = [(node.output[0], None, TensorProto.DOUBLE) for node in nodes]
    path = make_model(nodes, [("x", [5, 300], TensorProto.DOUBLE), ("z", ["n", 7], TensorProto.DOUBLE)], outputs)
    model = build(import_onnx(path), target, inspect=Inspection(code=("tir",)))
    assert not re.search(r"T\.(exp|tanh|sigmoid)\(", model.inspected.code["tir"])
    z = rng.uniform(-30, 30, (6, 7))

    def softmax(numbers: Any, axis: int) -> Any:
        shifted = np.exp(numbers - numbers.max(axis, keepdims=True))
        return shifted / shifted.sum(axis, keepdims=True)

    with np.errstate(all="ignore"):
        expected = [np.exp(x), np.tanh(x), 1 / (1 + np.exp(-x)), softmax(x, -1), np.log(softmax(x, -1))]
        expected += [softmax(z, 0), softmax(z, 1), np.log(softmax(z, 0)), np.log(softmax(z, 1))]
    for name, ours, theirs in zip(outputs, run_built(model, x, z), expected, strict=True):
        # A logistic function below the smallest normal number may be zero.
        bounds = {"rtol": 1e-12, "atol": 1e-12} if "Log" in name[0] else {"rtol": 4e-15, "atol": 0.0}
        if name[0] in ("Sigmoid", "LogSoftmax"):
            ours, theirs = (np.where(np.abs(theirs) < 700, item, 0) for item in (ours, theirs))
            bounds["atol"] = max(bounds["atol"], 3e-308)
        np.testing.assert_allclose(ours, theirs, **bounds, err_msg=name[0])
        np.testing.assert_array_equal(np.signbit(ours[theirs == 0]), np.signbit(theirs[theirs == 0]))


def test_odd_functions_keep_the_sign_of_zero(make_model: Any, target: Any, run_built: Any) -> None:
    functions = ["Sin", "Tan", "Asin", "Atan", "Sinh", "Asinh", "Atanh", "Tanh", "Erf"]
    nodes = [helper.make_node(name, ["x"], [name]) for name in functions]
    x = np.array([-0.0, 0.0] * 9, "float32")
    outputs = run_built(build(import_onnx(make_model(nodes, [("x", [18])], functions)), target), x)
    for name, y in zip(functions, outputs, strict=True):
        assert not y.any(), name
        assert np.signbit(y).tolist() == [True, False] * 9, name


def test_exponentials_of_extremes_are_zero_infinite_and_not_a_number(
    make_model: Any, target: Any, run_built: Any
) -> None:
    from tvmflow.compiler import build, import_onnx

    path = make_model([helper.make_node("Exp", ["x"], ["y"])], [("x", [16])], ["y"])
    x = np.array(
        [-np.inf, -1000, 1000, np.inf, np.nan, np.nan, 88.8, -87.4, *[0.0] * 4, 88.72284, 88.72283, -87.33, -87.0],
        "float32",
    )
    # The bits of a NaN that are not its sign and exponent are any.
    x.view("uint32")[5] += 0x1ABC1
    model = build(import_onnx(path), target, inspect=Inspection(code=("tir",)))
    (y,) = run_built(model, x)
    np.testing.assert_array_equal(y[:9], np.array([0, 0, np.inf, np.inf, np.nan, np.nan, np.inf, 0, 1], "float32"))
    # The first number whose exponential is too large for float32.
    assert y[12] == np.inf
    np.testing.assert_allclose(y[-3:], np.exp(x[-3:].astype("float64")), rtol=2e-7)
    # Whole powers are found by one sum, and none is converted.
    assert "T.floor" not in model.inspected.code["tir"]


def test_functions_of_exponentials_are_near_float64_and_convert_no_number(
    make_model: Any, target: Any, run_built: Any
) -> None:
    def gelu(x: Any) -> Any:
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    functions = {
        "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "Swish": lambda x: x / (1 + np.exp(-x)),
        "Gelu": gelu,
        "Softmax": lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
    }
    x = np.concatenate([np.linspace(-86, 86, 5000), np.geomspace(1e-30, 1, 500), [0, -1e30, -3e38]]).astype("float32")
    attributes: dict[str, dict[str, Any]] = {"Gelu": {"approximate": "tanh"}}
    nodes = [helper.make_node(name, ["x"], [name], **attributes.get(name, {})) for name in functions]
    path = make_model(nodes, [("x", [len(x)])], list(functions), opset=24)
    model = build(import_onnx(path), target, inspect=Inspection(code=("tir",)))
    assert "T.floor" not in model.inspected.code["tir"]
    for ours, (name, function) in zip(run_built(model, x), functions.items(), strict=True):
        with np.errstate(over="ignore"):
            exact = function(x.astype("float64"))
        # Softmax subtracts the largest number, 86, in float32; the float64 GELU subtracts nearly equal numbers.
        relative, absolute = (5e-6 if name == "Softmax" else 8e-7), (1e-7 if name == "Gelu" else 2e-37)
        np.testing.assert_allclose(ours, exact, rtol=relative, atol=absolute, err_msg=name)


def test_global_pooling_over_any_channels_equals_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for channels in scale.choose(normal=(19,), long=(1, 19, 24, 40, 70)):
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["a"]),
            helper.make_node("GlobalAveragePool", ["a"], ["y"]),
            helper.make_node("GlobalMaxPool", ["a"], ["z"]),
        ]
        feeds = [{"x": normal(batch, 3, 11, 9)} for batch in (1, 3)]
        weights = {"w": normal(channels, 3, 1, 1)}
        cases.append(((nodes, [("x", ["batch", 3, 11, 9])], ["y", "z"], weights), *feeds))
    assert_all_same(cases)


@pytest.mark.long  # Each operator has a test of its own.
def test_operators_without_a_rule_fall_back(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w"], ["a"], strides=[2, 2]),
        helper.make_node("ReduceMax", ["a", "axes"], ["b"], keepdims=0),
        helper.make_node("CumSum", ["b", "one"], ["c"]),
        helper.make_node("TopK", ["c", "k"], ["y", "indices"]),
    ]
    weights = {
        "w": normal(3, 5, 2, 2),
        "axes": np.array([3]),
        "one": np.array(1),
        "k": np.array([3]),
    }
    path = make_model(nodes, [("x", [1, 3, 5, 6])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(1, 3, 5, 6)})


def test_weights_apart_give_what_weights_inside_give(
    make_model: Any, assert_same_as_onnxruntime: Check, target: Target
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Flatten", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "d"], ["y"]),
    ]
    weights = {"w": normal(18, 3, 3, 3), "d": normal(18 * 36, 21)}
    path = make_model(nodes, [("x", [1, 3, 8, 8])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 3, 8, 8)}, options=BuildOptions(weights="apart"))
    # The library packs the matrix, and holds the few weights of the convolution.
    assert [value.shape for value in model.params.values()] == [(648, 21)]


def test_compiled_execution_gives_the_same(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    path = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", ["n", 6])], ["y"], {"w": normal(6, 40)})
    assert_same_as_onnxruntime(path, {"x": normal(4, 6)}, options=BuildOptions(exec_mode="compiled"))


@pytest.mark.long  # A transposed convolution after another is in test_compiler_transposed.py.
def test_operators_that_need_another_layout_keep_it(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"]),
        helper.make_node("ConvTranspose", ["a", "w2"], ["b"], strides=[2, 2]),
        helper.make_node("HardSwish", ["b"], ["c"]),
        helper.make_node("Conv", ["c", "w3"], ["y"]),
    ]
    weights = {"w1": normal(6, 3, 1, 1), "w2": normal(6, 5, 2, 2), "w3": normal(4, 5, 3, 3)}
    path = make_model(nodes, [("x", ["batch", 3, 6, 7])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(2, 3, 6, 7)})


def test_dimensions_counted_from_the_back_survive_the_change_of_layout(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], strides=[4, 4]),
        helper.make_node("Reshape", ["a", "flat"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[0, 2, 1]),
        helper.make_node("Concat", ["token", "c"], ["d"], axis=1),
        helper.make_node("MatMul", ["d", "m"], ["e"]),
        helper.make_node("Reshape", ["e", "heads"], ["f"]),
        helper.make_node("Unsqueeze", ["f", "first"], ["g"]),
        helper.make_node("Transpose", ["g"], ["h"], perm=[3, 1, 2, 0, 4]),
        helper.make_node("Squeeze", ["h", "last"], ["y"]),
    ]
    weights = {
        "w": normal(12, 3, 4, 4),
        "m": normal(12, 36),
        "token": normal(1, 1, 12),
        "flat": np.array([1, 12, 16]),
        "heads": np.array([1, 17, 3, 12]),
        "first": np.array([0]),
        "last": np.array([-2]),
    }
    model = assert_same_as_onnxruntime(
        make_model(nodes, [("x", [1, 3, 16, 16])], ["y"], weights), {"x": normal(1, 3, 16, 16)}
    )
    assert rule_counts(model)["conv2d"] == 1


def test_one_dimensional_convolutions_get_the_rules_of_two(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"], pads=[2, 1], strides=[2]),
        helper.make_node("Relu", ["a"], ["c"]),
        helper.make_node("Conv", ["c", "v"], ["y"], group=20, dilations=[2]),
    ]
    weights = {"w": normal(20, 6, 5), "b": normal(20), "v": normal(20, 1, 3)}
    path = make_model(nodes, [("x", ["n", 6, "time"])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 6, 40)}, {"x": normal(1, 6, 33)})
    assert (rule_counts(model)["conv2d"], rule_counts(model)["depthwise"]) == (1, 1)


def test_scattering_and_sorting_keep_their_order(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("ScatterElements", ["x", "where", "what"], ["a"], axis=1, reduction="add"),
        helper.make_node("ScatterND", ["a", "rows", "row"], ["b"]),
        helper.make_node("GatherElements", ["b", "where"], ["y"], axis=1),
    ]
    weights = {
        "where": np.array([[0, 3, 3, -1]] * 5),
        "what": normal(5, 4),
        "rows": np.array([[2], [4]]),
        "row": normal(2, 30),
    }
    path = make_model(nodes, [("x", [5, 30])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(5, 30)})


def test_scattering_into_a_part_of_the_data_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("ScatterElements", ["x", "places", "what"], ["y"], axis=2),
        helper.make_node("ScatterElements", ["x", "places", "what"], ["z"], axis=-3, reduction="add"),
    ]
    weights = {
        "places": np.array([[[-1, 0], [2, 1]], [[1, 2], [-2, -3]]]),
        "what": normal(2, 2, 2),
    }
    path = make_model(nodes, [("x", [4, 3, 5])], ["y", "z"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(4, 3, 5)})


def test_scatter_of_early_opsets_counts_from_the_end(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    node = helper.make_node("Scatter", ["x", "places", "what"], ["y"], axis=1)
    weights = {"places": np.array([[-1, 0], [2, -2]]), "what": normal(2, 2)}
    path = make_model([node], [("x", [3, 4])], ["y"], weights, opset=9)
    assert_same_as_onnxruntime(path, {"x": normal(3, 4)})


def test_indices_smaller_than_a_free_dimension_leave_the_rest_of_the_data(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("ScatterElements", ["x", "places", "what"], ["y"], axis=1),
        helper.make_node("ScatterElements", ["x", "few", "some"], ["z"], axis=0, reduction="add"),
    ]
    weights = {"places": np.array([[1, 0]]), "what": normal(1, 2)}
    few = ("few", ["rows", "columns"], TensorProto.INT64)
    path = make_model(nodes, [("x", ["n", 4]), few, ("some", ["rows", "columns"])], ["y", "z"], weights)
    feeds = [
        {
            "x": normal(rows, 4),
            "few": np.arange(count * width).reshape(count, width) % rows,
            "some": normal(count, width),
        }
        for rows, count, width in ((1, 1, 4), (3, 2, 3), (5, 7, 1))
    ]
    assert_same_as_onnxruntime(path, *feeds)


@pytest.mark.few(1)
@pytest.mark.parametrize("before", ["", "Conv"])
def test_nan_stays_nan_in_rectifiers(before: str, make_model: Any, target: Target) -> None:
    convolution = [helper.make_node("Conv", ["x", "w"], ["a"])] if before else []
    value = "a" if before else "x"
    nodes = [
        *convolution,
        helper.make_node("Relu", [value], ["relu"]),
        helper.make_node("Clip", [value, "zero", "six"], ["relu6"]),
        helper.make_node("Clip", [value, "minus", "six"], ["clip"]),
    ]
    weights = {name: np.array(number, "float32") for name, number in (("zero", 0), ("six", 6), ("minus", -1))}
    names = ["relu", "relu6", "clip"]
    path: Path = make_model(nodes, [("x", [1, 16, 5, 7])], names, {**weights, "w": normal(24, 16, 1, 1)})
    x = normal(1, 16, 5, 7)
    x[0, 3, 2, 4] = np.nan
    results = run_in_memory(build(import_onnx(path), target), [[x]])[0]
    for name, result in zip(names, results, strict=True):
        place = (0, slice(None) if before else 3, 2, 4)
        assert np.isnan(result[place]).all(), name
        assert np.isnan(result).sum() == np.size(result[place]), name


def test_nan_of_either_operand_stays_nan_in_max_and_min(make_model: Any, target: Target) -> None:
    import onnxruntime

    weights = {"row": np.array([0, np.nan, 2, -3], "float32"), "number": np.array(np.nan, "float32")}
    pairs = [["x", "y"], ["y", "x"], ["x", "row"], ["row", "x"], ["x", "number"], ["x", "y", "row"]]
    names = [f"{operator}{place}" for operator in ("Max", "Min") for place in range(len(pairs))]
    nodes = [helper.make_node(name[:3], pairs[int(name[3])], [name]) for name in names]
    path: Path = make_model(nodes, [("x", [6, 4]), ("y", [1, 4])], names, weights)
    x, y = normal(6, 4), normal(1, 4)
    x[2], x[3, 1], y[0, 2] = np.nan, np.inf, np.nan
    results = run_in_memory(build(import_onnx(path), target), [[x, y]])[0]
    expected = onnxruntime.InferenceSession(path).run(None, {"x": x, "y": y})
    for name, result, other in zip(names, results, expected, strict=True):
        np.testing.assert_array_equal(result, other, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_become_the_integers_of_onnx_runtime(dtype: str, make_model: Any, target: Target) -> None:
    import onnxruntime

    names = ("int8", "int16", "int32", "int64", "uint8", "uint16")
    elements = {name: helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in names}
    nodes = [helper.make_node("Cast", ["x"], [name], to=element) for name, element in elements.items()]
    inputs = [("x", ["n"], helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))]
    path: Path = make_model(nodes, inputs, [(name, ["n"], element) for name, element in elements.items()])
    # Among them are some that an integer of 32 bits, or each integer, lacks.
    x = np.array([1.5, -1.5, 300.7, -5, 40000, 3e9, -3e9, 1e19, np.nan, np.inf, -np.inf], dtype).repeat(3)
    results = run_in_memory(build(import_onnx(path), target), [[x]])[0]
    expected = onnxruntime.InferenceSession(path).run(None, {"x": x})
    for name, result, other in zip(names, results, expected, strict=True):
        np.testing.assert_array_equal(result, other, err_msg=name)


def test_small_powers_of_float64_are_products_and_roots(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    exponents = {
        "three": np.array(3, "float32"),
        "half": np.array(0.5),
        "minus": np.array(-1.0),
        "root": np.array(-0.5),
    }
    nodes = [helper.make_node("Pow", ["x", name], [f"y{name}"]) for name in exponents]
    outputs = [(f"y{name}", None, TensorProto.DOUBLE) for name in exponents]
    path = make_model(nodes, [("x", [3, 50], TensorProto.DOUBLE)], outputs, exponents)
    x = np.random.default_rng(0).uniform(0.1, 9, (3, 50))
    model = assert_same_as_onnxruntime(path, {"x": x}, inspect=Inspection(code=("tir",)))
    assert "T.pow" not in model.inspected.code["tir"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_quotients_of_integers_are_exact_in_vectors(dtype: str, make_model: Any, target: Any, run_built: Any) -> None:
    """At the limits of the type, and of quotients next to whole numbers, which floats could round to these."""
    limits, generator, element = (
        np.iinfo(dtype),
        np.random.default_rng(0),
        helper.np_dtype_to_tensor_dtype(np.dtype(dtype)),
    )
    node = helper.make_node("Div", ["a", "b"], ["y"])
    path = make_model([node], [("a", ["n"], element), ("b", ["n"], element)], [("y", None, element)])
    model = build(import_onnx(path), target, inspect=Inspection(code=("tir",)))
    divisors = generator.integers(limits.min, limits.max, 4000, endpoint=True).astype("int64")
    divisors[:1000] //= 1 + np.arange(1000)
    divisors[divisors == 0] = 1
    wholes = generator.integers(limits.min, limits.max, 4000, endpoint=True) // divisors * divisors
    numbers = np.clip(np.concatenate([wholes + step for step in (-1, 0, 1)]), limits.min, limits.max)
    divisors = np.tile(divisors, 3)
    # The quotient of the least number by -1 is none of the type.
    divisors[(numbers == limits.min) & (divisors == -1)] = 1
    expected = np.sign(numbers) * np.sign(divisors) * (np.abs(numbers) // np.abs(divisors))
    (ours,) = run_built(model, numbers.astype(dtype), divisors.astype(dtype))
    np.testing.assert_array_equal(ours, expected.astype(dtype))
    assert "float" in model.inspected.code["tir"]
