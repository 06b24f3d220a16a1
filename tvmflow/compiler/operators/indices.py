"""Indices that are data: a model that looks up an index outside of its data stops with an error, as in ONNX Runtime.

The importer writes an operator of its own for them. Its result is the indices, counted from the start of the data. On a
CPU it is a kernel that returns an error; on a GPU, where kernels return none, indices are clamped.
"""

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.bundle import INDEX_ERROR
from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, parts, registers, size_parameter, static

# The name of the kernel that checks them, in the place of a schedule rule.
RULE = "indices"


def checked(indices: relax.Expr, sizes: Sequence[Any], *, is_signed: bool) -> relax.Call:
    """Return a Relax call that stands for indices of known rank, each from 0 to the size of its dimension less one.

    `sizes` has one size, or one for each element along the last dimension of the indices. Where `is_signed`, negative
    indices count from the end. The model stops with an error where an index is outside.
    """
    return extensions.call("indices", [indices, relax.ShapeExpr(list(sizes))], is_signed=is_signed)


def _infer(call: relax.Call) -> relax.TensorType:
    return call.args[0].ty


extensions.register("indices", _infer)


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr:
    """Define checked indices as a kernel that returns an error for one that is outside."""
    indices, sizes = call.args
    shape, limits = list(indices.ty.shape.values), list(sizes.values)
    kernel = _Kernel(shape, str(indices.ty.dtype), limits, is_signed=bool(call.attrs["is_signed"]), machine=machine)
    function = extensions.emit_function(builder, kernel.function(), "check_indices")
    # An operand, because TVM fails on a function of one operand that has no blocks: it looks for reshapes among these.
    operands = [indices, relax.const(0, str(indices.ty.dtype)), *(size for size in limits if static(size) is None)]
    return relax.call_tir(function, operands, call.ty)


def legalize_clamped(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Define checked indices as element-wise arithmetic that takes the nearest index of the data."""
    indices, sizes = call.args
    is_signed = bool(call.attrs["is_signed"])

    def clamp(indices: te.Tensor, *limits: Any) -> te.Tensor:
        def element(*place: Any) -> Any:
            size = _of_place(limits, place[-1] if place else 0, indices.dtype)
            return _from_start(indices(*place), size, is_signed)

        return te.compute(indices.shape, element, name="indices")

    return builder.call_te(clamp, indices, *sizes.values, primfunc_name_hint="clamp_indices")


def _of_place(limits: Sequence[Any], place: Any, dtype: str) -> Any:
    """The limit of indices at a place along their last dimension; that of all if there is one limit alone."""
    *others, result = (_number(limit, dtype) for limit in limits)
    for number, limit in reversed([*enumerate(others)]):
        result = tirx.Select(place == number, limit, result)
    return result


def _number(size: Any, dtype: str) -> Any:
    """A size, an integer or symbolic, as a number of type `dtype`."""
    number = static(size)
    return tirx.Cast(dtype, size) if number is None else tirx.const(number, dtype)


def _from_start(value: Any, size: Any, is_signed: bool) -> Any:
    """An index counted from the start of data of `size`, or the nearest one that the data has."""
    zero = tirx.const(0, str(value.ty))
    if is_signed:
        value = tirx.Select(value < zero, value + size, value)
    return tirx.max(tirx.min(value, size - 1), zero)


class _Kernel:
    """Builds the TIR function that checks indices of a shape against `limits`."""

    def __init__(
        self, shape: Sequence[Any], dtype: str, limits: Sequence[Any], *, is_signed: bool, machine: Machine
    ) -> None:
        self._dtype, self._is_signed, self._machine = dtype, is_signed, machine
        sizes = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)]
        self._limits = [size_parameter(limit, f"limit{place}") for place, limit in enumerate(limits)]
        self._total = topi.utils.simplify(math.prod(sizes, start=tirx.IntImm("int64", 1)))
        self._indices, self._zero = buffer("indices", sizes, dtype), buffer("zero", (), dtype)
        self._result = buffer("result", sizes, dtype)

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        width = len(self._limits)
        rows = topi.utils.simplify(tirx.floordiv(self._total, width))
        # A task of fewer cycles than a parallel region is not worth one; an index takes about one.
        size = max(-(-self._machine.parallel_cycles // width), 1)
        tasks = parts(rows, size)
        with IRBuilder() as builder, T.seq_scope():
            x, y = (
                T.decl_buffer((self._total,), self._dtype, data=item.data, layout=None)
                for item in (self._indices, self._result)
            )
            is_alone = self._machine.cores == 1 or static(tasks) == 1
            with (T.serial if is_alone else T.parallel)(0, tasks) as task:
                wrong = registers((1,), self._dtype)
                T.buffer_store(wrong, self._zero[()], [0])
                first = task * size
                with T.serial(0, tirx.min(rows - first, tirx.IntImm("int64", size))) as row:
                    for place in range(width):
                        at = (first + row) * width + place
                        limit = _number(self._limits[place], self._dtype)
                        T.buffer_store(wrong, wrong[0] | self._is_outside(x[at], limit), [0])
                        T.buffer_store(y, _from_start(x[at], limit, self._is_signed), [at])
                with T.Assert(wrong[0] == 0, self._sentence()):
                    T.evaluate(0)
        parameters = [self._indices, self._zero, *(item for item in self._limits if static(item) is None), self._result]
        return tirx.PrimFunc(parameters, builder.get().body).with_attr(KERNEL, RULE)

    def _is_outside(self, value: Any, limit: Any) -> Any:
        """One for an index that data of the size `limit` lacks, else zero."""
        least = -limit if self._is_signed else tirx.const(0, self._dtype)
        is_outside = tirx.any(value < least, value >= limit)
        return tirx.Select(is_outside, tirx.const(1, self._dtype), tirx.const(0, self._dtype))

    def _sentence(self) -> str:
        """What the error says."""
        size = static(self._limits[0])
        if size is None or len(self._limits) > 1:
            return f"{INDEX_ERROR}an index is outside of its data"
        return f"{INDEX_ERROR}an index is not from {-size if self._is_signed else 0} to {size - 1}"
