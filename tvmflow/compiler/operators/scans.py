"""Running sums along a dimension.

TVM adds number by number, each of them a whole slice away from the one before, and reads every sum from memory again.
Here vectors of neighbouring numbers are added to those of the slice before, in the same order. Along the last
dimension, the sum of a line stays in a register.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import relax, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, parts, registers, size_parameter, static

# The most vectors side by side of which one core adds the slices: enough to read memory in order.
_VECTORS = 32
_DTYPES = ("float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


def lower(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define a running sum. Returns None for float16, and for sums of another type than the data.

    TVM dispatches running sums before it legalises, so this is no definition for `LegalizeOps`.
    """
    data, dtype = call.args[0], str(call.ty.dtype)
    if not isinstance(data.ty.shape, relax.ShapeExpr) or call.attrs.axis is None:
        return None
    if str(data.ty.dtype) != dtype or dtype not in _DTYPES:
        return None
    kernel = _Kernel(list(data.ty.shape.values), int(call.attrs.axis), dtype, bool(call.attrs.exclusive), machine)
    variable = extensions.emit_function(builder, kernel.function(), "cumsum")
    # An operand, because TVM fails on a function of one operand that has no blocks: it looks for reshapes among these.
    return relax.call_tir(variable, [data, relax.const(0, dtype)], call.ty)


class _Kernel:
    """Builds the TIR function of the sums of `shape` along `axis`; if `is_exclusive`, of the numbers before each place.

    The arrays are lines of `length` slices, of which each has `after` numbers.
    """

    def __init__(self, shape: Sequence[Any], axis: int, dtype: str, is_exclusive: bool, machine: Machine) -> None:
        sizes, one = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)], tirx.IntImm("int64", 1)
        axis %= len(shape)
        self._dtype, self._is_exclusive, self._machine = dtype, is_exclusive, machine
        self._lanes = machine.lanes * machine.number // int(tvm_ffi.dtype(dtype).itemsize)
        self._lines, self._length = math.prod(sizes[:axis], start=one), sizes[axis]
        self._after = math.prod(sizes[axis + 1 :], start=one)
        self._data, self._zero, self._result = (
            buffer("x", sizes, dtype),
            buffer("zero", (), dtype),
            buffer("y", sizes, dtype),
        )

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        total = self._lines * self._length * self._after
        width = self._width()
        pieces = topi.utils.simplify(tirx.floordiv(self._after + width - 1, width))
        count, work = topi.utils.simplify(self._lines * pieces), static(topi.utils.simplify(total))
        is_short = static(count) == 1 or (work is not None and work < self._machine.parallel_iterations)
        loop = T.serial if self._machine.cores == 1 or is_short else T.parallel
        with IRBuilder() as builder, T.seq_scope():
            x, y = (
                T.decl_buffer((total,), self._dtype, data=item.data, layout=None) for item in (self._data, self._result)
            )
            with loop(0, count) as task:
                if static(self._after) == 1:
                    self._add_numbers(x, y, task * self._length)
                else:
                    first = tirx.floormod(task, pieces) * width
                    start = tirx.floordiv(task, pieces) * self._length * self._after + first
                    self._add_slices(x, y, start, tirx.min(self._after - first, width))
        parameters = [self._data, self._zero, self._result]
        return tirx.PrimFunc(parameters, builder.get().body).with_attr(KERNEL, "scan")

    def _width(self) -> Any:
        """How many numbers side by side a core adds: fewer where the lines alone do not occupy all cores."""
        lines, cores, most = static(self._lines), self._machine.cores, tirx.IntImm("int64", _VECTORS)
        if lines is None or lines < cores:
            most = tirx.max(tirx.min(parts(parts(self._after, self._lanes), cores), most), 1)
        return topi.utils.simplify(most * self._lanes)

    def _add_numbers(self, x: Any, y: Any, start: Any) -> None:
        """Add the numbers of the line that begins at `start`."""
        sums = registers((1,), self._dtype)
        T.buffer_store(sums, self._zero[()], [0])
        with T.serial(0, self._length) as place:
            following = sums[0] + x[start + place]
            if self._is_exclusive:
                T.buffer_store(y, sums[0], [start + place])
                T.buffer_store(sums, following, [0])
            else:
                T.buffer_store(sums, following, [0])
                T.buffer_store(y, sums[0], [start + place])

    def _add_slices(self, x: Any, y: Any, start: Any, size: Any) -> None:
        """Add the first slice's `size` numbers from `start` on and those of the further slices of its line."""
        with T.serial(0, self._length) as place:
            row = start + place * self._after
            before = row - self._after
            term = before if self._is_exclusive else row
            with T.If(place == 0):
                with T.Then():
                    self._write(y, row, size, lambda number: self._zero[()] if self._is_exclusive else x[row + number])
                with T.Else():
                    self._write(y, row, size, lambda number: y[before + number] + x[term + number])

    def _write(self, y: Any, row: Any, size: Any, value: Callable[[Any], Any]) -> None:
        """Write `size` numbers from `row` on, vector by vector; `value` returns the one at a place behind it."""
        vectors = tirx.floordiv(size, self._lanes)
        with T.serial(0, vectors) as vector, T.vectorized(0, self._lanes) as lane:
            number = vector * self._lanes + lane
            T.buffer_store(y, value(number), [row + number])
        with T.serial(vectors * self._lanes, size) as number:
            T.buffer_store(y, value(number), [row + number])
