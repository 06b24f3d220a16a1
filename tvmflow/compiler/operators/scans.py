"""Running sums along a dimension that is not the last one.

TVM adds number by number, each of them a whole slice away from the one before. Here vectors of neighbouring numbers are
added, in the same order.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler import extensions
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import buffer, parts, registers, size_parameter, static


def lower(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define a running sum of float32. Returns None for other numbers, and where no dimension follows that of the sum.

    TVM dispatches running sums before it legalises, so this is no definition for `LegalizeOps`.
    """
    data = call.args[0]
    if not isinstance(data.ty.shape, relax.ShapeExpr) or call.attrs.axis is None:
        return None
    if {str(data.ty.dtype), str(call.ty.dtype)} != {"float32"}:
        return None
    shape = list(data.ty.shape.values)
    axis = int(call.attrs.axis) % len(shape)
    if all(static(size) == 1 for size in shape[axis + 1 :]):
        return None
    function = _function(shape, axis, bool(call.attrs.exclusive), machine).with_attr(KERNEL, "scan")
    variable = extensions.emit_function(builder, function, "cumsum")
    # An operand, because TVM fails on a function of one operand that has no blocks: it looks for reshapes among these.
    return relax.call_tir(variable, [data, relax.const(np.float32(0.0))], call.ty)


def _function(shape: Sequence[Any], axis: int, is_exclusive: bool, machine: Machine) -> tirx.PrimFunc:
    """The function of the sums of `shape` along `axis`; with `is_exclusive`, of the numbers before each place."""
    sizes = [size_parameter(size, f"n{place}") for place, size in enumerate(shape)]
    one, lanes = tirx.IntImm("int64", 1), machine.lanes
    before, after = math.prod(sizes[:axis], start=one), math.prod(sizes[axis + 1 :], start=one)
    data, zero, result = buffer("x", sizes), buffer("zero", ()), buffer("y", sizes)
    total = before * sizes[axis] * after
    pieces = parts(after, lanes)
    with IRBuilder() as builder, T.seq_scope():
        x, y = (T.decl_buffer((total,), "float32", data=item.data, layout=None) for item in (data, result))
        with (T.parallel if machine.cores > 1 else T.serial)(0, before * pieces) as task:
            first = tirx.floormod(task, pieces) * lanes
            start = tirx.floordiv(task, pieces) * sizes[axis] * after + first
            sums = registers((lanes,))

            def step(place: Any, lane: Any) -> None:
                at = start + place * after + lane
                following = sums[lane] + x[at]
                if is_exclusive:
                    T.buffer_store(y, sums[lane], [at])
                    T.buffer_store(sums, following, [lane])
                else:
                    T.buffer_store(sums, following, [lane])
                    T.buffer_store(y, sums[lane], [at])

            with T.vectorized(0, lanes) as lane:
                T.buffer_store(sums, zero[()], [lane])
            with T.If(first + lanes <= after):
                with T.Then(), T.serial(0, sizes[axis]) as place, T.vectorized(0, lanes) as lane:
                    step(place, lane)
                with T.Else(), T.serial(0, sizes[axis]) as place, T.serial(0, after - first) as lane:
                    step(place, lane)
    return tirx.PrimFunc([data, zero, result], builder.get().body)
