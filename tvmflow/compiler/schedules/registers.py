"""The register tile, which every kernel shares: results stay in vector registers while a reduction runs over them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common

# Steps of a reduction that may be unrolled: rarely better, and worse where registers are short. A reduction of at most
# `_SHORT` steps may be unrolled whole.
_UNROLLED = (2, 4)
_SHORT = 8


@dataclass(frozen=True)
class RegisterTile:
    """The loops of a product over one tile of its result: rows, vectors of channels, and the lanes of a vector."""

    row: LoopRV
    vector: LoopRV
    lane: LoopRV

    @property
    def loops(self) -> list[LoopRV]:
        """The loops from the outermost to the innermost one."""
        return [self.row, self.vector, self.lane]


def split_tile(sch: Schedule, row: LoopRV, channel: LoopRV, rows: int, vectors: int, lanes: int) -> RegisterTile:
    """Make a register tile of the loops over its rows and channels.

    Raises ValueError where their extents are not constants equal to `rows` and `vectors * lanes`: such a tile would
    not stay in registers.
    """
    extents = [common.extent(sch, loop) for loop in (row, channel)]
    if extents != [rows, vectors * lanes]:
        raise ValueError(f"a tile of {rows} rows by {vectors} vectors of {lanes} lanes has loops of {extents}")
    vector, lane = sch.split(channel, [vectors, lanes])
    return RegisterTile(row, vector, lane)


def accumulate(
    sch: Schedule,
    block: SBlockRV,
    tile: Sequence[LoopRV],
    reductions: Sequence[LoopRV],
    group: Sequence[LoopRV] = (),
    unrolled: Sequence[LoopRV] = (),
) -> None:
    """Keep the results of a block's loops `tile` in registers while its `reductions` run around them.

    The innermost loop of the tile becomes a vector, the others and those of the reductions in `unrolled` are unrolled.
    `group` are reductions within a lane: there an instruction takes the innermost loop, which stays as it is. The
    results are set to their identities by a loop nest of its own before the first reduction.
    """
    sch.reorder(*reductions, *tile, *group)
    for loop in (*unrolled, *tile[:-1]):
        sch.unroll(loop)
    if not group:
        sch.vectorize(tile[-1])
    start = sch.decompose_reduction(block, reductions[0])
    in_registers(sch, list(sch.get_loops(start))[-len(tile) :])


def in_registers(sch: Schedule, loops: Sequence[LoopRV]) -> None:
    """Unroll a tile's loops and make the innermost one a vector."""
    *unrolled, lane = loops
    sch.vectorize(lane)
    for loop in unrolled:
        sch.unroll(loop)


def in_steps(sch: Schedule, reduction: LoopRV, choices: Choices, subject: str = "") -> list[LoopRV]:
    """The loops of a reduction around a register tile: how many of its steps are unrolled is a choice."""
    size = common.extent(sch, reduction)
    counts = [count for count in _UNROLLED if size is not None and size > count and size % count == 0]
    if size is not None and 1 < size <= _SHORT:
        counts.append(size)
    count = choices.choose("unroll", subject, {str(count): count for count in (1, *counts)})
    if count == 1:
        return [reduction]
    rest, steps = sch.split(reduction, [None, count])
    sch.unroll(steps)
    return [rest, steps]


def choose_vectors(rows: int, vectors: int | None, machine: Machine, choices: Choices) -> int:
    """The vectors of a register tile of so many rows: the most that the registers hold, or one of an unknown number.

    `vectors` is their number in the whole result. Whether fewer are better is a choice.
    """
    if vectors is None:
        return 1
    fits = [
        count for count in range(8, 0, -1) if vectors % count == 0 and rows * count + count + 1 <= machine.registers
    ]
    return choices.choose("vectors", "", {str(count): count for count in fits or [1]})
