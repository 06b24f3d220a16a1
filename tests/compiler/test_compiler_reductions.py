"""Reductions of whole numbers, of nothing, of truth values and of infinities, beside ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from support.models import save_model
from tvmflow.compiler import CompiledModel, build, import_onnx
from tvmflow.compiler.inspection import Inspection
from tvmflow.hardware.target import Target

Check = Callable[..., CompiledModel]

_AXES = {"axes": np.array([1], "int64")}
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def _reduce(name: str, keepdims: int = 0) -> Any:
    return helper.make_node(name, ["x", "axes"], [name], keepdims=keepdims)


def test_whole_numbers_are_reduced_to_their_own_type(assert_all_same: Check) -> None:
    names = ["ReduceMean", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"]
    cases = []
    for element in _INTEGERS:
        x = np.array([[5, -2, 3, 5], [1, -1, -9, -1], [12, 40, 0, 7]], helper.tensor_dtype_to_np_dtype(element))
        # In a normal run the size is free for one type and known for the other.
        shapes = [(3, 4), (3, "n")]
        free = int(element == TensorProto.INT64)
        for shape in scale.choose(normal=shapes[free:][:1], long=shapes):
            nodes = [_reduce(name) for name in names if name != "ReduceLogSum"]
            outputs = [(node.output[0], None, element) for node in nodes]
            cases.append(((nodes, [("x", shape, element)], outputs, _AXES), {"x": x}))
        inputs = [("x", (3, 4), element)]
        outputs = [("ReduceLogSum", None, element)]
        cases.append((([_reduce("ReduceLogSum")], inputs, outputs, _AXES), {"x": np.abs(x)}))
    assert_all_same(cases)


@pytest.mark.parametrize("keepdims", scale.choose(normal=[0], long=[0, 1]))
def test_reductions_of_nothing_have_the_result_of_nothing(keepdims: int, assert_all_same: Check) -> None:
    names = ["ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceSumSquare"]
    cases = []
    for element in (*scale.choose(normal=_INTEGERS[1:], long=_INTEGERS), TensorProto.FLOAT):
        x = np.zeros((3, 0), helper.tensor_dtype_to_np_dtype(element))
        # ReduceMean of no floats is undefined.
        of_element = [*names, "ReduceL2" if element == TensorProto.FLOAT else "ReduceMean"]
        outputs = [(name, None, element) for name in of_element]
        for weights in (_AXES, {}):
            nodes = [helper.make_node(name, ["x", *weights], [name], keepdims=keepdims) for name in of_element]
            cases.append(((nodes, [("x", (3, "n"), element)], outputs, weights), {"x": x}))
        # A part that is empty whatever the input is.
        nodes = [
            helper.make_node("Slice", ["y", "zero", "zero", "one"], ["x"]),
            *(_reduce(name, keepdims) for name in of_element),
        ]
        weights = {"zero": np.array([0]), "one": np.array([1]), **_AXES}
        y = np.ones((3, 2), x.dtype)
        cases.append(((nodes, [("y", (3, 2), element)], outputs, weights), {"y": y}))
    assert_all_same(cases)


def test_reductions_of_last_dimensions_of_free_size(assert_all_same: Check) -> None:
    random = np.random.default_rng(0)
    names = scale.choose(normal=["ReduceMean", "ReduceMin"], long=["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"])
    cases: list[Any] = []
    # Sizes with and without whole vectors, short and long; the long row is divided into parts.
    forms: list[tuple[list[Any], list[int], list[list[int]]]] = [
        (["n"], [0], [[1], [37], [200_003]]),
        (["batch", "n"], [1], [[1, 150_001], [3, 150_001], [5, 70]]),
        ([2, "h", 3], [1, 2], [[2, 40, 3], [2, 60_000, 3]]),
        (["n", 1], [0], [[300, 1]]),
    ]
    for shape, axes, sizes in forms:
        # A normal run keeps the dimensions of every second form.
        for keepdims in scale.choose(normal=[len(cases) % 2], long=[0, 1]):
            nodes = [_reduce(name, keepdims) for name in names]
            outputs = [(name, None, TensorProto.FLOAT) for name in names]
            weights = {"axes": np.array(axes, "int64")}
            feeds = [{"x": random.uniform(0.5, 1.5, size).astype("float32")} for size in sizes]
            cases.append(((nodes, [("x", shape, TensorProto.FLOAT)], outputs, weights), *feeds))
    compiled = assert_all_same(cases)
    rules = [rule for name, rule in compiled.schedules if name.startswith(("max", "min", "sum", "mean"))]
    assert set(rules) == {"free_reduction"}


@pytest.mark.parametrize(
    ("shape", "rule"), [([4099], "reduction"), ([3, 1400], "free_reduction")], ids=["one dimension", "two dimensions"]
)
def test_reductions_to_one_number_compute_vectors(
    shape: list[int], rule: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """Several dimensions are one line of memory."""
    path = make_model([helper.make_node("ReduceMax", ["x"], ["y"], keepdims=0)], [("x", shape)], ["y"])
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    model = assert_same_as_onnxruntime(path, {"x": x}, inspect=Inspection(code=("tir",)))
    assert rule_counts(model) == {rule: 1}
    assert "T.vectorized" in model.inspected.code["tir"]


def test_the_logarithm_of_a_sum_of_powers_takes_infinities(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    path = make_model([_reduce("ReduceLogSumExp")], [("x", [3, 2])], ["ReduceLogSumExp"], _AXES)
    x = np.array([[-np.inf, -np.inf], [np.inf, 1], [-np.inf, 2]], "float32")
    assert_same_as_onnxruntime(path, {"x": x})


def test_extremes_of_truth_values(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    names = ["ReduceMax", "ReduceMin"]
    nodes = [_reduce(name) for name in names]
    path = make_model(
        nodes, [("x", [3, 2], TensorProto.BOOL)], [(name, [3], TensorProto.BOOL) for name in names], _AXES, opset=20
    )
    assert_same_as_onnxruntime(path, {"x": np.array([[True, False], [True, True], [False, False]])})


@pytest.mark.parametrize("shape", [(2, 1000, 24), (2, 20011, 24), (2, "n", 24)])
def test_long_sums_of_like_numbers_along_columns_are_exact(
    shape: tuple[int | str, ...], target: Target, tmp_path: Path
) -> None:
    # Where all numbers are alike, every addition rounds in the same direction.
    path = save_model(tmp_path / "model.onnx", [_reduce("ReduceMean")], [("x", shape)], ["ReduceMean"], _AXES)
    loaded = build(import_onnx(path), target).load()
    for depth in (1, 5, 128, 3001) if "n" in shape else (int(shape[1]),):
        data = np.full((2, depth, 24), 0.1, "float32")
        (mean,) = loaded.run(data)
        np.testing.assert_allclose(mean, data.astype("float64").mean(1), rtol=2e-6)


def test_sums_over_the_pixels_of_images_of_any_size_equal_onnx_runtime(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    # The channels of a convolution lie side by side, here no whole number of vectors.
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["t"]),
        helper.make_node("ReduceMean", ["t", "pixels"], ["mean"], keepdims=0),
        helper.make_node("ReduceSumSquare", ["t", "pixels"], ["squares"], keepdims=1),
    ]
    weights = {"pixels": np.array([2, 3]), "kernel": np.eye(19, 3, dtype="float32").reshape(19, 3, 1, 1)}
    path = make_model(nodes, [("x", ["batch", 3, "height", "width"])], ["mean", "squares"], weights)
    generator = np.random.default_rng(0)
    sizes = ((1, 3, 1, 1), (2, 3, 7, 5), (1, 3, 40, 131))
    feeds = [{"x": generator.normal(size=size).astype("float32") + 1} for size in sizes]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert rule_counts(model)["reduction"] == 2


def test_the_sums_of_rows_of_free_length_are_in_registers(make_model: Any, target: Target) -> None:
    path = make_model([_reduce("ReduceMean")], [("x", [64, "n"])], ["ReduceMean"], _AXES)
    model = build(import_onnx(path), target, inspect=Inspection(code=("asm",)))
    assert "mean_compute" in model.inspected.code["asm"]
    # A row would take memory from the runtime and give it back.
    assert "BackendAllocWorkspace" not in model.inspected.code["asm"]


@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.DOUBLE])
def test_columns_of_any_number_are_reduced_side_by_side(
    element: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    axis = {"axis": np.array([0])}
    nodes = [
        helper.make_node("ReduceSum", ["x", "axis"], ["sum"], keepdims=0),
        helper.make_node("ReduceMax", ["x", "axis"], ["most"], keepdims=1),
    ]
    outputs = [("sum", None, element), ("most", None, element)]
    path = make_model(nodes, [("x", ["rows", "columns"], element)], outputs, axis)
    generator = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(element)
    feeds = [{"x": generator.normal(size=size).astype(dtype)} for size in ((1, 1), (5, 3), (40, 67), (1030, 35))]
    model = assert_same_as_onnxruntime(path, *feeds, inspect=Inspection(code=("tir",)))
    # Sums of float32 add one line after the other: plain loops, which LLVM vectorises.
    lines = rule_counts(model)["reduction"]
    assert lines == int(element == TensorProto.FLOAT)
    assert model.inspected.code["tir"].count("T.vectorized") >= len(nodes) - lines


@pytest.mark.parametrize("columns", [1024, 16384])
def test_long_lines_are_added_one_after_the_other(
    columns: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """Tiles of columns in registers would read each line in pieces, far apart in memory."""
    node = helper.make_node("ReduceSum", ["x", "axis"], ["y"], keepdims=0)
    path = make_model([node], [("x", [2, 40, columns])], ["y"], {"axis": np.array([1])})
    x = np.random.default_rng(0).normal(size=(2, 40, columns)).astype("float32")
    model = assert_same_as_onnxruntime(path, {"x": x}, inspect=Inspection(code=("tir",)))
    assert rule_counts(model)["reduction"] == 1
    assert "T.unroll" not in model.inspected.code["tir"]


@pytest.mark.parametrize("columns", [40, "n"])
def test_the_logarithm_of_a_sum_is_computed_once_for_all_that_it_divides(
    columns: int | str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    path = make_model([helper.make_node("LogSoftmax", ["x"], ["y"], axis=1)], [("x", [2, 30, columns])], ["y"])
    x = np.random.default_rng(0).normal(size=(2, 30, 40)).astype("float32")
    model = assert_same_as_onnxruntime(path, {"x": x}, inspect=Inspection(code=("tir",)))
    assert 'sblock("logarithm' in model.inspected.code["tir"]


@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64])
def test_dimensions_of_free_size_that_are_apart_are_reduced_one_after_the_other(
    element: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """The last neighbours among them, side by side in memory, in vectors."""
    names = ["ReduceSum", "ReduceMax", "ReduceMin"]
    names += ["ReduceMean"] if element in (TensorProto.FLOAT, TensorProto.DOUBLE) else []
    nodes = [
        helper.make_node(name, ["x", axes], [f"{name}{axes}"], keepdims=int(name == "ReduceMax"))
        for name in names
        for axes in ("axes", "last")
    ]
    outputs = [(node.output[0], None, element) for node in nodes]
    weights = {"axes": np.array([0, 2, 3]), "last": np.array([3])}
    path = make_model(nodes, [("x", ["n", "c", "h", "w"], element)], outputs, weights)
    generator, dtype = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(element)
    sizes = ((1, 1, 1, 1), (2, 3, 7, 5), (3, 2, 9, 131))
    feeds = [{"x": (9 * generator.normal(size=size)).astype(dtype)} for size in sizes]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert rule_counts(model)["free_reduction"] >= len(nodes)


def test_known_dimensions_that_are_no_neighbours_are_reduced_apart(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    names = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd")
    nodes = [
        helper.make_node(name, ["x", axes], [f"{name}{axes}"], keepdims=int(name == "ReduceMax"))
        for name in names
        for axes in ("images", "lines")
    ]
    weights = {"images": np.array([0, 2, 3]), "lines": np.array([0, 2])}
    path = make_model(nodes, [("x", [2, 3, 8, 33])], [(node.output[0], None) for node in nodes], weights)
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 3, 8, 33)})
    # Side by side in memory, or in vectors, first.
    counts = rule_counts(model)
    assert (counts["free_reduction"], counts["reduction"]) == (len(names), 2 * len(names))


@pytest.mark.parametrize("rows", [5, "n"])
def test_softmax_before_dimensions_of_one_element_is_one_of_rows(
    rows: int | str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [helper.make_node(name, ["x"], [name], axis=1) for name in ("Softmax", "LogSoftmax")]
    path = make_model(nodes, [("x", [rows, 37, 1, 1])], ["Softmax", "LogSoftmax"])
    x = np.random.default_rng(0).normal(size=(5, 37, 1, 1)).astype("float32")
    assert rule_counts(assert_same_as_onnxruntime(path, {"x": x}))["rowwise"] == len(nodes)
