"""The register tile that every kernel uses: results stay in vector registers while a reduction runs over them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler import cost
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common

# The numbers of steps of a reduction that may be unrolled. Unrolling rarely helps, and costs registers. A reduction of
# at most `_SHORT` steps may be unrolled whole.
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
    """Split the loops over a tile's rows and channels into a register tile, and return it.

    Raises ValueError where the loops' extents are not constants equal to `rows` and `vectors * lanes`, because such a
    tile would not stay in registers.
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
    """Keep the results of a block's loops `tile` in registers while the loops `reductions` run around them.

    The innermost loop of the tile is vectorised. Its other loops are unrolled, and so are the reductions in `unrolled`.
    `group` are loops of a reduction within one lane, such as that of a dot-product instruction. With them the innermost
    loop of the tile is not vectorised: the caller replaces it by the instruction. A separate loop nest before the first
    reduction sets the results to the identity element, such as 0 for a sum.
    """
    sch.reorder(*reductions, *tile, *group)
    for loop in (*unrolled, *tile[:-1]):
        sch.unroll(loop)
    if not group:
        sch.vectorize(tile[-1])
    start = sch.decompose_reduction(block, reductions[0])
    keep_in_registers(sch, list(sch.get_loops(start))[-len(tile) :])


def keep_in_registers(sch: Schedule, loops: Sequence[LoopRV]) -> None:
    """Unroll a tile's loops and vectorise the innermost one."""
    *unrolled, lane = loops
    sch.vectorize(lane)
    for loop in unrolled:
        sch.unroll(loop)


def write_tile(sch: Schedule, block: SBlockRV, loops: Sequence[LoopRV]) -> None:
    """Write a tile of results by the `loops` of a block, in vectors.

    They are unrolled, so that the sums go from registers to memory, unless the block computes a function of many steps,
    such as an exponential: that of all sums at once would need more registers than these leave.
    """
    if common.has_function(sch, block):
        sch.vectorize(loops[-1])
    else:
        keep_in_registers(sch, loops)


def split_steps(sch: Schedule, reduction: LoopRV, choices: Choices, subject: str = "") -> list[LoopRV]:
    """Split a reduction around a register tile into an outer loop and unrolled steps; return the loops as a list.

    `choices` name the number of steps. By default the reduction is not split, and its loop alone is returned. `subject`
    tells the reductions of one function apart in the `choices`.
    """
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


def choose_vectors(rows: int, vectors: int | None, machine: Machine, choices: Choices, tasks: int | None = None) -> int:
    """Choose the number of vectors in each of the `rows` rows of a register tile.

    `vectors` is the number of vectors in a row of the result; where it is unknown (None), the tile has one vector, and
    there is no choice. Otherwise the number divides `vectors` and is at most 8; the default is the largest that
    the registers hold. `tasks` is the number of tiles, one above the other, that cover all rows of the result. If it is
    given, and the tiles do not give the cores even shares, the default is a smaller number, which makes more tiles. The
    `choices` may name another of the numbers that fit.
    """
    if vectors is None:
        return 1
    fits = [
        count for count in range(8, 0, -1) if vectors % count == 0 and rows * count + count + 1 <= machine.registers
    ]
    if tasks is not None:
        # The sort is stable: of numbers with even shares the largest comes first.
        fits.sort(key=lambda count: min(cost.EVEN, cost.evenness(tasks * vectors // count, machine)), reverse=True)
    return choices.choose("vectors", "", {str(count): count for count in fits or [1]})
