"""Sizes of free dimensions at which a bundle would not run: `tvmflow.onnx_model.size_limits`."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from support.models import make_model
from tvmflow.onnx_model.size_limits import SizeLimits


@pytest.fixture
def model() -> onnx.ModelProto:
    """The sum of an image of strides of two, of which one line may be left, and of the image's own lines."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["small"], kernel_shape=[1, 1], strides=[2, 1]),
        helper.make_node("Add", ["small", "y"], ["z"]),
    ]
    return make_model(nodes, [("x", ["n", 3, "h", 4]), ("y", ["n", 3, "m", 4])], ["z"], {})


@pytest.mark.parametrize(("lines", "is_chance"), [(1, True), (2, True), (6, False)])
def test_a_size_that_is_one_because_the_input_is_small_is_named(
    model: onnx.ModelProto, lines: int, is_chance: bool
) -> None:
    reason = SizeLimits(model).explain({"n": 1, "h": lines, "m": 3})
    assert (reason == "a size that is one by chance stands beside a larger one") == is_chance


def test_far_sizes_are_no_larger_than_they_must_be_and_keep_their_ratios(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    inferred = []
    infer_shapes = onnx.shape_inference.infer_shapes

    def record(proto: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        if options:
            inferred.append([dim.dim_value for value in proto.graph.input for dim in value.type.tensor_type.shape.dim])
        return infer_shapes(proto, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", record)
    limits = SizeLimits(model)
    for batch in (3, 17, 5000, 17):
        assert limits.explain({"n": batch, "h": 2, "m": 3}) is not None
    # Inference computes the elements of shapes, and of what is computed from them: the time grows with the sizes.
    assert inferred == [
        [factor * n, 3, factor * 2, 4, factor * n, 3, factor * 3, 4] for n in (3, 17, 5000) for factor in (1, 2048)
    ]


def test_vectors_of_all_items_stay_short_at_far_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    infer_shapes = onnx.shape_inference.infer_shapes

    def record(proto: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        inferred = infer_shapes(proto, **options)
        shapes = {value.name: value.type.tensor_type.shape.dim for value in inferred.graph.value_info}
        if options:
            lengths.append(shapes["places"][0].dim_value)
        return inferred

    # The inference takes a hundred bytes for each of the `places`, whose number grows with the product of the sizes.
    nodes = [
        helper.make_node("Reshape", ["i", "all"], ["places"]),
        helper.make_node("Unsqueeze", ["places", "last"], ["rows"]),
        helper.make_node("GatherND", ["table", "rows"], ["items"]),
        helper.make_node("MaxPool", ["x"], ["small"], kernel_shape=[1, 1], strides=[2, 1]),
        helper.make_node("Add", ["small", "y"], ["z"]),
    ]
    inputs = [("i", ["n", "m"], TensorProto.INT64), ("x", ["n", 3, "h", 4]), ("y", ["n", 3, "m", 4])]
    weights = {"all": np.array([-1]), "last": np.array([-1]), "table": np.zeros(4, "float32")}
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", record)
    limits = SizeLimits(make_model(nodes, inputs, ["items", "z"], weights))
    assert limits.explain({"n": 2, "h": 2, "m": 3}) == "a size that is one by chance stands beside a larger one"
    assert 6 in lengths
    assert 1 << 16 < max(lengths) < 1 << 20
    # The elements of vectors that are as long at the sizes themselves are not computed.
    assert limits.explain({"n": 1 << 10, "h": 4, "m": 1 << 10}) is None
    assert max(lengths) < 1 << 20


def test_a_model_without_free_dimensions_has_no_limits() -> None:
    node = helper.make_node("Add", ["x", "y"], ["z"])
    assert SizeLimits(make_model([node], [("x", [1, 4]), ("y", [3, 4])], ["z"], {})).explain({}) is None


@pytest.mark.parametrize(("columns", "is_chance"), [(1, True), (3, False)])
def test_an_einsum_repeats_a_dimension_of_one(columns: int, is_chance: bool) -> None:
    node = helper.make_node("Einsum", ["x", "y"], ["z"], equation="ij,jk->ik")
    limits = SizeLimits(make_model([node], [("x", ["i", "j"]), ("y", ["l", "k"])], ["z"], {}))
    reason = limits.explain({"i": 2, "j": columns, "l": 3, "k": 4})
    assert (reason == "a size that is one by chance stands beside a larger one") == is_chance


@pytest.mark.parametrize(("rank", "batch", "is_refused"), [(1, 1, False), (1, 4, True), (2, 4, False)])
def test_a_dimension_that_the_file_leaves_out_is_one(rank: int, batch: int, is_refused: bool) -> None:
    output = ("z", [None] * rank)
    model = make_model([helper.make_node("Squeeze", ["x"], ["z"])], [("x", ["n", 3, 1])], [output], {})
    reason = SizeLimits(model).explain({"n": batch})
    assert (reason == "the file says that a dimension is one and leaves it out, which here is larger") == is_refused


@pytest.mark.parametrize(("batch", "is_refused"), [(1, True), (2, False)])
def test_a_dimension_that_the_file_keeps_is_not_one(batch: int, is_refused: bool) -> None:
    node = helper.make_node("Squeeze", ["x"], ["z"])
    model = make_model([node], [("x", ["n", 3, 1])], [("z", [None, None])], {})
    reason = SizeLimits(model).explain({"n": batch})
    assert (reason == "the file keeps a dimension that a Squeeze removes here, because it is one") == is_refused


def test_the_sizes_that_weights_fix_are_known() -> None:
    weights = {
        "grouped": np.ones((6, 3, 3), "float32"),
        "dense": np.ones((7, 40), "float32"),
        "scale": np.ones(5, "float32"),
        "gates": np.ones((1, 12, 9), "float32"),
    }
    nodes = [
        helper.make_node("Conv", ["x", "grouped"], ["a"], group=2),
        helper.make_node("Gemm", ["x", "dense"], ["b"], transB=1),
        helper.make_node("MatMul", ["x", "dense"], ["c"]),
        helper.make_node("BatchNormalization", ["x", *["scale"] * 4], ["d"]),
        helper.make_node("GRU", ["x", "gates", "gates"], ["e"], hidden_size=4),
        helper.make_node("MatMul", ["x", "y"], ["f"]),
    ]
    graph = helper.make_graph(nodes, "weights", [], [], [numpy_helper.from_array(v, k) for k, v in weights.items()])
    assert SizeLimits(helper.make_model(graph)).weight_sizes == [6, 40, 7, 5, 9]


def test_shapes_that_are_unknown_at_far_sizes_are_no_reason() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "column"], ["left"]),
        helper.make_node("Reshape", ["x", "row"], ["right"]),
        helper.make_node("MatMul", ["left", "right"], ["products"]),
        # At far sizes more elements than 64 bits count, so that ONNX infers no shape.
        helper.make_node("Reshape", ["products", "column"], ["elements"]),
        helper.make_node("ReduceMax", ["elements", "axes"], ["largest"]),
        # Of this one it infers the type alone.
        helper.make_node("Add", ["one", "largest"], ["more"]),
        helper.make_node("Add", ["more", "x"], ["y"]),
    ]
    weights = {
        "column": np.array([-1, 1]),
        "row": np.array([1, -1]),
        "axes": np.array([0, 1]),
        "one": np.ones((1, 1), np.float32),
    }
    limits = SizeLimits(make_model(nodes, [("x", ["h", "w"])], ["y"], weights))
    assert limits.explain({"h": 1, "w": 300}) is None
