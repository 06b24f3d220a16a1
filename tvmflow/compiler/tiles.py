"""Chooses register tiles: how many rows by how many vectors of a matrix product stay in registers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvmflow.compiler import cost
from tvmflow.compiler.choices import Decisions
from tvmflow.compiler.dotproduct import PAIRS, Dot
from tvmflow.compiler.machine import Machine


@dataclass(frozen=True)
class Tile:
    """A register tile of a matrix product: `rows` of the left operand by `vectors` of output channels."""

    rows: int
    vectors: int


# The most rows of a tile for a product of a symbolic number of rows, most of which are wasted where there are few. Two
# vectors of this many rows, at most, fit the registers.
UNKNOWN_ROWS = 8
# The share of a cache's read rate that is left while a core computes: a part of the model, of every cache.
_READ_SHARE = 0.75
# The most heights of tiles that tuning measures.
_CHOICES = 4


def choose(
    rows: int | None,
    vectors: int,
    machine: Machine,
    row_bytes: int | None = None,
    *,
    exact: bool = False,
    uses: int = 1,
) -> Tile:
    """Return the fastest register tile for a product of `rows` rows (None: symbolic) and `vectors` vectors of channels.

    `row_bytes` is the distance in memory from one row of the left operand to the next, None where it is unknown. With
    `exact` the number of the tile's rows divides `rows`. Each number of the left operand is read `uses` times for each
    channel, as a convolution's taps read its input.
    """
    return rank(rows, vectors, machine, row_bytes, exact=exact, uses=uses)[0]


def rank(
    rows: int | None,
    vectors: int,
    machine: Machine,
    row_bytes: int | None = None,
    *,
    exact: bool = False,
    unknown: int = UNKNOWN_ROWS,
    uses: int = 1,
) -> list[Tile]:
    """Rank the register tiles for a product of `rows` rows (None: symbolic) and `vectors` vectors of channels.

    The fastest tile comes first, and there is at least one. No tile has more rows than the product, and none more than
    `unknown` where their number is symbolic.

    With `exact` the number of each tile's rows divides `rows`. `row_bytes` is the distance in memory from one row of
    the left operand to the next, None where it is unknown. If rows at this distance share one set of the first-level
    cache (`conflicts`), tiles have at most `cost.rows_in_set` rows: more would evict each other.

    Tiles are ranked by their multiply-adds per cycle. In a step of the reduction, a tile of r rows by v vectors does
    r*v multiply-adds with r + v loads, of which v load weights from the second-level cache. It needs r*v + v + 1
    registers. Work on the missing rows of a last, partial tile is wasted. Rows that no tile divides are copied, at a
    cost that the `uses` of each number share.
    """
    # More results in flight than this, two and a half times those that hide the latency, make no tile better.
    enough = cost.in_flight(machine) * 5 // 2
    most = machine.registers - (2 if exact else 4)
    if conflicts(row_bytes, machine):
        most = min(most, cost.rows_in_set(machine))
    if rows is not None:
        most = min(most, rows)
    rated_tiles: list[tuple[tuple[float, int, int], Tile]] = []
    for count in range(1, min(vectors, 8) + 1):
        if vectors % count:
            continue
        # Of a symbolic number of rows, a tile has as many as two vectors leave registers for; where two do not divide
        # the vectors, as many as its own do.
        fitting = min(unknown, (machine.registers - 1) // (count if vectors % 2 else 2) - 1, most)
        for height in range(1, most + 1):
            if height * count + count + 1 > machine.registers or (rows is None and height != fitting):
                continue
            if exact and rows is not None and rows % height:
                continue
            rate = _rate(Tile(height, count), rows, vectors, machine, uses)
            key = (round(rate, 2), min(height * count, enough), -abs(count - 2))
            rated_tiles.append((key, Tile(height, count)))
    # The sort is stable: of equal tiles the first one stays first.
    return [tile for _, tile in sorted(rated_tiles, key=lambda item: item[0], reverse=True)] or [Tile(1, 1)]


def _rate(tile: Tile, rows: int | None, vectors: int, machine: Machine, uses: int = 1) -> float:
    """The multiply-adds per cycle of a tile on a product of `rows` rows and `vectors` vectors of channels."""
    useful = 1.0 if rows is None else rows / (-(-rows // tile.rows) * tile.rows)
    # Uneven rows are copied into a panel first, once for all vectors of channels.
    is_even = rows is not None and rows % tile.rows == 0
    copying = 0.0 if is_even else 2 * tile.rows / machine.lanes / machine.vectors.loads * tile.vectors / vectors / uses
    return tile.rows * tile.vectors * useful / (step(tile, machine) + copying)


def filled(rows: int | None, vectors: int, machine: Machine, uses: int = 1, *, is_packed: bool = True) -> int:
    """Return how many vectors of channels to compute for `vectors` of them: as many, or one more, of zeros.

    One more takes less time where only poor register tiles divide `vectors`, as they do a prime number. The product has
    `rows` rows (None: symbolic), and reads each number of its left operand `uses` times for each channel. Without
    `is_packed` the right operand has `vectors` whole vectors side by side, and is copied where it needs one more.
    """

    def cycles(count: int) -> float:
        copying = 0.0
        if count > vectors and not is_packed:
            copying = (1 / machine.vectors.loads + 1 / machine.vectors.stores) / (rows or UNKNOWN_ROWS)
        return count * (1 / _rate(choose(rows, count, machine, uses=uses), rows, count, machine, uses) + copying)

    return min(vectors, vectors + 1, key=cycles)


def step(tile: Tile, machine: Machine) -> float:
    """Return the cycles of one step of a product's reduction, with weights from the second-level cache."""
    weights = tile.vectors * machine.lanes * machine.number / (_READ_SHARE * machine.second.read)
    return max(cost.step(tile.rows, tile.vectors, machine), weights)


def cycles(rows: int | None, depth: int, vectors: int, machine: Machine) -> float:
    """Return the cycles for one vector of results of a product by the fastest register tiles.

    The product has `rows` rows, `depth` steps of its reduction and `vectors` vectors of channels. For a symbolic number
    of rows, None, they are those of one tile.
    """
    tile = choose(rows, vectors, machine)
    return -(-(rows or tile.rows) // tile.rows) * depth * step(tile, machine) / tile.vectors


def most_pixels(machine: Machine) -> int:
    """Return the most pixels whose sums, a vector each, stay in registers while a depthwise convolution adds its taps.

    Half of the registers hold sums, the others the vectors that LLVM loads ahead.
    """
    return machine.registers // 2


def reserve_register(dot: Dot, machine: Machine) -> Machine:
    """Return the machine with the registers that dot products leave to the sums and operands of a tile.

    A pair's sum is added to another one by a second instruction, and takes a register until then.
    """
    if dot is not PAIRS:
        return machine
    return replace(machine, vectors=replace(machine.vectors, registers=machine.registers - 1))


def conflicts(row_bytes: int | None, machine: Machine) -> bool:
    """Whether rows at a distance of `row_bytes` (None: unknown, so no) share one set of the first-level cache."""
    return row_bytes is not None and row_bytes % machine.first.span == 0


def choose_rows(tiles: Sequence[Tile], decisions: Decisions) -> int:
    """Choose the number of rows of a product's register tile.

    `tiles` are the candidates, the fastest first. `decisions` choose among the first four different numbers of rows.
    """
    heights = list(dict.fromkeys(tile.rows for tile in tiles))[:_CHOICES]
    return decisions.choose("rows", {str(height): height for height in heights})
