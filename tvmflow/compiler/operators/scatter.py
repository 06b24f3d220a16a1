"""Numbers that are written to places of a tensor which indices name: ONNX's ScatterND and ScatterElements.

For slices, TVM begins a parallel region for each index. Here the cores share the columns of the slices, so that each
element is written by one core, in the order of the indices. For elements, TVM divides by free sizes at every index.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import relax, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import are_equal, buffer, parts, size_parameter, static

# The most pieces for each core: with more than one, a core that other programs delay does fewer of them.
_PARTS = 2
_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "update": lambda _, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "min": tirx.min,
    "max": tirx.max,
}
_DTYPES = ("float32", "float64", "int32", "int64")
# Types that elements of a tensor may have besides, and the one that has no arithmetic.
_NARROW = ("int8", "uint8", "int16", "uint16", "uint32", "uint64")
_TRUTH = "bool"


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define a ScatterND of numbers of 32 or 64 bits. Returns None for others, and for operands of unknown shape."""
    operands = call.args[:3]
    if not all(isinstance(operand.ty.shape, relax.ShapeExpr) for operand in operands):
        return None
    data, indices, updates = (list(operand.ty.shape.values) for operand in operands)
    dtype, depth = str(call.ty.dtype), static(indices[-1])
    combine = _COMBINED.get(str(call.attrs.reduction))
    if dtype not in _DTYPES or depth is None or combine is None:
        return None
    if len(updates) != len(indices) - 1 + len(data) - depth:
        return None
    kernel = _Kernel(data, indices[:-1], depth, dtype, str(operands[1].ty.dtype), combine, machine)
    function = extensions.emit_function(builder, kernel.function(), "scatter_nd")
    return relax.call_tir(function, list(operands), call.ty)


def legalize_elements(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define a ScatterElements, which writes a number for each index along one axis.

    Returns None for floats of 16 bits, for means, for operands of unknown shape, and for indices whose other sizes are
    not those of the data.
    """
    operands = call.args[:3]
    if not all(isinstance(operand.ty.shape, relax.ShapeExpr) for operand in operands):
        return None
    data, indices, _ = (list(operand.ty.shape.values) for operand in operands)
    axis, dtype, reduction = int(call.attrs.axis) % len(data), str(call.ty.dtype), str(call.attrs.reduction)
    combine = _COMBINED.get(reduction)
    if combine is None or dtype not in (*_DTYPES, *_NARROW, *([_TRUTH] if reduction == "update" else [])):
        return None
    if not all(are_equal(*pair) for place, pair in enumerate(zip(data, indices, strict=True)) if place != axis):
        return None
    function = _elements(data, indices[axis], axis, dtype, str(operands[1].ty.dtype), combine, machine)
    return relax.call_tir(extensions.emit_function(builder, function, "scatter_elements"), list(operands), call.ty)


def _elements(
    shape: Sequence[Any],
    count: Any,
    axis: int,
    dtype: str,
    index_dtype: str,
    combine: Callable[[Any, Any], Any],
    machine: Machine,
) -> tirx.PrimFunc:
    """Build the TIR function of a ScatterElements to data of a shape, of `count` indices along an axis.

    The cores share the places before the axis; those behind it are written side by side, in the order of the indices.
    """
    one = tirx.IntImm("int64", 1)
    sizes = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)]
    own = [size_parameter(count, "count") if place == axis else size for place, size in enumerate(sizes)]
    outer, inner = (topi.utils.simplify(math.prod(part, start=one)) for part in (sizes[:axis], sizes[axis + 1 :]))
    length, count = sizes[axis], own[axis]
    parameters = [
        buffer("data", sizes, dtype),
        buffer("indices", own, index_dtype),
        buffer("updates", own, dtype),
        buffer("result", sizes, dtype),
    ]
    with IRBuilder() as builder, T.seq_scope():
        x, indices, updates, y = (
            T.decl_buffer((outer * size * inner,), item.dtype, data=item.data, layout=None)
            for item, size in zip(parameters, (length, count, count, length), strict=True)
        )

        def copy(first: Any, size: Any) -> None:
            with T.serial(0, size) as place:
                T.buffer_store(y, x[first + place], [first + place])

        def write(row: Any, begin: Any, width: Any) -> None:
            with T.serial(0, count) as number, T.serial(0, width) as column:
                source = (row * count + number) * inner + begin + column
                index = indices[source].astype("int64")
                index = tirx.Select(index < 0, index + length, index)
                target = (row * length + index) * inner + begin + column
                T.buffer_store(y, combine(y[target], updates[source]), [target])

        if static(outer) == 1:
            with _pieces(length * inner, machine) as (first, size):
                copy(first, size)
            with _pieces(inner, machine) as (begin, width):
                write(0, begin, width)
        else:
            # A task of fewer cycles than a parallel region is not worth one.
            work = static(topi.utils.simplify(inner * (length + count)))
            rows = 1 if work is None else max(machine.parallel_cycles // max(work, 1), 1)
            tasks = parts(outer, rows)
            is_alone = machine.cores == 1 or static(tasks) == 1
            with (T.serial if is_alone else T.parallel)(0, tasks) as task:
                first = task * rows
                with T.serial(0, tirx.min(outer - first, tirx.IntImm("int64", rows))) as place:
                    copy((first + place) * length * inner, length * inner)
                    write(first + place, 0, inner)
    return tirx.PrimFunc(parameters, builder.get().body).with_attr(KERNEL, "scatter")


class _Kernel:
    """Builds the TIR function of a ScatterND whose `rows` of indices have `depth` numbers each."""

    def __init__(
        self,
        shape: Sequence[Any],
        rows: Sequence[Any],
        depth: int,
        dtype: str,
        index_dtype: str,
        combine: Callable[[Any, Any], Any],
        machine: Machine,
    ) -> None:
        self._machine, self._combine, self._depth, self._dtype = machine, combine, depth, dtype
        self._shape = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)]
        own = [size_parameter(size, f"m{place}") for place, size in enumerate(rows)]
        one = tirx.IntImm("int64", 1)
        self._count = math.prod(own, start=one)
        self._slices = math.prod(self._shape[:depth], start=one)
        self._size = math.prod(self._shape[depth:], start=one)
        self._data = buffer("data", self._shape, dtype)
        self._indices = buffer("indices", [*own, tirx.IntImm("int64", depth)], index_dtype)
        self._updates = buffer("updates", [*own, *self._shape[depth:]], dtype)
        self._result = buffer("result", self._shape, dtype)

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        total = self._slices * self._size
        with IRBuilder() as builder, T.seq_scope():
            flat = [
                T.decl_buffer((size,), item.dtype, data=item.data, layout=None)
                for item, size in (
                    (self._data, total),
                    (self._indices, self._count * self._depth),
                    (self._updates, self._count * self._size),
                    (self._result, total),
                )
            ]
            x, indices, updates, y = flat
            with _pieces(total, self._machine) as (first, size), T.serial(0, size) as place:
                T.buffer_store(y, x[first + place], [first + place])
            with _pieces(self._size, self._machine) as (first, size), T.serial(0, self._count) as row:
                target = tirx.IntImm("int64", 0)
                for place in range(self._depth):
                    index = indices[row * self._depth + place].astype("int64")
                    target = target * self._shape[place] + index
                with T.serial(0, size) as column:
                    there = target * self._size + first + column
                    new = updates[row * self._size + first + column]
                    T.buffer_store(y, self._combine(y[there], new), [there])
        parameters = [self._data, self._indices, self._updates, self._result]
        return tirx.PrimFunc(parameters, builder.get().body).with_attr(KERNEL, "scatter")


@contextmanager
def _pieces(total: Any, machine: Machine) -> Iterator[tuple[Any, Any]]:
    """Begin a loop over pieces of `total` elements, whole vectors, which the cores share; yield first and size."""
    one = tirx.IntImm("int64", 1)
    vectors = parts(total, machine.lanes)
    count = topi.utils.simplify(tirx.max(tirx.min(vectors, _PARTS * machine.cores), one))
    if machine.cores == 1 or static(count) == 1:
        yield tirx.IntImm("int64", 0), total
        return
    width = topi.utils.simplify(tirx.floordiv(vectors + count - 1, count) * machine.lanes)
    with T.parallel(0, count) as piece:
        first = piece * width
        yield first, tirx.max(tirx.min(width, total - first), 0)
