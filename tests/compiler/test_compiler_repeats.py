"""Products by constant matrices for each item of a batch, repeated by the model or not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.arrays import normal
from support.builds import rule_counts
from tvmflow.compiler import CompiledModel, import_onnx, lower, workloads
from tvmflow.hardware.target import Target

Check = Callable[..., CompiledModel]
MakeModel = Callable[..., Any]


def _repeated(make_model: MakeModel, is_transposed: bool, heads: int = 3) -> Any:
    """The product of `[n * heads, rows, 8]` by constant matrices of heads, tiled n times, as DeBERTa has it."""
    shape = (heads, 20, 8) if is_transposed else (heads, 8, 20)
    weights = {
        "w": normal(*shape),
        "heads": np.array([heads], "int64"),
        "ones": np.array([1, 1], "int64"),
        "start": np.array([0], "int64"),
        "end": np.array([1], "int64"),
    }
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "start", "end"], ["lines"]),
        helper.make_node("Div", ["lines", "heads"], ["n"]),
        helper.make_node("Concat", ["n", "ones"], ["repeats"], axis=0),
        helper.make_node("Tile", ["w", "repeats"], ["all"]),
        *([helper.make_node("Transpose", ["all"], ["right"], perm=[0, 2, 1])] if is_transposed else []),
        helper.make_node("MatMul", ["x", "right" if is_transposed else "all"], ["y"]),
    ]
    inputs = [("items", ["n", heads, "rows", 8])]
    merge = [
        helper.make_node("Shape", ["items"], ["sizes"]),
        helper.make_node("Slice", ["sizes", "two", "four"], ["last"]),
        helper.make_node("Concat", ["all_items", "last"], ["flat"], axis=0),
        helper.make_node("Reshape", ["items", "flat"], ["x"]),
    ]
    weights |= {"two": np.array([2], "int64"), "four": np.array([4], "int64"), "all_items": np.array([-1], "int64")}
    return make_model([*merge, *nodes], inputs, [("y", None, TensorProto.FLOAT)], weights)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
def test_matrices_that_are_repeated_for_each_item_are_stored_once(
    is_transposed: bool, make_model: MakeModel, target: Target, assert_same_as_onnxruntime: Check
) -> None:
    path = _repeated(make_model, is_transposed)
    names = [item.name for item in workloads(lower(import_onnx(path), target))]
    assert not [name for name in names if "broadcast" in name or "transpose" in name]
    feeds = [{"items": normal(n, 3, rows, 8)} for n, rows in ((1, 1), (2, 5), (5, 16))]
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds))["rows"] == 1


def test_constant_matrices_of_a_batch_are_packed(assert_all_same: Check) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    cases = []
    for shape, weight in (
        ((2, 3, 5, 8), (3, 8, 20)),
        ((2, 3, 5, 8), (2, 1, 8, 33)),
        ((3, 1, 8), (3, 8, 7)),
        ((4, 8), (2, 3, 8, 16)),
        ((2, 1, 6, 8), (3, 8, 5)),
    ):
        cases.append(((nodes, [("x", list(shape))], ["y"], {"w": normal(*weight)}), {"x": normal(*shape)}))
    free = ((nodes, [("x", ["n", 3, "rows", 8])], ["y"], {"w": normal(3, 8, 20)}), {"x": normal(2, 3, 7, 8)})
    assert rule_counts(assert_all_same([*cases, free]))["rows"] == len(cases) + 1
