"""Weights that a library holds as the model has them, and packs when it is loaded."""

from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import relax, te

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, Imported, build, import_onnx, lower, workloads
from tvmflow.compiler.dotproduct import BF16, INT8, PAIRS
from tvmflow.compiler.hoisting import share_weights
from tvmflow.compiler.machine import machine
from tvmflow.compiler.operators.packing import (
    ConvolutionPacking,
    DepthwisePacking,
    GroupsPacking,
    IntegerWinogradPacking,
    MatrixPacking,
    NarrowWinogradPacking,
    Packing,
    WideningPacking,
    WinogradPacking,
)
from tvmflow.compiler.operators.widening import NarrowWeight, narrow, tie
from tvmflow.compiler.schedules import schedule
from tvmflow.hardware.target import Precision, Target, resolve

MakeModel = Any


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("packing", "shape"),
    [
        (WinogradPacking(2, 8, 1), (32, 5, 3, 3)),
        (WinogradPacking(4, 4, 1), (21, 8, 3, 3)),
        (WinogradPacking(4, 8, 1, 3), (48, 5, 3, 3)),
        (WinogradPacking(2, 8, 2), (9, 3, 3, 3)),
        (WinogradPacking(3, 8, 2), (16, 3, 3, 3)),
        (WinogradPacking(4, 16, 2), (20, 7, 3, 3)),
        (IntegerWinogradPacking(2, 8, 1), (32, 6, 3, 3)),
        (IntegerWinogradPacking(3, 4, 2), (21, 4, 3, 3)),
        (NarrowWinogradPacking(4, 8, 1), (20, 6, 3, 3)),
        (NarrowWinogradPacking(2, 8, 1, 2), (32, 6, 3, 3)),
        (WideningPacking(), (5, 3, 1, 7, 8, 2)),
        (MatrixPacking(8, 3), (7, 21)),
        (MatrixPacking(4, 2), (2, 3, 5, 8)),
        (MatrixPacking(8, 3, number="float16"), (7, 21)),
        (MatrixPacking(8, 2, number="bfloat16"), (5, 16)),
        (MatrixPacking.of_dot(21, 8, BF16), (7, 21)),
        (MatrixPacking.of_dot(16, 8, INT8), (9, 16)),
        (MatrixPacking.of_dot(16, 8, BF16, 5), (7, 16)),
        (ConvolutionPacking(8, 4), (21, 5, 3, 2)),
        (ConvolutionPacking(4, 3), (12, 5, 1, 1)),
        (ConvolutionPacking(8, 2, number="float16"), (16, 3, 3, 3)),
        (ConvolutionPacking.of_dot(21, 8, BF16), (21, 5, 3, 2)),
        (ConvolutionPacking.of_dot(16, 4, PAIRS), (16, 6, 3, 3)),
        (ConvolutionPacking.of_dot(16, 4, INT8, 3), (16, 8, 3, 3)),
        (DepthwisePacking(16), (24, 1, 3, 2)),
        (DepthwisePacking(16), (21, 1, 5, 5)),
        (GroupsPacking(8), (20, 4, 3, 3)),
        (GroupsPacking(8, pairs=True), (20, 4, 3, 3)),
    ],
    ids=str,
)
def test_a_packing_in_a_library_equals_that_of_arrays(
    packing: Packing, shape: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    weight = normal(*shape)
    if isinstance(packing, IntegerWinogradPacking | WideningPacking) or "int" in getattr(packing, "number", ""):
        weight = (40 * weight).astype("int8")
    expected = packing.pack(weight)
    # Only for processors that multiply bfloat16 are weights rounded to it: for others, LLVM calls a function of C's.
    target: Target = request.getfixturevalue("bf16" if expected.dtype == np.uint16 else "target")
    parameter = te.placeholder(shape, str(weight.dtype), name="weight")
    func = te.create_prim_func([parameter, packing.define(parameter)]).with_attr("global_symbol", "main")
    scheduled, rule = schedule(func, machine(target))
    assert rule == ("packing" if isinstance(packing, WinogradPacking) else "fallback")
    library = tvm.tirx.build(tvm.IRModule({"main": scheduled}), target=tvm.target.Target(target.tvm))
    packed = tvm.runtime.tensor(np.full_like(expected, 99))
    library["main"](tvm.runtime.tensor(weight), packed)
    if isinstance(packing, WinogradPacking) and expected.dtype.kind == "f":
        # Sums in float64 in another order: a result may round to the other neighbour.
        np.testing.assert_array_max_ulp(packed.numpy(), expected, maxulp=1)
    elif isinstance(packing, NarrowWinogradPacking):
        # The same, of bfloat16, which differs by up to a 128th.
        actual, other = ((bits.astype("uint32") << 16).view("float32") for bits in (packed.numpy(), expected))
        np.testing.assert_allclose(actual, other, rtol=2**-7)
    else:
        np.testing.assert_array_equal(packed.numpy(), expected)


def _images(make_model: MakeModel, batch: int | str = 1) -> tuple[Imported, Array]:
    """A model of two convolutions with the same weights, which Winograd's algorithm computes."""
    weight = normal(48, 48, 3, 3) / 20
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    return import_onnx(make_model(nodes, [("x", [batch, 48, 16, 16])], ["y"], {"w": weight})), weight


def _constants(module: tvm.IRModule) -> list[tuple[int, ...]]:
    """The shapes of the constant tensors of four dimensions or more in a module."""
    constants: list[tvm.ir.GenericConst] = []
    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(
                function, lambda node: constants.append(node) if isinstance(node, tvm.ir.GenericConst) else None
            )
    return [tuple(item.value.shape) for item in constants if len(item.value.shape) >= 4]


def test_a_module_holds_the_weights_once_as_the_model_has_them(make_model: MakeModel, target: Target) -> None:
    imported, weight = _images(make_model)
    unpacked = lower(imported, target)
    assert _constants(unpacked) == [weight.shape]
    packed = lower(imported, target, BuildOptions(disabled_passes=("PackAtLoad",)))
    assert weight.shape not in _constants(packed)


@pytest.mark.parametrize("exec_mode", scale.choose(normal=["compiled"], long=["bytecode", "compiled"]))
def test_a_library_computes_the_same_however_it_gets_its_weights(
    make_model: MakeModel, target: Target, exec_mode: Any
) -> None:
    imported, _ = _images(make_model)
    x = normal(1, 48, 16, 16)
    models = [
        build(imported, target, BuildOptions(weights=place, exec_mode=exec_mode)) for place in ("inside", "apart")
    ]
    assert [model.weights for model in models] == ["unpacked", "shared"]
    unpacked, shared = (model.load().run(x)[0] for model in models)
    np.testing.assert_array_equal(unpacked, shared)


@pytest.mark.parametrize("place", scale.choose(normal=["apart"], long=["inside", "apart"]))
def test_without_the_pass_weights_are_packed_before(make_model: MakeModel, target: Target, place: Any) -> None:
    imported, _ = _images(make_model)
    x = normal(1, 48, 16, 16)
    model = build(imported, target, BuildOptions(weights=place, disabled_passes=("PackAtLoad",)))
    assert model.weights == place
    expected = build(imported, target).load().run(x)[0]
    np.testing.assert_allclose(model.load().run(x)[0], expected, rtol=1e-5, atol=1e-6)


def _layers(make_model: MakeModel) -> Imported:
    """A model with weights of every kind: images in groups, depthwise and by Winograd, rows, and products of both."""
    nodes = [
        helper.make_node("Conv", ["x", "stem"], ["a"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("BatchNormalization", ["a", "scale", "shift", "mean", "variance"], ["n"]),
        helper.make_node("Conv", ["n", "square"], ["b"], pads=[1] * 4),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Conv", ["c", "depthwise"], ["d"], group=128, pads=[3] * 4),
        helper.make_node("Conv", ["d", "groups"], ["e"], group=16, pads=[1] * 4),
        helper.make_node("Conv", ["e", "wide"], ["f"], group=2, strides=[2, 2]),
        helper.make_node("Reshape", ["f", "rows"], ["g"]),
        helper.make_node("MatMul", ["g", "dense"], ["h"]),
        helper.make_node("Add", ["h", "table"], ["i"]),
        helper.make_node("MatMul", ["i", "batched"], ["y"]),
    ]
    weights = {
        "stem": normal(128, 16, 3, 3),
        "scale": normal(128),
        "shift": normal(128),
        "mean": normal(128),
        "variance": np.abs(normal(128)) + 1,
        "square": normal(128, 128, 3, 3) / 30,
        "depthwise": normal(128, 1, 7, 7) / 7,
        "groups": normal(128, 8, 3, 3) / 8,
        "wide": normal(128, 64, 1, 1) / 8,
        "rows": np.array([1, 128, 49]),
        "dense": normal(49, 100) / 7,
        "table": normal(128, 100),
        "batched": normal(1, 100, 60) / 10,
    }
    return import_onnx(make_model(nodes, [("x", [1, 16, 28, 28])], ["y"], weights))


def test_models_for_all_targets_and_precisions_share_their_weights(make_model: MakeModel, target: Target) -> None:
    imported = _layers(make_model)
    precisions: list[tuple[str, Precision]] = [
        ("x86-64-v2", "fp32"),
        ("x86-64-v4-bf16", "fp32"),
        ("x86-64-v4-bf16", "bf16"),
        ("aarch64-neoverse-n1", "fp16"),
    ]
    stored = []
    for kind, precision in precisions:
        options = BuildOptions(weights="apart", precision=precision)
        _, weights = share_weights(lower(imported, resolve(kind), options))
        stored.append({name: (value.dtype, value.shape, value.tobytes()) for name, value in weights.items()})
    assert all(weights == stored[0] for weights in stored)
    # Convolution weights, those with the batch norm in them, the matrices and the table.
    assert len(stored[0]) == 8
    x = normal(1, 16, 28, 28)
    inside, shared = (build(imported, target, BuildOptions(weights=place)) for place in ("inside", "apart"))
    assert shared.weights == "shared"
    np.testing.assert_array_equal(shared.load().run(x)[0], inside.load().run(x)[0])


@pytest.mark.parametrize("place", ["inside", "apart"])
def test_main_and_its_variants_share_packed_weights(make_model: MakeModel, target: Target, place: Any) -> None:
    imported, _ = _images(make_model, "batch")
    model = build(imported, target, BuildOptions(weights=place, variants=({"batch": 2},)))
    loaded = model.load()
    assert len(loaded.weights) == 1
    x = normal(2, 48, 16, 16)
    of_main, of_variant = (loaded.run(x, function=function)[0] for function in ("main", "main_batch2"))
    np.testing.assert_allclose(of_variant, of_main, rtol=1e-5, atol=1e-6)


def test_small_weights_are_packed_in_the_library(make_model: MakeModel, target: Target) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    model = build(import_onnx(make_model(nodes, [("x", [1, 8, 16, 16])], ["y"], {"w": normal(16, 8, 3, 3)})), target)
    assert rule_counts(model)["winograd"] == 1
    assert model.weights == "inside"


def test_a_packing_is_no_function_that_a_tuner_measures(make_model: MakeModel, target: Target) -> None:
    names = [workload.name for workload in workloads(lower(_images(make_model)[0], target))]
    assert names
    assert not [name for name in names if name.startswith("pack_")]


def _save_loop(make_model: MakeModel) -> Path:
    """A model of a convolution within a loop, and a product after it."""
    body = helper.make_graph(
        [
            helper.make_node("Conv", ["state", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Identity", ["condition"], ["goes_on"]),
            helper.make_node("Tanh", ["c"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", 7, []),
            helper.make_tensor_value_info("condition", 9, []),
            helper.make_tensor_value_info("state", 1, [1, 32, 16, 16]),
        ],
        [
            helper.make_tensor_value_info("goes_on", 9, []),
            helper.make_tensor_value_info("next", 1, [1, 32, 16, 16]),
        ],
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["count"], to=7),
        helper.make_node("Loop", ["count", "", "x"], ["z"], body=body),
        helper.make_node("MatMul", ["z", "m"], ["y"]),
    ]
    weights = {"w": normal(32, 32, 3, 3) / 20, "m": normal(16, 300)}
    path: Path = make_model(nodes, [("x", [1, 32, 16, 16])], ["y"], weights, opset=17)
    return path


def test_weights_in_the_body_of_a_loop_are_packed_in_the_library(
    make_model: MakeModel, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of the body is called by `main` and takes no packed weights."""
    path, x = _save_loop(make_model), normal(1, 32, 16, 16)
    imported = import_onnx(path)
    (expected,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})

    def check(options: BuildOptions, place: str, count: int) -> None:
        model = build(imported, target, options)
        assert (model.weights, len(model.params)) == (place, count)
        np.testing.assert_allclose(model.load().run(x)[0], expected, rtol=1e-4, atol=1e-5)

    check(BuildOptions(), "inside", 0)
    check(BuildOptions(weights="apart"), "shared", 1)
    # Where a library cannot hold them, all weights are apart from it, and packed.
    monkeypatch.setattr(import_module("tvmflow.compiler.build"), "_MOST_WEIGHTS_INSIDE", 1 << 10)
    check(BuildOptions(weights="apart"), "apart", 2)


def _quantised(shape: tuple[int, ...], scales: tuple[int, ...], zero: int = 0) -> Array:
    """Weights as a quantised file has them: integers of 8 bits, less a zero point, times scales of a shape."""
    generator = np.random.default_rng(0)
    numbers = generator.integers(-127, 128, shape).astype("float32")
    for place in np.ndindex(*scales):
        # The largest number of a scale is 127.
        numbers[tuple(index if size > 1 else 0 for index, size in zip(place, scales, strict=True))] = 127
    return (numbers - zero) * generator.uniform(0.001, 0.1, scales).astype("float32")


@pytest.mark.parametrize(
    ("shape", "scales", "zero"),
    [
        ((300, 40), (300, 1), 0),
        ((40, 300), (1, 300), 0),
        ((7, 3, 3, 5, 16), (7, 1, 1, 1, 16), 0),
        ((60, 30, 3, 3), (1, 1, 1, 1), 0),
        ((200, 100), (1, 1), 3),
    ],
    ids=str,
)
def test_weights_of_8_bits_are_widened_to_the_same_numbers(
    shape: tuple[int, ...], scales: tuple[int, ...], zero: int, target: Target
) -> None:
    weight = _quantised(shape, scales, zero)
    form = narrow(weight)
    assert form is not None
    assert sum(part.nbytes for part in form.parts) <= 0.3 * weight.nbytes
    np.testing.assert_array_equal(_widen(form, weight.shape, target), weight)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_weights_of_16_bits_are_widened_to_the_same_numbers(dtype: Any, target: Target) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype).astype("float32")
    weight = every[np.isfinite(every)]
    form = narrow(weight)
    assert form is not None
    assert [part.nbytes for part in form.parts] == [weight.nbytes // 2]
    np.testing.assert_array_equal(_widen(form, weight.shape, target).view(np.uint32), weight.view(np.uint32))


@pytest.mark.parametrize("zero", [8, 5, 0, 15])
@pytest.mark.parametrize(
    ("shape", "axis", "block"), [((40, 96), 1, 32), ((4, 64, 8), 1, 16), ((256, 30), 0, 128)], ids=str
)
def test_weights_in_blocks_of_4_bits_are_widened_to_the_same_numbers(
    shape: tuple[int, ...], axis: int, block: int, zero: int, target: Target
) -> None:
    generator = np.random.default_rng(zero)
    levels = generator.integers(0, 16, shape).astype("float32")
    of_blocks = [size // block if place == axis else size for place, size in enumerate(shape)]
    scales = generator.uniform(0.001, 0.1, of_blocks).astype("float32")
    weight = (levels - np.float32(zero)) * np.repeat(scales, block, axis)
    form = narrow(weight)
    assert form is not None
    assert sum(part.nbytes for part in form.parts) <= weight.nbytes / 8 + 5 * scales.size
    np.testing.assert_array_equal(_widen(form, weight.shape, target), weight)


def _widen(form: NarrowWeight, shape: tuple[int, ...], target: Target) -> Array:
    """The float32 tensor that a library makes of a weight in fewer bytes."""
    parameters = [te.placeholder(part.shape, str(part.dtype), name=f"part{i}") for i, part in enumerate(form.parts)]
    func = te.create_prim_func([*parameters, form.widen(*parameters)]).with_attr("global_symbol", "main")
    library = tvm.tirx.build(
        tvm.IRModule({"main": schedule(func, machine(target))[0]}), target=tvm.target.Target(target.tvm)
    )
    widened = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    library["main"](*map(tvm.runtime.tensor, form.parts), widened)
    return widened.numpy()


@pytest.mark.parametrize(
    "weight",
    [
        normal(64, 300),
        np.full((64, 300), np.nan, "float32"),
        np.where(np.arange(300) == 7, np.inf, _quantised((64, 300), (64, 1))).astype("float32"),
        _quantised((64, 300), (64, 1)) + np.where(np.arange(300) == 299, np.float32(1e-4), np.float32(0)),
        np.float32(0.1) * np.arange(9000, dtype="float32"),
    ],
    ids=["float32", "not a number", "infinity", "one other column", "one dimension"],
)
def test_other_weights_are_held_as_they_are(weight: Array) -> None:
    assert narrow(weight) is None


@pytest.mark.long
@pytest.mark.parametrize("exec_mode", scale.choose(normal=["compiled"], long=["bytecode", "compiled"]))
def test_a_library_holds_the_weights_of_a_quantised_file_in_8_bits(
    make_model: MakeModel, target: Target, exec_mode: Any, tmp_path: Path
) -> None:
    """A table of words, a dense layer and a convolution for Winograd's algorithm, in float32."""
    tensors = {"q": (3000, 48), "d": (48, 480), "k": (48, 48, 3, 3)}
    generator = np.random.default_rng(1)
    numbers = {name: generator.integers(-127, 128, shape).astype("int8") for name, shape in tensors.items()}
    scales = {
        name: generator.uniform(0.01, 0.02, size).astype("float32")
        for name, size in {"q": (3000, 1), "d": (1, 480), "k": (48, 1, 1, 1)}.items()
    }
    for name, axes in {"q": 1, "d": 0, "k": (1, 2, 3)}.items():
        largest = np.abs(numbers[name].astype("int32")).max(axes, keepdims=True)
        numbers[name][np.abs(numbers[name].astype("int32")) == largest] = 127
    nodes = [
        node
        for name in tensors
        for node in (
            helper.make_node("Cast", [f"{name}_q"], [f"{name}_f"], to=1),
            helper.make_node("Mul", [f"{name}_f", f"{name}_s"], [name]),
        )
    ]
    nodes += [
        helper.make_node("Gather", ["q", "words"], ["a"]),
        helper.make_node("MatMul", ["a", "d"], ["y"]),
        helper.make_node("Conv", ["image", "k"], ["z"], pads=[1, 1, 1, 1]),
    ]
    file = make_model(
        nodes,
        [("words", [1, 20], 7), ("image", [1, 48, 16, 16])],
        ["y", "z"],
        {f"{name}_q": numbers[name] for name in tensors} | {f"{name}_s": scales[name] for name in tensors},
    )
    inputs = {"words": generator.integers(0, 3000, (1, 20)), "image": normal(1, 48, 16, 16)}
    expected = onnxruntime.InferenceSession(file).run(None, inputs)
    size = {}
    for passes in ((), ("PackAtLoad",)):
        options = BuildOptions(exec_mode=exec_mode, disabled_passes=passes)
        model = build(import_onnx(file), target, options)
        model.export(tmp_path / "mod.so")
        size[passes] = (tmp_path / "mod.so").stat().st_size
        for output, value in zip(model.load().run(*inputs.values()), expected, strict=True):
            np.testing.assert_allclose(output, value, rtol=1e-4, atol=1e-4 * np.abs(value).max())
    widened = sum(3 * np.prod(shape) for shape in tensors.values())
    assert size[("PackAtLoad",)] - size[()] > 0.9 * widened


def test_weights_of_bfloat16_stay_as_they_are(make_model: MakeModel, target: Target) -> None:
    weight, x = (normal(48, 64).astype(ml_dtypes.bfloat16) for _ in range(2))
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    path = make_model(
        nodes, [("x", [48, 64], TensorProto.BFLOAT16)], [("y", None, TensorProto.BFLOAT16)], {"w": weight}
    )
    (result,) = build(import_onnx(path), target).load().run(x)
    np.testing.assert_array_equal(np.asarray(result).view(x.dtype), x * weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", ["n", 128])
def test_a_library_holds_tied_weights_once(
    rows: int | str, make_model: MakeModel, target: Target, tmp_path: Path
) -> None:
    """Words are looked up in the table by which words are scored, as in most language models."""
    table = normal(6001, 64)
    nodes = [
        helper.make_node("Gather", ["table", "words"], ["x"]),
        helper.make_node("Softmax", ["x"], ["s"]),
        helper.make_node("Transpose", ["table"], ["scores"], perm=[1, 0]),
        helper.make_node("MatMul", ["s", "scores"], ["y"]),
    ]
    path = make_model(nodes, [("words", [rows], TensorProto.INT64)], ["y"], {"table": table})
    imported = import_onnx(path)
    assert [value.nbytes for value in imported.params.values()] == [table.nbytes]
    words = np.random.default_rng(0).integers(0, 6001, 128)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = session.run(None, {"words": words})[0]
    for place, count in (("inside", 0), ("apart", 1)):
        model = build(imported, target, BuildOptions(weights=place))
        assert len(model.params) == count
        np.testing.assert_allclose(model.load().run(words)[0], expected, rtol=1e-4, atol=1e-5)
    build(imported, target).export(tmp_path / "model.so")
    assert table.nbytes < (tmp_path / "model.so").stat().st_size < 1.2 * table.nbytes


def test_tied_weights_of_16_bits_are_held_once_in_16_bits(
    make_model: MakeModel, target: Target, tmp_path: Path
) -> None:
    table = normal(6001, 64).astype(ml_dtypes.bfloat16).astype("float32")
    nodes = [
        helper.make_node("Gather", ["table", "words"], ["x"]),
        helper.make_node("Transpose", ["table"], ["scores"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "scores"], ["y"]),
    ]
    path = make_model(nodes, [("words", ["n"], TensorProto.INT64)], ["y"], {"table": table})
    inside, apart = (build(import_onnx(path), target, BuildOptions(weights=place)) for place in ("inside", "apart"))
    assert [(value.itemsize, value.shape) for value in apart.params.values()] == [(2, table.shape)]
    inside.export(tmp_path / "model.so")
    assert (tmp_path / "model.so").stat().st_size < 0.7 * table.nbytes
    words = np.random.default_rng(0).integers(0, 6001, 9)
    np.testing.assert_array_equal(apart.load().run(words)[0], inside.load().run(words)[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_a_tied_weight_is_a_form_of_its_table(dtype: str) -> None:
    numbers = (100 * normal(21, 6)).astype("int16").astype("float32")
    table = numbers.astype(ml_dtypes.bfloat16).view("uint16") if dtype == "uint16" else numbers.astype(dtype)
    transpose = np.ascontiguousarray(table.T)
    form = tie(transpose, table)
    assert form is not None
    place = te.placeholder(table.shape, dtype, name="table")
    library = tvm.compile(te.create_prim_func([place, form.widen(place)]), target="llvm")
    result = tvm.runtime.tensor(np.full_like(transpose, 99))
    library["main"](*map(tvm.runtime.tensor, form.parts), result)
    np.testing.assert_array_equal(result.numpy(), transpose)
    if dtype != "float32":
        wide = transpose.astype("float32") if dtype == "float16" else (transpose.astype("uint32") << 16).view("float32")
        form = tie(wide, table)
        assert form is not None
        library = tvm.compile(te.create_prim_func([place, form.widen(place)]), target="llvm")
        result = tvm.runtime.tensor(np.full_like(wide, 99))
        library["main"](*map(tvm.runtime.tensor, form.parts), result)
        np.testing.assert_array_equal(result.numpy(), wide)
        assert tie(wide + 1, table) is None
    for place_of_change in ((0, 0), (-1, -1)):
        changed = transpose.copy()
        changed[place_of_change] += 1
        assert tie(changed, table) is None
    assert tie(table, table) is None
    assert tie(transpose.astype("float64"), table) is None
