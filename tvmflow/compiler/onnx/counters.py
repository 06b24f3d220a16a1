"""The number of iterations of a Loop that ends by a counter, as TensorFlow's loops do.

Such a Loop has no number of iterations, or a very large one, and each iteration compares a counter with a bound. The
counter is the number of the iteration, or a carried value to which each iteration adds one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.outlining import Importer, Value, scalar
from tvmflow.compiler.onnx.sizes import NotEvaluatedError, Quotient, SizeEvaluator, materialise
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of, is_static
from tvmflow.onnx_model.external_data import array_of
from tvmflow.onnx_model.graph import source_of, writers_of

_UNCHANGED = ("Identity", "Cast", "CastLike")
# The operators that compare a counter with a bound: whether the counter comes second, and whether it may be the bound.
_COMPARISONS = {
    "Less": (False, False),
    "LessOrEqual": (False, True),
    "Greater": (True, False),
    "GreaterOrEqual": (True, True),
}


@dataclass(frozen=True)
class _Counter:
    """A number that is `offset` plus `initial`, where that is not None, in the first iteration, and grows by one."""

    offset: int
    initial: Any = None


class _OtherConditionError(Exception):
    """A condition that compares something else than a counter with a bound."""


def count_iterations(
    importer: Importer, graph: onnx.GraphProto, initial: Sequence[Value], constant: set[int], limit: Any
) -> Any:
    """Return how many iterations a Loop runs that runs at least one; None where no counter and no limit decides that.

    `graph` is the Loop's body, `initial` are the values that the Loop carries, and `constant` the places of those that
    no iteration changes. The result and `limit` are sizes, or int64 tensors without dimensions. `limit` is the most
    iterations; None without a limit.
    """
    condition = _Condition(importer, graph, initial, constant)
    try:
        further = condition.further_iterations(graph.output[0].name)
    except _OtherConditionError:
        return None
    count = limit
    for number in further:
        # The condition is evaluated after an iteration.
        own = add(importer, greatest(importer, number, 0), 1)
        count = own if count is None else least(importer, count, own)
    return count


class _Condition:
    """The condition of a Loop's body, and what its counters and bounds are."""

    def __init__(
        self, importer: Importer, graph: onnx.GraphProto, initial: Sequence[Value], constant: set[int]
    ) -> None:
        self._importer = importer
        self._writers = writers_of(graph)
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._index, self._condition, *parameters = (item.name for item in graph.input)
        self._carried = {name: place for place, name in enumerate(parameters)}
        self._results = [item.name for item in graph.output[1:]]
        self._initial, self._constant = initial, constant

    def further_iterations(self, name: str) -> list[Any]:
        """Return how many iterations follow the first by each comparison of a condition: all must hold."""
        name = source_of(self._writers, name, _UNCHANGED)
        constant, node = self._constant_array(name), self._writers.get(name)
        # A condition that is passed on is true, as it was before the first iteration.
        if name == self._condition or (constant is not None and constant.all()):
            return []
        if node is not None and node.op_type == "And":
            return [number for item in node.input for number in self.further_iterations(item)]
        if node is None or node.op_type not in _COMPARISONS:
            raise _OtherConditionError
        comes_second, may_be_equal = _COMPARISONS[node.op_type]
        names = list(node.input)[:: -1 if comes_second else 1]
        counter, bound = self._counter(names[0]), self._number(names[1])
        number = add(self._importer, bound, int(may_be_equal) - counter.offset)
        return [number if counter.initial is None else subtract(self._importer, number, counter.initial)]

    def _counter(self, name: str) -> _Counter:
        name = source_of(self._writers, name, _UNCHANGED)
        if name == self._index:
            return _Counter(0)
        if name in self._carried:
            place = self._carried[name]
            grown = self._increment(source_of(self._writers, self._results[place], _UNCHANGED))
            if grown is None or grown != (name, 1):
                raise _OtherConditionError
            return _Counter(0, self._of(self._initial[place]))
        increment = self._increment(name)
        if increment is None:
            raise _OtherConditionError
        counter = self._counter(increment[0])
        return _Counter(counter.offset + increment[1], counter.initial)

    def _increment(self, name: str) -> tuple[str, int] | None:
        """The value to which an Add adds a whole number, and that number; None for other values."""
        node = self._writers.get(name)
        if node is None or node.op_type != "Add":
            return None
        for one, other in (node.input, node.input[::-1]):
            try:
                number = self._number(other)
            except _OtherConditionError:
                continue
            if isinstance(number, int):
                return source_of(self._writers, one, _UNCHANGED), number
        return None

    def _number(self, name: str) -> Any:
        """A number that is the same in all iterations, as a size or as a tensor."""
        name = source_of(self._writers, name, _UNCHANGED)
        if name in self._carried and self._carried[name] in self._constant:
            return self._of(self._initial[self._carried[name]])
        constant = self._constant_array(name)
        if constant is not None:
            return _whole(constant)
        if not self._is_around(name):
            raise _OtherConditionError
        return self._of(self._importer.value(name))

    def _is_around(self, name: str) -> bool:
        """Whether a value is computed around the loop."""
        is_inner = name in self._writers or name in self._carried or name in (self._index, self._condition)
        return not is_inner and self._importer.has_value(name)

    def _constant_array(self, name: str) -> Array | None:
        """A constant of the body or around it; None for other values."""
        if name in self._weights:
            return array_of(self._weights[name])
        node = self._writers.get(name)
        if self._is_around(name):
            return self._importer.elements(self._importer.value(name))
        return None if node is None else array_of_constant(node)

    def _of(self, value: Value) -> Any:
        """A value around the Loop as a size or as a tensor."""
        elements = self._importer.elements(value)
        if elements is not None:
            return _whole(elements)
        if value.sizes is not None:
            (item,) = value.sizes.elements.reshape(-1).tolist()
            if isinstance(item, Quotient):
                item = item.size if item.factor == 1 else None
            if item is not None:
                return item
        tensor = scalar(self._importer, value)
        if not dtype_of(tensor).startswith(("int", "uint")):
            raise _OtherConditionError
        return self._importer.bb.emit(relax.op.astype(tensor, "int64"))


def array_of_constant(node: onnx.NodeProto) -> Array | None:
    """Return the value of a Constant; None for other nodes."""
    if node.op_type != "Constant":
        return None
    (value,) = (onnx.helper.get_attribute_value(item) for item in node.attribute)
    return array_of(value) if isinstance(value, onnx.TensorProto) else np.array(value)


def _whole(array: Array) -> int:
    """The only element of an array, a whole number."""
    if array.size != 1:
        raise _OtherConditionError
    (number,) = array.reshape(-1).tolist()
    if isinstance(number, bool) or not math.isfinite(number) or number % 1:
        raise _OtherConditionError
    return int(number)


# -- Numbers of iterations: sizes, or int64 tensors without dimensions -------------------------------------------------


def is_size(number: Any) -> bool:
    """Return whether a number is a size rather than a tensor."""
    return is_static(number) or bool(tvm.ir.is_prim_expr(number))


def as_tensor(importer: Importer, number: Any) -> relax.Expr:
    """Return a size, or a tensor that holds one, as an int64 tensor without dimensions."""
    if is_static(number):
        return const(np.array(int(number), "int64"))
    if tvm.ir.is_prim_expr(number):
        return materialise(importer.bb, importer.evaluator.shape([number]), ())
    return number if dims_of(number) == [] else importer.bb.emit(relax.op.reshape(number, ()))


def add(importer: Importer, a: Any, b: Any) -> Any:
    """Return the sum of two numbers."""
    return _combine(importer, a, b, SizeEvaluator.add, relax.op.add)


def subtract(importer: Importer, a: Any, b: Any) -> Any:
    """Return the difference of two numbers."""
    return _combine(importer, a, b, lambda evaluator, x, y: evaluator.add(x, evaluator.negate(y)), relax.op.subtract)


def least(importer: Importer, a: Any, b: Any) -> Any:
    """Return the smaller of two numbers."""
    return _combine(importer, a, b, SizeEvaluator.least, relax.op.minimum)


def greatest(importer: Importer, a: Any, b: Any) -> Any:
    """Return the larger of two numbers."""
    return _combine(importer, a, b, SizeEvaluator.greatest, relax.op.maximum)


def _combine(
    importer: Importer,
    a: Any,
    b: Any,
    of_sizes: Callable[[SizeEvaluator, Any, Any], Any],
    of_tensors: Callable[[relax.Expr, relax.Expr], relax.Expr],
) -> Any:
    if is_size(a) and is_size(b):
        try:
            return of_sizes(importer.evaluator, a, b)
        except NotEvaluatedError:
            pass
    return importer.bb.emit(of_tensors(as_tensor(importer, a), as_tensor(importer, b)))
