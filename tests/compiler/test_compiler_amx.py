"""AMX: kernels of whole tiles, on any processor: their instructions are done by `amx.cc`, which aborts on a fault."""

import ctypes
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from support import scale
from support.arrays import normal, onnxruntime_outputs
from support.builds import rule_counts
from support.models import join_models, joined_name
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, Choices, CompiledModel, amx, build, import_onnx, lower, workloads
from tvmflow.compiler.annotations import AMX, TILE
from tvmflow.compiler.dotproduct import BF16, INT8
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import schedule, variants
from tvmflow.hardware.target import Precision, Target, resolve
from tvmflow.tuning.traces import normalize, replay, trace_of

RunBuilt = Callable[..., list[Array]]
BuildConvolutions = Callable[[list[tuple[int, ...]]], CompiledModel]
MakeModel = Callable[..., Path]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")


@pytest.fixture(scope="session")
def target(amx_target: Target) -> Target:
    return amx_target


def _rounded(value: Array) -> Array:
    return value.astype(ml_dtypes.bfloat16).astype("float32")


def _onnxruntime(path: Path, x: Array) -> Array:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def _count_kernels(model: CompiledModel) -> int:
    """The number of a model's products that AMX computes."""
    # The assembly lacks functions that an earlier build left in the cache.
    return model.ir_text.count(AMX)


def _conv(kernel: int, stride: int, pad: int, dilation: int) -> onnx.NodeProto:
    sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "dilations": [dilation] * 2}
    return helper.make_node("Conv", ["x", "w", "b"], ["c"], **sizes)


# channels in and out, kernel, stride, padding, dilation, height, width
_CONVOLUTIONS = [
    (64, 64, 3, 1, 1, 1, 6, 28),
    (64, 128, 1, 1, 0, 1, 9, 14),
    (64, 48, 1, 2, 0, 1, 8, 28),
    (32, 16, 5, 1, 2, 1, 9, 11),
    (3, 64, 7, 2, 3, 1, 33, 40),
    (30, 70, 3, 1, 0, 1, 7, 23),
    (24, 40, 1, 1, 0, 1, 7, 7),
    (16, 32, 3, 2, 1, 1, 12, 112),
    (64, 64, 1, 1, 0, 1, 3, 3),
]
# Convolutions that suit dot products better than tiles: a prime number of groups, few channels.
_OTHERS = [(37, 64, 3, 1, 1, 1, 9, 9), (64, 8, 3, 1, 1, 1, 9, 9)]


def _convolution(case: tuple[int, ...], make_model: MakeModel, weight: Array, bias: Array, name: str) -> Path:
    channels, _, *geometry, height, width = case
    nodes = [_conv(*geometry), helper.make_node("Relu", ["c"], ["y"])]
    return make_model(nodes, [("x", [2, channels, height, width])], ["y"], {"w": weight, "b": bias}, name=name)


@pytest.fixture
def build_convolutions(make_model: MakeModel, run_built: RunBuilt, target: Target, tmp_path: Path) -> BuildConvolutions:
    """Build convolutions in bfloat16 as one model, which must give ONNX Runtime's outputs of rounded operands."""

    def check(cases: list[tuple[int, ...]]) -> CompiledModel:
        models, rounded, inputs = [], [], []
        for place, case in enumerate(cases):
            channels, out, kernel, *_, height, width = case
            weight, bias = normal(out, channels, kernel, kernel), normal(out)
            inputs.append(normal(2, channels, height, width))
            models.append(onnx.load(_convolution(case, make_model, weight, bias, f"model{place}.onnx")))
            rounded.append(onnx.load(_convolution(case, make_model, _rounded(weight), bias, f"rounded{place}.onnx")))
        for name, several in (("models", models), ("rounded", rounded)):
            onnx.save(join_models(several), tmp_path / f"{name}.onnx")
        model = build(import_onnx(tmp_path / "models.onnx"), target, BuildOptions(precision="bf16"))
        feed = {joined_name(place, "x"): _rounded(x) for place, x in enumerate(inputs)}
        expected = onnxruntime_outputs(tmp_path / "rounded.onnx", feed)
        for actual, (name, value) in zip(run_built(model, *inputs), expected.items(), strict=True):
            atol = 2e-6 * float(np.abs(value).max())
            np.testing.assert_allclose(actual, value, rtol=1e-5, atol=atol, err_msg=name)
        return model

    return check


@pytest.mark.usefixtures("emulated_amx")
@pytest.mark.parametrize("by_tiles", [True, False], ids=["tiles", "dot products"])
def test_convolutions_equal_those_of_rounded_operands(by_tiles: bool, build_convolutions: BuildConvolutions) -> None:
    cases = (_CONVOLUTIONS if by_tiles else _OTHERS)[:: scale.count(normal=2, long=1)]
    model = build_convolutions(cases)
    assert _count_kernels(model) == (len(cases) if by_tiles else 0)
    rules = rule_counts(model)
    assert rules["dot_conv2d"] + rules["dot_rows"] == len(cases)


# channels in and out, kernel, stride, padding, dilation, height, width
_SMALL = [
    (64, 64, 3, 1, 1, 1, 7, 7),
    (64, 48, 3, 2, 1, 1, 13, 14),
    (128, 64, 3, 1, 2, 2, 6, 5),
    (60, 64, 5, 1, 2, 1, 6, 5),
    (64, 64, 3, 1, 1, 1, 3, 3),
]


@pytest.mark.usefixtures("emulated_amx")
def test_the_patches_of_small_images_fill_tiles_together(
    build_convolutions: BuildConvolutions,
) -> None:
    model = build_convolutions(_SMALL)
    assert rule_counts(model)["dot_rows"] == len(_SMALL)
    assert _count_kernels(model) == len(_SMALL)


def test_whether_patches_are_copied_is_a_decision(make_model: MakeModel, target: Target) -> None:
    path = _convolution(_SMALL[0], make_model, normal(64, 64, 3, 3), normal(64), "model.onnx")
    imported, options, choices = import_onnx(path), BuildOptions(precision="bf16"), Choices()
    usual = lower(imported, target, options, choices)
    (site,) = (site for site in choices.sites.values() if site.subject.startswith("tiles of conv2d"))
    assert site.options == ("patches", "lines")
    assert site.cycles == tuple(sorted(site.cycles))
    other = lower(imported, target, options, Choices({site.key: "lines"}))
    assert ["dot_conv2d" in module.script() for module in (usual, other)] == [False, True]


@pytest.mark.usefixtures("emulated_amx")
def test_a_convolution_of_any_batch_and_height_has_tiles(
    make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    weight, bias = normal(48, 64, 3, 3), normal(48)
    shape = [("x", ["batch", 64, "high", 14])]
    model = build(
        import_onnx(make_model([_conv(3, 1, 1, 1)], shape, ["c"], {"w": weight, "b": bias})),
        target,
        BuildOptions(precision="bf16"),
    )
    assert _count_kernels(model) == 1
    rounded = make_model([_conv(3, 1, 1, 1)], shape, ["c"], {"w": _rounded(weight), "b": bias}, name="rounded.onnx")
    for batch, height in ((1, 5), (3, 14)):
        x = normal(batch, 64, height, 14)
        expected = _onnxruntime(rounded, _rounded(x))
        np.testing.assert_allclose(
            run_built(model, x)[0], expected, rtol=1e-5, atol=2e-6 * float(np.abs(expected).max())
        )


# The shapes of an input of free sizes, of the weights of a convolution or a dense layer, and two inputs.
_FREE = [
    (["batch", 64, "high", "wide"], (48, 64, 3, 3), (1, 64, 5, 7), (2, 64, 6, 33)),
    (["batch", 128, "high", "wide"], (48, 128, 1, 1), (1, 128, 1, 3), (3, 128, 5, 9)),
    (["batch", 256, 7, 7], (64, 256, 1, 1), (1, 256, 7, 7), (3, 256, 7, 7)),
    (["batch", "length", 128], (128, 64), (1, 1, 128), (3, 21, 128)),
    (["length", 1, 96], (96, 64), (1, 1, 96), (33, 1, 96)),
]


@pytest.mark.usefixtures("emulated_amx")
def test_layers_of_free_sizes_have_tiles(
    make_model: MakeModel, run_built: RunBuilt, target: Target, tmp_path: Path
) -> None:
    models, rounded = [], []
    for place, (shape, size, *_) in enumerate(_FREE):
        weight = normal(*size)
        operator = "MatMul" if len(size) == 2 else "Conv"
        pads = {"pads": [size[-1] // 2] * 4} if operator == "Conv" else {}
        nodes = [helper.make_node(operator, ["x", "w"], ["c"], **pads)]
        for several, value in ((models, weight), (rounded, _rounded(weight))):
            several.append(onnx.load(make_model(nodes, [("x", shape)], ["c"], {"w": value}, name=f"m{place}.onnx")))
    path = tmp_path / "joined.onnx"
    onnx.save(join_models(models), path)
    model = build(import_onnx(path), target, BuildOptions(precision="bf16"))
    assert _count_kernels(model) == len(_FREE)
    onnx.save(join_models(rounded), path)
    for turn in (2, 3):
        inputs = [normal(*case[turn]) for case in _FREE]
        feed = {joined_name(place, "x"): _rounded(x) for place, x in enumerate(inputs)}
        expected = onnxruntime_outputs(path, feed).items()
        for actual, (name, value) in zip(run_built(model, *inputs), expected, strict=True):
            atol = 2e-6 * float(np.abs(value).max())
            np.testing.assert_allclose(actual, value, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.usefixtures("emulated_amx")
@pytest.mark.parametrize(
    ("shape", "units"),
    [((49, 64), 32), ((1, 128, 384), 80), ((197, 48), 48), ((2, 7, 256), 64), ((5, 8, 95), 64), ((16, 1, 64), 32)],
)
def test_dense_layers_equal_those_of_rounded_operands(
    shape: tuple[int, ...], units: int, make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["c"]), helper.make_node("Add", ["c", "b"], ["y"])]
    weight, bias, x = normal(shape[-1], units), normal(units), normal(*shape)
    path = make_model(nodes, [("x", list(shape))], ["y"], {"w": weight, "b": bias})
    model = build(import_onnx(path), target, BuildOptions(precision="bf16"))
    assert _count_kernels(model) == 1
    rounded = make_model(nodes, [("x", list(shape))], ["y"], {"w": _rounded(weight), "b": bias}, name="rounded.onnx")
    expected = _onnxruntime(rounded, _rounded(x))
    (actual,) = run_built(model, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6 * float(np.abs(expected).max()))


@pytest.mark.usefixtures("emulated_amx")
def test_a_network_is_within_the_bound_of_bfloat16(make_model: MakeModel, run_built: RunBuilt, target: Target) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], pads=[3] * 4, strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w1"], ["c"], pads=[1] * 4),
        helper.make_node("Add", ["c", "b"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("Conv", ["e", "w2"], ["f"], strides=[2, 2]),
        helper.make_node("Relu", ["f"], ["g"]),
        helper.make_node("GlobalAveragePool", ["g"], ["h"]),
        helper.make_node("Flatten", ["h"], ["i"]),
        helper.make_node("Gemm", ["i", "w3"], ["y"]),
    ]
    weights = {
        "w0": normal(64, 3, 7, 7) / 12,
        "w1": normal(64, 64, 3, 3) / 24,
        "w2": normal(512, 64, 1, 1) / 8,
        "w3": normal(512, 64) / 22,
    }
    path = make_model(nodes, [("x", [4, 3, 32, 32])], ["y"], weights)
    model, x = build(import_onnx(path), target, BuildOptions(precision="bf16")), normal(4, 3, 32, 32)
    assert _count_kernels(model) == 4
    expected = _onnxruntime(path, x)
    assert 0 < float(np.abs(run_built(model, x)[0] - expected).max() / np.abs(expected).max()) < 2e-2


def _quantised(make_model: MakeModel, operator: onnx.NodeProto, weight: Array, shape: list[int]) -> Path:
    """A model of one operator on quantised data and weights."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_whole"]),
        helper.make_node("DequantizeLinear", ["x_whole", "x_scale", "x_zero"], ["x_wide"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["w_wide"]),
        operator,
        helper.make_node("QuantizeLinear", ["c", "y_scale", "x_zero"], ["y_whole"]),
        helper.make_node("DequantizeLinear", ["y_whole", "y_scale", "x_zero"], ["y"]),
    ]
    constants: dict[str, Array] = {
        "w": weight,
        "x_scale": np.array(0.02, "float32"),
        "x_zero": np.array(121, "uint8"),
        "w_scale": np.array(0.01, "float32"),
        "w_zero": np.array(0, "int8"),
        "y_scale": np.array(0.4, "float32"),
    }
    return make_model(nodes, [("x", shape)], ["y"], constants)


@pytest.mark.usefixtures("emulated_amx")
@pytest.mark.parametrize("kind", ["convolution", "strided", "grouped", "small", "dense"])
def test_quantised_models_equal_onnx_runtime(
    kind: str, make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    image = [1, 128, 5, 5] if kind == "small" else [1, 64, 9, 18]
    shape, groups = [64, 96] if kind == "dense" else image, 2 if kind == "grouped" else 1
    size = (96, 48) if kind == "dense" else (48 * groups, shape[1] // groups, 3, 3)
    weight = np.random.default_rng(3).integers(-127, 128, size).astype("int8")
    stride = 2 if kind == "strided" else 1
    conv = helper.make_node("Conv", ["x_wide", "w_wide"], ["c"], pads=[1] * 4, strides=[stride] * 2, group=groups)
    operator = helper.make_node("MatMul", ["x_wide", "w_wide"], ["c"]) if kind == "dense" else conv
    path = _quantised(make_model, operator, weight, shape)
    model = build(import_onnx(path), target, BuildOptions(precision="int8"))
    assert _count_kernels(model) == 1
    assert rule_counts(model)["dot_rows"] == (kind in ("strided", "small", "dense"))
    x = normal(*shape)
    distance = np.round(np.abs(run_built(model, x)[0] - _onnxruntime(path, x)) / 0.4)
    assert distance.max() <= 1
    assert (distance > 0).mean() <= 0.01


@pytest.mark.usefixtures("emulated_amx")
def test_every_schedule_of_a_kernel_is_replayed_with_it(
    make_model: MakeModel, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _convolution(_CONVOLUTIONS[0], make_model, normal(64, 64, 3, 3), normal(64), "model.onnx")
    items = workloads(lower(import_onnx(path), target, BuildOptions(precision="bf16")))
    (func,) = (normalize(item.func) for item in items if "conv2d" in item.name)
    for variant in variants(func, machine(target)):
        assert "tvmflow_amx_bf16" in replay(trace_of(variant), func).script()


@pytest.mark.parametrize(("precision", "instruction"), [("bf16", "tdpbf16ps"), ("int8", "tdpbusd")])
def test_products_are_amx_instructions(precision: Precision, instruction: str, make_model: MakeModel) -> None:
    shape, weight = [1, 64, 9, 18], np.random.default_rng(3).integers(-127, 128, (48, 64, 3, 3))
    if precision == "int8":
        operator = helper.make_node("Conv", ["x_wide", "w_wide"], ["c"], pads=[1] * 4)
        path = _quantised(make_model, operator, weight.astype("int8"), shape)
    else:
        operator = helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4)
        path = make_model([operator], [("x", shape)], ["c"], {"w": weight.astype("float32")})
    model = build(import_onnx(path), resolve("x86-64-v4-amx"), BuildOptions(precision=precision))
    assembly = str(model.executable.mod.imports[0].inspect_source("asm"))
    # Two tiles of pixels by vectors of three, which do not fit beside them two by two.
    for name in (instruction, "ldtilecfg", "tileloadd", "tilestored", "tilerelease"):
        assert re.search(rf"\t{name}", assembly), name


def test_without_narrow_numbers_nothing_of_it_is_used(make_model: MakeModel) -> None:
    path = _convolution(_CONVOLUTIONS[0], make_model, normal(64, 64, 3, 3), normal(64), "model.onnx")
    assert _count_kernels(build(import_onnx(path), resolve("x86-64-v4-amx"))) == 0


@pytest.mark.parametrize("dot", [BF16, INT8], ids=lambda dot: dot.name)
def test_the_sizes_of_a_kernels_tiles_fit_the_registers(dot: Any) -> None:
    for rows in range(1, 33):
        for vectors, groups in ((1, 8), (12, 8), (5, 9), (7, 16), (13, 48)):
            kernel = amx.Kernel(rows, vectors, groups)
            assert (sum(kernel.heights), sum(kernel.widths)) == (rows, vectors)
            assert max(kernel.heights) <= amx.ROWS
            assert len(kernel.heights) * max(kernel.widths) <= 4
            instruction = "tdpbf16ps" if dot is BF16 else "tdpbusd"
            count = amx.write_code(dot, [kernel]).count(f"call void @llvm.x86.{instruction}")
            assert count == len(kernel.heights) * sum(set(kernel.widths))


@pytest.mark.parametrize(
    ("rows", "depth", "tile"),
    [(28, 64, 28), (56, 64, 28), (112, 64, 28), (7, 64, 7), (128, 64, 32), (3, 64, 0), (28, 17, 0)],
)
def test_the_rows_of_tiles_divide_those_of_the_product_where_that_is_good(rows: int, depth: int, tile: int) -> None:
    assert amx.choose_rows(rows, depth, 16, machine(resolve("x86-64-v4-amx"))) == tile


def test_a_kernel_of_free_rows_fills_one_tile() -> None:
    assert amx.choose_rows(None, 64, 16, machine(resolve("x86-64-v4-amx"))) == amx.ROWS


def test_short_products_are_dot_products() -> None:
    # The configuration of the tiles takes longer than the product.
    processor = machine(resolve("x86-64-v4-amx"))
    assert amx.choose_rows(112, 8, 1, processor) == amx.choose_rows(None, 8, 1, processor) == 0
    assert amx.choose_rows(112, 3 * 8, 1, processor, pieces=3) > 0


@pytest.mark.usefixtures("emulated_amx")
@pytest.mark.parametrize("kind", ["convolution", "strided", "dense"])
def test_depths_that_no_tiles_divide_are_filled(
    kind: str, make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    # Of 152 numbers, 76 pairs, tiles would have 4.
    shape, size = ([2, 49, 152], (152, 64)) if kind == "dense" else ([1, 152, 14, 15], (64, 152, 1, 1))
    if kind == "dense":
        operator = helper.make_node("MatMul", ["x", "w"], ["c"])
    else:
        operator = helper.make_node("Conv", ["x", "w"], ["c"], strides=[2 if kind == "strided" else 1] * 2)
    weight, x = normal(*size), normal(*shape)
    model = build(
        import_onnx(make_model([operator], [("x", shape)], ["c"], {"w": weight})),
        target,
        BuildOptions(precision="bf16"),
    )
    assert model.ir_text.count(AMX) == 1
    rounded = make_model([operator], [("x", shape)], ["c"], {"w": _rounded(weight)}, name="rounded.onnx")
    expected = _onnxruntime(rounded, _rounded(x))
    (actual,) = run_built(model, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6 * float(np.abs(expected).max()))


# groups, channels of a group in and out, kernel, stride, dilation
_APART = [(2, 32, 48, 3, 1, 1), (12, 16, 16, 3, 2, 1), (3, 48, 48, 1, 1, 1), (1, 32, 48, 3, 1, 2), (4, 24, 32, 5, 1, 3)]


@pytest.mark.usefixtures("emulated_amx")
def test_convolutions_whose_taps_are_apart_have_tiles(
    make_model: MakeModel, run_built: RunBuilt, target: Target, tmp_path: Path
) -> None:
    models, rounded = [], []
    for place, (groups, inputs, outputs, kernel, stride, dilation) in enumerate(_APART):
        weight = normal(groups * outputs, inputs, kernel, kernel)
        node = _conv(kernel, stride, kernel // 2 * dilation, dilation)
        node.attribute.append(helper.make_attribute("group", groups))
        for several, value in ((models, weight), (rounded, _rounded(weight))):
            values = {"w": value, "b": normal(groups * outputs)}
            shape = [("x", [2, groups * inputs, 9, 28])]
            several.append(onnx.load(make_model([node], shape, ["c"], values, name=f"m{place}.onnx")))
    path = tmp_path / "joined.onnx"
    onnx.save(join_models(models), path)
    model = build(import_onnx(path), target, BuildOptions(precision="bf16"))
    assert rule_counts(model)["dot_conv2d"] + rule_counts(model)["dot_rows"] == len(_APART)
    assert model.ir_text.count(AMX) == len(_APART)
    onnx.save(join_models(rounded), path)
    inputs = [normal(2, groups * channels, 9, 28) for groups, channels, *_ in _APART]
    feed = {joined_name(place, "x"): _rounded(x) for place, x in enumerate(inputs)}
    for actual, (name, value) in zip(run_built(model, *inputs), onnxruntime_outputs(path, feed).items(), strict=True):
        atol = 2e-6 * float(np.abs(value).max())
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.usefixtures("emulated_amx")
def test_a_quantised_layer_of_a_filled_depth_equals_onnx_runtime(
    make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    # Of 136 numbers, 34 groups of four, tiles would have 2.
    weight = np.random.default_rng(3).integers(-127, 128, (136, 48)).astype("int8")
    path = _quantised(make_model, helper.make_node("MatMul", ["x_wide", "w_wide"], ["c"]), weight, [64, 136])
    model = build(import_onnx(path), target, BuildOptions(precision="int8"))
    assert model.ir_text.count(AMX) == 1
    x = normal(64, 136)
    assert np.round(np.abs(run_built(model, x)[0] - _onnxruntime(path, x)) / 0.4).max() <= 1


def test_all_pixels_of_a_small_image_fill_tiles_together(make_model: MakeModel, target: Target) -> None:
    heights = {}
    for size in (7, 28):
        nodes = [helper.make_node("Conv", ["x", "w"], ["c"])]
        path = make_model(nodes, [("x", [1, 256, size, size])], ["c"], {"w": normal(64, 256, 1, 1)})
        model = build(import_onnx(path), target, BuildOptions(precision="bf16"))
        (heights[size],) = map(int, re.findall(rf'"{TILE}": (\d+)', model.ir_text))
    # By lines, tiles would have 7 rows.
    assert heights == {7: 28, 28: 28}


def _attention(queries: Any, keys: Any, channels: int, group: int, make: MakeModel, masked: bool, name: str) -> Path:
    """Attention of four heads, of which `group` share keys, with a mask where it is `masked`."""
    heads = 4 // group
    inputs = [("q", [2, queries, 4, channels]), *((operand, [2, keys, heads, channels]) for operand in "kv")]
    sizes = {"one": np.array([1, 1, group, 1, 1]), "two": np.array([2]), "heads": np.array([2, 4, -1, channels])}
    nodes = [helper.make_node("Transpose", [item], [f"{item}0"], perm=[0, 2, 1, 3]) for item in "qkv"]
    for operand in "kv":
        nodes += [
            helper.make_node("Unsqueeze", [f"{operand}0", "two"], [f"{operand}1"]),
            helper.make_node("Expand", [f"{operand}1", "one"], [f"{operand}2"]),
            helper.make_node("Reshape", [f"{operand}2", "heads"], [f"{operand}3"]),
        ]
    nodes += [
        helper.make_node("Transpose", ["k3"], ["keys"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q0", "keys"], ["scores"]),
        helper.make_node("Add" if masked else "Identity", ["scores", "mask"][: 1 + masked], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v3"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["y"], perm=[0, 2, 1, 3]),
    ]
    inputs += [("mask", [1, 1, queries, keys])] if masked else []
    return make(nodes, inputs, ["y"], sizes, name=name)


# Queries, keys, channels, heads that share keys; a mask; for free sizes a second number of queries and of keys.
_ATTENTION = [
    ((29, 29, 64, 1), False, None),
    ((20, 75, 26, 2), True, None),
    ((64, 48, 40, 4), False, None),
    (("new", "all", 32, 1), True, ((5, 3), (33, 130))),
    (("all", "all", 24, 1), False, ((7, 7), (70, 70))),
]


@pytest.mark.usefixtures("emulated_amx")
def test_attention_has_tiles_and_equals_that_by_dot_products(
    make_model: MakeModel, run_built: RunBuilt, target: Target, tmp_path: Path
) -> None:
    cases = _ATTENTION[:: scale.count(normal=2, long=1)]
    models = [
        onnx.load(_attention(*sizes, make_model, masked, f"model{place}.onnx"))
        for place, (sizes, masked, _) in enumerate(cases)
    ]
    path = tmp_path / "joined.onnx"
    onnx.save(join_models(models), path)
    model = build(import_onnx(path), target, BuildOptions(precision="bf16"))
    assert model.ir_text.count(AMX) == 2 * len(cases)
    for turn in (0, 1):
        feed = {}
        for place, ((queries, keys, channels, group), masked, free) in enumerate(cases):
            new, every = (queries, keys) if free is None else free[turn]
            arrays = [normal(2, new, 4, channels), *(normal(2, every, 4 // group, channels, seed=at) for at in (1, 2))]
            hidden = np.random.default_rng(3).random((1, 1, new, every)) < 0.3
            arrays += [np.where(hidden, -np.inf, 0).astype("float32")] if masked else []
            feed |= {joined_name(place, name): x for name, x in zip(["q", "k", "v", "mask"], arrays, strict=False)}
        expected = onnxruntime_outputs(path, feed).values()
        for actual, value in zip(run_built(model, *feed.values()), expected, strict=True):
            # A query all of whose keys are hidden has NaN.
            assert (np.isnan(actual) == np.isnan(value)).all()
            assert np.nanmax(np.abs(actual - value)) < 1.5e-2 * np.nanmax(np.abs(value))


@pytest.mark.usefixtures("emulated_amx")
def test_products_of_activations_have_tiles(
    make_model: MakeModel, run_built: RunBuilt, target: Target, tmp_path: Path
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    shapes = [((2, 3, 29, 64), (2, 3, 64, 50)), ((4, 40, 77), (4, 77, 32)), ((2, 48, 96), (2, 96, 80))]
    models = [
        onnx.load(make_model(nodes, [("x", list(left)), ("w", list(right))], ["y"], name=f"model{place}.onnx"))
        for place, (left, right) in enumerate(shapes)
    ]
    path = tmp_path / "joined.onnx"
    onnx.save(join_models(models), path)
    imported, options = import_onnx(path), BuildOptions(precision="bf16")
    model = build(imported, target, options)
    assert _count_kernels(model) == len(shapes)
    scheduled = [schedule(item.func, machine(target))[0] for item in workloads(lower(imported, target, options))]
    assert sum("tvmflow_transpose_2x16_16_whole" in function.script() for function in scheduled) == len(shapes)
    operands = [normal(*shape) for both in shapes for shape in both]
    names = [joined_name(place, name) for place in range(len(shapes)) for name in ("x", "w")]
    feed = dict(zip(names, map(_rounded, operands), strict=True))
    expected = onnxruntime_outputs(path, feed).items()
    for actual, (name, value) in zip(run_built(model, *operands), expected, strict=True):
        atol = 2e-6 * float(np.abs(value).max())
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=atol, err_msg=name)


def test_one_call_computes_as_many_vectors_as_the_registers_hold(make_model: MakeModel, target: Target) -> None:
    # Tiles hold the results of two vectors of 28 pixels. Of five, they hold two, two and one.
    for units, vectors in ((192, 2), (80, 5)):
        nodes = [helper.make_node("Conv", ["x", "w"], ["c"])]
        path = make_model(nodes, [("x", [1, 64, 28, 28])], ["c"], {"w": normal(units, 64, 1, 1)})
        lowered = lower(import_onnx(path), target, BuildOptions(precision="bf16"))
        scripts = [schedule(item.func, machine(target))[0].script() for item in workloads(lowered)]
        assert f"tvmflow_amx_bf16_28_{vectors}_32_" in "".join(scripts)


def test_calls_are_even_shares_for_all_cores() -> None:
    kernel, processor = amx.Kernel(28, 1, 32), machine(resolve("x86-64-v4-amx"))
    counts = [amx.choose_vectors(kernel, 12, 1, replace(processor, cores=cores)) for cores in (1, 4, 12)]
    assert counts == [2, 3, 1]


@pytest.mark.parametrize("batch", [6, "batch"])
def test_the_registers_are_configured_once_for_each_share_of_a_loop(
    batch: int | str, emulated_amx: Path, make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4)]
    path = make_model(nodes, [("x", [batch, 64, 12, 28])], ["c"], {"w": normal(64, 64, 3, 3)})
    model = build(import_onnx(path), target, BuildOptions(precision="bf16"))
    software = ctypes.CDLL(str(emulated_amx))
    software.emulated_configurations()
    run_built(model, normal(6, 64, 12, 28))
    # The kernel computes 72 lines, each by two calls.
    assert 1 <= software.emulated_configurations() < 72


@pytest.mark.parametrize("rows", [64, "rows"])
def test_kernels_fetch_the_weights_of_those_that_follow(
    rows: int | str, emulated_amx: Path, make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    weight, x = normal(1024, 1024), normal(64, 1024)
    path = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [rows, 1024])], ["y"], {"w": weight})
    model = build(import_onnx(path), target, BuildOptions(precision="bf16"))
    software = ctypes.CDLL(str(emulated_amx))
    software.emulated_fetched_lines()
    (actual,) = run_built(model, x)
    np.testing.assert_allclose(actual, _rounded(x) @ _rounded(weight), rtol=1e-4, atol=1e-4)
    # All weights but those that the first kernels read, of two vectors of channels with known rows and of four else.
    vectors = 2 if rows == 64 else 4
    assert software.emulated_fetched_lines() == (64 - vectors) * 1024 * 16 * 2 // 64


def test_rows_that_nothing_divides_are_spread_evenly() -> None:
    assert BF16.name in machine(resolve("x86-64-v4-amx")).amx
    assert amx.choose_rows(197, 64, 48, machine(resolve("x86-64-v4-amx"))) == 29
    assert amx.choose_rows(197, 64, 48, machine(resolve("x86-64-v4"))) == 0
