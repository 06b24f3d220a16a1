"""Forms in ONNX of operators that PyTorch's exporter has none of."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript import opset18 as op


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return, for PyTorch's operators, functions that write them in ONNX: `custom_translation_table` of an export."""
    aten, prims = torch.ops.aten, torch.ops.prims
    return {
        operator.floordiv: _floor_quotient,
        aten._cdist_forward.default: _distances,
        aten.cummax.default: _running_maximum,
        aten.cummin.default: _running_minimum,
        aten.kthvalue.default: _element_in_order,
        aten.median.default: _median_of_all,
        aten.median.dim: _median,
        aten.remainder.Scalar: _remainder,
        aten.searchsorted.Tensor: _places_in_order,
        prims.hypot.default: _hypotenuse,
        prims.prod.default: _product,
        prims.signbit.default: _is_negative,
    }


def _floor_quotient(self: Any, other: Any) -> Any:
    """The quotient of sizes, rounded down; the exporter's own form rounds negative ones up, as in `-(-size // 2)`."""
    if _may_be_negative(self):
        return op.Div(op.Sub(self, op.Mod(self, other)), other)
    return op.Div(self, other)


def _may_be_negative(value: Any) -> bool:
    """Whether a sum of sizes and numbers subtracts a size, as far as the operators before it say."""
    node = None if isinstance(value, int) else value.producer()
    if node is None:
        return False
    numbers = [ir.convenience.get_const_tensor(item) for item in node.inputs]
    match node.op_type:
        case "Neg":
            return True
        case "Sub" if numbers[1] is None:
            return True
        case "Mul" if any(number is not None and (number.numpy() < 0).any() for number in numbers):
            return True
        case "Add" | "Sub" | "Mul":
            return any(map(_may_be_negative, node.inputs))
    return False


def _distances(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """The distances by the norm of power `p` between rows of the last two dimensions."""
    differences = op.Sub(_unsqueeze(x1, -2), _unsqueeze(x2, -3))
    axes = _integers([-1])
    if p == 2:
        return op.ReduceL2(differences, axes, keepdims=0)
    if p == 1:
        return op.ReduceL1(differences, axes, keepdims=0)
    sizes = op.Abs(differences)
    if p == float("inf"):
        return op.ReduceMax(sizes, axes, keepdims=0)
    if p == 0:
        zero = op.CastLike(_integer(0), x1)
        return op.ReduceSum(op.CastLike(op.Not(op.Equal(differences, zero)), x1), axes, keepdims=0)
    power = op.CastLike(op.Constant(value_float=p), x1)
    return op.Pow(op.ReduceSum(op.Pow(sizes, power), axes, keepdims=0), op.Reciprocal(power))


def _running_maximum(self: Any, dim: int) -> Any:
    return _running(self, dim, op.ReduceMin, op.ReduceMax, op.ArgMax)


def _running_minimum(self: Any, dim: int) -> Any:
    return _running(self, dim, op.ReduceMax, op.ReduceMin, op.ArgMin)


def _running(self: Any, dim: int, opposite: Any, reduce: Any, find: Any) -> Any:
    """The largest or smallest of the elements up to each one along `dim`, and the last index at which it stands.

    All pairs of elements are compared. `reduce` is the operator that finds these values, `find` the one that finds
    their indices, and `opposite` the one that finds the other extreme: it takes the place of elements that come later.
    """
    rank = len(self.shape)
    axis = dim % rank
    places = op.Range(_integer(0), _size(self, axis), _integer(1))
    before = op.LessOrEqual(_unsqueeze(places, 0), _unsqueeze(places, 1))
    if rank > axis + 1:
        before = op.Unsqueeze(before, _integers(range(2, rank - axis + 1)))
    # What comes later has the other extreme of all elements, which changes nothing.
    elements = op.Where(before, _unsqueeze(self, axis), opposite(self, keepdims=0))
    indices = find(elements, axis=axis + 1, keepdims=0, select_last_index=1)
    return reduce(elements, _integers([axis + 1]), keepdims=0), indices


def _median_of_all(self: Any) -> Any:
    return _median(op.Reshape(self, _integers([-1])), 0)[0]


def _median(self: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower median, which PyTorch returns, and its place."""
    return _element_in_order(self, op.Div(op.Add(_size(self, dim), _integer(1)), _integer(2)), dim, keepdim)


def _element_in_order(self: Any, k: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest element, counted from 1, and its place."""
    count = _integers([k]) if isinstance(k, int) else _unsqueeze(k, 0)
    values, indices = op.TopK(self, count, axis=dim, largest=0, sorted=1)
    last = _integers([-1]) if keepdim else _integer(-1)
    return op.Gather(values, last, axis=dim), op.Gather(indices, last, axis=dim)


def _places_in_order(
    sorted_sequence: Any,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """The number of elements of a sorted sequence that are less than each value, or not greater."""
    order = sorted_sequence if sorter is None else op.GatherElements(sorted_sequence, sorter, axis=-1)
    if len(order.shape) > 1:
        order = _unsqueeze(order, -2)
    values = op.CastLike(_unsqueeze(self, -1), order)
    is_before = op.LessOrEqual(order, values) if right or side == "right" else op.Less(order, values)
    # 6 and 7 are ONNX's numbers of int32 and int64.
    return op.ReduceSum(op.Cast(is_before, to=6 if out_int32 else 7), _integers([-1]), keepdims=0)


def _remainder(self: Any, other: Any) -> Any:
    """The remainder with the divisor's sign; the exporter's own form takes no size for the divisor."""
    divisor = op.CastLike(other, self) if not isinstance(other, int | float) else other
    if self.dtype.is_floating_point():
        return op.Sub(self, op.Mul(op.Floor(op.Div(self, divisor)), divisor))
    return op.Mod(self, divisor)


def _is_negative(a: Any) -> Any:
    return op.Less(a, op.CastLike(_integer(0), a))


def _hypotenuse(self: Any, other: Any) -> Any:
    return op.Sqrt(op.Add(op.Mul(self, self), op.Mul(other, other)))


def _product(inp: Any, dims: Sequence[int] | None) -> Any:
    axes = None if dims is None else _integers(dims)
    return op.ReduceProd(inp, axes, keepdims=0)


def _size(tensor: Any, axis: int) -> Any:
    """The size of a dimension, without dimensions."""
    return op.Gather(op.Shape(tensor), _integer(axis))


def _unsqueeze(tensor: Any, axis: int) -> Any:
    return op.Unsqueeze(tensor, _integers([axis]))


def _integer(value: int) -> Any:
    return op.Constant(value_int=value)


def _integers(values: Sequence[int]) -> Any:
    return op.Constant(value_ints=list(values))
