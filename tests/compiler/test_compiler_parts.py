"""Parts of tensors: layers compute only the rows that are read, and a slice does not take a product its rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import NodeProto, TensorProto, helper
from tvm import relax

from support.arrays import normal
from support.builds import canonical_form, rule_counts
from support.models import value_info
from tvmflow.arrays import Array, NamedArrays
from tvmflow.compiler import CompiledModel

Check = Callable[..., CompiledModel]

# A block of a transformer without attention: what reads `h` needs of every layer only the rows that it reads.
_BLOCK = (
    ("Relu", "x", "a"),
    ("MatMul", "a project", "p"),
    ("Add", "p x", "r"),
    ("LayerNormalization", "r scale shift", "n"),
    ("MatMul", "n widen", "w"),
    ("Add", "w bias", "b"),
    ("Sigmoid", "b", "g"),
    ("MatMul", "g narrow", "m"),
    ("Add", "m r", "h"),
)
_LENGTH = 9


def _nodes(lines: Sequence[tuple[Any, ...]]) -> list[NodeProto]:
    return [
        helper.make_node(operator, reads.split(), writes.split(), **(attributes[0] if attributes else {}))
        for operator, reads, writes, *attributes in lines
    ]


def _weights() -> dict[str, Array]:
    return {
        "project": normal(16, 16),
        "scale": normal(16),
        "shift": normal(16, seed=1),
        "widen": normal(16, 40),
        "bias": normal(40),
        "narrow": normal(40, 16, seed=2),
        "zero": np.array(0),
        "one": np.array(1),
        "last": np.array(-1),
        "begin": np.array([0]),
        "second": np.array([1]),
        "table": np.array([[0]]),
        "end": np.array([_LENGTH]),
        "few": np.array([3]),
        "most": np.array([6]),
        "axis": np.array([1]),
        "columns": np.array([2]),
        "flat": np.array([-1, 4, 4]),
    }


@dataclass(frozen=True)
class Case:
    """What reads the block's result `h`, and the rows of each sequence for which the block's layers are computed."""

    name: str
    lines: Sequence[tuple[Any, ...]]
    rows: int
    shape: tuple[Any, ...] = (2, _LENGTH, 16)
    outputs: Sequence[str] = field(default=("y",))


_FIRST = ("Gather", "h zero", "y", {"axis": 1})
CASES = [
    Case("the first row", [_FIRST], 1),
    Case("the first row of any length", [_FIRST], 1, ("b", "n", 16)),
    Case("the last row", [("Gather", "h last", "y", {"axis": 1})], 1),
    Case("the first row as a line", [("Gather", "h begin", "y", {"axis": 1})], 1),
    Case("the first row as a table", [("Gather", "h table", "y", {"axis": 1})], _LENGTH),
    Case("a slice", [("Slice", "h begin few axis", "y")], 3),
    Case("a slice from the second row", [("Slice", "h second few axis", "y")], 2),
    Case("a norm and a layer behind", [
        ("LayerNormalization", "h scale shift", "v"),
        ("MatMul", "v widen", "u"),
        ("Gather", "u zero", "y", {"axis": 1}),
    ], 1),
    Case("a transpose behind", [
        ("Transpose", "h", "t", {"perm": [1, 0, 2]}), ("Gather", "t zero", "y", {"axis": 0}),
    ], 1),
    Case("a softmax of the channels behind", [
        ("Softmax", "h", "s", {"axis": -1}), ("Gather", "s zero", "y", {"axis": 1}),
    ], 1),
    Case("the same row twice", [
        _FIRST, ("Sin", "h", "s"), ("Gather", "s zero", "z", {"axis": 1}),
    ], 1, outputs=["y", "z"]),
    Case("two rows, each by itself", [
        ("Gather", "h zero", "q", {"axis": 1}), ("Gather", "h one", "o", {"axis": 1}), ("Sub", "q o", "y"),
    ], _LENGTH),
    Case("most rows", [("Slice", "h begin most axis", "y")], _LENGTH),
    Case("all rows but the first", [("Slice", "h second end axis", "y")], _LENGTH),
    Case("the result as well", [_FIRST], _LENGTH, outputs=["y", "h"]),
    Case("columns", [("Slice", "h begin few columns", "y")], _LENGTH),
    Case("a softmax of the rows behind", [
        ("Softmax", "h", "s", {"axis": 1}), ("Gather", "s zero", "y", {"axis": 1}),
    ], _LENGTH),
    Case("a row that a reshape joins with others", [
        ("Reshape", "h flat", "f"), ("Gather", "f zero", "y", {"axis": 0}),
    ], _LENGTH),
]  # fmt: skip


def _products(path: Path) -> list[list[int | None]]:
    """The shapes of the results of the matrix products in the canonical form of a model; None for a free size."""
    mod = canonical_form(path)
    shapes: list[list[int | None]] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and expr.op == tvm.ir.Op.get("relax.matmul"):
            shapes.append([int(size) if isinstance(size, tvm.tirx.IntImm) else None for size in expr.ty.shape.values])

    relax.analysis.post_order_visit(mod["main"], visit)
    relax.analysis.well_formed(mod)
    return shapes


def _feeds(shape: Sequence[Any], length: int) -> NamedArrays:
    return {"x": normal(*({"b": 2, "n": length}.get(size, size) for size in shape))}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layers_compute_the_rows_that_are_read(case: Case, make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    path = make_model(_nodes([*_BLOCK, *case.lines]), [("x", list(case.shape))], case.outputs, _weights())
    rows = [shape[1] for shape in _products(path)]
    assert len(rows) >= 3
    assert rows == [case.rows] * len(rows)
    lengths = (_LENGTH, 3) if "n" in case.shape else (_LENGTH,)
    assert_same_as_onnxruntime(path, *(_feeds(case.shape, length) for length in lengths))


def test_an_input_of_the_layers_is_sliced_once(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    lines = [("MatMul", "x project", "p"), ("Add", "p x", "r"), ("Mul", "r x", "h"), _FIRST]
    path = make_model(_nodes(lines), [("x", [2, _LENGTH, 16])], ["y"], _weights())
    assert _products(path) == [[2, 1, 16]]
    model = assert_same_as_onnxruntime(path, _feeds((2, _LENGTH, 16), _LENGTH))
    assert sum("strided_slice" in name for name, _ in model.schedules) <= 2


def test_slices_before_and_after_a_branch_are_apart(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    branches = {
        f"{name}_branch": helper.make_graph([helper.make_node(operator, ["p"], [name])], name, [], [value_info(name)])
        for name, operator in (("then", "Neg"), ("else", "Exp"))
    }
    lines = [
        ("MatMul", "x project", "h"),
        ("Gather", "h zero", "p", {"axis": 1}),
        ("If", "c", "q", branches),
        ("MatMul", "x widen", "v"),
        ("Gather", "v zero", "w", {"axis": 1}),
        ("MatMul", "q widen", "u"),
        ("Add", "u w", "y"),
    ]
    path = make_model(_nodes(lines), [("x", [2, _LENGTH, 16]), ("c", [], TensorProto.BOOL)], ["y"], _weights())
    assert [2, _LENGTH, 16] not in _products(path)
    feeds = ({"x": normal(2, _LENGTH, 16), "c": np.array(choice)} for choice in (True, False))
    assert_same_as_onnxruntime(path, *feeds)


@pytest.mark.parametrize(
    ("lines", "shape", "rule"),
    [
        ([("MatMul", "x widen", "p"), ("Slice", "p begin most axis", "y")], [2, 9, 16], "rows"),
        (
            [("Conv", "x kernel", "c", {"strides": [2, 2]}), ("Slice", "c begin few columns", "y")],
            [1, 5, 9, 9],
            "conv2d",
        ),
    ],
    ids=["product", "convolution"],
)
def test_a_slice_leaves_a_kernel_its_rule(
    lines: Sequence[tuple[Any, ...]], shape: list[int], rule: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    """TVM takes a slice from the first element on for element-wise, and would fuse it with the kernel before it."""
    weights = {**_weights(), "kernel": normal(16, 5, 3, 3)}
    path = make_model(_nodes(lines), [("x", shape)], ["y"], weights)
    assert rule_counts(assert_same_as_onnxruntime(path, {"x": normal(*shape)}))[rule] == 1
