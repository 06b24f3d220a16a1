"""Operators and forms that few models have, beside ONNX Runtime: determinants and counts of words."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.arrays import normal
from tvmflow.compiler import CompiledModel, import_onnx
from tvmflow.errors import UnsupportedOperatorError

Check = Callable[..., CompiledModel]


def test_determinants_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = []
    for size in (1, 4):
        # The last matrix has none, the one before begins with a zero.
        x = np.concatenate([normal(3, size, size), np.zeros((1, size, size), "float32")])
        x[2, 0, 0] = 0
        node = helper.make_node("Det", ["x"], ["y"])
        cases.append((([node], [("x", ["n", size, size])], ["y"]), {"x": x}))
    assert_all_same(cases)


_POOL: dict[str, Any] = {
    "min_gram_length": 1,
    "max_gram_length": 2,
    "max_skip_count": 1,
    "ngram_counts": [0, 3],
    "ngram_indexes": [3, 0, 4, 1, 2],
    "pool_int64s": [2, 3, 5, 5, 4, 2, 3],
}


def test_counts_of_words_equal_onnx_runtime(assert_all_same: Check) -> None:
    rows, weights = np.array([[2, 3, 5, 4, 2, 5, 4], [5, 4, 4, 3, 2, 2, 3]]), [0.5, 1.0, 2.0, 3.0, 4.0]
    cases = []
    for shape, form in (
        ([2, "m"], {"mode": "TF", "min_gram_length": 2}),
        (["n", 7], {"mode": "TFIDF", "weights": weights}),
        ([7], {"mode": "IDF", "weights": weights}),
    ):
        node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], **{**_POOL, **form})
        x = rows if len(shape) == 2 else rows[0]
        cases.append((([node], [("x", shape, TensorProto.INT64)], ["y"]), {"x": x}))
    assert_all_same(cases)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"pool_strings": ["a", "b", "c", "b", "c", "a", "b"], "pool_int64s": None}, "words that are strings"),
        ({"ngram_indexes": [3, 0, 4, 1, 3]}, "sequences that share a column"),
    ],
)
def test_words_that_cannot_be_counted_are_refused(form: dict[str, Any], reason: str, make_model: Any) -> None:
    attributes = {name: value for name, value in {**_POOL, **form}.items() if value is not None}
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], "words", mode="TF", **attributes)
    with pytest.raises(UnsupportedOperatorError, match=f"TfIdfVectorizer, node 'words'.*{reason}"):
        import_onnx(make_model([node], [("x", [7], TensorProto.INT64)], ["y"]))


def test_forms_that_a_sweep_found_equal_onnx_runtime(assert_all_same: Check) -> None:
    places = [(name, [None], TensorProto.INT64) for name in ("first", "places", "counts")]
    slope = helper.make_node("PRelu", ["x", "s"], ["y"])
    unique, distinct = (
        helper.make_node("Unique", ["x"], ["y", "first", "places", "counts"], axis=axis) for axis in (None, -2)
    )
    celu = helper.make_node("Celu", ["x"], ["y"], alpha=0.5)
    conv = helper.make_node("Conv", ["x", "w", "b"], ["y"])
    scaled = [helper.make_node(f"{name}Linear", ["x", "s", "z"], ["y"]) for name in ("Quantize", "Dequantize")]
    numbers, zeros = ("z", ["m"], TensorProto.INT8), np.array([1, -3, 4], "int8")
    scales = {"s": np.array([0.1, 0.2, 0.3], "float32"), "z": zeros}
    sizes = [("x", ["n", "c", 5]), ("w", [4, 3, 2]), ("b", ["m"])]
    split = helper.make_node("Split", ["x", "parts"], ["a", "b"], axis=1)
    pool = {"kernel_shape": [3], "strides": [3], "pads": [2, 1], "ceil_mode": 1}
    mean = helper.make_node("AveragePool", ["x"], ["y"], count_include_pad=1, **pool)
    largest = helper.make_node("MaxPool", ["x"], ["y"], **pool)
    lines = [{"x": normal(1, 2, size)} for size in (1, 3, 4, 5)]
    resize = helper.make_node(
        "Resize", ["x", "", "s"], ["y"], mode="linear", coordinate_transformation_mode="align_corners"
    )
    assert_all_same(
        [
            (([mean], [("x", [1, 2, "n"])], ["y"]), *lines),
            (([largest], [("x", [1, 2, "n"])], ["y"]), *lines),
            (
                ([resize], [("x", [1, 2, 1, 4])], ["y"], {"s": np.array([1, 1, 1, 3], "float32")}),
                {"x": normal(1, 2, 1, 4)},
            ),
            (([split], [("x", [2, 3])], ["a", "b"], {"parts": np.array([0, 3])}), {"x": normal(2, 3)}),
            (
                ([scaled[0]], [("x", [2, 3]), ("s", ["m"]), numbers], [("y", [2, 3], TensorProto.INT8)]),
                {"x": normal(2, 3), **scales},
            ),
            (
                ([scaled[1]], [("x", ["n", "c"], TensorProto.INT8)], [("y", ["n", "c"])], scales),
                {"x": np.array([[7, 8, -9]], "int8")},
            ),
            (([celu], [("x", [])], ["y"]), {"x": np.array(-2, "float32")}),
            (([conv], sizes, ["y"]), {"x": normal(2, 3, 5), "w": normal(4, 3, 2), "b": normal(4)}),
            (([slope], [("x", []), ("s", [])], ["y"]), {"x": np.array(-2, "float32"), "s": np.array(3, "float32")}),
            (([slope], [("x", ["n"]), ("s", [])], ["y"]), {"x": normal(5), "s": np.array(3, "float32")}),
            (([unique], [("x", ["n", 3])], [("y", [None]), *places]), {"x": np.round(normal(4, 3))}),
            (
                ([distinct], [("x", [2, "n", 1])], [("y", [2, None, 1]), *places]),
                {"x": np.array([[1, 2, 1, 1], [3, 0, 3, -1]], "float32")[..., None]},
            ),
        ]
    )


def test_free_numbers_of_places_are_refused_in_words(make_model: Any) -> None:
    node = helper.make_node("GatherND", ["x", "i"], ["y"], "pick")
    path = make_model([node], [("x", [2, 4]), ("i", [1, "k"], TensorProto.INT64)], ["y"])
    with pytest.raises(UnsupportedOperatorError, match=r"GatherND, node 'pick'.*whose last dimension is symbolic"):
        import_onnx(path)


def test_weights_of_a_free_window_are_refused_in_words(make_model: Any) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "filter")
    path = make_model([node], [("x", [1, 3, 8, 8]), ("w", [4, 3, "h", 3])], ["y"])
    with pytest.raises(UnsupportedOperatorError, match=r"Conv, node 'filter'.*weights of symbolic size.*fixed sizes"):
        import_onnx(path)


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [5, "count"])
@pytest.mark.parametrize("limit", [1, np.iinfo("int64").max])
def test_suppression_with_and_without_a_limit_of_boxes_equals_onnx_runtime(
    count: int | str, limit: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["chosen"]),
        helper.make_node("Cast", ["chosen"], ["y"], to=TensorProto.FLOAT),
    ]
    weights = {"most": np.array([limit]), "overlap": np.array([0.5], "float32"), "least": np.array([0.3], "float32")}
    corners = np.array([[0, 0], [0, 0.1], [3, 3], [5, 0], [5.1, 0]], "float32")
    boxes = np.concatenate([corners, corners + 1], axis=1)[None]
    path = make_model(nodes, [("boxes", [1, count, 4]), ("scores", [1, 2, count])], ["y"], weights)
    scores = np.linspace(0.9, 0.1, 10, dtype="float32").reshape(1, 2, 5)[..., ::-1]
    feeds = [{"boxes": boxes[:, :some], "scores": scores[..., :some].copy()} for some in (5, 2)]
    assert_same_as_onnxruntime(path, *feeds[: 1 if count == 5 else 2])


def test_limits_and_thresholds_of_suppression_may_be_inputs(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    names = ["boxes", "scores", "most", "overlap", "least"]
    node = helper.make_node("NonMaxSuppression", names, ["y"])
    inputs = [("boxes", ["n", 30, 4]), ("scores", ["n", 3, 30]), ("most", [1], TensorProto.INT64)]
    path = make_model([node], [*inputs, ("overlap", [1]), ("least", [1])], [("y", [None, 3], TensorProto.INT64)])
    corners = np.abs(normal(2, 30, 2))
    feed = {"boxes": np.concatenate([corners, corners + 0.5], axis=2), "scores": normal(2, 3, 30, seed=1)}
    feeds = [
        {
            **feed,
            "most": np.array([most]),
            "overlap": np.array([overlap], "float32"),
            "least": np.array([least], "float32"),
        }
        for most, overlap, least in ((4, 0.3, 0.1), (0, 0.3, 0.1), (100, 0.0, -5), (1 << 40, 1, -9))
    ]
    assert_same_as_onnxruntime(path, *feeds)


@pytest.mark.parametrize("count", [333, "count"])
@pytest.mark.parametrize("limit", [3, 1000])
def test_suppression_takes_the_best_boxes_one_by_one_and_sorts_none(
    count: int | str, limit: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["y"])
    weights = {"most": np.array([limit]), "overlap": np.array([0.4], "float32"), "least": np.array([0.3], "float32")}
    inputs = [("boxes", ["n", count, 4]), ("scores", ["n", 3, count])]
    path = make_model([node], inputs, [("y", [None, 3], TensorProto.INT64)], weights)
    # A detector sorts thousands of boxes in more time than it needs for the rest.
    assert "sort" not in import_onnx(path).mod.script()
    corners = normal(2, 333, 2)
    boxes = np.concatenate([corners, corners + np.abs(normal(2, 333, 2, seed=1))], axis=2)
    # Equal scores, no score above the least one, and corners in another order.
    scores = np.round(np.abs(normal(2, 3, 333, seed=2)), 1)
    scores[1, 2] = 0.3
    boxes[:, ::7] = boxes[:, ::7, [2, 3, 0, 1]]
    feeds = [{"boxes": boxes[:, :some], "scores": scores[..., :some].copy()} for some in (333, 64, 5)]
    assert_same_as_onnxruntime(path, *feeds[: 1 if count == 333 else 3])


@pytest.mark.parametrize("count", [6, "count"])
def test_without_a_least_score_boxes_of_negative_scores_are_chosen(
    count: int | str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap"], ["chosen"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["apart"]),
        *(
            helper.make_node("Cast", [name], [result], to=TensorProto.FLOAT)
            for name, result in (("chosen", "y"), ("apart", "z"))
        ),
    ]
    weights = {"most": np.array([np.iinfo("int64").max]), "overlap": np.array([0.5], "float32")}
    corners = np.array([[0, 0], [0, 0.1], [3, 3], [5, 0], [5.1, 0], [5.9, 0.9]], "float32")
    boxes = np.concatenate([corners, corners + 1], axis=1)[None]
    path = make_model(nodes, [("boxes", [1, count, 4]), ("scores", [1, 1, count])], ["y", "z"], weights)
    feeds = [{"boxes": boxes, "scores": np.array([[[-3, -1, 2, -2, 0, 1.5]]], "float32")}]
    assert_same_as_onnxruntime(path, *feeds)


def test_bools_are_compared(assert_all_same: Check) -> None:
    nodes = [helper.make_node("Equal", ["x", "y"], ["both"]), helper.make_node("Equal", ["no", "x"], ["neither"])]
    inputs = [(name, ["n", 7], TensorProto.BOOL) for name in "xy"]
    outputs = [(name, ["n", 7], TensorProto.BOOL) for name in ("both", "neither")]
    feed = {name: normal(3, 7, seed=seed) > 0 for seed, name in enumerate("xy")}
    assert_all_same([((nodes, inputs, outputs, {"no": np.array(False)}), feed)])
