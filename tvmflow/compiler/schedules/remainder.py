"""Writes the last channels of a result in smaller vectors, where the channels fill no whole vectors.

A schedule writes a tile of the result in whole vectors. The last vector may have channels that do not exist. Vectors
with a condition for each channel would be written number by number, and so would the element-wise operators after a
product be computed. `split` marks the loop over the vectors of a tile by an annotation, and `expand` writes two forms
of the loops over the tile: whole vectors without a condition, and, for the last tile alone, whole vectors followed by
vectors of half as many lanes, a quarter and so on, for the channels that are left. If their number is free, as that of
the columns of a product of two tensors may be, the last tile keeps the condition for each of them.
"""

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import For, ForKind, PrimFunc, SeqStmt

from tvmflow.compiler.schedules import common
from tvmflow.compiler.schedules.tails import limit_of, renewed, without_term
from tvmflow.compiler.statements import replace_variables, run_either, uses, with_loop_body

# The annotation of the loop over the vectors of a tile: the number of channels of the result, 0 for a free one.
_CHANNELS = "tvmflow.channels"


def split(sch: Schedule, channel: LoopRV, count: int, lanes: int) -> tuple[LoopRV, LoopRV, LoopRV]:
    """Split the loop `channel` over output channels into loops over tiles, vectors and lanes, and return these three.

    A tile has `count` vectors of `lanes` channels. The caller vectorises the loop over lanes.
    """
    channels = common.extent(sch, channel)
    outer, pieces, lane = sch.split(channel, [None, count, lanes])
    if channels is None or channels % lanes:
        sch.annotate(pieces, _CHANNELS, channels or 0)
    return outer, pieces, lane


def expand(func: PrimFunc) -> PrimFunc:
    """Return a scheduled function with the vectors that its annotations ask for, or unchanged without any."""
    body = tvm_ffi.structural_map(func.body, (For, _expand), order="pre")
    return func if body.same_as(func.body) else func.with_body(body)


def _expand(loop: For) -> Any:
    """Return the loops over a tile of the result in two forms; other loops are returned unchanged."""
    loops: list[Any] = [loop]
    while isinstance(loops[-1].body, For):
        loops.append(loops[-1].body)
    if len(loops) < 2 or _CHANNELS not in loops[-2].annotations:
        return loop
    limit = limit_of(loops[-1], loops[-1].body.predicate)
    if limit is None:
        return loop
    tile = _Tile(loops, limit)
    # Else the inner ones of these loops alone are within a tile.
    return loop if uses(tile.last_channel, *(item.loop_var for item in tile.rows)) else tile.in_two_forms()


class _Tile:
    """The loops that write a tile of the result: `rows`, and within them those over vectors and lanes.

    `limit` is the condition that a channel exists.
    """

    def __init__(self, loops: Sequence[Any], limit: Any) -> None:
        *self.rows, self._vectors, self._lanes = loops
        self._count, self._width = int(self._vectors.extent), int(self._lanes.extent)
        self._channels = int(self._vectors.annotations[_CHANNELS])
        self._limit, self._block = limit, without_term(self._lanes.body, limit)
        last = {self._vectors.loop_var: self._count - 1, self._lanes.loop_var: self._width - 1}
        # The last channel of the tile, which may not exist.
        self.last_channel = common.substitute(limit.a, {name: tirx.const(at, "int64") for name, at in last.items()})

    def in_two_forms(self) -> Any:
        """Return a branch between whole vectors and the vectors of the last tile; the latter alone of a single tile."""
        whole = self._write([self._whole(self._count)])
        if not self._channels:
            return run_either(self.last_channel < self._limit.b, whole, self._write([self._with_condition()]))
        left = (self._channels - 1) % (self._count * self._width) + 1
        last = self._write(self._last_vectors(left))
        if left == self._channels:
            return last
        return run_either(self.last_channel < self._channels, whole, last)

    def _last_vectors(self, left: int) -> list[Any]:
        """The vectors of a tile in which so many channels are left."""
        first = left - left % self._width
        parts = [self._whole(first // self._width)] if first else []
        width = self._width // 2
        while first < left:
            if left - first >= width:
                parts.append(self._part(first, width))
                first += width
            width //= 2
        return parts

    def _whole(self, count: int) -> Any:
        """The loops over the first `count` vectors of the tile."""
        return renewed(_with_extent(self._vectors, count, _with_extent(self._lanes, self._width, self._block)), [])

    def _with_condition(self) -> Any:
        """The loops over all vectors of the tile, with the condition for each channel."""
        return renewed(_with_extent(self._vectors, self._count, self._lanes), [])

    def _part(self, first: int, width: int) -> Any:
        """A vector of fewer lanes, which begins at the channel `first` of the tile."""
        vector, lane = divmod(first, self._width)
        places = {
            self._vectors.loop_var: tirx.const(vector, "int64"),
            self._lanes.loop_var: self._lanes.loop_var + lane,
        }
        return renewed(_with_extent(self._lanes, width, replace_variables(self._block, places)), [])

    def _write(self, parts: Sequence[Any]) -> Any:
        """Write all rows by these parts."""
        stmt = SeqStmt(parts) if len(parts) > 1 else parts[0]
        for loop in reversed(self.rows):
            stmt = with_loop_body(loop, stmt)
        return renewed(stmt, [])


def _with_extent(loop: For, extent: int, body: Any) -> For:
    """Return a loop of another extent, with another body and no annotations; a loop of one iteration is serial."""
    kind = loop.kind if extent > 1 else ForKind.SERIAL
    return For(loop.loop_var, loop.min, tirx.const(extent, loop.extent.ty.dtype), kind, body)
