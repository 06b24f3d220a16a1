"""Joins the last dimensions along which a function reads and writes memory in order.

A loop over a dimension of two elements, or of a free size that may be as short, has no vectors. Where each tensor that
a block reads or writes has the same last dimensions at the same index, or does not depend on them, these dimensions are
one line of memory. Along the first of them, a tensor may have another size and be read from another place on, and a
condition may ask for the index: so do the parts of a concatenation, and data within padding.
"""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.tirx import BufferStore, For, PrimFunc, SeqStmt

from tvmflow.compiler.borders import MOST_CHOICES
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import static
from tvmflow.compiler.schedules import common
from tvmflow.compiler.statements import is_one_of, replace_variables, uses, with_body

# The comparisons that a condition may have.
_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)
# The attribute of a function with joined dimensions: its parameters as they were.
_PARAMETERS = "tvmflow.parameters"


def join(sch: Schedule, machine: Machine) -> Schedule:
    """Return the schedule of a function in whose only block the last dimensions are one, or the same schedule.

    The parameters have these dimensions too, until `separate` gives them their own again. A last dimension of a
    known size that fills a vector stays as it is.
    """
    common.inline_elementwise(sch)
    func = sch.mod["main"]
    if len(common.blocks(sch)) != 1:
        return sch
    realize = _only_block(func.body.block.body)
    if realize is None or func.body.block.alloc_buffers:
        return sch
    block = realize.block
    accesses = _accesses(block)
    rank = len(block.iter_vars)
    count = next((n for n in range(rank, 1, -1) if _are_lines(block, accesses, n)), 0)
    extents = [static(item.dom.extent) for item in block.iter_vars[-count:]] if count > 1 else []
    if not extents or (extents[-1] or 0) >= machine.lanes:
        return sch
    return Schedule(_joined(func, block, accesses, count))


def _only_block(body: Any) -> SBlockRealize | None:
    """The block of a nest of loops, one for each dimension in order, that stores an element; None for other nests."""
    loops = []
    while isinstance(body, For):
        loops.append(body.loop_var)
        body = body.body
    if not isinstance(body, SBlockRealize) or not isinstance(body.block.body, BufferStore):
        return None
    block = body.block
    is_plain = len(loops) == len(body.iter_values) and all(
        value.same_as(loop) for value, loop in zip(body.iter_values, loops, strict=True)
    )
    is_spatial = all(item.iter_type == tirx.IterVar.DataPar for item in block.iter_vars)
    is_whole = isinstance(body.predicate, tirx.IntImm) and bool(int(body.predicate))
    return body if is_plain and is_spatial and is_whole and not block.annotations else None


def _accesses(block: SBlock) -> list[tuple[Any, list[Any]]]:
    """The tensors that a block reads and writes, each with the indices."""
    accesses = [(block.body.buffer, list(block.body.indices))]

    def add(load: tvm.ir.TensorLoad) -> None:
        accesses.append((load.source, list(load.indices)))

    tvm_ffi.structural_walk(block.body, (tvm.ir.TensorLoad, add))
    return accesses


def _are_lines(block: SBlock, accesses: Sequence[tuple[Any, list[Any]]], count: int) -> bool:
    """Whether the last `count` dimensions are the last ones of each tensor that depends on them."""
    last = block.iter_vars[-count:]
    variables = [item.var for item in last]
    lines = [buffer for buffer, indices in accesses if _first(buffer, indices, last) is not None]
    for buffer, indices in accesses:
        if is_one_of(buffer, lines):
            if _first(buffer, indices, last) is None:
                return False
        elif any(uses(index, *variables) for index in indices):
            return False
    target, indices = accesses[0]
    start = _first(target, indices, last)
    is_whole = start is not None and static(start) == 0
    if not is_whole or not tvm_ffi.structural_equal(target.shape[-count], last[0].dom.extent):
        return False
    comparisons: list[Any] = []

    def remove(comparison: Any) -> Any:
        moved = _moved(comparison, variables, variables[0], tirx.const(1, variables[0].ty.dtype))
        comparisons.extend([] if moved is None else [moved])
        return comparison if moved is None else tirx.const(True, "bool")

    # Conditions are left out of a loop by one loop more for each.
    without_reads = tvm_ffi.structural_map(
        block.body.value, (tvm.ir.TensorLoad, lambda load: tirx.const(0, load.ty.dtype))
    )
    return not uses(tvm_ffi.structural_map(without_reads, (_COMPARISONS, remove)), *variables) and (
        len(comparisons) <= MOST_CHOICES
    )


def _first(buffer: Any, indices: Sequence[Any], last: Sequence[tirx.IterVar]) -> Any:
    """The index along the first of the dimensions `last` at which a block reads a tensor when its own index is zero.

    It is None unless the tensor's last dimensions are these, at the same index but for the first one.
    """
    variables = [item.var for item in last]
    before, ends = indices[: -len(last)], indices[-len(last) :]
    if len(ends) < len(last) or any(uses(index, *variables) for index in before):
        return None
    for index, size, item in zip(ends[1:], buffer.shape[1 - len(last) :], last[1:], strict=True):
        is_same = isinstance(index, tirx.Var) and index.same_as(item.var)
        if not is_same or not tvm_ffi.structural_equal(size, item.dom.extent):
            return None
    return _without(ends[0] - variables[0], variables)


def _without(expr: Any, variables: Sequence[tirx.Var]) -> Any:
    """An expression, simplified; None where it depends on any of the variables."""
    simple = tvm.sym.Analyzer().simplify(expr)
    return None if uses(simple, *variables) else simple


def _moved(comparison: Any, variables: Sequence[tirx.Var], place: Any, rest: Any) -> Any:
    """A comparison of the first of the variables with a number, of a place in a line of `rest` elements for each.

    It is None for other comparisons.
    """
    if not str(comparison.a.ty.dtype).startswith("int"):
        return None
    difference, less = comparison.a - comparison.b, isinstance(comparison, tirx.LT | tirx.LE)
    bound, is_strict = _without(variables[0] - difference, variables), isinstance(comparison, tirx.LT | tirx.GE)
    if bound is None:
        # The variable is on the other side.
        bound, less, is_strict = _without(variables[0] + difference, variables), not less, not is_strict
    if bound is None:
        return None
    end = (bound if is_strict else bound + 1) * rest
    return place < end if less else place >= end


def _joined(func: PrimFunc, block: SBlock, accesses: Sequence[tuple[Any, list[Any]]], count: int) -> PrimFunc:
    """The function whose block has one dimension in the place of its last `count`, and so have its tensors."""
    last = block.iter_vars[-count:]
    variables = [item.var for item in last]
    rest = reduce(operator.mul, (item.dom.extent for item in last[1:]))
    # The sizes in this order, as TVM's proofs have them.
    size = reduce(operator.mul, (item.dom.extent for item in last))
    place = tirx.Var("place", last[0].var.ty)
    lines = {
        buffer: tirx.decl_buffer(
            [*buffer.shape[:-count], reduce(operator.mul, buffer.shape[-count:])],
            buffer.dtype,
            buffer.name,
            layout=None,
        )
        for buffer, indices in accesses
        if _first(buffer, indices, last) is not None
    }

    def spot(buffer: Any, indices: Sequence[Any]) -> list[Any]:
        first = _first(buffer, indices, last)
        return [*indices[:-count], place if static(first) == 0 else place + first * rest]

    def load(access: tvm.ir.TensorLoad) -> Any:
        if access.source not in lines:
            return access
        return lines[access.source][tuple(spot(access.source, access.indices))]

    def compare(comparison: Any) -> Any:
        moved = _moved(comparison, variables, place, rest)
        return comparison if moved is None else moved

    def regions(tensors: Sequence[tuple[Any, list[Any]]]) -> list[Any]:
        spots = (
            (lines[buffer], spot(buffer, indices)) if buffer in lines else (buffer, indices)
            for buffer, indices in tensors
        )
        return [
            tirx.BufferRegion(buffer, [tvm.ir.Range.from_min_extent(index, 1) for index in indices])
            for buffer, indices in spots
        ]

    value = tvm_ffi.structural_map(block.body.value, [(tvm.ir.TensorLoad, load), (_COMPARISONS, compare)])
    target = lines[block.body.buffer]
    store = BufferStore(target, value, [*block.body.indices[:-count], place])
    iter_vars = [*block.iter_vars[:-count], tirx.IterVar(tvm.ir.Range(0, size), place, tirx.IterVar.DataPar)]
    inner = SBlock(iter_vars, regions(accesses[1:]), regions(accesses[:1]), block.name_hint, store)
    loops = [tirx.Var(item.var.name, item.var.ty) for item in iter_vars]
    body: Any = SBlockRealize(loops, True, inner)
    for variable, item in zip(reversed(loops), reversed(iter_vars), strict=True):
        body = For(variable, tirx.const(0, variable.ty.dtype), item.dom.extent, tirx.ForKind.SERIAL, body)
    root = SBlockRealize([], True, with_body(func.body.block, body))
    parameters = [lines.get(parameter, parameter) for parameter in func.params]
    joined = PrimFunc(parameters, root, func.ret_type, func.attrs).with_attr(_PARAMETERS, list(func.params))
    # A value that was inlined at several places defines the same variable at each of them.
    return tirx.transform.ConvertSSA()(tvm.IRModule({"main": joined}))["main"]


def separate(func: PrimFunc) -> PrimFunc:
    """Return a scheduled function with the parameters that it had before `join`, or unchanged."""
    parameters = (func.attrs or {}).get(_PARAMETERS)
    if parameters is None:
        return func
    views, names = [], {}
    for line, parameter in zip(func.params, parameters, strict=True):
        if not line.same_as(parameter):
            view = tirx.decl_buffer(line.shape, line.dtype, line.name, layout=None)
            names[line] = view
            views.append(tirx.DeclBuffer(view, data=parameter.data))
    body = replace_variables(func.body, names)
    block = with_body(body.block, SeqStmt([*views, body.block.body]))
    root = SBlockRealize(body.iter_values, body.predicate, block)
    return PrimFunc(list(parameters), root, func.ret_type, func.attrs).without_attr(_PARAMETERS)
