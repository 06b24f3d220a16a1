"""NonMaxSuppression: of boxes that overlap, the best one stays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.onnx.node import FreeSizeError, Node
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of
from tvmflow.compiler.operators.common import registers

# The types of the numbers that steer the suppression.
_DTYPES = {"limit": "int32", "overlap": "float32", "least": "float32"}
# The boxes of which one look tells whether any counts.
_GROUP = 64


def convert_non_max_suppression(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's NonMaxSuppression: the image, the class and the place of each box it keeps.

    Limit and thresholds may be constants or computed. Returns None, which leaves the node to TVM's converter, where it
    has no limit, so that it keeps none. Raises FreeSizeError for boxes or scores of unknown shape.
    """
    boxes, scores = node.inputs[:2]
    if dims_of(boxes) is None or dims_of(scores) is None:
        raise FreeSizeError("boxes or scores of unknown shape")
    if node.input(2) is None:
        return None
    if node.attrs.get("center_point_box", 0):
        centre, extent = (node.emit(relax.op.strided_slice(boxes, [2], [first], [first + 2])) for first in (0, 2))
        half = node.emit(relax.op.multiply(extent, const(0.5, dtype_of(boxes))))
        corners = [node.emit(relax.op.subtract(centre, half)), node.emit(relax.op.add(centre, half))]
        boxes = node.emit(relax.op.concat(corners, 2))
    most = np.iinfo("int32").max
    limit: Any = node.constant(2)
    if limit is None:
        limit = node.emit(relax.op.astype(node.emit(relax.op.minimum(node.integers(2), const(most, "int64"))), "int32"))
    else:
        limit = int(min(limit.reshape(-1)[0], most))
    # Without a least score all boxes count.
    overlap, least = (_threshold(node, place, default) for place, default in ((3, 0.0), (4, None)))
    numbers = {"limit": limit, "overlap": overlap, "least": least}
    computed = {
        name: node.emit(relax.op.reshape(value, (1,)))
        for name, value in numbers.items()
        if isinstance(value, relax.Expr)
    }

    def select(boxes: te.Tensor, scores: te.Tensor, *tensors: te.Tensor) -> list[te.Tensor]:
        return _select(boxes, scores, {**numbers, **dict(zip(computed, tensors, strict=True))})

    result = node.emit(node.builder.call_te(select, boxes, scores, *computed.values(), primfunc_name_hint="suppress"))
    selected, kept = (node.emit(relax.TupleGetItem(result, place)) for place in (0, 1))
    (total,) = node.bind(node.emit(relax.op.sum(kept, keepdims=True)))

    def rows(selected: te.Tensor, kept: te.Tensor, scores: te.Tensor) -> te.Tensor:
        return _rows(selected, kept, scores.shape[1], total)

    return node.builder.call_te(rows, selected, kept, scores, primfunc_name_hint="kept_rows")


def _threshold(node: Node, position: int, default: float | None) -> Any:
    """The operand at `position`: a number, where it is constant or missing, or else the operand itself."""
    if node.input(position) is None:
        return default
    constant = node.constant(position)
    return node.inputs[position] if constant is None else float(constant.reshape(-1)[0])


def _select(boxes: te.Tensor, scores: te.Tensor, numbers: Mapping[str, Any]) -> list[te.Tensor]:
    """The boxes that each class of each image keeps, the best first, and how many these are.

    Each of `numbers` is a number, a tensor of one, or None for what has no bound.
    """
    batch, classes, count = scores.shape
    lines = batch * classes
    limit = numbers["limit"]
    width = count if isinstance(limit, te.Tensor) else te.min(count, tirx.const(max(limit, 1), "int64"))
    tensors = [value for value in numbers.values() if isinstance(value, te.Tensor)]

    def write(inputs: Any, outputs: Any) -> Any:
        with IRBuilder() as builder:
            operands = map(T.buffer_proxy, inputs[2:])
            values = {
                name: next(operands)[0] if isinstance(value, te.Tensor) else _constant(value, _DTYPES[name])
                for name, value in numbers.items()
            }
            with T.parallel(0, lines) as line:
                _Suppression(line, *inputs[:2], *outputs).write(**values)
            return builder.get()

    shapes, dtypes = [(lines, width), (lines,), (lines, count)], ["int32", "int64", "int32"]
    buffers = [
        tirx.decl_buffer(shape, dtype, name)
        for shape, dtype, name in zip(shapes, dtypes, ("selected", "kept", "heap"), strict=True)
    ]
    operands = [boxes, scores, *tensors]
    return list(te.extern(shapes, operands, write, out_buffers=buffers, dtype=dtypes, name="suppress")[:2])


class _Suppression:
    """Writes the suppression of the boxes of one class of one image, a `line` of scores.

    The places of boxes whose score is high enough are a heap, of which the best box comes first, and of equal ones the
    first. So a detector's thousands of boxes, of which few are above the least score or kept, are never sorted.
    """

    def __init__(self, line: Any, boxes: Any, scores: Any, selected: Any, kept: Any, heap: Any) -> None:
        classes = scores.shape[1]
        self._line, self._count = line, scores.shape[2]
        self._image, self._class = tirx.floordiv(line, classes), tirx.floormod(line, classes)
        self._boxes, self._scores = T.buffer_proxy(boxes), T.buffer_proxy(scores)
        self._selected, self._kept, self._heap = map(T.buffer_proxy, (selected, kept, heap))
        # The boxes in the heap, those that stay, the best box, and the place in the heap and a place below it.
        self._left, self._stay, self._best, self._hole, self._below, self._other = (_variable() for _ in range(6))
        self._is_over = _variable()

    def write(self, limit: Any, overlap: Any, least: Any) -> None:
        """Keep at most `limit` boxes, of which no two overlap by more than `overlap`.

        They have scores above `least`; None takes boxes of all scores.
        """
        heap, line, left, stay = self._heap, self._line, self._left, self._stay
        _set(left, 0)

        def counts(box: Any) -> Any:
            # Without a least score boxes whose score is minus infinity or no number count as well.
            return tirx.const(True) if least is None else self._score(box) > least

        def insert(box: Any) -> None:
            with T.If(counts(box)), T.Then():
                heap[line, left[0]] = box.astype("int32")
                _set(left, left[0] + 1)

        # In most groups of boxes there is none: to know that, vectors compare.
        groups, number = tirx.floordiv(self._count, _GROUP), _variable()
        with T.serial(0, groups) as group:
            _set(number, 0)
            with T.serial(0, _GROUP) as place:
                _set(number, number[0] + counts(group * _GROUP + place).astype("int32"))
            with T.If(number[0] > 0), T.Then(), T.serial(0, _GROUP) as place:
                insert(group * _GROUP + place)
        with T.serial(groups * _GROUP, self._count) as box:
            insert(box)
        half = _variable()
        _set(half, tirx.floordiv(left[0], 2))
        with T.While(half[0] > 0):
            _set(half, half[0] - 1)
            self._sink(half[0])
        _set(stay, 0)
        with T.While(tirx.all(left[0] > 0, stay[0] < limit)):
            _set(self._best, heap[line, 0])
            _set(left, left[0] - 1)
            heap[line, 0] = heap[line, left[0]]
            self._sink(_int(0))
            # The loop ends by a branch: its next step does not wait for the overlap.
            _set(self._other, 0)
            _set(self._is_over, 0)
            with T.While(tirx.all(self._other[0] < stay[0], self._is_over[0] == 0)):
                other = self._selected[line, self._other[0]]
                _set(self._is_over, (self._overlap(self._best[0], other) > overlap).astype("int32"))
                _set(self._other, self._other[0] + 1)
            with T.If(self._is_over[0] == 0), T.Then():
                self._selected[line, stay[0]] = self._best[0]
                _set(stay, stay[0] + 1)
        self._kept[line] = stay[0].astype("int64")

    def _sink(self, start: Any) -> None:
        """Move the box at a place of the heap below the better ones of those below it."""
        heap, line, hole, below, left = self._heap, self._line, self._hole, self._below, self._left
        item = _variable()
        _set(hole, start)
        _set(item, heap[line, hole[0]])
        _set(below, 2 * hole[0] + 1)
        with T.While(below[0] < left[0]):
            second = tirx.min(below[0] + 1, left[0] - 1)
            _set(below, tirx.Select(self._is_before(heap[line, second], heap[line, below[0]]), second, below[0]))
            with T.If(self._is_before(heap[line, below[0]], item[0])):
                with T.Then():
                    heap[line, hole[0]] = heap[line, below[0]]
                    _set(hole, below[0])
                    _set(below, 2 * hole[0] + 1)
                with T.Else():
                    _set(below, left[0])
        heap[line, hole[0]] = item[0]

    def _score(self, box: Any) -> Any:
        return self._scores[self._image, self._class, box]

    def _is_before(self, box: Any, other: Any) -> Any:
        """Whether one box comes before another: its score is higher, or the same, and its place is lower."""
        first, second = self._score(box), self._score(other)
        return tirx.any(first > second, tirx.all(first == second, box < other))

    def _overlap(self, box: Any, other: Any) -> Any:
        """The area that two boxes share, as a part of the area that they cover; minus one where they share none."""
        corners = [[self._boxes[self._image, item, corner] for corner in range(4)] for item in (box, other)]
        ends = [
            [(tirx.min(item[axis], item[axis + 2]), tirx.max(item[axis], item[axis + 2])) for item in corners]
            for axis in (0, 1)
        ]
        sides = [tirx.min(first[1], second[1]) - tirx.max(first[0], second[0]) for first, second in ends]
        areas = [(ends[0][place][1] - ends[0][place][0]) * (ends[1][place][1] - ends[1][place][0]) for place in (0, 1)]
        shared = sides[0] * sides[1]
        union = areas[0] + areas[1] - shared
        none = tirx.const(-1, "float32")
        part = tirx.Select(tirx.all(shared > 0, *(value > 0 for value in (*areas, union))), shared / union, none)
        # Most boxes are apart along an axis: branches spare the rest.
        for side in reversed(sides):
            part = tirx.if_then_else(side > 0, part, none)
        return part


def _rows(selected: te.Tensor, kept: te.Tensor, classes: Any, total: Any) -> te.Tensor:
    """The image, the class and the place of each box that stays, as int64."""

    def write(inputs: Any, outputs: Any) -> Any:
        with IRBuilder() as builder, T.seq_scope():
            selected, kept, rows = map(T.buffer_proxy, (*inputs, *outputs))
            row = registers((1,), "int64")
            T.buffer_store(row, tirx.const(0, "int64"), [0])
            with T.serial(0, inputs[1].shape[0]) as line, T.serial(0, kept[line]) as place:
                parts = (tirx.floordiv(line, classes), tirx.floormod(line, classes), selected[line, place])
                for column, part in enumerate(parts):
                    rows[row[0], column] = part.astype("int64")
                T.buffer_store(row, row[0] + 1, [0])
        return builder.get().body

    buffer = tirx.decl_buffer((total, 3), "int64", "rows")
    return te.extern([(total, 3)], [selected, kept], write, out_buffers=[buffer], dtype=["int64"], name="kept_rows")


def _constant(value: float | None, dtype: str) -> Any:
    return None if value is None else tirx.const(value, dtype)


def _variable() -> Any:
    return registers((1,), "int32")


def _set(variable: Any, value: Any) -> None:
    T.buffer_store(variable, _int(value) if isinstance(value, int) else value, [0])


def _int(value: int) -> Any:
    return tirx.const(value, "int32")
