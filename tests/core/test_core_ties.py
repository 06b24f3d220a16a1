"""Ties: integers and bools of a model's outputs that rounding decides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.models import save_model
from tvmflow.arrays import Array
from tvmflow.onnx_model.ties import Ties
from tvmflow.tolerance import Bounds

BOUNDS = Bounds(rtol=0.0, atol=1e-3)
# Two scores are equal within the bounds in the first row, none in the second, and three in the third.
SCORES = np.array([[1.0, 5.0, 5.0005, 0.0], [1.0, 2.0, 3.0, 4.0], [7.0, 7.0, 1.0, 7.0]], "float32")


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


@pytest.fixture
def ties_of(tmp_path: Path) -> Callable[..., Ties]:
    """The ties of a model of nodes from float32 x to y, with constants by name."""

    def make(*nodes: Any, element: int = TensorProto.INT64, x: int = TensorProto.FLOAT, **weights: Array) -> Ties:
        path = tmp_path / "model.onnx"
        return Ties(save_model(path, nodes, [("x", ["rows", "columns"], x)], [("y", None, element)], weights))

    return make


def settled(ties: Ties, x: Array, expected: Array, actual: Array) -> list[Any]:
    result: list[Any] = ties.settle({"x": x}, {"y": expected}, {"y": actual}, BOUNDS)["y"].tolist()
    return result


@pytest.mark.parametrize("keepdims", [0, 1])
def test_the_place_of_an_equal_score_is_as_right(ties_of: Callable[..., Ties], keepdims: int) -> None:
    ties = ties_of(node("ArgMax", "x", "y", axis=1, keepdims=keepdims))
    expected, actual = (np.array(items).reshape(3, *[1] * keepdims) for items in ([2, 3, 0], [1, 2, 3]))
    assert np.ravel(settled(ties, SCORES, expected, actual)).tolist() == [2, 2, 0]
    masks = ties.find_undecided({"x": SCORES}, {"y": expected}, BOUNDS)
    assert masks["y"].shape == expected.shape
    assert masks["y"].ravel().tolist() == [True, False, True]


def test_places_along_another_axis_follow_through_reshapes_and_casts(ties_of: Callable[..., Ties]) -> None:
    nodes = [
        node("ArgMin", "x", "a", axis=0, keepdims=1),
        node("Cast", "a", "b", to=TensorProto.INT32),
        node("Reshape", "b shape", "y"),
    ]
    ties = ties_of(*nodes, element=TensorProto.INT32, shape=np.array([2, 2], "int64"))
    x = np.array([[1.0, 1.0, 3.0, 3.0], [1.0, 2.0, 3.0, 1.0]], "float32")
    expected, actual = np.array([[0, 0], [0, 1]], "int32"), np.array([[1, 1], [1, 0]], "int32")
    assert settled(ties, x, expected, actual) == [[0, 1], [0, 0]]


@pytest.mark.parametrize("axis", [0, 1])
def test_several_places_of_equal_scores_may_change_but_each_must_be_another(
    ties_of: Callable[..., Ties], axis: int
) -> None:
    ties = ties_of(node("TopK", "x count", "values y", axis=axis), count=np.array([2], "int64"))
    expected, actual = np.array([[2, 1], [3, 2], [0, 1]]), np.array([[1, 2], [3, 1], [3, 3]])
    x, expected, actual = (item if axis else item.T.copy() for item in (SCORES, expected, actual))
    result = np.array([[2, 1], [3, 1], [3, 3]])
    assert settled(ties, x, expected, actual) == (result if axis else result.T).tolist()


def test_labels_stand_for_places(ties_of: Callable[..., Ties]) -> None:
    labels = np.array([[40, 30, 20, 10]])
    nodes = [
        node("ArgMax", "x", "a", axis=1, keepdims=0),
        node("ArrayFeatureExtractor", "labels a", "y", domain="ai.onnx.ml"),
    ]
    ties = ties_of(*nodes, labels=labels)
    expected, actual = np.array([[20, 10, 40]]), np.array([[30, 20, 77]])
    assert settled(ties, SCORES, expected, actual) == [[20, 20, 77]]


def test_a_classifiers_label_is_the_place_of_its_scores(ties_of: Callable[..., Ties]) -> None:
    attributes = {"coefficients": np.eye(4).ravel(), "intercepts": [0.0] * 4, "classlabels_ints": [9, 8, 7, 6]}
    ties = ties_of(node("LinearClassifier", "x", "y scores", domain="ai.onnx.ml", **attributes))
    assert settled(ties, SCORES, np.array([7, 6, 9]), np.array([8, 7, 6])) == [7, 7, 9]


def test_a_comparison_of_equal_numbers_may_have_either_answer(ties_of: Callable[..., Ties]) -> None:
    ties = ties_of(node("Greater", "x limit", "y"), element=TensorProto.BOOL, limit=np.array(5.0002, "float32"))
    expected, actual = SCORES > 5.0002, SCORES > 2.5
    assert settled(ties, SCORES, expected, actual) == [
        [False, False, True, False],
        [False, False, True, True],
        [True, True, False, True],
    ]


@pytest.mark.parametrize("kind", ["ArgMax", "Relu"])
def test_other_outputs_stay_as_they_are(ties_of: Callable[..., Ties], kind: str) -> None:
    is_float = kind == "Relu"
    x = np.zeros((1, 4), "float32" if is_float else "int64")
    ties = (
        ties_of(node("Relu", "x", "y"), element=TensorProto.FLOAT)
        if is_float
        else ties_of(node("ArgMax", "x", "y", axis=1), x=TensorProto.INT64)
    )
    assert bool(ties) is not is_float
    expected, actual = np.array([[0]], x.dtype), np.array([[3]], x.dtype)
    assert settled(ties, x, expected, actual) == [[3]]
    assert ties.find_undecided({"x": x}, {"y": expected}, BOUNDS) == {}


def test_a_bound_relative_to_the_largest_score_holds_for_scores_too(ties_of: Callable[..., Ties]) -> None:
    ties = ties_of(node("ArgMax", "x", "y", axis=1, keepdims=0))
    bounds = Bounds(0.0, None, max_relative_error=0.3)
    answers = ties.settle({"x": SCORES[1:2]}, {"y": np.array([3])}, {"y": np.array([2])}, bounds)
    assert answers["y"].tolist() == [3]
