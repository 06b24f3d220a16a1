"""Writes the last channels of a result in smaller vectors, where the channels fill no whole vectors.

A schedule writes a tile of the result in whole vectors. The last vector may have channels that do not exist. Vectors
with a condition for each channel would be written number by number, and so would the element-wise operators after a
product be computed. `split` marks the loop over the vectors of a tile by an annotation, and `expand` writes two forms
of the loops over the tile: whole vectors without a condition, and, for the last tile alone, whole vectors followed by
vectors of half as many lanes, a quarter and so on, for the channels that are left.
"""

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import For, ForKind, PrimFunc, SeqStmt

from tvmflow.compiler.schedules import common
from tvmflow.compiler.schedules.tails import renewed
from tvmflow.compiler.statements import replace_variables, run_if, terms, uses, with_loop_body

# The annotation of the loop over the vectors of a tile: the number of channels of the result.
_CHANNELS = "tvmflow.channels"


def split(sch: Schedule, channel: LoopRV, count: int, lanes: int) -> tuple[LoopRV, LoopRV, LoopRV]:
    """Split the loop `channel` over output channels into loops over tiles, vectors and lanes, and return these three.

    A tile has `count` vectors of `lanes` channels. The caller vectorises the loop over lanes.
    """
    channels = common.extent(sch, channel)
    outer, pieces, lane = sch.split(channel, [None, count, lanes])
    if channels is not None and channels % lanes:
        sch.annotate(pieces, _CHANNELS, channels)
    return outer, pieces, lane


def expand(func: PrimFunc) -> PrimFunc:
    """Return a scheduled function with the vectors that its annotations ask for, or unchanged without any."""
    body = tvm_ffi.structural_map(func.body, (For, _expand), order="pre")
    return func if body.same_as(func.body) else func.with_body(body)


def _expand(tile: For) -> Any:
    """Return the loops over a tile of the result in two forms; other loops are returned unchanged."""
    loops: list[Any] = [tile]
    while isinstance(loops[-1].body, For):
        loops.append(loops[-1].body)
    if len(loops) < 2 or _CHANNELS not in loops[-2].annotations:
        return tile
    *rows, pieces, lane = loops
    realize = lane.body
    count, lanes, channels = int(pieces.extent), int(lane.extent), int(pieces.annotations[_CHANNELS])
    (limit,) = (term for term in terms(realize.predicate) if uses(term, lane.loop_var))
    kept = [term for term in terms(realize.predicate) if not term.same_as(limit)]
    condition = tirx.all(*kept) if kept else tirx.const(True, "bool")
    inside = SBlockRealize(realize.iter_values, condition, realize.block)

    def vectors(first: int, number: int, width: int) -> For:
        """The loops over so many vectors of a width, of which the first begins at a channel of the tile."""
        zero = tirx.const(0, lane.extent.ty.dtype)
        place = {lane.loop_var: lane.loop_var + first % lanes}
        body = inside if first % lanes == 0 else replace_variables(inside, place)
        kind = ForKind.VECTORIZED if width > 1 else ForKind.SERIAL
        run = For(lane.loop_var, zero, tirx.const(width, zero.ty.dtype), kind, body)
        start = tirx.const(first // lanes, zero.ty.dtype)
        if number == 1:
            return renewed(replace_variables(run, {pieces.loop_var: start}), [])
        return renewed(For(pieces.loop_var, zero, tirx.const(number, zero.ty.dtype), pieces.kind, run), [])

    def whole_tile(parts: Sequence[Any]) -> Any:
        stmt = SeqStmt(parts) if len(parts) > 1 else parts[0]
        for loop in reversed(rows):
            stmt = with_loop_body(loop, stmt)
        return renewed(stmt, [])

    end = common.substitute(
        limit.a, {pieces.loop_var: tirx.const(count - 1, "int64"), lane.loop_var: tirx.const(lanes - 1, "int64")}
    )
    if uses(end, *(loop.loop_var for loop in rows)):
        # The inner loops alone are within a tile.
        return tile
    start = (channels - 1) // (count * lanes) * count * lanes
    full, rest = divmod(channels - start, lanes)
    parts = [vectors(0, full, lanes)] if full else []
    first = full * lanes
    width = lanes // 2
    while rest:
        if rest >= width:
            parts.append(vectors(first, 1, width))
            first, rest = first + width, rest - width
        width //= 2
    last = whole_tile(parts)
    if start == 0:
        return last
    is_whole = end < channels
    return SeqStmt([run_if(is_whole, whole_tile([vectors(0, count, lanes)])), run_if(tirx.Not(is_whole), last)])
