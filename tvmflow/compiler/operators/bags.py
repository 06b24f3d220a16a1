"""Rows of a table that are summed, averaged or compared in bags, as PyTorch's EmbeddingBag does.

A bag is a run of neighbours in a vector of indices, or of the rows themselves. PyTorch exports it as a loop over bags.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, parts, registers, size_parameter, static

Mode = Literal["sum", "mean", "max"]
MODES: tuple[Mode, ...] = get_args(Mode)

# The rows of a bag, where nobody knows their number.
_TYPICAL_ROWS = 16
_COMBINED: dict[Mode, Callable[[Any, Any], Any]] = {
    "sum": lambda one, other: one + other,
    "mean": lambda one, other: one + other,
    "max": tirx.max,
}


@dataclass(frozen=True)
class Bags:
    """What the bags of a table are.

    Bag i has the rows from `begins[i + first]` to `ends[i + last]` less one, counted as ONNX's Slice counts them.
    `indices` are the places of these rows in the table; None where the rows stand in it one after the other. `weights`
    multiply the rows, as many as there are `indices`; None without. The sum and the mean of no rows are zero. The
    largest of none is minus infinity; where it `is_zero`, that of a bag whose begin and end are equal is zero.
    """

    table: relax.Expr
    begins: relax.Expr
    ends: relax.Expr
    count: Any
    mode: Mode
    indices: relax.Expr | None = None
    weights: relax.Expr | None = None
    first: int = 0
    last: int = 0
    is_zero: bool = False


def bags(form: Bags) -> relax.Call:
    """Return a Relax call that stands for the bags of a float32 table [rows, width]; its result is [count, width].

    Begins, ends and indices are vectors of int32 or int64, and weights a vector of float32. No index is outside of the
    table.
    """
    operands = [item for item in (form.indices, form.weights) if item is not None]
    return extensions.call(
        "bags",
        [form.table, form.begins, form.ends, relax.ShapeExpr([form.count]), *operands],
        mode=form.mode,
        has_indices=form.indices is not None,
        has_weights=form.weights is not None,
        first=form.first,
        last=form.last,
        is_zero=form.is_zero,
    )


def _infer(call: relax.Call) -> relax.TensorType:
    table, _, _, count, *_ = call.args
    return relax.TensorType([count.values[0], table.ty.shape.values[1]], "float32")


extensions.register("bags", _infer)


def lower(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr:
    """Define bags as one function for `machine`."""
    table, begins, ends, _, *others = call.args
    function = extensions.emit_function(builder, _Kernel(call, machine).function(), "bags")
    return relax.call_tir(function, [table, begins, ends, *others], call.ty)


class _Kernel:
    """Builds the TIR function of bags; its parameters are the operands of `bags` and the result."""

    def __init__(self, call: relax.Call, machine: Machine) -> None:
        table, begins, ends, count, *others = call.args
        attrs = call.attrs
        self._mode: Mode = next(mode for mode in MODES if mode == str(attrs["mode"]))
        self._first, self._last, self._is_zero = int(attrs["first"]), int(attrs["last"]), bool(attrs["is_zero"])
        self._machine = machine
        rows, width = table.ty.shape.values
        self._width = int(width)
        self._count = size_parameter(count.values[0], "count")
        self._rows = size_parameter(rows, "rows")
        self._table = buffer("table", (self._rows, self._width))
        self._begins, self._ends = (
            buffer(name, (size_parameter(item.ty.shape.values[0], f"{name}_size"),), str(item.ty.dtype))
            for name, item in (("begins", begins), ("ends", ends))
        )
        self._indices = self._weights = None
        self._length = self._rows
        if attrs["has_indices"]:
            indices = others[0]
            self._length = size_parameter(indices.ty.shape.values[0], "length")
            self._indices = buffer("indices", (self._length,), str(indices.ty.dtype))
        if attrs["has_weights"]:
            self._weights = buffer("weights", (self._length,))
        self._result = buffer("result", (self._count, self._width))

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        vectors = -(-self._width // self._machine.lanes)
        # A task of fewer cycles than a parallel region is not worth one.
        size = max(self._machine.parallel_cycles // (_TYPICAL_ROWS * vectors), 1)
        tasks = parts(self._count, size)
        is_alone = self._machine.cores == 1 or static(tasks) == 1
        with IRBuilder() as builder, T.seq_scope(), (T.serial if is_alone else T.parallel)(0, tasks) as task:
            begin = task * size
            with T.serial(0, tirx.min(self._count - begin, tirx.IntImm("int64", size))) as place:
                self._bag(begin + place)
        others = [item for item in (self._indices, self._weights) if item is not None]
        parameters = [self._table, self._begins, self._ends, *others, self._result]
        return tirx.PrimFunc(parameters, builder.get().body).with_attr(KERNEL, "bags")

    def _bag(self, bag: Any) -> None:
        first, last = self._begins[bag + self._first], self._ends[bag + self._last]
        begin = T.bind(self._place(first))
        rows = T.bind(tirx.max(self._place(last) - begin, 0))
        zero, infinity = tirx.const(0.0, "float32"), tirx.const(float("-inf"), "float32")
        least = zero if self._mode != "max" else infinity
        if self._mode == "max" and self._is_zero:
            least = T.bind(tirx.Select(first.astype("int64") == last.astype("int64"), zero, infinity))
        lanes = self._machine.lanes
        # The results of a row so wide stay in registers, beside the row's vectors and its weight.
        together = self._machine.registers // 2
        groups, rest = divmod(self._width, together * lanes)
        if groups:
            with T.serial(0, groups) as group:
                self._columns(bag, begin, rows, least, group * (together * lanes), [lanes] * together)
        if rest:
            powers = [1 << bit for bit in reversed(range(lanes.bit_length())) if rest % lanes >> bit & 1]
            self._columns(bag, begin, rows, least, groups * together * lanes, [lanes] * (rest // lanes) + powers)

    def _place(self, number: Any) -> Any:
        """A place that is counted from the end where it is negative, within the rows that bags can have."""
        number = number.astype("int64")
        number = tirx.Select(number < 0, number + self._length, number)
        return tirx.max(tirx.min(number, self._length), tirx.const(0, "int64"))

    def _columns(self, bag: Any, begin: Any, rows: Any, least: Any, column: Any, widths: list[int]) -> None:
        """Combine the rows of a bag, and the number `least`, in vectors of these widths, from a column on."""
        firsts = [column + sum(widths[:place]) for place in range(len(widths))]
        totals = [registers((width,)) for width in widths]
        for total, width in zip(totals, widths, strict=True):
            T.buffer_store(total, _repeated(least, width), [_lanes(0, width)])
        with T.serial(0, rows) as row:
            place = begin + row
            source = place if self._indices is None else T.bind(self._indices[place].astype("int64"))
            for total, first, width in zip(totals, firsts, widths, strict=True):
                value = self._table[source, _lanes(first, width)]
                if self._weights is not None:
                    value = value * _repeated(self._weights[place], width)
                T.buffer_store(total, _COMBINED[self._mode](total[_lanes(0, width)], value), [_lanes(0, width)])
        for total, first, width in zip(totals, firsts, widths, strict=True):
            T.buffer_store(
                self._result, self._of_total(total[_lanes(0, width)], rows, width), [bag, _lanes(first, width)]
            )

    def _of_total(self, total: Any, rows: Any, width: int) -> Any:
        """The result of a bag whose rows, combined, are `total`."""
        if self._mode != "mean":
            return total
        return total / _repeated(tirx.max(rows, tirx.const(1, "int64")).astype("float32"), width)


def _lanes(first: Any, width: int) -> Any:
    """The index of `width` neighbours from the element `first` on, as one vector."""
    first = tirx.const(first, "int64") if isinstance(first, int) else first
    return first if width == 1 else tirx.Ramp(first, tirx.const(1, "int64"), width)


def _repeated(value: Any, width: int) -> Any:
    return value if width == 1 else tirx.Broadcast(value, width)
