"""Reduced precision: products in bfloat16, and quantised models in integers."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from tvm import te, tirx
from tvm.s_tir import Schedule

from support import scale
from support.arrays import normal, onnxruntime_outputs
from support.builds import rule_counts
from support.models import join_models, joined_name
from support.quantised import quantise
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, build, import_onnx, lower, winograd, workloads
from tvmflow.compiler.dotproduct import round_bf16, use_rounding
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import complete, variants
from tvmflow.errors import BuildError, SpecError, TargetError
from tvmflow.hardware.target import Precision, Target, resolve
from tvmflow.onnx_model.session import open_session
from tvmflow.spec import parse
from tvmflow.tuning.candidates import Candidate, Library, arguments_of
from tvmflow.tuning.measure import MeasurePool
from tvmflow.tuning.traces import normalize, trace_of
from tvmflow.tuning.worker_process import TrialError

RunBuilt = Callable[..., list[Array]]
MakeModel = Callable[..., Path]


@pytest.fixture(params=scale.choose(normal=["int8"], long=["bf16", "int8"]))
def reduced_precision(request: pytest.FixtureRequest) -> tuple[Precision, Target]:
    """A reduced precision, and the target that has its dot products."""
    return request.param, request.getfixturevalue(request.param)


def _rounded(value: Array) -> Array:
    return value.astype(ml_dtypes.bfloat16).astype("float32")


def _onnxruntime(path: Path, **feed: Array) -> Array:
    return np.asarray(open_session(path, threads=1).run(None, feed)[0])


def _conv(groups: int, kernel: int, stride: int, pad: int, dilation: int) -> onnx.NodeProto:
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


# channels in and out, groups, kernel, stride, padding, dilation, height, width
_CONVOLUTIONS = [
    (3, 32, 1, 3, 2, 1, 1, 33, 29),
    (1, 70, 1, 3, 1, 1, 1, 9, 8),
    (2, 1, 1, 5, 1, 2, 1, 11, 7),
    (5, 37, 1, 3, 1, 0, 2, 19, 23),
    (16, 70, 1, 1, 1, 0, 1, 13, 11),
    (17, 9, 1, 1, 1, 0, 1, 7, 7),
    (20, 24, 1, 1, 2, 0, 1, 15, 15),
    (33, 64, 1, 3, 1, 1, 1, 14, 14),
    (12, 24, 3, 3, 1, 1, 1, 10, 9),
    (64, 32, 2, 3, 2, 2, 1, 9, 17),
    (10, 40, 1, 3, 1, 9, 9, 20, 33),
    (8, 48, 1, 5, 3, 2, 1, 20, 31),
    (70, 8, 1, 1, 1, 0, 1, 7, 7),
]


def _joined(paths: Sequence[Path], name: str) -> Path:
    """One model of several, whose inputs and outputs have the order of the models."""
    path = paths[0].with_name(name)
    onnx.save(join_models([onnx.load(path) for path in paths]), path)
    return path


def test_bfloat16_convolutions_equal_those_of_rounded_operands(
    make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    paths, inputs = [], []
    cases = scale.choose(normal=_CONVOLUTIONS[::2], long=_CONVOLUTIONS)
    for place, case in enumerate(cases):
        channels, out, groups, kernel, stride, pad, dilation, height, width = case
        nodes = [_conv(groups, kernel, stride, pad, dilation), helper.make_node("Relu", ["c"], ["y"])]
        inputs.append(normal(1, channels, height, width))
        weight, bias = normal(out, channels // groups, kernel, kernel), normal(out)
        paths.append(
            [
                make_model(nodes, [("x", inputs[-1].shape)], ["y"], {"w": value, "b": bias}, name=f"{kind}{place}.onnx")
                for kind, value in (("model", weight), ("rounded", _rounded(weight)))
            ]
        )
    models, rounded = (_joined(files, name) for files, name in zip(zip(*paths, strict=True), ("a", "b"), strict=True))
    model = build(import_onnx(models), bf16, BuildOptions(precision="bf16", fast_algorithms=False))
    feed = {joined_name(place, "x"): _rounded(x) for place, x in enumerate(inputs)}
    expected = onnxruntime_outputs(rounded, feed)
    for actual, (name, value) in zip(run_built(model, *inputs), expected.items(), strict=True):
        atol = 1e-6 * float(np.abs(value).max())
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=atol, err_msg=name)
    rules = rule_counts(model)
    assert rules["dot_conv2d"] + rules["dot_rows"] >= len(cases) - 1


@pytest.mark.parametrize(
    ("channels", "size", "groups", "rule"),
    [
        (96, 14, 1, "dot_winograd"),
        (45, 56, 1, "winograd"),
        (192, 28, 2, "dot_winograd"),
        *scale.choose(normal=[], long=[(128, 28, 1, "dot_winograd")]),
    ],
)
def test_winograd_rounds_little_more_than_the_direct_way(
    channels: int, size: int, groups: int, rule: str, make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    weights = {"w": normal(64, channels // groups, 3, 3), "b": normal(64)}
    path = make_model([_conv(groups, 3, 1, 1, 1)], [("x", [1, channels, size, size])], ["c"], weights)
    imported, x = import_onnx(path), normal(1, channels, size, size)
    expected = _onnxruntime(path, x=x)
    errors = []
    for is_fast in (False, True):
        model = build(imported, bf16, BuildOptions(precision="bf16", fast_algorithms=is_fast))
        errors.append(float(np.abs(run_built(model, x)[0] - expected).max() / np.abs(expected).max()))
        assert (rule_counts(model)[rule] == 1) is is_fast
    assert errors[1] <= 2 * errors[0] <= 1e-2


def test_winograd_of_free_sizes_multiplies_in_bfloat16(
    make_model: MakeModel, run_built: RunBuilt, bf16: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [2])
    weights = {"w": normal(64, 96, 3, 3), "b": normal(64)}
    path = make_model([_conv(1, 3, 1, 1, 1)], [("x", ["n", 96, "h", "w"])], ["c"], weights)
    model = build(import_onnx(path), bf16, BuildOptions(precision="bf16"))
    assert rule_counts(model)["dot_winograd"] == 1
    for shape in ((1, 96, 5, 3), (2, 96, 10, 21)):
        x = normal(*shape)
        expected = _onnxruntime(path, x=x)
        assert np.abs(run_built(model, x)[0] - expected).max() <= 1e-2 * np.abs(expected).max()


def test_groups_of_free_sizes_are_direct_in_bfloat16(make_model: MakeModel, bf16: Target) -> None:
    weights = {"w": normal(192, 96, 3, 3), "b": normal(192)}
    for size, is_fast in ((28, True), ("h", False)):
        path = make_model([_conv(2, 3, 1, 1, 1)], [("x", [1, 192, size, 28])], ["c"], weights)
        names = [item.name for item in workloads(lower(import_onnx(path), bf16, BuildOptions(precision="bf16")))]
        assert any("winograd" in name for name in names) is is_fast


@pytest.mark.parametrize("depth", [31, 32])
def test_pointwise_layers_of_several_images_of_free_size_multiply_in_bfloat16(
    depth: int, make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    """Also where the number of images is known, so that the number of all pixels is a multiple of it."""
    weights = {"w": normal(24, depth, 1, 1), "b": normal(24)}
    path = make_model([helper.make_node("Conv", ["x", "w", "b"], ["y"])], [("x", [2, depth, "h", "w"])], ["y"], weights)
    model = build(import_onnx(path), bf16, BuildOptions(precision="bf16"))
    assert rule_counts(model)["dot_rows"] == 1
    for shape in ((2, depth, 5, 3), (2, depth, 8, 1)):
        x = normal(*shape)
        expected = _onnxruntime(path, x=x)
        assert np.abs(run_built(model, x)[0] - expected).max() <= 1e-2 * np.abs(expected).max()


# channels, groups, kernel, stride, padding, dilation, size
_NARROW = [
    (64, 16, 3, 1, 1, 1, 14),
    (40, 5, 3, 2, 1, 1, 15),
    (20, 10, 5, 1, 2, 1, 9),
    (36, 9, 1, 1, 0, 1, 1),
    (24, 3, 3, 1, 3, 3, 7),
]


@pytest.mark.parametrize("is_free", [False, True])
def test_bfloat16_convolutions_in_narrow_groups_equal_those_of_rounded_operands(
    is_free: bool, make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    paths: list[Path] = []
    inputs, expected = [], []
    for place, (channels, groups, kernel, stride, pad, dilation, size) in enumerate(_NARROW):
        nodes = [_conv(groups, kernel, stride, pad, dilation), helper.make_node("Relu", ["c"], ["y"])]
        x, weight = (
            _rounded(normal(2, channels, size, size)),
            _rounded(normal(channels, channels // groups, kernel, kernel)),
        )
        shape = ["n", channels, "h", "w"] if is_free else x.shape
        paths.append(
            make_model(nodes, [("x", shape)], ["y"], {"w": weight, "b": normal(channels)}, name=f"{place}.onnx")
        )
        inputs.append(x)
        expected.append(_onnxruntime(paths[-1], x=x))
    model = build(import_onnx(_joined(paths, "joined.onnx")), bf16, BuildOptions(precision="bf16"))
    for actual, value in zip(run_built(model, *inputs), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-5 * np.abs(value).max())
    assert rule_counts(model)["depthwise"] == len(_NARROW)
    assert model.ir_text.count("grouped_conv2d_bf16") >= len(_NARROW)


@pytest.mark.parametrize(("groups", "rule"), [(2, "conv2d"), (14, "depthwise")])
def test_groups_of_an_odd_number_of_channels_are_multiplied_in_float32(
    groups: int, rule: str, make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    weights = {"w": normal(14, 14 // groups, 3, 3), "b": normal(14)}
    path = make_model([_conv(groups, 3, 1, 1, 1)], [("x", [1, 14, 8, 8])], ["c"], weights)
    model = build(import_onnx(path), bf16, BuildOptions(precision="bf16"))
    x = _rounded(normal(1, 14, 8, 8))
    np.testing.assert_allclose(run_built(model, x)[0], _onnxruntime(path, x=x), rtol=1e-4, atol=1e-5)
    assert rule_counts(model)[rule] == 1


@pytest.mark.parametrize("weights", ["inside", "apart"])
def test_bfloat16_dense_layers_equal_those_of_rounded_operands(
    weights: Any, make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    paths, inputs, expected = [], [], []
    for place, (shape, units) in enumerate(_DENSE):
        x, weight, bias = normal(*shape), normal(shape[-1], units), normal(units)
        nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
        values = {"w": weight, "b": bias}
        paths.append(make_model(nodes, [("x", ["batch", *shape[1:]])], ["y"], values, name=f"{place}.onnx"))
        inputs.append(x)
        expected.append(_rounded(x) @ _rounded(weight) + bias)
    imported = import_onnx(_joined(paths, "joined.onnx"))
    model = build(imported, bf16, BuildOptions(precision="bf16", weights=weights))
    for actual, value in zip(run_built(model, *inputs), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-5)
    assert rule_counts(model)["dot_rows"] == len(_DENSE)


def test_layers_of_few_numbers_keep_them(make_model: MakeModel, run_built: RunBuilt, bf16: Target) -> None:
    # Positions as sines of coordinates, as the prompts of a segmenter have them.
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Sin", ["a"], ["y"]),
        helper.make_node("Conv", ["points", "v"], ["z"]),
    ]
    weights = {"w": 20 * normal(2, 64), "v": normal(32, 3, 1)}
    x, points = normal(7, 2), normal(1, 3, 20)
    path = make_model(nodes, [("x", [7, 2]), ("points", [1, 3, 20])], ["y", "z"], weights)
    model = build(import_onnx(path), bf16, BuildOptions(precision="bf16"))
    expected = open_session(path, threads=1).run(None, {"x": x, "points": points})
    for actual, value in zip(run_built(model, x, points), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-4, atol=1e-4)


# The shape of a dense layer's input, and its units.
_DENSE = [((1, 5), 3), ((7, 33), 70), ((49, 64), 32), ((2, 3, 31), 17), ((13, 130), 1)]


@pytest.mark.parametrize(
    ("batch", "rows", "depth", "units"), [((3,), 14, 64, 32), ((2, 3), 5, 7, 9), ((1,), 50, 1, 70)]
)
def test_bfloat16_products_of_activations_equal_those_of_rounded_operands(
    batch: tuple[int, ...],
    rows: int,
    depth: int,
    units: int,
    make_model: MakeModel,
    run_built: RunBuilt,
    bf16: Target,
) -> None:
    left, right = normal(*batch, rows, depth), normal(*batch, depth, units, seed=1)
    shapes = [("a", [*batch, "rows", depth]), ("b", [*batch, depth, "units"])]
    path = make_model([helper.make_node("MatMul", ["a", "b"], ["y"])], shapes, ["y"])
    for sizes in (None, {"a": left.shape, "b": right.shape}):
        model = build(import_onnx(path, sizes), bf16, BuildOptions(precision="bf16"))
        actual = run_built(model, left, right)[0]
        np.testing.assert_allclose(actual, _rounded(left) @ _rounded(right), rtol=1e-5, atol=1e-5)
        assert any(name.startswith("batch_matmul_bf16") for name, _ in model.schedules)


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize("channels", [7, 10, 32])
def test_attention_multiplies_in_bfloat16(
    channels: int, is_free: bool, make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    nodes = [
        helper.make_node("Transpose", ["k"], ["a"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "a"], ["b"]),
        helper.make_node("Mul", ["b", "scale"], ["c"]),
        helper.make_node("Add", ["c", "m"], ["d"]),
        helper.make_node("Softmax", ["d"], ["e"]),
        helper.make_node("MatMul", ["e", "v"], ["y"]),
    ]
    cases = [(1, 9, 37), (2, 33, 16), (1, 1, 1)][: 3 if is_free else 1]
    n, s, t = ("n", "s", "t") if is_free else cases[0]
    inputs = [("q", [n, 2, s, channels]), ("k", [n, 2, t, channels]), ("v", [n, 2, t, channels]), ("m", [s, t])]
    path = make_model(nodes, inputs, ["y"], {"scale": np.array(channels**-0.5, "float32")})
    model = build(import_onnx(path), bf16, BuildOptions(precision="bf16"))
    # A pair of channels is multiplied at a time.
    assert rule_counts(model)["attention"] == 1
    assert ("uint16" in model.ir_text) is (channels % 2 == 0)
    for batch, queries, keys in cases:
        feed = {
            name: _rounded(normal(batch, 2, positions, channels, seed=positions))
            for name, positions in (("q", queries), ("k", keys), ("v", keys))
        }
        feed["m"] = np.triu(np.full((queries, keys), -np.inf, "float32"), 1)
        expected = _onnxruntime(path, **feed)
        np.testing.assert_allclose(run_built(model, *feed.values())[0], expected, atol=1e-2 * np.abs(expected).max())


def test_roundings_are_within_the_functions_before_them(
    make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Reshape", ["b", "shape"], ["c"]),
        helper.make_node("MatMul", ["c", "v"], ["d"]),
        helper.make_node("LayerNormalization", ["d", "scale"], ["y"]),
    ]
    weights = {"scale": normal(48), "w": normal(48, 64), "shape": np.array([10, 32]), "v": normal(32, 48)}
    path = make_model(nodes, [("x", [5, 48])], ["y"], weights, opset=20)
    model = build(import_onnx(path), bf16, BuildOptions(precision="bf16"))
    assert rule_counts(model)["rowwise"] == rule_counts(model)["dot_rows"] == 2
    assert not [name for name, _ in model.schedules if name.startswith("round")]
    x = normal(5, 48)
    expected = _onnxruntime(path, x=x)
    np.testing.assert_allclose(run_built(model, x)[0], expected, atol=2e-2 * np.abs(expected).max())


def test_not_a_number_and_infinity_survive_rounding(make_model: MakeModel, run_built: RunBuilt, bf16: Target) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = make_model(nodes, [("x", [5, 8])], ["y"], {"w": np.ones((8, 4), "float32")})
    x = np.zeros((5, 8), "float32")
    x[:, 0] = [np.nan, np.inf, -np.inf, 3.4e38, 1.0]
    x[0, :1].view("uint32")[:] = 0x7FFFFFFF  # the payload that rounding would carry over
    model = build(import_onnx(path), bf16, BuildOptions(precision="bf16"))
    np.testing.assert_array_equal(run_built(model, x)[0][:, 0], np.array([np.nan, np.inf, -np.inf, np.inf, 1], "f"))


def test_rounding_is_an_instruction_for_vectors_of_any_size_and_equals_numpys(bf16: Target) -> None:
    lanes, size = (1, 2, 4, 8, 16), 64
    x = np.random.default_rng(0).standard_normal(size).astype("float32")
    x[:6] = [np.nan, np.inf, -np.inf, 3.4e38, 1.00390625, 1.01171875]  # the last two lie between two bfloat16
    data = te.placeholder((size,), "float32", name="x")
    results = [te.compute((size,), lambda i: round_bf16(data[i]), name=f"by{count}") for count in lanes]
    sch = Schedule(te.create_prim_func([data, *results]))
    for count in lanes[1:]:
        (loop,) = sch.get_loops(sch.get_sblock(f"by{count}"))
        sch.vectorize(sch.split(loop, [None, count])[1])
    scheduled = tvm.IRModule({"main": complete(sch.mod["main"])})
    library = tvm.compile(scheduled, tvm.target.Target(bf16.tvm))
    arrays = [tvm.runtime.tensor(np.zeros(size, "uint16")) for _ in lanes]
    library["main"](tvm.runtime.tensor(x), *arrays)
    for array in arrays:
        np.testing.assert_array_equal(array.numpy().view(ml_dtypes.bfloat16).astype("float32"), _rounded(x))
    assembly = library.mod.inspect_source("asm")
    assert "vcvtneps2bf16" in assembly
    assert "truncsfbf2" not in assembly  # a function that a bundle's library lacks


def test_a_choice_that_resembles_a_rounding_stays_as_it_is() -> None:
    condition, value = te.placeholder((8,), "bool", name="condition"), te.placeholder((8,), "uint32", name="value")
    quiet_nan = tirx.const(0x7FC0, "uint32")
    result = te.compute((8,), lambda i: tirx.Select(condition[i], quiet_nan, value[i]).astype("uint16"), name="result")
    func = te.create_prim_func([condition, value, result])
    assert use_rounding(func).same_as(func)


def _residual_network(make_model: MakeModel) -> Path:
    """Convolution, pooling, a residual block with a depthwise convolution, and a classifier."""
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["p"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        helper.make_node("Conv", ["p", "w1"], ["c"]),
        helper.make_node("Clip", ["c", "zero", "six"], ["d"]),
        helper.make_node("Conv", ["d", "w2"], ["e"], pads=[1] * 4, group=48),
        helper.make_node("Clip", ["e", "zero", "six"], ["f"]),
        helper.make_node("Conv", ["f", "w3"], ["g"]),
        helper.make_node("Add", ["g", "p"], ["h"]),
        helper.make_node("Relu", ["h"], ["i"]),
        helper.make_node("Conv", ["i", "w4"], ["j"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Add", ["j", "j"], ["k"]),
        helper.make_node("GlobalAveragePool", ["k"], ["m"]),
        helper.make_node("Flatten", ["m"], ["n"]),
        helper.make_node("Gemm", ["n", "w5", "b5"], ["y"], transB=1),
    ]
    weights = {
        "w0": normal(24, 3, 3, 3) / 5,
        "w1": normal(48, 24, 1, 1) / 5,
        "w2": normal(48, 1, 3, 3) / 3,
        "w3": normal(24, 48, 1, 1) / 7,
        "w4": normal(40, 24, 3, 3) / 15,
        "w5": normal(10, 40) / 6,
        "b5": normal(10),
        "zero": np.array(0, "float32"),
        "six": np.array(6, "float32"),
    }
    return make_model(nodes, [("x", [1, 3, 32, 32])], ["y"], weights)


def test_a_network_in_bfloat16_is_within_its_bound(
    make_model: MakeModel, run_built: RunBuilt, bf16: Target, tmp_path: Path
) -> None:
    path = _residual_network(make_model)
    spec = parse({"name": "n", "model": {"onnx": str(path)}, "build": {"precision": "bf16"}}, tmp_path)
    model = build(import_onnx(path), bf16, BuildOptions(precision=spec.build.precision))
    x = normal(1, 3, 32, 32)
    expected = _onnxruntime(path, x=x)
    error = float(np.abs(run_built(model, x)[0] - expected).max() / np.abs(expected).max())
    assert 0 < error <= (spec.bounds().max_relative_error or 0)
    # Convolutions, of which a block has two, and the classifier; the residual connection and all roundings are within.
    rules = rule_counts(model)
    assert rules["dot_conv2d"] + rules["dot_rows"] + 2 * rules["block"] == 5


def test_equal_models_give_equal_libraries(
    reduced_precision: tuple[Precision, Target], make_model: MakeModel, tmp_path: Path
) -> None:
    precision, target = reduced_precision
    path = _small_network(make_model)
    if precision == "int8":
        path = quantise(path, tmp_path / "quantised.onnx")
    libraries = []
    for name in ("one.so", "two.so"):
        build(import_onnx(path), target, BuildOptions(precision=precision)).export(tmp_path / name)
        libraries.append((tmp_path / name).read_bytes())
    assert libraries[0] == libraries[1]


def _small_network(make_model: MakeModel) -> Path:
    """A convolution, a depthwise one and a classifier."""
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w1"], ["c"], group=24),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", "w2"], ["y"]),
    ]
    weights = {"w0": normal(24, 3, 3, 3) / 5, "w1": normal(24, 1, 3, 3) / 3, "w2": normal(24, 10) / 5}
    return make_model(nodes, [("x", [1, 3, 12, 12])], ["y"], weights)


def _step(quantised: Path, tensor: str) -> float:
    """The scale of a tensor that a quantised model dequantises."""
    model = onnx.load(quantised)
    scales = {item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer}
    (node,) = (node for node in model.graph.node if tensor in node.output)
    return float(scales[node.input[1]])


def _assert_steps(actual: Array, expected: Array, step: float, steps: int = 1) -> None:
    """At most so many steps apart, and hardly ever apart."""
    distance = np.round(np.abs(actual - expected) / step)
    assert distance.max() <= steps
    assert (distance > 0).mean() <= 0.01


@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_quantised_convolutions_equal_onnx_runtime(
    signed: bool, make_model: MakeModel, run_built: RunBuilt, int8: Target, tmp_path: Path
) -> None:
    paths, inputs = [], []
    some = _CONVOLUTIONS[signed::4]
    cases = [*scale.choose(normal=some, long=_CONVOLUTIONS), (14, 14, 14, 3, 1, 1, 1, 8, 8)]
    for place, case in enumerate(cases):
        channels, out, groups, kernel, stride, pad, dilation, height, width = case
        activation = helper.make_node("LeakyRelu", ["c"], ["y"], alpha=0.3)
        weights = {"w": normal(out, channels // groups, kernel, kernel), "b": normal(out)}
        inputs.append(normal(1, channels, height, width, seed=9))
        nodes = [_conv(groups, kernel, stride, pad, dilation), activation]
        path = make_model(nodes, [("x", inputs[-1].shape)], ["y"], weights)
        quantised = tmp_path / f"quantised{place}.onnx"
        paths.append(quantise(path, quantised, signed=signed, per_channel=groups != 3))
    joined = _joined(paths, "joined.onnx")
    model = build(import_onnx(joined), int8, BuildOptions(precision="int8"))
    expected = onnxruntime_outputs(joined, {joined_name(place, "x"): x for place, x in enumerate(inputs)})
    for path, actual, value in zip(paths, run_built(model, *inputs), expected.values(), strict=True):
        _assert_steps(actual, value, _step(path, "y"))
    rules = rule_counts(model)
    assert rules["dot_conv2d"] + rules["dot_rows"] + rules["depthwise"] >= sum(map(depth_fits, cases)) - 1


def depth_fits(case: tuple[int, ...]) -> bool:
    """Whether the groups of a convolution are whole groups of a dot product, or single channels."""
    channels, _, groups = case[:3]
    return groups == 1 or channels // groups % 4 == 0 or channels == groups


@pytest.mark.few(3)
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize(("rows", "depth", "units"), [(1, 5, 3), (7, 33, 70), (49, 64, 32)])
def test_quantised_dense_layers_equal_onnx_runtime(
    rows: int,
    depth: int,
    units: int,
    signed: bool,
    make_model: MakeModel,
    run_built: RunBuilt,
    int8: Target,
    tmp_path: Path,
) -> None:
    weights = {"w": normal(units, depth), "b": normal(units)}
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)]
    path = make_model(nodes, [("x", [rows, depth])], ["y"], weights)
    quantised = quantise(path, tmp_path / "quantised.onnx", signed=signed)
    model = build(import_onnx(quantised), int8, BuildOptions(precision="int8"))
    x = normal(rows, depth, seed=9)
    _assert_steps(run_built(model, x)[0], _onnxruntime(quantised, x=x), _step(quantised, "y"))
    assert rule_counts(model)["dot_rows"] == 1


@pytest.mark.parametrize(("signed", "precision"), [(False, "int8"), (True, "int8"), (True, "fp32")])
def test_a_quantised_network_stays_in_integers(
    signed: bool, precision: Precision, make_model: MakeModel, run_built: RunBuilt, int8: Target, tmp_path: Path
) -> None:
    quantised = quantise(_residual_network(make_model), tmp_path / "quantised.onnx", signed=signed)
    model = build(import_onnx(quantised), int8, BuildOptions(precision=precision))
    x = normal(1, 3, 32, 32, seed=9)
    expected = _onnxruntime(quantised, x=x)
    assert float(np.abs(run_built(model, x)[0] - expected).max()) <= 2 * _step(quantised, "y") + 1e-6
    rules = rule_counts(model)
    assert (rules["dot_conv2d"] + rules["dot_rows"], rules["depthwise"]) == (5, 1)
    # Also what lies between layers: the pooling reads and writes integers.
    (pooling,) = (line for line in model.ir_text.splitlines() if "def max_pool2d" in line)
    assert pooling.count('"uint8"') == 2


def test_a_quantised_convolution_of_free_channels_equals_onnx_runtime(
    make_model: MakeModel, run_built: RunBuilt, int8: Target
) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "scale", "none"], ["dw"]),
        helper.make_node("Conv", ["d", "dw"], ["y"]),
    ]
    weights = {
        "scale": np.array(0.02, "float32"),
        "zero": np.array(120, "uint8"),
        "none": np.array(0, "int8"),
        "w": np.random.default_rng(0).integers(-127, 128, (8, 4, 3, 3)).astype("int8"),
    }
    path = make_model(nodes, [("x", [1, "channels", 6, 6])], [("y", [1, 8, 4, 4])], weights)
    x = normal(1, 4, 6, 6)
    (ours,) = run_built(build(import_onnx(path), int8), x)
    np.testing.assert_allclose(ours, _onnxruntime(path, x=x), rtol=1e-4, atol=1e-3)


def test_int8_refuses_a_model_that_is_not_quantised(make_model: MakeModel, int8: Target) -> None:
    imported = import_onnx(_residual_network(make_model))
    with pytest.raises(BuildError, match=r"needs a quantised model.*quantize_static"):
        build(imported, int8, BuildOptions(precision="int8"))


@pytest.mark.parametrize(
    ("target", "precision", "fitting"),
    [
        ("x86-64-v3", "bf16", "build for x86-64-v4-bf16"),
        ("x86-64-v4-vnni", "bf16", "build for x86-64-v4-bf16"),
        ("aarch64-generic", "int8", "build for aarch64-cortex-a76"),
        ("aarch64-cortex-a72", "fp16", "build for aarch64-cortex-a76 or aarch64-neoverse-n1"),
        ("x86-64-v4-bf16", "fp16", "build for aarch64-cortex-a76"),
        ("cuda-sm80", "bf16", "build for x86-64-v4-bf16"),
        ("cuda-sm80", "int8", "build for aarch64-cortex-a76 .* or any target of x86_64"),
    ],
)
def test_targets_without_the_instructions_are_refused(
    target: str, precision: Any, fitting: str, make_model: MakeModel, tmp_path: Path
) -> None:
    path = _residual_network(make_model)
    with pytest.raises(TargetError, match=f"has no instructions for precision {precision} .*{fitting}"):
        lower(import_onnx(path), resolve(target), BuildOptions(precision=precision))
    document = {"name": "n", "model": {"onnx": str(path)}, "targets": [target], "build": {"precision": precision}}
    with pytest.raises(SpecError, match=f"build.precision: target .*{fitting}"):
        parse(document, tmp_path)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("target", "precision", "instructions"),
    [
        ("x86-64-v4-bf16", "bf16", ("vdpbf16ps", "vcvtneps2bf16")),
        ("x86-64-v4-vnni", "int8", ("vpdpbusd",)),
        ("x86-64-v4", "int8", ("vpmaddwd.*zmm",)),
        ("x86-64-v3", "int8", ("vpmaddwd.*ymm",)),
        ("x86-64-v2", "int8", ("pmaddwd",)),
        ("aarch64-neoverse-n1", "int8", (r"\tsdot",)),
        ("aarch64-neoverse-v1", "int8", (r"\tusdot",)),
        ("aarch64-neoverse-v1", "bf16", ("bfdot", "bfcvtn")),
        ("llvm -mcpu=alderlake", "int8", ("vpdpbusd",)),
        ("aarch64-cortex-a76", "fp16", (r"fmla\tv\d+\.8h",)),
    ],
)
def test_products_are_instructions_on_narrow_numbers(
    target: str, precision: Any, instructions: Sequence[str], make_model: MakeModel, tmp_path: Path
) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    path = make_model([node], [("x", [1, 3, 12, 12])], ["y"], {"w": normal(24, 3, 3, 3) / 5})
    if precision == "int8":
        path = quantise(path, tmp_path / "quantised.onnx")
    model = build(import_onnx(path), resolve(target), BuildOptions(precision=precision))
    assembly = str(model.executable.mod.imports[0].inspect_source("asm"))
    assert all(re.search(instruction, assembly) for instruction in instructions)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v2"])
def test_sums_of_pairs_stay_in_registers(target: str, make_model: MakeModel, tmp_path: Path) -> None:
    """The sum of a pair waits in a register until it is added, so that a tile has one register less than others."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = make_model([node], [("x", [128, 64])], ["y"], {"w": normal(64, 96)})
    model = build(import_onnx(quantise(path, tmp_path / "quantised.onnx")), resolve(target))
    assembly = str(model.executable.mod.imports[0].inspect_source("asm"))
    code = re.sub(r"^(\.Ltmp\w+:|\t\..*)\n", "", assembly, flags=re.MULTILINE)
    # A loop is a label, its instructions, and a jump back to the label.
    loops = re.findall(r"^(\.L\w+):\n((?:\t(?!j).*\n)+)\tj\w+\t\1$", code, re.MULTILINE)
    products = [body for _, body in loops if body.count("pmaddwd") > 3]
    assert products
    assert not any("mm" in line and "%rsp" in line for body in products for line in body.splitlines())


def test_values_read_by_products_and_returned_are_right(
    make_model: MakeModel, run_built: RunBuilt, bf16: Target
) -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["left", "right"], num_outputs=2, axis=1),
        helper.make_node("Conv", ["left", "w"], ["a"]),
        helper.make_node("Conv", ["a", "w"], ["b"]),
        helper.make_node("Concat", ["a", "right"], ["c"], axis=1),
        helper.make_node("Conv", ["x", "v"], ["d"]),
        helper.make_node("Conv", ["x", "v"], ["e"], pads=[1] * 4),
    ]
    weights = {"w": _rounded(normal(8, 8, 1, 1)), "v": _rounded(normal(3, 16, 1, 1))}
    outputs = ["a", "b", "c", "d", "e"]
    model = build(
        import_onnx(make_model(nodes, [("x", [1, 16, 5, 5])], outputs, weights)), bf16, BuildOptions(precision="bf16")
    )
    x = _rounded(normal(1, 16, 5, 5))

    def conv(data: Array, weight: Array) -> Array:
        return np.einsum("oc,nchw->nohw", weight[:, :, 0, 0], data)

    a = conv(x[:, :8], weights["w"])
    padded = np.pad(conv(x, weights["v"]), ((0, 0), (0, 0), (1, 1), (1, 1)))
    expected = (a, conv(_rounded(a), weights["w"]), np.concatenate([a, x[:, 8:]], 1), conv(x, weights["v"]), padded)
    for actual, reference in zip(run_built(model, x), expected, strict=True):
        # Values that products read are rounded for the others too; a last bit of the sum may tip the rounding.
        np.testing.assert_allclose(actual, reference, rtol=2**-8, atol=0.05)


def _candidate(path: Path, target: Target, precision: Precision) -> tuple[tvm.tirx.PrimFunc, Candidate]:
    """The one convolution of a model, unscheduled, and what builds it."""
    options = BuildOptions(precision=precision, fast_algorithms=False)
    lowered = lower(import_onnx(path), target, options)
    (func,) = (normalize(item.func) for item in workloads(lowered) if "conv2d" in item.name)
    return func, Candidate(tvm.ir.save_json(func), arguments_of(func) or ())


@pytest.mark.long
def test_other_schedules_of_dot_products_are_built_in_other_processes_and_right(
    reduced_precision: tuple[Precision, Target], make_model: MakeModel, tmp_path: Path
) -> None:
    precision, target = reduced_precision
    nodes, weights = [_conv(1, 3, 1, 1, 1)], {"w": normal(64, 32, 3, 3), "b": normal(64)}
    path = make_model(nodes, [("x", [1, 32, 9, 9])], ["c"], weights)
    if precision == "int8":
        path = quantise(path, tmp_path / "quantised.onnx")
    func, unscheduled = _candidate(path, target, precision)
    schedules = variants(func, machine(target))
    assert all("Tensorize" in {step.kind.name for step in item.trace.insts} for item in schedules)
    first, last = (trace_of(schedules[place]) for place in (0, -1))
    assert first != last
    with MeasurePool(target.canonical, builders=2, threads=1, timeout=60, deadline=math.inf) as pool:
        reference, *model = pool.build([unscheduled, *(replace(unscheduled, trace=trace) for trace in (first, last))])
        assert isinstance(reference, Library)
        for library in model:
            assert isinstance(library, Library), library
            pool.check(library, reference)
            assert pool.time(library) > 0


def test_a_schedule_in_bfloat16_that_computes_something_else_is_found_wrong(
    make_model: MakeModel, bf16: Target
) -> None:
    shape, weights = [("x", [1, 32, 9, 9])], {"w": normal(64, 32, 3, 3), "b": normal(64)}
    conv, relu = _conv(1, 3, 1, 1, 1), helper.make_node("Relu", ["c"], ["y"])
    one = make_model([conv], shape, ["c"], weights)
    other = make_model([conv, relu], shape, ["y"], weights, name="relu.onnx")
    candidates = [_candidate(path, bf16, "bf16")[1] for path in (one, other)]
    with MeasurePool(bf16.canonical, builders=2, threads=1, timeout=60, deadline=math.inf) as pool:
        plain, clipped = pool.build(candidates)
        assert isinstance(plain, Library)
        assert isinstance(clipped, Library)
        with pytest.raises(TrialError, match="wrong result"):
            pool.check(plain, clipped)
