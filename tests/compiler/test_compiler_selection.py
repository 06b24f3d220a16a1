"""TopK selects the first elements, a few by inserting and more by collecting; ArgMax selects one."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from support.models import save_model
from tvmflow.compiler import build, import_onnx
from tvmflow.compiler.inspection import Inspection
from tvmflow.hardware.target import resolve

Shape = tuple[int, ...]


def _case(
    shape: Shape, k: int, axis: int, largest: int, array: np.ndarray[Any, Any] | None = None, *, free: bool = False
) -> Any:
    """The arguments of `save_model`, and a feed: few different numbers, so that many are equal, without an `array`."""
    data = np.round(2 * normal(*shape)) if array is None else array
    node = helper.make_node("TopK", ["x", "k"], ["y", "places"], axis=axis, largest=largest)
    dims = [f"n{place}" for place in range(len(shape))] if free else list(shape)
    outputs = ["y", ("places", None, TensorProto.INT64)]
    return ([node], [("x", dims)], outputs, {"k": np.array([k], "int64")}), {"x": data}


def test_the_first_elements_are_those_of_onnx_runtime(assert_all_same: Any) -> None:
    cases = [
        _case(shape, k, axis, largest)
        for shape, k, axis in [((3, 100), 5, 1), ((3, 7), 1, -1), ((40, 6), 3, 0), ((2, 64, 5), 4, 1), ((2, 9), 2, 1)]
        for largest in (0, 1)
    ]
    random = normal(3, 200)
    # In rising order each element comes before all chosen ones.
    rising = np.sort(random, axis=1)
    cases += [_case((3, 200), 6, 1, 1, array) for array in (random, rising, rising[:, ::-1].copy())]
    # The last three share one function.
    assert rule_counts(assert_all_same(cases))["selection"] == len(cases) - 2


def test_the_first_elements_of_free_sizes_are_those_of_onnx_runtime(assert_all_same: Any) -> None:
    cases = [_case((3, 100), 5, 1, 1, free=True), _case((40, 6), 3, 0, 0, free=True), _case((3, 5), 5, 1, 1, free=True)]
    # The first and the last one share one function.
    assert rule_counts(assert_all_same(cases))["selection"] == len(cases) - 1


def test_lines_of_free_number_have_no_branch_for_each_element(make_model: Any, target: Any) -> None:
    arguments, _ = _case((64, 100), 5, 1, 1, free=True)
    model = build(import_onnx(make_model(*arguments)), target, inspect=Inspection(code=("tir",)))
    assert "if_then_else" not in model.inspected.code["tir"]


def test_many_elements_are_those_of_onnx_runtime(assert_all_same: Any) -> None:
    random = normal(2, 1500)
    # More than a vector, more than a sorted block, and several blocks, the last of them not whole.
    many = scale.choose(normal=(17, 700), long=(17, 130, 700))
    cases = [
        *(_case((2, 1500), k, 1, 1, array) for k in many for array in (random, np.sort(random, axis=1))),
        *(_case((2, 1500), k, 1, largest) for k, largest in ((40, 0), (300, 1))),
        # All elements, of fewer than a vector more than are asked for, and of lines whose elements are apart.
        _case((3, 100), 100, 1, 1),
        _case((3, 45), 40, 1, 0),
        _case((90, 3), 33, 0, 1),
    ]
    # Those of the same numbers share a function.
    assert rule_counts(assert_all_same(cases))["selection"] == len(cases) - len(many)


def test_many_elements_of_free_sizes_are_those_of_onnx_runtime(assert_all_same: Any) -> None:
    cases = [
        _case((2, 900), 50, 1, 1, free=True),
        _case((2, 50), 50, 1, 1, free=True),
        _case((400, 3), 30, 0, 0, free=True),
    ]
    # The first two share a function.
    assert rule_counts(assert_all_same(cases))["selection"] == len(cases) - 1


@pytest.mark.parametrize("preset", ["x86-64-v2", "x86-64-v3"])
@pytest.mark.parametrize("k", [3, 30, 200])
def test_the_first_elements_by_narrower_vectors_are_the_same(
    tmp_path: Any, run_built: Any, preset: str, k: int
) -> None:
    x = np.round(3 * normal(2, 333))
    arguments, _ = _case((2, 333), k, 1, 1, x)
    model = build(import_onnx(save_model(tmp_path / "model.onnx", *arguments)), resolve(preset))
    values, places = run_built(model, x)
    expected = np.argsort(-x, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


def test_a_few_numbers_of_a_line_are_on_the_stack(make_model: Any, target: Any) -> None:
    arguments, _ = _case((64, 100), 5, 1, 1)
    model = build(import_onnx(make_model(*arguments)), target, inspect=Inspection(code=("asm",)))
    # The rows of TopK run in a function of the thread pool.
    assert "BackendParallelLaunch" in model.inspected.code["asm"]
    assert "BackendAllocWorkspace" not in model.inspected.code["asm"]


@pytest.mark.parametrize("k", [5, 38])
@pytest.mark.parametrize("largest", [0, 1])
def test_not_a_number_counts_as_the_largest_and_zeros_are_equal(
    tmp_path: Any, target: Any, run_built: Any, k: int, largest: int
) -> None:
    x = np.zeros((1, 40), "float32")
    x[0, :6] = [-0.0, 0.0, np.inf, np.nan, -np.inf, -np.nan]
    arguments, _ = _case((1, 40), k, 1, largest)
    model = build(import_onnx(save_model(tmp_path / "model.onnx", *arguments)), target)
    values, places = run_built(model, x)
    others = [0, 1, *range(6, 40)]
    expected = ([3, 5, 2, *others] if largest else [4, *others, 2])[:k]
    assert places[0].tolist() == expected
    np.testing.assert_array_equal(values[0], x[0, expected])


_TYPES = {"int32": TensorProto.INT32, "int64": TensorProto.INT64, "float64": TensorProto.DOUBLE}


@pytest.mark.few(3)
@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize("dtype", _TYPES)
def test_integers_and_doubles_are_selected_too(make_model: Any, run_built: Any, dtype: str, free: bool) -> None:
    x = np.round(3 * normal(3, 90)).astype(dtype)
    # The smallest integers are among the first ones of the last line, and of the one before it if most are asked for.
    smallest, largest = (-np.inf, np.inf) if dtype == "float64" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    x[1, 7:40], x[2], x[2, [3, 44]] = smallest, smallest, [largest, 5]
    nodes, outputs, counts = [], [], {}
    for k in (1, 4, 70):
        counts[f"k{k}"] = np.array([k], "int64")
        for is_largest in (0, 1):
            names = [f"{name}{k}{is_largest}" for name in ("y", "places")]
            nodes.append(helper.make_node("TopK", ["x", f"k{k}"], names, largest=is_largest))
            outputs += [(names[0], None, _TYPES[dtype]), (names[1], None, TensorProto.INT64)]
    for operator in ("ArgMax", "ArgMin"):
        nodes.append(helper.make_node(operator, ["x"], [operator], axis=1))
        outputs.append((operator, None, TensorProto.INT64))
    path = make_model(nodes, [("x", ["n", "m"] if free else [3, 90], _TYPES[dtype])], outputs, counts)
    model = build(import_onnx(path), resolve("native"))
    expected = []
    for k in (1, 4, 70):
        for is_largest in (0, 1):
            # The complement of an integer has the opposite order, and that of the smallest one is the largest one.
            keys = (~x if dtype != "float64" else -x) if is_largest else x
            places = np.argsort(keys, axis=1, kind="stable")[:, :k]
            expected += [np.take_along_axis(x, places, 1), places]
    expected += [np.argmax(x, 1)[:, None], np.argmin(x, 1)[:, None]]
    for place, (ours, theirs) in enumerate(zip(run_built(model, x), expected, strict=True)):
        np.testing.assert_array_equal(ours, theirs, str(place))
    assert rule_counts(model)["selection"] == len(nodes)


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
def test_the_place_of_the_first_element_is_that_of_onnx_runtime(assert_all_same: Any, free: bool) -> None:
    cases = []
    for operator, shape, axis, keepdims in [
        ("ArgMax", (3, 300), -1, 1),
        ("ArgMin", (2, 3, 33), -1, 0),
        ("ArgMax", (4, 5), -1, 0),
        # Lines whose elements are side by side, in whole vectors and fewer.
        ("ArgMin", (2, 5, 3, 15), 1, 0),
        ("ArgMax", (7, 4), 0, 1),
    ]:
        node = helper.make_node(operator, ["x"], ["y"], axis=axis, keepdims=keepdims)
        dims = [f"n{place}" for place in range(len(shape))] if free else list(shape)
        outputs = [("y", None, TensorProto.INT64)]
        cases.append((([node], [("x", dims)], outputs), {"x": np.round(2 * normal(*shape))}))
    assert rule_counts(assert_all_same(cases))["selection"] == len(cases)


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize("operator", ["ArgMax", "ArgMin"])
def test_places_in_short_lines_are_found_without_a_branch_for_each_element(
    operator: str, free: bool, make_model: Any, target: Any, assert_same_as_onnxruntime: Any
) -> None:
    # The classes of pixels, as a network that divides images into parts has them.
    node = helper.make_node(operator, ["x"], ["y"], axis=-1, keepdims=0)
    dims = ["n", "high", "wide", 21] if free else [2, 9, 7, 21]
    path = make_model([node], [("x", dims)], [("y", None, TensorProto.INT64)])
    feeds = [{"x": np.round(2 * normal(*shape, 21))} for shape in ((2, 9, 7), (1, 1, 1), (1, 4, 4))[: 3 if free else 1]]
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds))["selection"] == 1
    code = build(import_onnx(path), target, inspect=Inspection(code=("tir",))).inspected.code["tir"]
    assert "while " not in code
    assert "if " not in code.replace(" if ", "")
