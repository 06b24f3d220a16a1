"""Reductions: sums, means, products, extremes and norms over dimensions."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from tvm import relax, te

from tvmflow.compiler.onnx.node import Converter, FreeSizeError, Node
from tvmflow.compiler.onnx.ordering import find_places
from tvmflow.compiler.onnx.sizes import materialise
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of

# The operators of this family.
OPERATORS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"),
    *("ReduceSum", "ReduceSumSquare"),
)
# The opset in which the axes of a reduction became an operand.
_OPERAND_OF = {"ReduceSum": 13}
_OPERAND = 18
# What a reduction over no dimensions applies to each element.
_OF_ONE: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "ReduceL1": relax.op.abs,
    "ReduceL2": relax.op.abs,
    "ReduceLogSum": relax.op.log,
    "ReduceSumSquare": relax.op.square,
}
# The result of nothing, other than zero.
_OF_NOTHING = {
    "ReduceLogSum": -np.inf,
    "ReduceLogSumExp": -np.inf,
    "ReduceMax": -np.inf,
    "ReduceMean": np.nan,
    "ReduceMin": np.inf,
    "ReduceProd": 1,
}
# Reductions whose steps are numbers that are not whole.
_OF_FLOATS = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")


def convert_reduction(operator: str) -> Converter:
    """Return a converter of the forms of the reduction `operator` that TVM's converter refuses or gets wrong.

    These are reductions of no elements, over no dimensions, of bool, and along axes that are not constant; every
    ReduceLogSumExp; and ReduceMean, ReduceL2 and ReduceLogSum of integers. Integer results are rounded towards zero.
    For any other form the converter returns None, which leaves the node to TVM's converter. Where the axes are not
    constant, the converter raises FreeSizeError if their number or the shape of the data is unknown.
    """

    def convert(node: Node) -> relax.Expr | None:
        data, dims = node.inputs[0], dims_of(node.inputs[0])
        dtype, keepdims = dtype_of(data), bool(node.attrs.get("keepdims", 1))
        if _has_computed_axes(node, operator):
            return _reduce_computed_axes(node, operator, keepdims)
        axes = _axes(node, operator)
        if axes is None:
            # TVM's converter applies nothing to the elements.
            return _OF_ONE[operator](data) if operator in _OF_ONE else data
        if dims is not None and any(isinstance(dims[axis], int) and dims[axis] == 0 for axis in axes):
            shape = [1 if axis in axes else size for axis, size in enumerate(dims) if keepdims or axis not in axes]
            return relax.op.broadcast_to(const(_result_of_nothing(operator, dtype)), relax.ShapeExpr(shape))
        if operator == "ReduceLogSumExp":
            return _reduce_log_sum_exp(node, data, axes, keepdims)
        if dtype == "bool":
            whole = node.emit(relax.op.astype(data, "uint8"))
            return relax.op.astype(_apply(node, operator, whole, axes, keepdims), dtype)
        if dtype.startswith(("int", "uint")) and operator in _OF_FLOATS:
            return relax.op.astype(
                _apply(node, operator, node.emit(relax.op.astype(data, "float64")), axes, keepdims), dtype
            )
        if dtype.startswith(("int", "uint")) and operator == "ReduceMean" and dims is not None:
            total = node.emit(relax.op.sum(data, axes, keepdims))
            count: Any = 1
            for axis in axes:
                count = node.evaluator.multiply(count, dims[axis])
            counts = node.emit(relax.op.astype(materialise(node.builder, node.evaluator.shape([count]), ()), dtype))
            return relax.op.divide(total, node.emit(relax.op.maximum(counts, const(1, dtype))))
        return None

    return convert


def _has_computed_axes(node: Node, operator: str) -> bool:
    is_operand = node.opset >= _OPERAND_OF.get(operator, _OPERAND) and node.input(1) is not None
    return is_operand and node.constant(1) is None and dims_of(node.inputs[1]) != [0]


def _reduce_computed_axes(node: Node, operator: str, keepdims: bool) -> relax.Expr:
    """A reduction whose axes are known when the model runs; none of them may be named twice."""
    data, dims, emit = node.inputs[0], dims_of(node.inputs[0]), node.emit
    if dims is None:
        raise FreeSizeError("computed axes of data of unknown shape")
    rank, one = len(dims), const(1, "int64")
    axes = emit(relax.op.floor_mod(node.integers(1), const(rank, "int64")))
    (count,) = dims_of(axes)  # type: ignore[misc]
    if count == rank:
        return node.apply(operator, data, const(np.arange(rank)), opset=18, keepdims=int(keepdims))
    is_axis = relax.op.equal(emit(relax.op.expand_dims(axes, 1)), const(np.arange(rank)))
    is_reduced = emit(relax.op.max(emit(relax.op.astype(emit(is_axis), "int64")), axis=0))
    is_kept = emit(relax.op.equal(is_reduced, const(0, "int64")))
    sizes = node.vector(dims)
    kept = emit(relax.op.where(is_kept, sizes, one))
    reduced = emit(relax.op.where(is_kept, one, sizes))
    left = kept
    if not keepdims:
        # The places of the axes that are left.
        order = node.builder.match_cast(find_places(node, is_kept), relax.TensorType([1, rank - count], "int64"))
        left = emit(relax.op.take(kept, emit(relax.op.squeeze(order, [0])), axis=0))
    shape = node.bind(left)
    rows = reduce(node.evaluator.multiply, shape, 1)
    (columns,) = node.bind(emit(relax.op.prod(reduced, keepdims=True)))

    def regroup(data: te.Tensor, kept: te.Tensor, reduced: te.Tensor) -> te.Tensor:
        def element(row: Any, column: Any) -> Any:
            places = []
            for axis in reversed(range(rank)):
                places.append(te.floormod(row, kept[axis]) + te.floormod(column, reduced[axis]))
                row, column = te.floordiv(row, kept[axis]), te.floordiv(column, reduced[axis])
            return data[tuple(reversed(places))]

        return te.compute((rows, columns), element, name="regroup")

    table = emit(node.builder.call_te(regroup, data, kept, reduced, primfunc_name_hint="regroup"))
    result = node.apply(operator, table, const(np.array([1])), opset=18, keepdims=0)
    return relax.op.reshape(result, relax.ShapeExpr(shape))


def _axes(node: Node, operator: str) -> list[int] | None:
    """The dimensions to reduce, none negative; None where there are none."""
    rank = node.inputs[0].ty.ndim
    is_operand = node.opset >= _OPERAND_OF.get(operator, _OPERAND)
    axes = node.constant(1) if is_operand else node.attrs.get("axes")
    if axes is None or not len(axes):
        return None if node.attrs.get("noop_with_empty_axes", 0) else list(range(rank))
    return sorted({int(axis) % rank for axis in axes})


def _apply(node: Node, operator: str, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    """A reduction by TVM's converter."""
    return node.apply(operator, data, const(np.array(axes, "int64")), opset=18, keepdims=int(keepdims))


def _result_of_nothing(operator: str, dtype: str) -> Any:
    """What a reduction of no elements gives."""
    result = _OF_NOTHING.get(operator, 0)
    if dtype == "bool":
        return np.bool_(result < 0 if operator == "ReduceMin" else result > 0)
    if dtype.startswith(("int", "uint")):
        limits = {np.inf: np.iinfo(dtype).max, -np.inf: np.iinfo(dtype).min}
        result = 0 if np.isnan(result) else limits.get(result, result)
    return np.array(result, dtype)


def _reduce_log_sum_exp(node: Node, data: relax.Expr, axes: list[int], keepdims: bool) -> relax.Expr:
    """The logarithm of the sum of powers, to which the largest element is added where it is finite."""
    dtype, emit = dtype_of(data), node.emit
    is_whole = not dtype.startswith(("float", "bfloat"))
    data = emit(relax.op.astype(data, "float64")) if is_whole else data
    largest = emit(relax.op.max(data, axes, keepdims=True))
    is_infinite = emit(relax.op.isinf(largest))
    largest = emit(relax.op.where(is_infinite, const(0, dtype_of(data)), largest))
    total = emit(relax.op.sum(emit(relax.op.exp(emit(relax.op.subtract(data, largest)))), axes, keepdims=True))
    result = emit(relax.op.add(emit(relax.op.log(total)), largest))
    result = result if keepdims else emit(relax.op.squeeze(result, axes))
    return relax.op.astype(result, dtype) if is_whole else result
