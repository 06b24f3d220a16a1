"""Joins the last dimensions of free sizes along which a function reads and writes memory in order.

A loop over a dimension of two elements, or of a free size that may be as short, has no vectors. Where each tensor that
a block reads or writes has the same last dimensions at the same index, or does not depend on them, these dimensions are
one line of memory.
"""

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.tirx import BufferStore, For, PrimFunc, SeqStmt

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import static
from tvmflow.compiler.schedules import common
from tvmflow.compiler.statements import is_one_of, replace_variables, uses, with_body

# The attribute of a function with joined dimensions: its parameters as they were.
_PARAMETERS = "tvmflow.parameters"


def join(sch: Schedule, machine: Machine) -> Schedule:
    """Return the schedule of a function in whose only block the last dimensions are one, or the same schedule.

    The parameters have these dimensions too, until `separate` gives them their own again. A last dimension of a
    known size that fills a vector stays as it is.
    """
    common.inline_elementwise(sch)
    func = sch.mod["main"]
    if common.has_fixed_sizes(func) or len(common.blocks(sch)) != 1:
        return sch
    realize = _only_block(func.body.block.body)
    if realize is None or func.body.block.alloc_buffers:
        return sch
    block = realize.block
    accesses = _accesses(block)
    rank = len(block.iter_vars)
    count = next((n for n in range(rank, 1, -1) if _are_lines(block, accesses, n)), 0)
    extents = [static(item.dom.extent) for item in block.iter_vars[-count:]] if count > 1 else []
    if None not in extents or (extents[-1] or 0) >= machine.lanes:
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
    lines = [buffer for buffer, indices in accesses if _is_line((buffer, indices), last)]
    for buffer, indices in accesses:
        if is_one_of(buffer, lines):
            if not _is_line((buffer, indices), last):
                return False
        elif any(uses(index, *variables) for index in indices):
            return False
    return _is_line(accesses[0], last) and not _used_elsewhere(block.body.value, variables)


def _is_line(access: tuple[Any, list[Any]], last: Sequence[tirx.IterVar]) -> bool:
    """Whether the dimensions `last` of a block are the last ones of a tensor, at the indices of an access."""
    buffer, indices = access
    before, ends = indices[: -len(last)], indices[-len(last) :]
    if len(ends) < len(last) or any(uses(index, *(item.var for item in last)) for index in before):
        return False
    sizes = buffer.shape[-len(last) :]
    return all(
        isinstance(index, tirx.Var) and index.same_as(item.var) and tvm_ffi.structural_equal(size, item.dom.extent)
        for index, size, item in zip(ends, sizes, last, strict=True)
    )


def _used_elsewhere(value: Any, variables: Sequence[tirx.Var]) -> bool:
    """Whether an expression depends on variables otherwise than by the tensors that it reads."""
    constant = tvm_ffi.structural_map(value, (tvm.ir.TensorLoad, lambda load: tirx.const(0, load.ty.dtype)))
    return uses(constant, *variables)


def _joined(func: PrimFunc, block: SBlock, accesses: Sequence[tuple[Any, list[Any]]], count: int) -> PrimFunc:
    """The function whose block has one dimension in the place of its last `count`, and so have its tensors."""
    last = block.iter_vars[-count:]
    size = reduce(operator.mul, (item.dom.extent for item in last))
    place = tirx.Var("place", last[0].var.ty)
    lines = {
        buffer: tirx.decl_buffer([*buffer.shape[:-count], size], buffer.dtype, buffer.name, layout=None)
        for buffer, indices in accesses
        if _is_line((buffer, indices), last)
    }

    def load(access: tvm.ir.TensorLoad) -> Any:
        if access.source not in lines:
            return access
        return lines[access.source][(*access.indices[:-count], place)]

    value = tvm_ffi.structural_map(block.body.value, (tvm.ir.TensorLoad, load))
    target = lines[block.body.buffer]
    store = BufferStore(target, value, [*block.body.indices[:-count], place])
    iter_vars = [*block.iter_vars[:-count], tirx.IterVar(tvm.ir.Range(0, size), place, tirx.IterVar.DataPar)]
    reads = [_region(region, lines, place, count) for region in block.reads]
    writes = [_region(region, lines, place, count) for region in block.writes]
    inner = SBlock(iter_vars, reads, writes, block.name_hint, store)
    loops = [tirx.Var(item.var.name, item.var.ty) for item in iter_vars]
    body: Any = SBlockRealize(loops, True, inner)
    for variable, item in zip(reversed(loops), reversed(iter_vars), strict=True):
        body = For(variable, tirx.const(0, variable.ty.dtype), item.dom.extent, tirx.ForKind.SERIAL, body)
    root = SBlockRealize([], True, with_body(func.body.block, body))
    parameters = [lines.get(parameter, parameter) for parameter in func.params]
    joined = PrimFunc(parameters, root, func.ret_type, func.attrs).with_attr(_PARAMETERS, list(func.params))
    # A value that was inlined at several places defines the same variable at each of them.
    return tirx.transform.ConvertSSA()(tvm.IRModule({"main": joined}))["main"]


def _region(region: Any, lines: Mapping[Any, Any], place: tirx.Var, count: int) -> Any:
    """The region of a tensor whose last `count` dimensions are one, at a place along it."""
    if region.source not in lines:
        return region
    spans = [*region.region[:-count], tvm.ir.Range.from_min_extent(place, 1)]
    return tirx.BufferRegion(lines[region.source], spans)


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
