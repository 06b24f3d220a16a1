from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tvm import te

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from tvmflow.arrays import Array
from tvmflow.compiler import CompiledModel, build, import_onnx
from tvmflow.compiler.machine import machine
from tvmflow.compiler.operators import norms
from tvmflow.hardware.target import Target

Check = Callable[..., CompiledModel]
RunBuilt = Callable[..., list[Array]]


_REDUCTIONS = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2"]
# The shape of a tensor, and the dimensions that are reduced.
_REDUCED: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 19, 7, 5), (2, 3)),
    ((2, 9, 11, 24), (1, 2)),
    ((1, 50, 70), (1,)),
    ((5, 37), (1,)),
    ((200, 197), (0, 1)),
    ((2, 3, 1000), (2,)),
    ((40, 64, 6), (1,)),
    ((2, 1, 8, 23), (0, 2)),
]


def test_reductions_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    reduced = scale.choose(normal=_REDUCED[1::3], long=_REDUCED)
    for shape, axes in reduced:
        nodes = [helper.make_node(name, ["x", "axes"], [name], keepdims=len(axes) % 2) for name in _REDUCTIONS]
        cases.append(((nodes, [("x", shape)], _REDUCTIONS, {"axes": np.array(axes)}), {"x": normal(*shape) + 1}))
    rules = rule_counts(assert_all_same(cases))
    # Several dimensions that end a tensor are one line of memory. Equal functions are counted once: the sum of squares
    # of such lines calls the function of their sum.
    assert rules["reduction"] + rules["free_reduction"] >= (len(_REDUCTIONS) - 1) * len(reduced)
    assert rules["free_reduction"] > 0


def test_reductions_over_dimensions_apart_and_of_few_results_equal_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x", "apart"], ["a"]),
        helper.make_node("ReduceMean", ["x", "last"], ["b"]),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    weights = {"apart": np.array([0, 2]), "last": np.array([3])}
    path = make_model(nodes, [("x", [2, 3, 5, 3])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(2, 3, 5, 3)})


@pytest.mark.parametrize("shape", [("batch", 20, 8, 8), (2, 20, "high", 8)], ids=str)
def test_reductions_of_symbolic_shapes_equal_onnx_runtime(
    shape: tuple[Any, ...], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["m"]),
        helper.make_node("Sub", ["x", "m"], ["c"]),
        helper.make_node("ReduceMax", ["c", "axes"], ["y"]),
    ]
    path = make_model(nodes, [("x", shape)], ["y"], {"axes": np.array([2, 3])})
    sizes = [[size if isinstance(size, int) else value for size in shape] for value in (1, 3)]
    assert_same_as_onnxruntime(path, *({"x": normal(*size)} for size in sizes))


def test_the_largest_of_infinities_is_infinite(make_model: Any, target: Target, run_built: Any) -> None:
    node = helper.make_node("ReduceMax", ["x", "axes"], ["y"], keepdims=0)
    path = make_model([node], [("x", [4, 40])], ["y"], {"axes": np.array([1])})
    x = normal(4, 40)
    x[1] = -np.inf
    x[2, 3] = np.inf
    model = build(import_onnx(path), target)
    np.testing.assert_array_equal(run_built(model, x)[0], x.max(1))
    assert rule_counts(model) == {"reduction": 1}


def test_group_norm_equals_onnx_runtime(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    sizes = scale.choose(normal=[(24, 4)], long=[(24, 4), (70, 70), (19, 1), (64, 32)])
    nodes, inputs, weights, outputs = [], [], {}, []
    for channels, groups in sizes:
        for where in ("last", "first"):
            name = f"{where}{channels}"
            is_channels_last = where == "last"  # Behind a convolution the channels are last.
            if is_channels_last:
                nodes.append(helper.make_node("Conv", [f"x{name}", f"w{name}"], [f"a{name}"]))
                weights[f"w{name}"] = normal(channels, 3, 1, 1)
            operands = [f"{'a' if is_channels_last else 'x'}{name}", f"s{name}", f"b{name}"]
            nodes.append(helper.make_node("GroupNormalization", operands, [f"c{name}"], num_groups=groups))
            nodes.append(helper.make_node("Relu", [f"c{name}"], [f"y{name}"]))
            weights |= {f"s{name}": normal(channels), f"b{name}": normal(channels)}
            inputs.append((f"x{name}", [2, 3 if is_channels_last else channels, 9, 7]))
            outputs.append(f"y{name}")
    path = make_model(nodes, inputs, outputs, weights, opset=21)
    model = assert_same_as_onnxruntime(path, {name: normal(*shape) + 3 for name, shape in inputs})
    rules = rule_counts(model)
    assert (rules["reduction"], rules["rowwise"]) == (len(sizes), len(sizes))


@pytest.mark.parametrize("is_channels_last", [True, False], ids=["channels last", "channels first"])
def test_instance_norm_of_a_symbolic_batch_equals_onnx_runtime(
    is_channels_last: bool, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    first = [helper.make_node("Conv", ["x", "w"], ["a"])] if is_channels_last else []
    nodes = [*first, helper.make_node("InstanceNormalization", ["a" if is_channels_last else "x", "s", "b"], ["y"])]
    weights = {"s": normal(24), "b": normal(24), **({"w": normal(24, 24, 1, 1)} if is_channels_last else {})}
    path = make_model(nodes, [("x", ["batch", 24, 11, 5])], ["y"], weights)
    assert_same_as_onnxruntime(path, *({"x": 5 * normal(batch, 24, 11, 5) + 30} for batch in (1, 3)))


@pytest.mark.few(2)
@pytest.mark.parametrize("image", [("long",), ("high", "wide"), ("deep", "high", "wide")], ids=len)
def test_instance_norm_of_free_images_is_vectorised(
    image: tuple[str, ...], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("InstanceNormalization", ["a", "s", "b"], ["y"]),
    ]
    weights = {"s": normal(24), "b": normal(24), "w": normal(24, 24, *[1] * len(image))}
    path = make_model(nodes, [("x", ["batch", 24, *image])], ["y"], weights)
    sizes = [[300], [5, 11], [4, 3, 9]][len(image) - 1]
    feeds = [{"x": 5 * normal(batch, 24, *sizes[::step]) + 30} for batch, step in ((1, 1), (3, -1))]
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds))["reduction"] == 1


@pytest.mark.parametrize("operator", ["InstanceNormalization", "GroupNormalization"])
def test_norms_join_the_pixels_of_free_images_with_the_channels_first(
    operator: str, make_model: Any, assert_same_as_onnxruntime: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that fill no vectors would be read element by element."""
    ranks = []

    def flat(data: te.Tensor, *operands: te.Tensor, **options: Any) -> te.Tensor:
        ranks.append(len(data.shape))
        return channels_first(data, *operands, **options)

    channels_first = norms._channels_first
    monkeypatch.setattr(norms, "_channels_first", flat)
    attributes = {"num_groups": 2} if operator == "GroupNormalization" else {}
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node(operator, ["a", "s", "b"], ["c"], **attributes),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"s": normal(6), "b": normal(6, seed=1)}
    path = make_model(nodes, [("x", ["batch", 6, "high", "wide"])], ["y"], weights, opset=21)
    assert_same_as_onnxruntime(path, *({"x": normal(batch, 6, 7, wide)} for batch, wide in ((2, 3), (1, 19))))
    assert ranks == [3]


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_softmax_of_rows_of_any_length_equals_onnx_runtime(operator: str, assert_all_same: Check) -> None:
    nodes = [
        helper.make_node("Div", ["x", "root"], ["a"]),
        helper.make_node("Add", ["a", "mask"], ["b"]),
        helper.make_node(operator, ["b"], ["y"]),
    ]
    cases = []
    for size in scale.choose(normal=(7, 197) if operator == "Softmax" else (197,), long=(7, 16, 70, 197, 1000)):
        mask = np.where(np.arange(size) % 5 == 1, -1e9, 0).astype("float32") * np.ones((2, 1, 1), "float32")
        inputs = [("x", [2, 5, size]), ("mask", [2, 1, size])]
        feed = {"x": 20 * normal(2, 5, size), "mask": mask}
        cases.append(((nodes, inputs, ["y"], {"root": np.array(8, "float32")}), feed))
    assert rule_counts(assert_all_same(cases)) == {"rowwise": len(cases)}


def test_norms_over_the_last_dimensions_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for shape in ((4, 3, 5, 6), (2, 40), ("batch", 7, 24)):
        tail = shape[-2:] if len(shape) == 4 else shape[-1:]
        node = helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], axis=-len(tail))
        sizes = [size if isinstance(size, int) else 3 for size in shape]
        weights = {"s": normal(*tail), "b": normal(*tail)}
        cases.append((([node], [("x", shape)], ["y"], weights), {"x": 5 * normal(*sizes) + 50}))
    assert rule_counts(assert_all_same(cases)) == {"rowwise": 3}


def test_a_norm_by_the_root_of_the_mean_square_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["a"]),
        helper.make_node("ReduceMean", ["a", "last"], ["m"]),
        helper.make_node("Add", ["m", "epsilon"], ["e"]),
        helper.make_node("Sqrt", ["e"], ["r"]),
        helper.make_node("Div", ["x", "r"], ["d"]),
        helper.make_node("Mul", ["d", "scale"], ["y"]),
    ]
    weights = {
        "two": np.array(2, "float32"),
        "last": np.array([-1]),
        "epsilon": np.array(1e-6, "float32"),
        "scale": normal(70),
    }
    path = make_model(nodes, [("x", ["batch", 9, 70])], ["y"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(1, 9, 70)}, {"x": normal(4, 9, 70)})


def test_a_norm_by_the_root_of_the_mean_square_of_a_vector_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["q"]),
        helper.make_node("ReduceMean", ["q", "last"], ["m"]),
        helper.make_node("Add", ["m", "epsilon"], ["e"]),
        helper.make_node("Sqrt", ["e"], ["r"]),
        helper.make_node("Div", ["x", "r"], ["composed"]),
        helper.make_node("RMSNormalization", ["x", "scale"], ["fixed"]),
        helper.make_node("RMSNormalization", ["z", "scale"], ["free"]),
    ]
    weights = {"last": np.array([-1]), "epsilon": np.array(1e-6, "float32"), "scale": normal(11)}
    inputs, outputs = [("x", [11]), ("z", [3, "n"])], ["composed", "fixed", "free"]
    path = make_model(nodes, inputs, outputs, weights, opset=23)
    assert_same_as_onnxruntime(path, {"x": normal(11), "z": normal(3, 11)})


def test_an_average_of_whole_numbers_equals_onnx_runtime(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["s"]),
        helper.make_node("Cast", ["s"], ["y"], to=TensorProto.FLOAT),
    ]
    path = make_model(nodes, [("x", [3, 40], TensorProto.INT64)], ["y"], {"axes": np.array([1])})
    assert_same_as_onnxruntime(path, {"x": np.arange(120).reshape(3, 40)})


def test_a_layer_norm_over_dimensions_of_free_sizes_equals_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], start=2),
        helper.make_node(
            "ConstantOfShape", ["shape"], ["ones"], value=helper.make_tensor("v", TensorProto.FLOAT, [1], [1])
        ),
        helper.make_node("LayerNormalization", ["x", "ones"], ["y"], axis=2),
        helper.make_node("LayerNormalization", ["y", "line"], ["z"], axis=-1),
    ]
    inputs = [("x", ["batch", 3, "rows", "columns"]), ("line", ["columns"])]
    feeds = [{"x": 5 * normal(*shape) + 50, "line": normal(shape[-1])} for shape in ((1, 3, 5, 7), (2, 3, 16, 9))]
    assert_same_as_onnxruntime(make_model(nodes, inputs, ["y", "z"]), *feeds)


def test_a_layer_norm_of_float64_equals_onnx_runtime(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    node = helper.make_node("LayerNormalization", ["x", "scale"], ["y"], axis=-1)
    scale = normal(7).astype("float64")
    path = make_model(
        [node], [("x", [3, 7], TensorProto.DOUBLE)], [("y", [3, 7], TensorProto.DOUBLE)], {"scale": scale}
    )
    assert_same_as_onnxruntime(path, {"x": normal(3, 7).astype("float64")})


def test_a_layer_norm_with_a_broadcast_scale_equals_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for shape, axis, scale_shape, bias_shape in (
        ((5, 3, 4), 1, (3, 4), (4,)),
        ((5, 3, 4), 0, (4,), (1, 1)),
        (("n", "rows", 4), 1, (1, 4), (4,)),
        (("n", "rows", "columns"), -1, (4,), (4,)),
    ):
        node = helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], axis=axis)
        weights = {"s": normal(*scale_shape), "b": normal(*bias_shape)}
        cases.append((([node], [("x", shape)], ["y"], weights), {"x": normal(5, 3, 4)}))
    assert_all_same(cases)


def test_reductions_over_no_dimensions_apply_to_each_element(assert_all_same: Check) -> None:
    cases = []
    for name in ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum"):
        for axes in ([], [1]):
            node = helper.make_node(name, ["x", "axes"], ["y"], noop_with_empty_axes=1)
            x = normal(3, 4) if name != "ReduceLogSum" else np.abs(normal(3, 4)) + 1
            cases.append((([node], [("x", (3, 4))], ["y"], {"axes": np.array(axes, "int64")}), {"x": x}))
    assert_all_same(cases)


@pytest.mark.long
def test_norms_of_a_free_number_of_channels_equal_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    weights = {name: np.abs(normal(4, seed=seed)) for seed, name in enumerate(("scale", "bias", "mean", "variance"))}
    nodes = [
        helper.make_node("BatchNormalization", ["x", *weights], ["a"]),
        helper.make_node("InstanceNormalization", ["x", "scale", "bias"], ["b"]),
        helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["c"], num_groups=2),
        helper.make_node("GroupNormalization", ["x", "free_scale", "free_bias"], ["d"], num_groups=2),
    ]
    inputs = [("x", ["n", "channels", "high", 5]), ("free_scale", ["channels"]), ("free_bias", ["channels"])]
    feeds = {"x": normal(2, 4, 3, 5), "free_scale": weights["scale"], "free_bias": weights["bias"]}
    path = make_model(nodes, inputs, ["a", "b", "c", "d"], weights, opset=21)
    assert_same_as_onnxruntime(path, feeds)


def test_groups_of_a_free_number_of_channels_are_those_of_the_channels_alone(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    node = helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["y"], num_groups=2)
    inputs = [("x", ["n", "channels", "high", 5]), ("scale", ["channels"]), ("bias", ["channels"])]
    feeds = {"x": normal(2, 4, 3, 5), "scale": normal(4), "bias": normal(4, seed=1)}
    assert_same_as_onnxruntime(make_model([node], inputs, ["y"], opset=21), feeds)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("operator", "attributes", "shape", "through_convolution"),
    [
        ("InstanceNormalization", {}, ["n", 32, "h", "w"], False),
        ("InstanceNormalization", {}, ["n", 32, "h", 19], True),
        ("InstanceNormalization", {}, ["n", 32, "l"], False),
        ("InstanceNormalization", {}, ["n", "c", "h", "w"], False),
        ("InstanceNormalization", {}, ["n", 32, 3, "h", "w"], False),
        ("GroupNormalization", {"num_groups": 4}, ["n", 32, "h", "w"], True),
        ("GroupNormalization", {"num_groups": 4}, ["n", 32, 13, "w"], False),
    ],
)
def test_norms_of_free_sizes_keep_the_digits_of_data_whose_mean_is_far_from_zero(
    operator: str,
    attributes: dict[str, int],
    shape: list[Any],
    through_convolution: bool,
    make_model: Any,
    run_built: RunBuilt,
    native: Target,
) -> None:
    sizes = {"n": 2, "c": 32, "h": 13, "w": 19, "l": 37}
    x = normal(*(sizes.get(size, size) for size in shape)) / 10 + 100
    weights = {"scale": normal(32, seed=1), "bias": normal(32, seed=2), "w": np.eye(32, dtype="f")[..., None, None]}
    inputs: list[Any] = [("x", shape)]
    if "c" in shape:
        inputs += [("scale", ["c"]), ("bias", ["c"])]
    operands = [weights[name] for name, *_ in inputs[1:]]
    # A convolution takes the channels to the end.
    nodes = [helper.make_node("Conv", ["x", "w"], ["h"])] if through_convolution else []
    nodes.append(
        helper.make_node(operator, [nodes[0].output[0] if nodes else "x", "scale", "bias"], ["y"], **attributes)
    )
    kept = {name: value for name, value in weights.items() if name not in dict.fromkeys(name for name, *_ in inputs)}
    path = make_model(nodes, inputs, ["y"], kept, opset=21)
    actual = run_built(build(import_onnx(path), native), x, *operands)[0]
    wide = x.astype("float64").reshape(2, attributes.get("num_groups", 32), -1)
    wide = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    per_channel = (1, 32, *[1] * (len(shape) - 2))
    expected = wide.reshape(x.shape) * weights["scale"].reshape(per_channel) + weights["bias"].reshape(per_channel)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
def test_a_softmax_over_any_dimension_equals_onnx_runtime(assert_all_same: Any, free: bool) -> None:
    cases = []
    forms = [((2, 5, 7, 9), 1), ((3, 40, 16), 1), ((6, 21), 0), ((2, 3, 4, 33), 2), ((4, 9, 1), -2)]
    for shape, axis in scale.choose(normal=forms[1:4:2] if free else forms[::2], long=forms):
        x = 20 * np.random.default_rng(0).standard_normal(shape).astype("float32")
        x[x < -20] = -np.inf
        dims = [f"n{place}" for place in range(len(shape))] if free else list(shape)
        operators = ["Softmax", "LogSoftmax"]
        nodes = [helper.make_node(operator, ["x"], [operator], axis=axis) for operator in operators]
        cases.append(((nodes, [("x", dims)], operators), {"x": x}))
    assert_all_same(cases)


def test_a_softmax_over_a_size_that_is_a_multiple_less_a_number_takes_rows(
    make_model: Callable[..., Path], assert_same_as_onnxruntime: Check
) -> None:
    """Nine tokens for each column, less the two that a convolution without padding takes: `9 * width - 2`."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["tokens"]),
        helper.make_node("Conv", ["tokens", "w"], ["a"]),
        helper.make_node("Unsqueeze", ["a", "three"], ["left"]),
        helper.make_node("Unsqueeze", ["a", "two"], ["right"]),
        helper.make_node("Mul", ["left", "right"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["y"]),
    ]
    weights = {"shape": np.array([0, 0, -1]), "three": np.array([3]), "two": np.array([2]), "w": normal(4, 4, 3)}
    path = make_model(nodes, [("x", [1, 4, 9, "width"])], ["y"], weights)
    model = assert_same_as_onnxruntime(path, *({"x": normal(1, 4, 9, width)} for width in (1, 5)))
    assert rule_counts(model)["free_softmax"] == 1


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_softmax_over_a_free_size_equals_onnx_runtime_at_any_size(
    operator: str, make_model: Callable[..., Path], assert_same_as_onnxruntime: Check, target: Target
) -> None:
    path = make_model([helper.make_node(operator, ["x"], ["y"])], [("x", [2, "rows", "size"])], ["y"])
    lanes = machine(target).lanes
    # No whole vector, one, and as many as are compared side by side and others, with and without numbers left.
    feeds = [{"x": 5 * normal(2, 3, size)} for size in (1, lanes - 1, lanes, lanes + 1, 9 * lanes, 21 * lanes + 5)]
    # What a mask leaves out, and what is all of the sum.
    feeds[-1]["x"][0, 1, ::2] = -np.inf
    feeds[-1]["x"][1, 2, -1] = 1e30
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds))["free_softmax"] == 1
