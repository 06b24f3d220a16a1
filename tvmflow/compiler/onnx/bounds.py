"""What is known, at import, of the integers of a tensor that a model computes: the least and the largest of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import tvm
from tvm import relax, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.node import Node
from tvmflow.compiler.onnx.values import dims_of, dtype_of
from tvmflow.compiler.operators.common import called_operator

# Operators whose result has the integers of their operand: all of them, or some.
_KEEPING = {
    *("relax.broadcast_to", "relax.expand_dims", "relax.permute_dims", "relax.reshape", "relax.squeeze", "relax.tile"),
}
_SELECTING = {"relax.flip", "relax.gather_elements", "relax.gather_nd", "relax.strided_slice", "relax.take"}
# Operators whose result is places along an axis of their operand.
_PLACES = {"relax.argmax", "relax.argmin", "relax.argsort", "relax.topk"}
# The most tensors that are read for the bounds of one: a chain of operators can be longer than Python's stack.
_MOST_TENSORS = 64


@dataclass(frozen=True)
class Bounds:
    """Integers are from `least` to `largest`, numbers or symbolic sizes; None where nothing is known.

    With `are_taken`, the largest is one of them: they are those of a Range, perhaps moved, or sums of such.
    """

    least: Any | None = None
    largest: Any | None = None
    are_taken: bool = False


_UNKNOWN = Bounds()


def bounds_of(node: Node, numbers: relax.Expr) -> Bounds:
    """Return the bounds of the integers of a tensor."""
    return _Finder(node).bounds(numbers)


class _Finder:
    def __init__(self, node: Node) -> None:
        self._node, self._evaluator = node, node.evaluator
        self._known: dict[relax.Var, Bounds] = {}

    def bounds(self, numbers: relax.Expr) -> Bounds:
        """Return the bounds of a tensor; those of a variable are computed once."""
        if not isinstance(numbers, relax.Var):
            return self._of_expression(numbers)
        if numbers not in self._known and len(self._known) < _MOST_TENSORS:
            self._known[numbers] = _UNKNOWN
            source = self._node.builder.lookup_binding(numbers)
            self._known[numbers] = _UNKNOWN if source is None else self._of_expression(source)
        return self._known.get(numbers, _UNKNOWN)

    def _of_expression(self, source: relax.Expr) -> Bounds:
        if isinstance(source, relax.Var):
            return self.bounds(source)
        if isinstance(source, tvm.ir.GenericConst):
            return _of_constant(source.value.numpy())
        if isinstance(source, relax.TupleGetItem):
            pair = source.tuple_value
            pair = self._node.builder.lookup_binding(pair) if isinstance(pair, relax.Var) else pair
            is_places = called_operator(pair) == "relax.topk" and source.index == 1
            return self._of_places(pair) if is_places else _UNKNOWN
        return self._of_call(source) if isinstance(source, relax.Call) and len(source.args) else _UNKNOWN

    def _of_call(self, call: relax.Call) -> Bounds:
        name, (first, *others) = called_operator(call), call.args
        if name == "relax.arange":
            return self._of_range(first, *others)
        if name in _KEEPING:
            return self.bounds(first)
        if name == "relax.astype":
            return self._of_cast(first)
        if name == "relax.nn.relu":
            return self._larger(self.bounds(first), Bounds(0, 0))
        if name in _SELECTING:
            return self._joined([first])
        if name == "relax.concat":
            return self._joined(first)
        if name == "relax.where":
            return self._joined(others)
        if name in _PLACES:
            return self._of_places(call)
        if name == "tvmflow.indices":
            (size, *rest) = others[0].values
            return _UNKNOWN if rest else Bounds(0, self._evaluator.add(size, -1))
        if name in _ARITHMETIC:
            return _ARITHMETIC[name](self, self.bounds(first), self.bounds(others[0]))
        return _UNKNOWN

    def _of_range(self, start: Any, stop: Any, step: Any) -> Bounds:
        if not isinstance(step, tirx.IntImm) or int(step) < 1:
            return _UNKNOWN
        last = self._evaluator.simplify(start + (stop - start - 1) // step * step)
        return Bounds(self._evaluator.simplify(start), last, are_taken=True)

    def _of_cast(self, operand: relax.Expr) -> Bounds:
        """A cast to integers; of other numbers nothing is known."""
        if dtype_of(operand) == "bool":
            return Bounds(0, 1)
        return self.bounds(operand) if dtype_of(operand) in ("int32", "int64") else _UNKNOWN

    def _of_places(self, call: relax.Call) -> Bounds:
        """Places along an axis of the operand, or in all of it."""
        dims = dims_of(call.args[0])
        if not dims:
            return _UNKNOWN
        axis = call.attrs.axis
        size = self._evaluator.quotient(dims, []) if axis is None else dims[int(axis)]
        return Bounds(0, self._evaluator.add(size, -1))

    def _joined(self, parts: Iterable[relax.Expr]) -> Bounds:
        """The bounds of elements of several tensors, of which some may be left out."""
        each = [self.bounds(part) for part in parts]
        return Bounds(
            self._chosen([item.least for item in each], self._evaluator.least),
            self._chosen([item.largest for item in each], self._evaluator.greatest),
        )

    def _sum(self, one: Bounds, other: Bounds) -> Bounds:
        least = self._chosen([one.least, other.least], self._evaluator.add)
        largest = self._chosen([one.largest, other.largest], self._evaluator.add)
        return Bounds(least, largest, one.are_taken and other.are_taken)

    def _smaller(self, one: Bounds, other: Bounds) -> Bounds:
        known = [item for item in (one.largest, other.largest) if item is not None]
        largest = reduce(self._evaluator.least, known) if known else None
        return Bounds(self._chosen([one.least, other.least], self._evaluator.least), largest)

    def _larger(self, one: Bounds, other: Bounds) -> Bounds:
        known = [item for item in (one.least, other.least) if item is not None]
        least = reduce(self._evaluator.greatest, known) if known else None
        return Bounds(least, self._chosen([one.largest, other.largest], self._evaluator.greatest))

    @staticmethod
    def _chosen(values: Sequence[Any], choose: Callable[[Any, Any], Any]) -> Any | None:
        """What `choose` makes of values; None where one of them is unknown."""
        return None if any(value is None for value in values) else reduce(choose, values)


_ARITHMETIC: dict[str, Callable[[_Finder, Bounds, Bounds], Bounds]] = {
    "relax.add": _Finder._sum,
    "relax.minimum": _Finder._smaller,
    "relax.maximum": _Finder._larger,
}


def _of_constant(value: Array) -> Bounds:
    if not value.size or value.dtype.kind not in "biu":
        return _UNKNOWN
    return Bounds(int(value.min()), int(value.max()), are_taken=True)
