"""Operators on quantised tensors, as ONNX Runtime's quantiser writes them, reach the kernels of integers."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support import scale
from support.arrays import normal, onnxruntime_outputs
from support.builds import rule_counts
from support.machines import runnable_levels, simple_target
from support.models import join_models, joined_name
from support.quantised import quantise, quantise_dynamically
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, build, import_onnx, lower, workloads
from tvmflow.compiler.dotproduct import PAIRS, integer_dot
from tvmflow.errors import BuildError
from tvmflow.hardware.target import Precision, Target, resolve
from tvmflow.onnx_model.graph import rounds_activations

MakeModel = Callable[..., Path]
RunBuilt = Callable[..., list[Array]]
_IMAGE, _TOKENS = (1, 3, 16, 16), (2, 6, 16)


def _network(make_model: MakeModel) -> Path:
    """Every operator that the quantiser writes for images: convolutions, activations, sums, pools, a dense layer."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w0"], ["a"], strides=[2, 2], pads=[1] * 4),
        node("Conv", ["a", "w1"], ["b"], pads=[1] * 4, group=24),
        node("LeakyRelu", ["b"], ["c"], alpha=0.2),
        node("Conv", ["c", "w2", "b2"], ["d"]),
        node("Sigmoid", ["d"], ["e"]),
        node("Mul", ["d", "e"], ["f"]),
        node("Add", ["f", "c"], ["g"]),
        node("Concat", ["g", "c"], ["h"], axis=1),
        node("AveragePool", ["h"], ["i"], kernel_shape=[2, 2]),
        node("GlobalAveragePool", ["i"], ["j"]),
        node("Flatten", ["j"], ["k"]),
        node("Gemm", ["k", "w3", "b3"], ["l"]),
        node("Softmax", ["l"], ["y"]),
    ]
    weights = {
        "w0": normal(24, 3, 3, 3) / 5,
        "w1": normal(24, 1, 3, 3) / 3,
        "w2": normal(24, 24, 1, 1) / 5,
        "b2": normal(24),
        "w3": normal(48, 10) / 5,
        "b3": normal(10),
    }
    return make_model(nodes, [("x", _IMAGE)], ["y"], weights, "network.onnx")


def _encoder(make_model: MakeModel) -> Path:
    node = helper.make_node
    nodes = [
        *(node("MatMul", ["x", f"w{name}"], [name]) for name in "qkv"),
        node("Add", ["q", "bias"], ["qb"]),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["qb", "kt"], ["s"]),
        node("Softmax", ["s"], ["p"]),
        node("MatMul", ["p", "v"], ["o"]),
        node("MatMul", ["o", "wo"], ["z"]),
        node("Add", ["z", "x"], ["y"]),
    ]
    weights = {f"w{name}": normal(16, 16, seed=place) / 4 for place, name in enumerate("qkvo")}
    return make_model(nodes, [("x", _TOKENS)], ["y"], {**weights, "bias": normal(16)}, "encoder.onnx")


def _quantised(make_model: MakeModel, quantise_model: Callable[[Path, Path], Path]) -> tuple[list[Path], Counter[str]]:
    """The network and the encoder, each quantised into another file, and how many of each operator both have."""
    paths = [
        quantise_model(path, path.with_name(f"quantised{place}.onnx"))
        for place, path in enumerate((_network(make_model), _encoder(make_model)))
    ]
    return paths, Counter(node.op_type for path in paths for node in onnx.load(path).graph.node)


def _run(paths: list[Path], target: Target, precision: Precision, run_built: RunBuilt) -> tuple[Counter[str], float]:
    """The schedule rules of models built as one, and the largest error beside ONNX Runtime over the largest output."""
    models = [onnx.load(path) for path in paths]
    joined = paths[0].with_name("joined.onnx")
    onnx.save(join_models(models), joined)
    shapes = [[dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] for model in models]
    inputs = [normal(*shape, seed=9) for shape in shapes]
    expected = onnxruntime_outputs(joined, {joined_name(place, "x"): x for place, x in enumerate(inputs)})
    whole = build(import_onnx(joined), target, BuildOptions(precision=precision))
    pairs = zip(run_built(whole, *inputs), expected.values(), strict=True)
    return rule_counts(whole), max(float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in pairs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("signed", "per_channel", "signed_weights"),
    scale.choose(
        normal=[(True, True, True)],
        long=[(True, True, True), (False, False, False), (False, False, True), (False, True, False)],
    ),
)
def test_operators_of_the_static_quantiser_are_computed_in_integers(
    signed: bool,
    per_channel: bool,
    signed_weights: bool,
    make_model: MakeModel,
    run_built: RunBuilt,
    int8: Target,
) -> None:
    form = partial(quantise, signed=signed, per_channel=per_channel, signed_weights=signed_weights, operators=True)
    paths, operators = _quantised(make_model, form)
    layers = ("Add", "AveragePool", "Concat", "Conv", "GlobalAveragePool", "LeakyRelu", "MatMul", "Mul", "Sigmoid")
    assert {f"QLinear{name}" for name in layers} | {"QGemm", "QLinearSoftmax"} <= operators.keys()
    rules, error = _run(paths, int8, "int8", run_built)
    # The layers are exact; one step of the last quantisation is 1/127 of the largest output at least.
    assert error <= 1.01 / 127
    # Equal functions are counted once.
    assert rules["dot_conv2d"] + rules["dot_rows"] >= 4
    assert (rules["depthwise"], rules["conv2d"], rules["winograd"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("precision", "signed_weights"),
    scale.choose(
        normal=[("int8", False)],
        long=[("fp32", True), ("int8", False), ("fp32", False), ("int8", True)],
    ),
)
def test_models_that_quantise_as_they_run_are_computed_in_integers(
    signed_weights: bool,
    precision: Precision,
    make_model: MakeModel,
    run_built: RunBuilt,
    int8: Target,
) -> None:
    paths, operators = _quantised(make_model, partial(quantise_dynamically, signed_weights=signed_weights))
    assert {"DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"} <= operators.keys()
    rules, error = _run(paths, int8, precision, run_built)
    # A last digit of what is quantised decides between two levels.
    assert error <= 0.01
    assert rules["dot_conv2d"] + rules["dot_rows"] >= 5
    assert (rules["depthwise"], rules["conv2d"], rules["rows"]) == (1, 0, 0)


def test_models_that_quantise_activations_are_told_from_those_that_do_not(make_model: MakeModel) -> None:
    path = _network(make_model)
    assert not rounds_activations(onnx.load(path))
    dynamic = path.with_name("dynamic.onnx")
    static = path.with_name("static.onnx")
    for form, result in ((quantise_dynamically, dynamic), (quantise, static)):
        form(path, result)
        assert rounds_activations(onnx.load(result))
    weights = helper.make_node("DequantizeLinear", ["w", "scale"], ["y"])
    numbers = {"w": np.zeros(4, "int8"), "scale": np.array(0.5, "float32")}
    assert not rounds_activations(onnx.load(make_model([weights], [], ["y"], numbers)))


def test_models_that_compute_in_float16_are_told_from_those_that_store_weights_in_it(make_model: MakeModel) -> None:
    multiply = helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = {"w": np.ones((4, 3), "float16")}
    half = [(name, [2, size], onnx.TensorProto.FLOAT16) for name, size in (("x", 4), ("y", 3))]
    assert rounds_activations(onnx.load(make_model([multiply], half[:1], half[1:], weights)))
    widen = helper.make_node("Cast", ["h"], ["w"], to=onnx.TensorProto.FLOAT)
    stored = {"h": weights["w"]}
    assert not rounds_activations(onnx.load(make_model([widen, multiply], [("x", [2, 4])], ["y"], stored)))
    narrow = helper.make_node("Cast", ["v"], ["x"], to=onnx.TensorProto.FLOAT16)
    assert rounds_activations(onnx.load(make_model([narrow, multiply], [("v", [2, 4])], half[1:], weights)))


@pytest.mark.parametrize(("level", "rounds"), [(0, False), (1, False), (2, True), (4, True)])
def test_products_that_onnx_runtime_may_compute_in_integers_round_activations(
    level: int, rounds: bool, make_model: MakeModel
) -> None:
    attributes = {"K": 32, "N": 3, "block_size": 32, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes)
    weights = {"w": np.zeros((3, 1, 16), "uint8"), "s": np.ones(3, "float32")}
    assert rounds_activations(onnx.load(make_model([node], [("x", [2, 32])], ["y"], weights))) == rounds


def _integer_nodes(make_model: MakeModel) -> tuple[Path, dict[str, Array]]:
    """Operators of integers with zero points of each kind, computed ones among them, and inputs for them."""
    rng = np.random.default_rng(5)
    node, int8, uint8 = helper.make_node, "int8", "uint8"
    weights = {
        "w": rng.integers(-128, 128, (20, 8, 3, 3)).astype(int8),
        "u": rng.integers(0, 256, (20, 8, 3, 3)).astype(uint8),
        "d": rng.integers(-128, 128, (8, 1, 3, 3)).astype(int8),
        "g": rng.integers(-128, 128, (20, 4, 1, 1)).astype(int8),
        "m": rng.integers(-128, 128, (24, 10)).astype(int8),
        "n": rng.integers(0, 256, (24, 10)).astype(uint8),
        "zero": np.array(117, uint8),
        "zeros": rng.integers(0, 256, 20).astype(uint8),
        "columns": rng.integers(0, 256, 10).astype(uint8),
        "signed": np.array(-5, int8),
        "rows": rng.integers(0, 256, (6, 1)).astype(uint8),
    }
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        node("ConvInteger", ["x", "w", "zero"], ["y0"], strides=[2, 2], **pads),
        node("ConvInteger", ["x", "w", "z"], ["y1"], **pads),
        node("ConvInteger", ["x", "u", "zero", "zeros"], ["y2"], **pads),
        node("ConvInteger", ["x", "d", "z"], ["y3"], group=8, **pads),
        node("ConvInteger", ["x", "g", "zero"], ["y4"], group=2),
        node("ConvInteger", ["x", "w"], ["y5"], auto_pad="SAME_UPPER"),
        node("MatMulInteger", ["a", "m", "z"], ["y6"]),
        node("MatMulInteger", ["a", "n", "zero", "columns"], ["y7"]),
        node("MatMulInteger", ["s", "m", "signed"], ["y8"]),
        node("MatMulInteger", ["a", "m", "rows"], ["y9"]),
        node("MatMulInteger", ["a", "t", "zero"], ["y10"]),
    ]
    inputs = {
        "x": rng.integers(0, 256, (1, 8, 9, 9)).astype(uint8),
        "z": np.array(121, uint8),
        "a": rng.integers(0, 256, (6, 24)).astype(uint8),
        "s": rng.integers(-128, 128, (6, 24)).astype(int8),
        "t": rng.integers(-128, 128, (24, 7)).astype(int8),
    }
    types = {uint8: TensorProto.UINT8, int8: TensorProto.INT8}
    infos = [(name, list(value.shape), types[str(value.dtype)]) for name, value in inputs.items()]
    outputs = [(f"y{place}", None, TensorProto.INT32) for place in range(len(nodes))]
    return make_model(nodes, infos, outputs, weights), inputs


@pytest.mark.parametrize("is_simple", [False, True], ids=["best", "pairs"])
def test_operators_of_integers_are_exact(
    is_simple: bool, make_model: MakeModel, run_built: RunBuilt, int8: Target
) -> None:
    target = simple_target() if is_simple else int8
    path, inputs = _integer_nodes(make_model)
    model = build(import_onnx(path), target)
    expected = onnx.reference.ReferenceEvaluator(str(path)).run(None, inputs)
    for place, (ours, theirs) in enumerate(zip(run_built(model, *inputs.values()), expected, strict=True)):
        assert np.array_equal(ours, theirs), place
    rules = rule_counts(model)
    # Those of pairs take centred integers, so that more functions are equal, and are one.
    assert rules["dot_conv2d"] + rules["dot_rows"] >= (3 if integer_dot(target) is PAIRS else 6)
    assert rules["rows"] == 0


def test_convolutions_of_integers_along_lines_have_dot_products(
    make_model: MakeModel, run_built: RunBuilt, int8: Target
) -> None:
    rng = np.random.default_rng(4)
    weights = {"w": rng.integers(-128, 128, (20, 8, 3)).astype("int8"), "zero": np.array(117, "uint8")}
    node = helper.make_node("ConvInteger", ["x", "w", "zero"], ["y"], pads=[1, 2], strides=[2])
    path = make_model([node], [("x", ["n", 8, "length"], TensorProto.UINT8)], [("y", None, TensorProto.INT32)], weights)
    model = build(import_onnx(path), int8)
    inputs = {"x": rng.integers(0, 256, (2, 8, 31)).astype("uint8")}
    (expected,) = onnx.reference.ReferenceEvaluator(str(path)).run(None, inputs)
    assert np.array_equal(run_built(model, *inputs.values())[0], expected)
    assert rule_counts(model)["dot_conv2d"] == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [9, "size"], ids=["fixed", "free"])
def test_computed_weights_of_integers_are_multiplied_by_patches(
    size: int | str, make_model: MakeModel, run_built: RunBuilt, int8: Target
) -> None:
    rng = np.random.default_rng(3)
    forms: list[tuple[str, tuple[int, ...], list[str], dict[str, Any]]] = [
        ("uint8", (20, 8, 3, 3), ["zero"], {"pads": [1, 0, 1, 2]}),
        ("int8", (20, 8, 3, 3), ["z"], {"strides": [2, 1], "pads": [1, 1, 1, 1]}),
        ("uint8", (20, 4, 3, 2), ["z", "zeros"], {"group": 2, "dilations": [2, 1]}),
        ("int8", (20, 8, 1, 1), [], {}),
        ("uint8", (20, 8, 3, 3), ["zero", "z"], {"auto_pad": "SAME_UPPER"}),
    ]
    weights = {"zero": np.array(117, "uint8"), "zeros": rng.integers(0, 256, 20).astype("uint8")}
    inputs = {"x": rng.integers(0, 256, (2, 8, 9, 9)).astype("uint8"), "z": np.array(121, "uint8")}
    infos = [("x", [2, 8, size, size], TensorProto.UINT8), ("z", [], TensorProto.UINT8)]
    nodes = []
    for place, (dtype, shape, zeros, attributes) in enumerate(forms):
        inputs[f"w{place}"] = rng.integers(-128, 128, shape).astype(dtype)
        infos.append((f"w{place}", list(shape), TensorProto.UINT8 if dtype == "uint8" else TensorProto.INT8))
        nodes.append(helper.make_node("ConvInteger", ["x", f"w{place}", *zeros], [f"y{place}"], **attributes))
    outputs = [(f"y{place}", None, TensorProto.INT32) for place in range(len(nodes))]
    path = make_model(nodes, infos, outputs, weights)
    model = build(import_onnx(path), int8)
    expected = onnx.reference.ReferenceEvaluator(str(path)).run(None, inputs)
    for place, (ours, theirs) in enumerate(zip(run_built(model, *inputs.values()), expected, strict=True)):
        assert np.array_equal(ours, theirs), place
    # The padding of the last one depends on the free size.
    assert rule_counts(model)["dot_rows"] == len(forms) - (size == "size")


@pytest.mark.long
def test_without_dot_products_operators_of_integers_are_computed_in_float32(make_model: MakeModel) -> None:
    path, _ = _integer_nodes(make_model)
    rules = rule_counts(build(import_onnx(path), resolve("aarch64-cortex-a72")))
    assert rules["dot_conv2d"] + rules["dot_rows"] == 0
    assert rules["conv2d"] + rules["rows"] + rules["depthwise"] >= 5


@pytest.mark.parametrize("is_simple", [True, False], ids=["pairs", "best"])
@pytest.mark.parametrize("is_free", [False, True], ids=["known", "free"])
def test_products_of_two_computed_operands_multiply_integers(
    is_free: bool, is_simple: bool, int8: Target, make_model: MakeModel, run_built: RunBuilt
) -> None:
    """With zero points of each kind, broadcast batches, an odd depth, and differences of 255."""
    rng = np.random.default_rng(3)
    node = helper.make_node
    shapes = {"a": (6, 35), "b": (35, 37), "c": (2, 3, 6, 35), "d": (1, 35, 20), "e": (2, 1, 20, 35), "f": (9, 35)}
    nodes = [
        node("MatMulInteger", ["a", "b", "zero", "columns"], ["y0"]),
        node("MatMulInteger", ["a", "b", "rows"], ["y1"]),
        node("MatMulInteger", ["c", "d", "none", "signed"], ["y2"]),
        node("Transpose", ["e"], ["t"], perm=[0, 1, 3, 2]),
        node("MatMulInteger", ["c", "t", "zero"], ["y3"]),
        node("MatMulInteger", ["f", "b", "signed", "zero"], ["y4"]),
    ]
    types = {"a": "uint8", "b": "uint8", "c": "uint8", "d": "int8", "e": "int8", "f": "int8"}
    inputs = {name: _integers(rng, shape, types[name]) for name, shape in shapes.items()}
    inputs["a"][0], inputs["b"][:, 0] = 255, 255
    weights = {
        "none": np.array(0, "uint8"),
        "zero": np.array(131, "uint8"),
        "signed": np.array(-7, "int8"),
        "columns": np.append(0, _integers(rng, (36,), "uint8")).astype("uint8"),
        "rows": _integers(rng, (6, 1), "uint8"),
    }
    of_type = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}
    infos = [
        (name, [f"n{size}" if is_free and size in (20, 35) else size for size in shape], of_type[types[name]])
        for name, shape in shapes.items()
    ]
    outputs = [(f"y{place}", None, TensorProto.INT32) for place in range(5)]
    path = make_model(nodes, infos, outputs, weights)
    model = build(import_onnx(path), simple_target() if is_simple else int8)
    # The first two are one function.
    assert rule_counts(model)["dot_rows"] == 4
    expected = onnx.reference.ReferenceEvaluator(str(path)).run(None, inputs)
    for ours, theirs in zip(run_built(model, *inputs.values()), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("zero", [0, 9])
def test_computed_8_bit_integers_are_multiplied_as_they_are(zero: int, make_model: MakeModel) -> None:
    infos: list[Any] = [("a", ["rows", 64], TensorProto.UINT8), ("b", [64, "columns"], TensorProto.INT8)]
    node = helper.make_node("MatMulInteger", ["a", "b", "zero"], ["y"])
    path = make_model([node], infos, [("y", None, TensorProto.INT32)], {"zero": np.array(zero, "uint8")})
    texts = [str(item.func) for item in workloads(lower(import_onnx(path), resolve("zen4")))]
    assert any("int8" in text for text in texts)
    assert not any("int16" in text for text in texts)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("scales", [(0.1, 0.1, 0.2), (0.013, 0.027, 0.04)], ids=["halves", "thirds"])
def test_sums_of_quantised_numbers_round_ties_as_onnx_runtime_does(
    scales: tuple[float, float, float], dtype: str, make_model: MakeModel, run_built: RunBuilt
) -> None:
    element, rng = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), np.random.default_rng(5)
    weights = {f"s{place}": np.array(value, "float32") for place, value in enumerate(scales)}
    weights |= {f"z{place}": np.array(value, dtype) for place, value in enumerate((120, 127, 100))}
    operands = ["a", "s0", "z0", "b", "s1", "z1", "s2", "z2"]
    path = make_model(
        [helper.make_node("QLinearAdd", operands, ["y"], domain="com.microsoft")],
        [(name, [300, 77], element) for name in "ab"],
        [("y", None, element)],
        weights,
    )
    inputs = {name: _integers(rng, (300, 77), dtype) for name in "ab"}
    (ours,) = run_built(build(import_onnx(path), simple_target()), *inputs.values())
    (theirs,) = onnxruntime_outputs(path, inputs).values()
    # ONNX Runtime's order on x86-64 with fused multiply-adds.
    most = 0 if runnable_levels()[1:] else 1
    assert np.abs(ours.astype("int32") - theirs.astype("int32")).max() <= most


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_integers_are_concatenated_as_they_are(dtype: str, make_model: MakeModel, run_built: RunBuilt) -> None:
    """Where scale and zero point stay the same; others are quantised anew before."""
    rng, element = np.random.default_rng(4), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = {name: np.array(value, "float32") for name, value in (("s", 0.1), ("t", 0.03))}
    weights |= {"z": np.array(11, dtype), "n": np.array(0, dtype)}
    one, other = ["s", "z"], ["t", "n"]
    node = helper.make_node
    nodes = [
        node("QLinearConcat", [*one, "a", *one, "b", *one], ["y0"], domain="com.microsoft", axis=1),
        node("QLinearConcat", [*one, "a", *one, "b", *other], ["y1"], domain="com.microsoft", axis=1),
    ]
    inputs = {name: _integers(rng, shape, dtype) for name, shape in (("a", (2, 5, 7)), ("b", (2, 3, 7)))}
    for count in (1, 2):
        infos = [("a", [2, "p", 7], element), ("b", [2, "q", 7], element)]
        outputs = [(f"y{place}", None, element) for place in range(count)]
        path = make_model(nodes[:count], infos, outputs, weights)
        model = build(import_onnx(path), simple_target())
        expected = onnxruntime_outputs(path, inputs)
        for ours, theirs in zip(run_built(model, *inputs.values()), expected.values(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert any("quantize" in name for name, _ in model.schedules) == (count > 1)


def test_layers_of_concatenated_signed_integers_read_unsigned_ones(make_model: MakeModel, run_built: RunBuilt) -> None:
    node = helper.make_node
    weights = {
        "s": np.array(0.03, "float32"),
        "z": np.array(-11, "int8"),
        "u": normal(24, 3, 3, 3) / 5,
        "w": _integers(np.random.default_rng(0), (20, 27, 1, 1), "int8"),
        "sw": np.array(0.01, "float32"),
        "zw": np.array(0, "int8"),
    }
    nodes = [
        node("Conv", ["x", "u"], ["a"], pads=[1] * 4),
        *(node("QuantizeLinear", [name, "s", "z"], [f"{name}q"]) for name in "ax"),
        *(node("DequantizeLinear", [f"{name}q", "s", "z"], [f"{name}d"]) for name in "ax"),
        node("Concat", ["ad", "xd"], ["c"], axis=1),
        node("QuantizeLinear", ["c", "s", "z"], ["cq"]),
        node("DequantizeLinear", ["cq", "s", "z"], ["cd"]),
        node("DequantizeLinear", ["w", "sw", "zw"], ["wd"]),
        node("Conv", ["cd", "wd"], ["y"]),
    ]
    path = make_model(nodes, [("x", [1, 3, 12, 12])], ["y"], weights)
    model, x = build(import_onnx(path), simple_target()), normal(1, 3, 12, 12)
    expected = onnxruntime_outputs(path, {"x": x})["y"]
    np.testing.assert_allclose(run_built(model, x)[0], expected, rtol=1e-2, atol=2e-2)
    assert rule_counts(model)["dot_rows"] + rule_counts(model)["dot_conv2d"] == 1


@pytest.mark.parametrize("size", [7, "h"])
def test_means_of_quantised_images_equal_onnx_runtime(
    size: int | str, make_model: MakeModel, run_built: RunBuilt
) -> None:
    scales = {name: np.array(value, "float32") for name, value in (("s", 0.1), ("t", 0.05))}
    weights = scales | {"z": np.array(120, "uint8"), "n": np.array(7, "uint8")}
    form = {"domain": "com.microsoft", "channels_last": 0}
    node = helper.make_node("QLinearGlobalAveragePool", ["x", "s", "z", "t", "n"], ["y"], **form)
    info = ("x", [2, 40, size, 7], TensorProto.UINT8)
    path = make_model([node], [info], [("y", None, TensorProto.UINT8)], weights)
    model, x = build(import_onnx(path), simple_target()), _integers(np.random.default_rng(0), (2, 40, 7, 7), "uint8")
    expected = onnxruntime_outputs(path, {"x": x})["y"]
    (ours,) = run_built(model, x)
    assert np.abs(ours.astype(int) - expected).max() <= 1
    # Numbers of float32 are not stored.
    assert (rule_counts(model)["reduction"] == 1) == (size == 7)


def _integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)


def test_a_layer_of_integers_whose_sums_no_float32_holds_is_exact(make_model: MakeModel, run_built: RunBuilt) -> None:
    """Zero points at the edge make differences of 255 of the data and of the weights."""
    nodes = [helper.make_node("MatMulInteger", ["a", "w", "zero", "other"], ["y"])]
    weights = {
        "w": np.full((4096, 20), 255, "uint8"),
        "zero": np.array(0, "uint8"),
        "other": np.array(0, "uint8"),
    }
    path = make_model(nodes, [("a", [3, 4096], TensorProto.UINT8)], [("y", None, TensorProto.INT32)], weights)
    (ours,) = run_built(build(import_onnx(path), simple_target()), np.full((3, 4096), 255, "uint8"))
    np.testing.assert_array_equal(ours, np.full((3, 20), 4096 * 255 * 255, "int32"))


def test_between_convolutions_integers_keep_the_channels_last(make_model: MakeModel, run_built: RunBuilt) -> None:
    """With a scale for each channel, too, which is along another axis then."""
    node = helper.make_node
    weights = {
        "u": normal(24, 3, 3, 3) / 5,
        "v": normal(24, 24, 1, 1) / 5,
        "scale": np.array(0.03, "float32"),
        "scales": np.linspace(0.02, 0.05, 24, dtype="float32"),
        "zero": np.array(120, "uint8"),
        "zeros": np.arange(110, 134, dtype="uint8"),
    }
    nodes = [
        node("Conv", ["x", "u"], ["a"]),
        node("QuantizeLinear", ["a", "scale", "zero"], ["b"]),
        node("DequantizeLinear", ["b", "scale", "zero"], ["c"]),
        node("Softplus", ["c"], ["d"]),
        node("QuantizeLinear", ["d", "scales", "zeros"], ["e"], axis=1),
        node("DequantizeLinear", ["e", "scales", "zeros"], ["f"], axis=1),
        node("Conv", ["f", "v"], ["g"]),
        node("GlobalAveragePool", ["g"], ["y"]),
    ]
    path = make_model(nodes, [("x", [1, 3, 12, 12])], ["y"], weights)
    model = build(import_onnx(path), simple_target())
    x = normal(1, 3, 12, 12)
    np.testing.assert_allclose(run_built(model, x)[0], onnxruntime_outputs(path, {"x": x})["y"], rtol=1e-2, atol=1e-2)
    # That of the input is the only transpose.
    assert sum(name.count("transpose") for name, _ in model.schedules) == 1


def test_pointwise_layers_of_images_of_any_size_quantise_their_results(
    make_model: MakeModel, run_built: RunBuilt
) -> None:
    """In the function that computes the layer, which takes all pixels as one line."""
    node = helper.make_node
    weights = {
        "s": np.array(0.03, "float32"),
        "z": np.array(7, "uint8"),
        "v": np.random.default_rng(0).integers(-127, 128, (24, 16, 1, 1)).astype("int8"),
        "t": np.array(0.002, "float32"),
        "none": np.array(0, "int8"),
        "b": normal(24),
    }
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("DequantizeLinear", ["v", "t", "none"], ["w"]),
        node("Conv", ["d", "w", "b"], ["c"]),
        node("QuantizeLinear", ["c", "s", "z"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["n", 16, "h", "w"])], [("y", None, TensorProto.UINT8)], weights)
    model = build(import_onnx(path), simple_target())
    for shape in ((1, 16, 5, 7), (2, 16, 9, 3)):
        (ours,), (theirs,) = run_built(model, normal(*shape)), onnxruntime_outputs(path, {"x": normal(*shape)}).values()
        assert np.abs(ours.astype("int32") - theirs.astype("int32")).max() <= 1
    assert [name for name, rule in model.schedules if rule == "dot_rows" and "quantize" in name]


def test_convolutions_of_volumes_of_any_size_quantise_their_results(make_model: MakeModel) -> None:
    """The volumes have a dimension more than the images that compute them."""
    node = helper.make_node
    weights = {"s": np.array(0.03, "float32"), "z": np.array(7, "uint8"), "w": normal(16, 4, 1, 1, 1) / 2}
    nodes = [node("Conv", ["x", "w"], ["c"]), node("QuantizeLinear", ["c", "s", "z"], ["y"])]
    path = make_model(nodes, [("x", ["n", 4, "d", "h", "w"])], [("y", None, TensorProto.UINT8)], weights)
    names = [item.name for item in workloads(lower(import_onnx(path), simple_target()))]
    assert "fused_conv2d_quantize" in names


def test_both_branches_of_a_condition_quantise_the_same_tensor(make_model: MakeModel, run_built: RunBuilt) -> None:
    weights = {
        "w": np.random.default_rng(0).integers(-127, 128, (16, 12)).astype("int8"),
        "v": np.random.default_rng(1).integers(-127, 128, (16, 12)).astype("int8"),
        "zero": np.array(100, "uint8"),
    }
    result = helper.make_tensor_value_info("r", TensorProto.INT32, [3, 12])
    branches = [
        helper.make_graph([helper.make_node("MatMulInteger", ["a", name, "zero"], ["r"])], name, [], [result])
        for name in "wv"
    ]
    node = helper.make_node("If", ["first"], ["y"], then_branch=branches[0], else_branch=branches[1])
    inputs = [("a", [3, 16], TensorProto.UINT8), ("first", [], TensorProto.BOOL)]
    path = make_model([node], inputs, [("y", [3, 12], TensorProto.INT32)], weights)
    model = build(import_onnx(path), simple_target())
    a = np.random.default_rng(2).integers(0, 256, (3, 16)).astype("uint8")
    for first in (True, False):
        (ours,) = run_built(model, a, np.array(first))
        np.testing.assert_array_equal(ours, (a.astype("int32") - 100) @ weights["w" if first else "v"].astype("int32"))


def _activated(
    make_model: MakeModel, dtype: str, *activation: onnx.NodeProto, scales: str = "s", lines: int | str = 9
) -> Path:
    """A convolution, whose results x are quantised, dequantised to c and, after an activation y, quantised again."""
    node = helper.make_node
    zero = np.array(3, dtype)
    weights = {"w": normal(16, 4, 1, 1) / 2, "s": np.array(0.03, "float32"), "t": np.array(0.02, "float32"), "z": zero}
    weights |= {"many": np.linspace(0.02, 0.04, 16, dtype="float32"), "zeros": np.full(16, 3, dtype)}
    zeros = "z" if scales == "s" else "zeros"
    nodes = [
        node("Conv", ["x", "w"], ["a"], strides=[2, 1]),
        node("QuantizeLinear", ["a", scales, zeros], ["b"], axis=1),
        node("DequantizeLinear", ["b", scales, zeros], ["c"], axis=1),
        *activation,
        node("QuantizeLinear", ["d", "t", "z"], ["y"]),
    ]
    types = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}
    return make_model(nodes, [("x", [1, 4, lines, 9])], [("y", None, types[dtype])], weights)


@pytest.mark.parametrize(("dtype", "lines"), [("uint8", 9), ("int8", "lines")], ids=["fixed", "free"])
def test_a_slow_function_of_an_integer_is_one_table(
    dtype: str, lines: int | str, make_model: MakeModel, run_built: RunBuilt
) -> None:
    """SiLU as the static quantiser writes it, with the sigmoid quantised between."""
    node = helper.make_node
    between = [
        node("Sigmoid", ["c"], ["e"]),
        node("QuantizeLinear", ["e", "t", "z"], ["f"]),
        node("DequantizeLinear", ["f", "t", "z"], ["g"]),
        node("Mul", ["c", "g"], ["d"]),
    ]
    path = _activated(make_model, dtype, *between, lines=lines)
    model = build(import_onnx(path), simple_target())
    x = normal(1, 4, 9, 9) * 3
    (ours,), (theirs,) = run_built(model, x), onnxruntime_outputs(path, {"x": x}).values()
    # What lies between two levels may be rounded to either.
    assert np.abs(ours.astype("int32") - theirs.astype("int32")).max() <= 1
    assert (ours != theirs).mean() < 0.05
    assert [name for name, _ in model.schedules if "lookup" in name] == ["lookup"]


@pytest.mark.parametrize(
    ("activation", "scales"), [("Relu", "s"), ("Sigmoid", "many"), ("Sin", "s")], ids=["fast", "channels", "other"]
)
def test_other_functions_of_integers_are_no_tables(
    activation: str, scales: str, make_model: MakeModel, run_built: RunBuilt
) -> None:
    path = _activated(make_model, "uint8", helper.make_node(activation, ["c"], ["d"]), scales=scales)
    model = build(import_onnx(path), simple_target())
    assert not [name for name, _ in model.schedules if "lookup" in name]


@pytest.mark.few(4)
@pytest.mark.parametrize("activation", ["Exp", "Tanh", "Sqrt", "Log", "Erf", "HardSwish", "Softplus", "Elu"])
def test_tables_hold_the_results_of_onnx_runtime(activation: str, make_model: MakeModel, run_built: RunBuilt) -> None:
    """Of numbers that are none, too: logarithms and roots of negative ones."""
    path = _activated(make_model, "uint8", helper.make_node(activation, ["c"], ["d"]))
    x = normal(1, 4, 9, 9) * 3
    (ours,) = run_built(build(import_onnx(path), simple_target()), x)
    (theirs,) = onnxruntime_outputs(path, {"x": x}).values()
    assert np.abs(ours.astype("int32") - theirs.astype("int32")).max() <= 1


def test_a_range_of_zero_is_quantised_by_a_scale_of_one(
    make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    outputs = [("y", None, TensorProto.UINT8), "scale", ("zero", None, TensorProto.UINT8)]
    path = make_model(
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])], [("x", [3, 5])], outputs
    )
    model = build(import_onnx(path), target)
    for x in (np.zeros((3, 5), "float32"), normal(3, 5), -np.abs(normal(3, 5)), np.abs(normal(3, 5))):
        expected = onnxruntime_outputs(path, {"x": x})
        for ours, theirs in zip(run_built(model, x), expected.values(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_numbers_between_two_levels_of_a_computed_scale_are_quantised_as_onnx_runtime_does(
    make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    outputs = [("y", None, TensorProto.UINT8), "scale", ("zero", None, TensorProto.UINT8)]
    path = make_model(
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])], [("x", [255])], outputs
    )
    model = build(import_onnx(path), target)
    for span in (42.1, 3.3, 0.7):
        scale = np.float32(span) / np.float32(255)
        x = (np.arange(255, dtype="float32") + np.float32(0.5)) * scale
        x[-1] = span
        for ours, theirs in zip(run_built(model, x), onnxruntime_outputs(path, {"x": x}).values(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_convolution_without_padding_of_integers_with_a_computed_zero_point_equals_onnx_runtime(
    make_model: MakeModel, run_built: RunBuilt, int8: Target
) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("ConvInteger", ["q", "w", "zero"], ["y"], strides=[1, 2]),
    ]
    weight = np.random.default_rng(0).integers(-127, 128, (32, 16, 1, 3)).astype("int8")
    path = make_model(nodes, [("x", [1, 16, 1, 75])], [("y", None, TensorProto.INT32)], {"w": weight})
    x = normal(1, 16, 1, 75)
    (ours,) = run_built(build(import_onnx(path), int8), x)
    np.testing.assert_array_equal(ours, onnxruntime_outputs(path, {"x": x})["y"])


@pytest.mark.parametrize("operator", ["QLinearMatMul", "QLinearAdd", "QLinearConcat"])
def test_quantised_operands_whose_batches_have_two_names_equal_onnx_runtime(
    operator: str, make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    numbers = {"scale": np.array(0.02, "float32"), "zero": np.array(120, "uint8")}
    a, b, result = (["a", "scale", "zero"], ["b", "scale", "zero"], ["scale", "zero"])
    operands = [*result, *a, *b] if operator == "QLinearConcat" else [*a, *b, *result]
    domain, attributes = ("", {}) if operator == "QLinearMatMul" else ("com.microsoft", {})
    if operator == "QLinearConcat":
        attributes = {"axis": 1}
    node = helper.make_node(operator, operands, ["y"], domain=domain, **attributes)
    inputs = [("a", ["n", 5, 5], TensorProto.UINT8), ("b", ["m", 5, 5], TensorProto.UINT8)]
    path = make_model([node], inputs, [("y", None, TensorProto.UINT8)], numbers)
    rng = np.random.default_rng(0)
    feed = {name: rng.integers(0, 256, (2, 5, 5)).astype("uint8") for name in "ab"}
    (ours,) = run_built(build(import_onnx(path), target), *feed.values())
    (theirs,) = onnxruntime_outputs(path, feed).values()
    assert np.abs(ours.astype("int32") - theirs.astype("int32")).max() <= 1


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_number_that_is_none_is_quantised_as_onnx_runtime_does(
    dtype: str, make_model: MakeModel, run_built: RunBuilt, target: Target
) -> None:
    nodes = [helper.make_node("QuantizeLinear", ["x", name, "zero"], [f"y{name}"], axis=0) for name in ("one", "each")]
    numbers = {"one": np.array(0.5, "float32"), "each": np.array([0.5, 0.25], "float32"), "zero": np.array(3, dtype)}
    zeros = numbers | {"zeros": np.array([3, 5], dtype)}
    nodes[1].input[2] = "zeros"
    kind = TensorProto.INT8 if dtype == "int8" else TensorProto.UINT8
    outputs = [("yone", None, kind), ("yeach", None, kind)]
    path = make_model(nodes, [("x", [2, 6])], outputs, zeros)
    x = np.array([[np.nan, np.inf, -np.inf, 1.25, 1e30, 0], [np.nan, -1e30, 3.5, -7.25, 0.125, np.nan]], "float32")
    for ours, theirs in zip(
        run_built(build(import_onnx(path), target), x), onnxruntime_outputs(path, {"x": x}).values(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_lines_transposed_convolutions_and_factors_of_products_are_computed_in_integers(
    make_model: MakeModel, run_built: RunBuilt
) -> None:
    node = helper.make_node
    layers = {
        "line": ("Conv", (1, 8, 18), (8, 4, 3), 0, {"group": 2, "pads": [1, 2], "strides": [2]}),
        "phases": ("ConvTranspose", (1, 8, 18), (8, 4, 4), 1, {"group": 2, "strides": [2], "pads": [1, 1]}),
        "product": ("Gemm", (16, 9), (16, 5), 1, {"alpha": 0.5, "transA": 1}),
    }
    rng, nodes = np.random.default_rng(0), []
    weights = {"s": np.array(0.02, "float32"), "z": np.array(120, "uint8")}
    for name, (operator, shape, kernel, axis, attributes) in layers.items():
        nodes += [
            node("Reshape", ["d", f"shape{name}"], [f"r{name}"]),
            node("DequantizeLinear", [f"w{name}", f"t{name}", f"z{name}"], [f"d{name}"], axis=axis),
            node(operator, [f"r{name}", f"d{name}"], [name], **attributes),
        ]
        weights[f"shape{name}"] = np.array(shape, "int64")
        weights[f"w{name}"] = rng.integers(-127, 128, kernel).astype("int8")
        weights[f"t{name}"] = np.linspace(0.01, 0.02, kernel[axis], dtype="float32")
        weights[f"z{name}"] = np.zeros(kernel[axis], "int8")
    quantised = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["d"])]
    path = make_model([*quantised, *nodes], [("x", [144])], list(layers), weights)
    model = build(import_onnx(path), simple_target())
    x = normal(144)
    for ours, theirs in zip(run_built(model, x), onnxruntime_outputs(path, {"x": x}).values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    rules = rule_counts(model)
    assert rules["dot_conv2d"] + rules["dot_rows"] == 4
    assert rules["conv2d"] + rules["rows"] == 0


def test_int8_names_the_layers_of_a_quantised_model_that_it_does_not_cover(make_model: MakeModel) -> None:
    """Scales along the dimension that is summed belong to single products."""
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "t"], ["e"], axis=0),
        helper.make_node("MatMul", ["d", "e"], ["y"]),
    ]
    weights = {
        "s": np.array(0.02, "float32"),
        "w": np.ones((8, 6), "int8"),
        "t": np.linspace(0.01, 0.02, 8, dtype="float32"),
    }
    imported = import_onnx(make_model(nodes, [("x", [3, 8], TensorProto.INT8)], ["y"], weights))
    with pytest.raises(BuildError, match=r"computes no MatMul or Gemm of this quantised model.*precision fp32"):
        lower(imported, simple_target(), BuildOptions(precision="int8"))
