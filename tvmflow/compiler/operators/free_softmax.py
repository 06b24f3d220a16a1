"""Softmax over the last dimension of a tensor, where the size of that dimension is free.

A tensor is viewed as rows that lie side by side. Three passes go through a row: for the largest number, for the
exponentials, which are written to the result and summed, and for the products with the inverse of their sum. The
numbers that fill no vector are copied to one whose other numbers are minus infinity.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import cost, extensions, vectormath
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, registers, size_parameter, static
from tvmflow.compiler.operators.reductions import MAX, SUM, Kind, tree


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine, logarithm: bool) -> relax.Expr | None:
    """Define softmax over the last dimension of a float32 tensor, or its `logarithm`.

    Returns None where the size of that dimension is known, and where the shape is unknown.
    """
    data = call.args[0]
    if not isinstance(data.ty.shape, relax.ShapeExpr) or static(data.ty.shape.values[-1]) is not None:
        return None
    kernel = _Kernel(list(data.ty.shape.values), machine, logarithm)
    function = extensions.emit_function(builder, kernel.function(), call.op.name.rpartition(".")[2])
    # An operand, because TVM fails on a function of one operand that has no blocks: it looks for reshapes among these.
    return relax.call_tir(function, [data, relax.const(np.float32(-math.inf))], call.ty)


class _Kernel:
    """Builds the TIR function of a softmax, or of its `logarithm`."""

    def __init__(self, shape: list[Any], machine: Machine, logarithm: bool) -> None:
        self._machine, self._logarithm = machine, logarithm
        sizes = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)]
        self._size, self._rows = sizes[-1], math.prod(sizes[:-1], start=tirx.IntImm("int64", 1))
        self._data, self._result, self._least = buffer("x", sizes), buffer("y", sizes), buffer("least", ())

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        lanes = self._machine.lanes
        with IRBuilder() as builder, T.seq_scope():
            total = self._rows * self._size
            x, y = (
                T.decl_buffer((total,), "float32", data=item.data, layout=None) for item in (self._data, self._result)
            )
            with (T.parallel if self._machine.cores > 1 else T.serial)(0, self._rows) as row:
                begin, whole = row * self._size, tirx.floordiv(self._size, lanes)
                # The place of the first number that fills no vector, and how many there are.
                self._end, self._rest = begin + whole * lanes, self._size - whole * lanes
                self._last = registers((lanes,))
                self._store(self._last, 0, lambda _: self._least[()])
                with T.serial(0, self._rest) as place:
                    T.buffer_store(self._last, x[self._end + place], [place])
                largest = self._largest(x, begin, whole)
                sums, exponentials = registers((lanes,)), registers((lanes,))
                self._store(sums, 0, lambda _: tirx.const(0.0, "float32"))

                def add(source: Any, target: Any, at: Any) -> None:
                    """Add the exponentials of a vector of numbers, and store them if they are in the result."""
                    self._store(
                        exponentials, 0, lambda lane: vectormath.exp_of_negative(source[at + lane] - largest[0])
                    )
                    self._store(sums, 0, lambda lane: sums[lane] + exponentials[lane])
                    if not self._logarithm:
                        self._store(target, at, lambda lane: exponentials[lane])

                with T.serial(0, whole) as vector:
                    add(x, y, begin + vector * lanes)
                add(self._last, self._last, 0)
                self._finish(x, y, begin, whole, largest, self._reduced(SUM, sums))
        return tirx.PrimFunc([self._data, self._least, self._result], builder.get().body).with_attr(
            KERNEL, "free_softmax"
        )

    def _largest(self, x: Any, begin: Any, whole: Any) -> Any:
        """Find the largest number of a row, of which `whole` vectors precede the last one; return it in a buffer."""
        lanes, side = self._machine.lanes, cost.side_by_side(self._machine.registers, self._machine)
        vectors = [registers((lanes,)) for _ in range(side)]

        def take(vector: Any, at: Any) -> None:
            first = begin + at * lanes
            self._store(vector, 0, lambda lane: tirx.max(vector[lane], x[first + lane]))

        for vector in vectors:
            self._store(vector, 0, lambda lane: self._last[lane])
        groups = tirx.floordiv(whole, side)
        with T.serial(0, groups) as group:
            for place, vector in enumerate(vectors):
                take(vector, group * side + place)
        with T.serial(groups * side, whole) as at:
            take(vectors[0], at)
        self._store(vectors[0], 0, lambda lane: tree(MAX, [vector[lane] for vector in vectors]))
        largest = registers((1,))
        T.buffer_store(largest, self._reduced(MAX, vectors[0]), [0])
        return largest

    def _finish(self, x: Any, y: Any, begin: Any, whole: Any, largest: Any, total: Any) -> None:
        """Write a row: the numbers less the logarithm of their sum, or the exponentials, divided by it."""
        lanes, factor = self._machine.lanes, registers((1,))
        if self._logarithm:
            T.buffer_store(factor, largest[0] + tirx.log(total), [0])
            source, combine = x, operator.sub
        else:
            T.buffer_store(factor, 1.0 / total, [0])
            source, combine = y, operator.mul
        with T.serial(0, whole) as vector:
            at = begin + vector * lanes
            self._store(y, at, lambda lane: combine(source[at + lane], factor[0]))
        with T.serial(0, self._rest) as place:
            T.buffer_store(y, combine(self._last[place], factor[0]), [self._end + place])

    def _reduced(self, kind: Kind, vector: Any) -> Any:
        """The numbers of a vector, combined to one."""
        return tree(kind, [vector[lane] for lane in range(self._machine.lanes)])

    def _store(self, target: Any, at: Any, number: Callable[[Any], Any]) -> None:
        """Store a vector of numbers from a place on."""
        with T.vectorized(0, self._machine.lanes) as lane:
            T.buffer_store(target, number(lane), [at + lane])
