"""Loops over bags of rows, as PyTorch exports EmbeddingBag: each iteration reduces some neighbours among the rows.

PyTorch has two exporters. One writes a loop that slices the indices of a bag, gathers their rows and reduces these. The
other gathers all rows before the loop, which slices them, handles empty bags and the last one apart, and adds each
result to a sequence. Both become one operator, `tvmflow.bags`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.counters import array_of_constant
from tvmflow.compiler.onnx.outlining import Importer, Value
from tvmflow.compiler.onnx.values import dims_of, dtype_of
from tvmflow.compiler.operators.bags import Bags, Mode, bags
from tvmflow.compiler.operators.indices import checked
from tvmflow.onnx_model.external_data import array_of
from tvmflow.onnx_model.graph import graphs_of, nodes_of, source_of, writers_of

_MODES: dict[str, Mode] = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max"}
# The operators that change nothing but a type or dimensions of size one.
_SAME = ("Identity",)
_SAME_NUMBER = ("Identity", "Cast", "CastLike", "Reshape", "Unsqueeze", "Squeeze")
# The dimensions of a table, and of a vector.
_TABLE, _VECTOR = 2, 1


@dataclass(frozen=True)
class _Element:
    """The element of a vector around the loop whose place is the number of the iteration and `shift`."""

    vector: str
    shift: int


@dataclass(frozen=True)
class _Rows:
    """The rows of a bag. Their `end` is a name where it is the number of all rows, as in the last bag."""

    table: str
    begin: _Element
    end: _Element | str
    indices: str | None = None
    weights: str | None = None


@dataclass(frozen=True)
class _Result:
    """What an iteration makes of the rows of a bag.

    `keeps` says whether it has a dimension in their stead. `is_zero` says that it is zero for a bag without rows, and
    `is_of_last` that only the last iteration computes it in this way.
    """

    mode: Mode
    rows: _Rows
    keeps: bool
    is_zero: bool = False
    is_of_last: bool = False


class BagLoop:
    """A Loop whose iterations each may reduce a bag of rows.

    `graph` is its body and `carried` are the values that it carries. `counted` is the number of its iterations, a size,
    where it has a first one. The value `starts` says whether it has; it is empty where that is certain.
    """

    def __init__(
        self, importer: Importer, graph: onnx.GraphProto, carried: Sequence[Value], counted: Any, starts: str
    ) -> None:
        self._importer, self._counted, self._starts = importer, counted, starts
        self._writers = {name: node for node in nodes_of(graph) for name in node.output}
        names = Counter(name for node in nodes_of(graph) for name in node.output if name)
        names.update(tensor.name for inner in graphs_of(graph) for tensor in inner.initializer)
        # Branches may each use a name that the other one uses too.
        self._is_clear = max(names.values(), default=0) <= 1
        self._around = writers_of(importer.graph)
        self._weights = {tensor.name: tensor for inner in graphs_of(graph) for tensor in inner.initializer}
        self._inputs = [item.name for item in graph.input]
        self._counters = {self._inputs[0]}
        for place, value in enumerate(carried):
            name, elements = self._inputs[2 + place], importer.elements(value)
            is_zero = elements is not None and elements.size == 1 and elements.dtype.kind == "i" and not elements.any()
            if is_zero and self._sum(graph.output[1 + place].name) == (name, 1):
                self._counters.add(name)

    def read(self, row: str, keeps: bool) -> relax.Expr | None:
        """Return the results of all iterations, of shape [trips, width]; None where they are no bags.

        `row` is the value of the body that is an iteration's result. `keeps` says whether it has a dimension of size
        one before the others.
        """
        result = self._result(row) if self._is_clear else None
        if result is None or result.is_of_last or result.keeps != keeps:
            return None
        rows, importer = result.rows, self._importer
        end = rows.end
        if isinstance(end, str):
            return None
        trips = self._length(end)
        if not self._is_count(trips) or not self._runs_if_any(trips) or not self._has_elements(rows.begin, trips):
            return None
        table, begins, ends = (self._tensor(name) for name in (rows.table, rows.begin.vector, end.vector))
        indices, weights = (None if name is None else self._tensor(name) for name in (rows.indices, rows.weights))
        dims = dims_of(table) or [None]
        if dtype_of(table) != "float32" or not isinstance(dims[-1], int) or (weights is not None and indices is None):
            return None
        if weights is not None and (dtype_of(weights) != "float32" or not self._are_equal(weights, indices)):
            return None
        if indices is not None:
            # All are checked: bags share them out without a gap.
            indices = importer.bb.emit(checked(indices, [dims[0]], is_signed=True))
        form = Bags(
            table,
            begins,
            ends,
            trips,
            result.mode,
            indices,
            weights,
            first=rows.begin.shift,
            last=end.shift,
            is_zero=result.is_zero,
        )
        return importer.bb.emit(bags(form))

    # -- Results of iterations -----------------------------------------------------------------------------------------

    def _result(self, name: str) -> _Result | None:
        node = self._writers.get(source_of(self._writers, name))
        if node is None:
            return None
        if node.op_type in _MODES:
            rows, attributes = self._rows(node.input[0]), _attributes(node)
            axes = attributes.get("axes") if len(node.input) == 1 else self._numbers(node.input[1])
            is_along_rows = axes is not None and list(axes) in ([0], [-_TABLE])
            if rows is None or not is_along_rows:
                return None
            return _Result(_MODES[node.op_type], rows, bool(attributes.get("keepdims", 1)))
        if node.op_type == "If":
            return self._choice(node)
        return self._mean_of_last(node) if node.op_type == "Div" else None

    def _choice(self, node: onnx.NodeProto) -> _Result | None:
        """The result of an If that handles empty bags, or the last one, apart."""
        condition = self._writers.get(source_of(self._writers, node.input[0]))
        first, second = map(self._result, _results(node))
        if condition is None or second is None:
            return None
        if condition.op_type == "Equal" and set(map(self._element, condition.input)) == {
            second.rows.begin,
            second.rows.end,
        }:
            values = self._constant(_results(node)[0])
            return replace(second, is_zero=True) if values is not None and not values.any() else None
        if first is None:
            return None
        if self._is_last_iteration(node.input[0]):
            rows = self._with_end(first.rows, second.rows.end)
            return second if replace(first, rows=rows, is_of_last=False) == second else None
        # The number of rows of a bag that is not empty is greater than zero.
        is_count = (
            first.is_of_last
            and condition.op_type == "Greater"
            and self._counts_last(condition.input[0], second.rows)
            and self._numbers(condition.input[1]) == [0]
        )
        return first if is_count and replace(first, mode="sum", is_of_last=False) == second else None

    def _mean_of_last(self, node: onnx.NodeProto) -> _Result | None:
        """The result of a Div of a sum by the number of all rows less the first of the bag."""
        total = self._result(node.input[0])
        if total is None or total.mode != "sum" or not self._counts_last(node.input[1], total.rows):
            return None
        return replace(total, mode="mean", is_of_last=True)

    def _counts_last(self, name: str, rows: _Rows) -> bool:
        """Whether a value is the number of rows of the last bag: that of all rows less the first of the bag."""
        node = self._writers.get(source_of(self._writers, name, _SAME_NUMBER))
        if node is None or node.op_type != "Sub" or self._element(node.input[1]) != rows.begin:
            return False
        return self._is_end(node.input[0], rows.end)

    def _with_end(self, rows: _Rows, end: _Element | str) -> _Rows:
        """Rows of the last bag, with their end in another form where that is the same."""
        is_same = isinstance(rows.end, str) and self._is_end(rows.end, end)
        return replace(rows, end=end) if is_same else rows

    # -- Rows, elements and numbers ------------------------------------------------------------------------------------

    def _rows(self, name: str) -> _Rows | None:
        node = self._writers.get(source_of(self._writers, name))
        if node is None:
            return None
        if node.op_type == "Slice":
            return self._slice(node, _TABLE)
        if node.op_type == "Gather" and _attributes(node).get("axis", 0) == 0 and self._has_rank(node.input[0], _TABLE):
            indices = self._writers.get(source_of(self._writers, node.input[1]))
            bag = self._slice(indices, _VECTOR)
            return None if bag is None else replace(bag, table=node.input[0], indices=bag.table)
        if node.op_type == "If" and self._is_last_iteration(node.input[0]):
            first, second = map(self._rows, _results(node))
            return second if first and second and self._with_end(first, second.end) == second else None
        if node.op_type == "Mul":
            return self._weighted(*node.input) or self._weighted(*reversed(node.input))
        return None

    def _weighted(self, data: str, column: str) -> _Rows | None:
        """The product of rows and a column of their weights."""
        rows, node = self._rows(data), self._writers.get(source_of(self._writers, column))
        if rows is None or rows.weights is not None or node is None or node.op_type != "Unsqueeze":
            return None
        axes = self._numbers(node.input[1]) if len(node.input) > 1 else _attributes(node).get("axes")
        weights = self._slice(self._writers.get(source_of(self._writers, node.input[0])), _VECTOR)
        if weights is None or axes is None or list(axes) not in ([1], [-1]):
            return None
        return replace(rows, weights=weights.table) if (weights.begin, weights.end) == (rows.begin, rows.end) else None

    def _slice(self, node: onnx.NodeProto | None, rank: int) -> _Rows | None:
        """The neighbours that a Slice takes out of a tensor around the loop, which is called their table."""
        if node is None or node.op_type != "Slice" or not self._has_rank(node.input[0], rank):
            return None
        others = [self._numbers(name) if name else None for name in node.input[3:]]
        is_along_rows = all(
            list(numbers) == [usual] if numbers is not None else not name
            for name, numbers, usual in zip(node.input[3:], others, (0, 1), strict=False)
        )
        begin, end = self._element(node.input[1]), self._element(node.input[2]) or node.input[2]
        return _Rows(node.input[0], begin, end) if begin is not None and is_along_rows else None

    def _element(self, name: str) -> _Element | None:
        node = self._writers.get(source_of(self._writers, name, _SAME_NUMBER))
        if node is None or node.op_type not in ("Gather", "Slice") or not self._has_rank(node.input[0], _VECTOR):
            return None
        shift = self._counter(node.input[1])
        if shift is None or shift < 0:
            return None
        is_one = node.op_type == "Gather" or (len(node.input) == 3 and self._counter(node.input[2]) == shift + 1)
        return _Element(node.input[0], shift) if is_one else None

    def _counter(self, name: str) -> int | None:
        """What a value has more than the number of the iteration; None where it is not such a value."""
        name = source_of(self._writers, name, _SAME_NUMBER)
        if name in self._counters:
            return 0
        parts = self._sum(name)
        return parts[1] if parts is not None and parts[0] in self._counters else None

    def _sum(self, name: str) -> tuple[str, int] | None:
        """The value to which an Add adds a whole number, and that number."""
        node = self._writers.get(source_of(self._writers, name, _SAME_NUMBER))
        if node is None or node.op_type != "Add":
            return None
        for one, other in (node.input, reversed(node.input)):
            numbers = self._numbers(other)
            if numbers is not None and len(numbers) == 1:
                return source_of(self._writers, one, _SAME_NUMBER), numbers[0]
        return None

    def _numbers(self, name: str) -> list[int] | None:
        """Whole numbers that are known at import; None for others."""
        values = self._constant(source_of(self._writers, name, _SAME_NUMBER))
        return None if values is None or values.dtype.kind not in "iu" else [int(item) for item in values.reshape(-1)]

    def _constant(self, name: str) -> Array | None:
        name = source_of(self._writers, name)
        if name in self._weights:
            return array_of(self._weights[name])
        node = self._writers.get(name)
        if node is not None:
            return array_of_constant(node)
        return self._importer.elements(self._importer.value(name)) if self._is_around(name) else None

    def _is_around(self, name: str) -> bool:
        """Whether a value is computed around the loop."""
        is_inner = name in self._writers or name in self._inputs or name in self._weights
        return not is_inner and self._importer.has_value(name)

    def _tensor(self, name: str) -> relax.Expr:
        return self._importer.tensor(self._importer.value(name))

    def _has_rank(self, name: str, rank: int) -> bool:
        """Whether a value is a tensor around the loop, of known dimensions."""
        return self._is_around(name) and len(dims_of(self._tensor(name)) or []) == rank

    # -- Sizes ---------------------------------------------------------------------------------------------------------

    def _length(self, element: _Element) -> Any:
        """How many iterations have an element."""
        (length,) = dims_of(self._tensor(element.vector)) or [0]
        return self._importer.evaluator.add(length, -element.shift)

    def _has_elements(self, element: _Element, trips: Any) -> bool:
        """Whether each of so many iterations has an element."""
        return bool(self._importer.evaluator.holds(self._length(element) >= trips))

    def _is_count(self, size: Any) -> bool:
        """Whether a size is the number of iterations, where that is not zero."""
        return self._same(size, self._counted) or self._same(self._importer.evaluator.greatest(size, 1), self._counted)

    def _runs_if_any(self, trips: Any) -> bool:
        """Whether the loop has a first iteration where `trips` is not zero, and no other loop."""
        if not self._starts or self._importer.evaluator.holds(trips >= 1):
            return True
        node = self._around.get(source_of(self._around, self._starts))
        if node is None or node.op_type != "Less" or self._numbers(node.input[0]) != [0]:
            return False
        size = self._size(node.input[1])
        return size is not None and self._same(size, trips)

    def _are_equal(self, one: relax.Expr, other: relax.Expr | None) -> bool:
        """Whether two vectors have the same length."""
        lengths = [(dims_of(item) or [None])[0] for item in (one, other) if item is not None]
        return self._same(*lengths)

    def _same(self, one: Any, other: Any) -> bool:
        evaluator = self._importer.evaluator
        return bool(evaluator.are_equal(evaluator.expression(one), evaluator.expression(other)))

    def _is_last_iteration(self, name: str) -> bool:
        """Whether a condition compares the number of an iteration with that of the last, the number of all less one."""
        condition = self._writers.get(source_of(self._writers, name))
        if condition is None or condition.op_type != "Equal" or self._counter(condition.input[0]) != 0:
            return False
        node = self._writers.get(source_of(self._writers, condition.input[1], _SAME_NUMBER))
        if node is None or node.op_type != "Sub" or self._numbers(node.input[1]) != [1]:
            return False
        size = self._size(node.input[0])
        return size is not None and self._is_count(size)

    def _is_end(self, name: str, end: _Element | str) -> bool:
        """Whether a value is the end of the last bag, because a Concat has put it at the end of the vector of ends."""
        if isinstance(end, str):
            return name == end
        writer, size = self._around.get(source_of(self._around, end.vector)), self._size(name)
        if writer is None or writer.op_type != "Concat" or size is None:
            return False
        last = self._size(writer.input[-1])
        return last is not None and self._same(last, size) and self._is_count(self._length(end))

    def _size(self, name: str) -> Any:
        """A value that is a size, as one; None for other values."""
        name = source_of(self._writers, name, _SAME_NUMBER)
        node = self._writers.get(name)
        if node is not None and node.op_type == "Shape" and self._is_around(node.input[0]):
            dims = dims_of(self._tensor(node.input[0])) or []
            attributes = _attributes(node)
            taken = dims[attributes.get("start", 0) : attributes.get("end")]
            return taken[0] if len(taken) == 1 else None
        if not self._is_around(name):
            return None
        value = self._importer.value(name)
        elements = self._importer.elements(value) if value.sizes is None else value.sizes.elements
        if elements is None or elements.size != 1:
            return None
        (size,) = elements.reshape(-1).tolist()
        return size if isinstance(size, int) or hasattr(size, "ty") else None


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}


def _results(node: onnx.NodeProto) -> list[str]:
    """The names of the results of an If's branches."""
    attributes = _attributes(node)
    return [attributes[branch].output[0].name for branch in ("then_branch", "else_branch")]
