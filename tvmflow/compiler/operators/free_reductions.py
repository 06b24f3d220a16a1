"""Sums, means, products and extremes over the last dimensions of a tensor, where the size of one of these is free.

A tensor is viewed as rows of `depth` numbers that lie side by side, each of which is reduced to one number. Several
vectors of sums go through a row. A long row is divided into parts, so that every core has work. How it is divided
depends on its length alone: a row has the same result in every batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.arrays import Array
from tvmflow.compiler import cost, extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, constant, reduced_axes, registers, size_parameter, static

# The most parts of a row for each core: with more than one, a core that other programs delay does fewer of them.
_PARTS = 2
_TYPES = ("float32", "float64", "int32", "int64", "uint32", "uint64")


def legalize(
    builder: relax.BlockBuilder,
    call: relax.Call,
    machine: Machine,
    combine: Callable[[Any, Any], Any],
    identity: float,
    is_mean: bool = False,
    narrow: relax.Expr | None = None,
) -> relax.Expr | None:
    """Define a reduction over all last dimensions from the first reduced one on, of numbers of 32 or 64 bits.

    `combine` combines two numbers, and `identity` is the result of none; infinity stands for the limit of integers. A
    mean divides the result by the number of elements. `narrow` are the numbers of fewer bits of which the operand is
    made, and which are widened on the way; None where it is read itself. Returns None for other types, for a mean of
    integers, and where a dimension behind a reduced one is kept.
    """
    dtype = str(call.args[0].ty.dtype)
    if dtype not in _TYPES or (is_mean and not dtype.startswith("float")):
        return None
    shape = list(call.args[0].ty.shape.values)
    reduced = reduced_axes(call)
    if not reduced or any(static(shape[place]) != 1 for place in range(reduced[0], len(shape)) if place not in reduced):
        return None
    ones = len(call.ty.shape.values) - reduced[0]
    of_type = replace(machine, number=np.dtype(dtype).itemsize)
    data = call.args[0] if narrow is None else narrow
    kernel = _Kernel(shape, reduced[0], ones, of_type, combine, is_mean, dtype, str(data.ty.dtype))
    function = extensions.emit_function(builder, kernel.function(), call.op.name.rpartition(".")[2])
    # An operand, because TVM fails on a function of one operand that has no blocks: it looks for reshapes among these.
    return relax.call_tir(function, [data, constant(_identity(identity, dtype))], call.ty)


def multiply_rows(builder: relax.BlockBuilder, rows: relax.Expr, matrix: relax.Expr, machine: Machine) -> relax.Expr:
    """Define the sums of products of each row of `matrix` `[..., M, K]` with each of a few `rows` `[..., N, K]`.

    All numbers are float32. The leading dimensions are equal, and the result is `[..., M, N]`. K is known or free.
    """
    *batch, count, _ = rows.ty.shape.values
    kernel = _Products([*batch, matrix.ty.shape.values[-2], count, matrix.ty.shape.values[-1]], machine)
    function = extensions.emit_function(builder, kernel.function(), "multiply_rows")
    shape = relax.ShapeExpr([*matrix.ty.shape.values[:-1], count])
    return relax.call_tir(
        function, [matrix, rows, constant(_identity(0.0, "float32"))], relax.TensorType(shape, "float32")
    )


def _identity(identity: float, dtype: str) -> Array:
    """The result of no elements, in whose place integers have their limit if it is infinite."""
    if np.isinf(identity) and not dtype.startswith("float"):
        limits = np.iinfo(dtype)
        identity = limits.max if identity > 0 else limits.min
    return np.array(identity, dtype)


class _Kernel:
    """Builds the TIR function of a reduction over the dimensions from index `first` on.

    The result has `ones` dimensions of size one after the others. The numbers of type `source` become such of type
    `dtype`, which are reduced.
    """

    def __init__(
        self,
        shape: Sequence[Any],
        first: int,
        ones: int,
        machine: Machine,
        combine: Callable[[Any, Any], Any],
        is_mean: bool,
        dtype: str,
        source: str,
    ) -> None:
        self._machine, self._combine, self._is_mean, self._dtype = machine, combine, is_mean, dtype
        self._identity = buffer("identity", (), dtype)
        sizes = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)]
        one = tirx.IntImm("int64", 1)
        self._rows = math.prod(sizes[:first], start=one)
        self._depth = math.prod(sizes[first:], start=one)
        self._sizes = sizes
        self._data = buffer("x", sizes, source)
        self._result = buffer("y", [*sizes[:first], *[one] * ones], dtype)
        # Vectors that are accumulated side by side.
        self._side = cost.side_by_side(machine.registers, machine)

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        machine, rows = self._machine, static(self._rows)
        # A part that takes fewer cycles than a parallel region is not worth one.
        fewest = -(-machine.region // self._side) or 1
        groups = tirx.floordiv(self._depth, self._side * machine.lanes)
        most = _PARTS * machine.cores
        parts = tirx.max(tirx.min(tirx.floordiv(groups, fewest), most), 1)
        with IRBuilder() as builder, T.seq_scope():
            self._declare()
            self._y = T.decl_buffer((self._rows,), self._dtype, data=self._result.data, layout=None)
            if machine.cores == 1 or (rows is not None and rows >= machine.cores):
                self._by_rows(groups)
            else:
                with T.If(parts <= 1):
                    with T.Then():
                        self._by_rows(groups)
                    with T.Else():
                        self._by_parts(groups, parts, most)
        parameters = [*self._operands(), self._identity, self._result]
        return tirx.PrimFunc(parameters, builder.get().body).with_attr(KERNEL, "free_reduction")

    def _operands(self) -> list[Any]:
        return [self._data]

    def _declare(self) -> None:
        self._x = T.decl_buffer((self._rows * self._depth,), self._data.dtype, data=self._data.data, layout=None)

    def _number(self, row: Any, place: Any) -> Any:
        """The number of a row that is reduced at an index."""
        number = self._x[row * self._depth + place]
        return number if self._data.dtype == self._dtype else number.astype(self._dtype)

    def _by_rows(self, groups: Any) -> None:
        """Reduce whole rows, side by side on the cores."""
        with self._parallel(self._rows) as row, self._vectors(1) as total:
            self._accumulate(total, row, 0, groups)
            self._finish(total, row, groups * self._side)

    def _by_parts(self, groups: Any, parts: Any, most: int) -> None:
        """Reduce the parts of all rows, side by side on the cores, then combine those of each row."""
        lanes, size = self._machine.lanes, tirx.floordiv(groups, parts)
        totals = T.alloc_buffer((self._rows, most, lanes), self._dtype, scope="global", layout=None)
        with self._parallel(self._rows * parts) as task, self._vectors(1) as total:
            row, part = tirx.floordiv(task, parts), tirx.floormod(task, parts)
            self._accumulate(total, row, part * size, size)
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(totals, total[0, lane], [row, part, lane])
        with T.serial(0, self._rows) as row, self._vectors(1) as total:
            with T.serial(0, parts) as part:
                self._add(total, 0, lambda lane: totals[row, part, lane])
            self._finish(total, row, parts * size * self._side)

    def _accumulate(self, total: Any, row: Any, first: Any, count: Any) -> None:
        """Reduce `count` groups of vectors of a row, from the group `first` on, to the vector `total`."""
        with self._vectors(self._side) as sums:
            with T.serial(0, count) as group:
                for place in range(self._side):
                    self._add(sums, place, self._vector(row, (first + group) * self._side + place))
            for place in range(self._side):
                self._add(total, 0, lambda lane, place=place: sums[place, lane])  # type: ignore[misc]

    def _finish(self, total: Any, row: Any, first: Any) -> None:
        """Add the vectors of a row from the vector `first` on, and the numbers that fill none, and store the result."""
        lanes = self._machine.lanes
        whole = tirx.floordiv(self._depth, lanes)
        with T.serial(0, whole - first) as place:
            self._add(total, 0, self._vector(row, first + place))
        last = registers((1,), self._dtype)
        numbers = [total[0, lane] for lane in range(lanes)]
        while len(numbers) > 1:
            half = len(numbers) // 2
            numbers = [self._combine(a, b) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
        T.buffer_store(last, numbers[0], [0])
        with T.serial(0, tirx.floormod(self._depth, lanes)) as place:
            number = self._number(row, whole * lanes + place)
            T.buffer_store(last, self._combine(last[0], number), [0])
        value = last[0] / self._depth.astype(self._dtype) if self._is_mean else last[0]
        T.buffer_store(self._y, value, [row])

    def _vector(self, row: Any, place: Any) -> Callable[[Any], Any]:
        """Return a lane of the vector `place` of a row as a function of the lane."""
        return lambda lane: self._number(row, place * self._machine.lanes + lane)

    def _add(self, sums: Any, place: int, number: Callable[[Any], Any]) -> None:
        with T.vectorized(0, self._machine.lanes) as lane:
            T.buffer_store(sums, self._combine(sums[place, lane], number(lane)), [place, lane])

    @contextmanager
    def _vectors(self, count: int) -> Iterator[Any]:
        """Allocate `count` vectors, each number of which is the result of no elements."""
        lanes = self._machine.lanes
        vectors = registers((count, lanes), self._dtype)
        for place in range(count):
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(vectors, self._identity[()], [place, lane])
        yield vectors

    @contextmanager
    def _parallel(self, count: Any) -> Iterator[Any]:
        """Begin a loop of `count` tasks, which the cores share."""
        with (T.parallel if self._machine.cores > 1 else T.serial)(0, count) as task:
            yield task


class _Products(_Kernel):
    """Builds the function that sums the products of the rows of a matrix with each of a few other rows.

    The shape is that of all products: `[..., M, N, K]` for a matrix of M rows, and N others.
    """

    def __init__(self, shape: Sequence[Any], machine: Machine) -> None:
        super().__init__(shape, len(shape) - 1, 0, machine, lambda a, b: a + b, False, "float32", "float32")
        *batch, self._height, self._count, depth = self._sizes
        self._data = buffer("x", [*batch, self._height, depth], "float32")
        self._factors = buffer("factors", [*batch, self._count, depth], "float32")

    def _operands(self) -> list[Any]:
        return [self._data, self._factors]

    def _declare(self) -> None:
        one = tirx.IntImm("int64", 1)
        self._x, self._w = (
            T.decl_buffer((math.prod(source.shape, start=one),), self._dtype, data=source.data, layout=None)
            for source in self._operands()
        )

    def _number(self, row: Any, place: Any) -> Any:
        of_matrix, other = tirx.floordiv(row, self._count), tirx.floormod(row, self._count)
        factor = tirx.floordiv(of_matrix, self._height) * self._count + other
        return self._x[of_matrix * self._depth + place] * self._w[factor * self._depth + place]
