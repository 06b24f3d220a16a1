"""Ensembles of decision trees: every mode and form beside ONNX Runtime, and on protected pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support import builds, scale
from support.forests import DOMAIN, classifier, draw_forest, regressor, rows
from support.models import save_model
from tvmflow.compiler import CompiledModel, build, import_onnx
from tvmflow.errors import UnsupportedOperatorError
from tvmflow.hardware.target import Target

Check = Callable[..., CompiledModel]

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
_INPUT: list[tuple[Any, ...]] = [("x", ["rows", 3])]
_LABELLED = [("label", ["rows"], TensorProto.INT64), ("y", ["rows", None])]
# A single row, fewer rows than paths that are followed at a time, and many.
_COUNTS = (1, 5, 300)


def _feeds(missing: bool = False) -> list[dict[str, Any]]:
    return [{"x": rows(count, missing=missing, seed=count)} for count in _COUNTS]


def _regression(targets: int = 1, missing: bool = False, **drawn: Any) -> tuple[Any, ...]:
    node = regressor(targets, missing=missing, **drawn)
    return ([node], _INPUT, [("y", ["rows", targets])]), *_feeds(missing)


def test_every_mode_of_tests_equals_onnx_runtime(assert_all_same: Check) -> None:
    # A normal run has every second mode alone, and the others with missing values below.
    modes = scale.choose(normal=_MODES[::2], long=_MODES)
    cases = [_regression(modes=[mode], seed=place) for place, mode in enumerate(modes)]
    cases.append(_regression(modes=["BRANCH_LEQ"], missing=True))
    cases.append(_regression(modes=_MODES, depth=scale.count(normal=8, long=12), trees=scale.count(normal=10, long=20)))
    model = assert_all_same(cases)
    assert builds.rule_counts(model)["trees"] > 0


def test_missing_values_go_where_each_node_says(assert_all_same: Check) -> None:
    modes = scale.choose(normal=_MODES[1::2], long=_MODES)
    assert_all_same([_regression(modes=[mode], missing=True, seed=place) for place, mode in enumerate(modes)])


@pytest.mark.few(1)
@pytest.mark.parametrize("aggregate", scale.choose(normal=["SUM", "MIN"], long=["SUM", "AVERAGE", "MIN", "MAX"]))
def test_aggregates_and_targets_equal_onnx_runtime(aggregate: str, assert_all_same: Check) -> None:
    more = {"aggregate_function": aggregate}
    assert_all_same(
        [
            _regression(attributes={**more, "base_values": [0.5]}),
            _regression(3, per_leaf=3, trees=11, attributes={**more, "base_values": [0.5, -1.0, 2.0]}),
            _regression(4, per_leaf=2, trees=30, attributes=more),
        ]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("trees", "targets"),
    scale.choose(
        normal=[(5, 1), (100, 3), (803, 1)], long=[(trees, targets) for trees in (5, 100, 803) for targets in (1, 3)]
    ),
)
def test_a_row_has_the_same_scores_to_the_last_bit_in_every_batch(
    tmp_path: Path, run_built: Any, target: Target, trees: int, targets: int
) -> None:
    node = regressor(targets, trees=trees, depth=8, per_leaf=targets)
    for name, size in (("free", "rows"), ("one", 1), ("many", 1000)):
        save_model(tmp_path / f"{name}.onnx", [node], [("x", [size, 3])], [("y", [size, targets])])
    x = rows(1000)
    free, one, many = (build(import_onnx(tmp_path / f"{name}.onnx"), target) for name in ("free", "one", "many"))
    (expected,) = run_built(many, x)
    for model in (free, one):
        for row in range(0, 1000, 125):
            np.testing.assert_array_equal(run_built(model, x[row : row + 1])[0], expected[row : row + 1])
    np.testing.assert_array_equal(run_built(free, x)[0], expected)


def _classification(labels: list[int], ids: list[int], **drawn: Any) -> tuple[Any, ...]:
    return ([classifier(labels, ids, **drawn)], _INPUT, _LABELLED), *_feeds()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "post", scale.choose(normal=["LOGISTIC", "SOFTMAX_ZERO"], long=["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
)
def test_classes_and_scores_equal_onnx_runtime(post: str, assert_all_same: Check) -> None:
    attributes = {"post_transform": post}
    assert_all_same(
        [
            _classification([0, 1, 2], [0, 1, 2], per_leaf=3, attributes=attributes),
            _classification([4, 7, 9], [0, 1, 2], trees=30, attributes={**attributes, "base_values": [0.1, 0.2, 0.3]}),
            _classification([4, 7], [0], positive=True, attributes=attributes),
            _classification([4, 7], [0], attributes={**attributes, "base_values": [0.2]}),
        ]
    )


def test_the_second_of_two_classes_and_a_probit_equal_onnx_runtime(assert_all_same: Check) -> None:
    assert_all_same(
        [
            _classification([4, 7], [1], attributes={"post_transform": "SOFTMAX"}),
            _regression(trees=1, positive=True, attributes={"post_transform": "PROBIT"}),
        ]
    )


def test_thresholds_and_rows_of_double_precision_are_compared_as_such(
    tmp_path: Path, assert_same_as_onnxruntime: Check
) -> None:
    forest = draw_forest("target", [0])
    values = np.array(forest.pop("nodes_values")) + 1e-12
    weights = np.array(forest.pop("target_weights"))
    tensors = {
        name: helper.make_tensor(name, TensorProto.DOUBLE, array.shape, array)
        for name, array in (("nodes_values_as_tensor", values), ("target_weights_as_tensor", weights))
    }
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain=DOMAIN, n_targets=1, **forest, **tensors)
    path = save_model(
        tmp_path / "model.onnx",
        [node],
        [("x", ["rows", 3], TensorProto.DOUBLE)],
        [("y", ["rows", 1])],
        domains={DOMAIN: 3},
    )
    x = rows(64).astype("float64")
    assert_same_as_onnxruntime(path, {"x": x}, {"x": x + 2e-12})


def test_scores_of_double_precision_are_transformed_as_such(tmp_path: Path, assert_same_as_onnxruntime: Check) -> None:
    tensors = {
        name: helper.make_tensor(name, kind, [len(numbers)], numbers)
        for name, kind, numbers in (
            ("nodes_modes", TensorProto.UINT8, [0]),
            ("nodes_splits", TensorProto.DOUBLE, [0.5]),
            ("leaf_weights", TensorProto.DOUBLE, [0.25, 0.75]),
        )
    }
    children = {"nodes_truenodeids": [0], "nodes_trueleafs": [1], "nodes_falsenodeids": [1], "nodes_falseleafs": [1]}
    nodes = [
        helper.make_node(
            *("TreeEnsemble", ["x"], [f"y{post}"]),
            domain=DOMAIN,
            n_targets=2,
            tree_roots=[0],
            nodes_featureids=[0],
            leaf_targetids=[0, 1],
            post_transform=post,
            **children,
            **tensors,
        )
        for post in (3, 4)
    ]
    outputs = [(node.output[0], ["rows", 2], TensorProto.DOUBLE) for node in nodes]
    inputs = [("x", ["rows", 3], TensorProto.DOUBLE)]
    path = save_model(tmp_path / "model.onnx", nodes, inputs, outputs, domains={DOMAIN: 5})
    assert_same_as_onnxruntime(path, {"x": rows(8).astype("float64")})


def test_more_features_than_a_packed_link_holds(tmp_path: Path, assert_same_as_onnxruntime: Check) -> None:
    node = regressor(features=70_000, trees=60, depth=11)
    path = save_model(tmp_path / "model.onnx", [node], [("x", ["rows", 70_000])], [("y", ["rows", 1])])
    assert_same_as_onnxruntime(path, {"x": rows(9, 70_000)}, {"x": rows(1, 70_000)})


@pytest.mark.parametrize(
    ("node", "features", "form"),
    [
        (classifier([1, 2], [0, 1], per_leaf=2), 3, "two classes.*export the weights of the second"),
        (regressor(features=5), 3, "feature 4 of rows with 3"),
        (regressor(attributes={"aggregate_function": "MEDIAN"}), 3, "'MEDIAN'"),
    ],
    ids=["both classes", "features", "aggregate"],
)
def test_a_form_that_would_be_computed_otherwise_is_refused(
    node: Any, features: int, form: str, tmp_path: Path
) -> None:
    outputs: list[Any] = _LABELLED if len(node.output) > 1 else ["y"]
    path = save_model(tmp_path / "model.onnx", [node], [("x", [2, features])], outputs)
    with pytest.raises(UnsupportedOperatorError, match=form):
        import_onnx(path)


def test_labels_that_are_strings_are_their_places(
    tmp_path: Path, target: Target, assert_same_as_onnxruntime: Check
) -> None:
    """A class has its place as its label, as in the same forest with these integers."""
    paths = []
    for name, labels, form in (("strings", [], {"classlabels_strings": ["b", "a", "c"]}), ("places", [0, 1, 2], {})):
        node = classifier(labels, [0, 1, 2], attributes=form)
        kind = TensorProto.STRING if form else TensorProto.INT64
        outputs = [("label", ["rows"], kind), ("y", ["rows", 3])]
        paths.append(save_model(tmp_path / f"{name}.onnx", [node], _INPUT, outputs))
    strings, places = (build(import_onnx(path), target) for path in paths)
    x = rows(7)
    for one, other in zip(*(builds.run_in_memory(model, [[x]])[0] for model in (strings, places)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert_same_as_onnxruntime(paths[1], {"x": x})
