"""The cost model of blocks of convolutions: the patches and register tiles with which a block takes the least time.

`operators.blocks` defines a block by the plan that is chosen here.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from tvmflow.compiler import cost, tiles, winograd
from tvmflow.compiler.choices import Decisions
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.blocks import Block, Plan

# Element-wise operations on a vector of a result: a bias and the two bounds of an activation.
_EPILOGUE = 3
# The most options of a decision.
_CHOICES = 4
# The most widths of a patch that are tried for an image of free width: beside a patch of 32 columns, the two more that
# a 3x3 kernel needs are 6 %, and an image wastes half a patch of each strip on average.
_WIDTHS = 32
# A line of the first convolution gets at most so many more pixels, so that a tile divides it: fewer than a small tile.
_FILLED = 3


def plans(block: Block, batch: int, machine: Machine) -> tuple[list[Plan], float]:
    """Return a block's plans, the fastest first, and the estimated cycles of its convolutions as separate functions.

    The list of plans is empty where patches are impossible or not worth it; the cycles may be 0 then. `batch` is the
    number of images.
    """
    lanes, middle = machine.lanes, block.middle
    high, wide, depth = block.inner
    step = middle.winograd or 1
    # Channels that do not fill vectors, such as a model's input, are not worth a block.
    if middle.channels % lanes or (depth % lanes and not (middle.depthwise and block.first is None)):
        return [], 0.0
    result = middle.geometry.result_size(high, wide)
    all_lines, all_columns = ([part for part in range(step, size + 1, step) if size % part == 0] for size in result)
    # Where the height is free: for each number of patches below each other, the lowest ones.
    if block.free[0]:
        all_lines = sorted({-(-result[0] // count // step) * step for count in range(1, result[0] + 1)})
    if block.free[1]:
        all_columns = [*range(step, result[1] + 1, step)]
    ranked: list[Plan] = []
    apart = 0.0
    for columns in all_columns[:_WIDTHS] if block.free[1] else all_columns[-1:]:
        (first_tile, *_), (middle_tile, *_), (last_tile, *_) = _tiles(block, columns, machine)
        # A depthwise convolution has short sums, so it needs fewer of them in flight.
        busy = cost.in_flight(machine)
        if middle_tile.rows * middle_tile.vectors < (busy // 2 if middle.depthwise else busy):
            continue
        others = [tile.rows * tile.vectors for tile in (first_tile, last_tile) if tile]
        if min(others, default=busy) < busy:
            continue
        costs = _Costs(block, batch, machine, (first_tile, middle_tile, last_tile))
        apart = min(costs.apart(), apart or math.inf)
        for lines in all_lines:
            cycles = costs.whole(lines, columns, first_tile)
            if cycles is not None:
                ranked.append(Plan(lines, columns, first_tile, middle_tile, last_tile, cycles))
    ranked.sort(key=lambda plan: plan.cycles)
    return ranked, apart


class _Costs:
    """Counts the cycles of a block on all cores."""

    def __init__(
        self,
        block: Block,
        batch: int,
        machine: Machine,
        chosen: tuple[tiles.Tile | None, tiles.Tile, tiles.Tile | None],
    ) -> None:
        self._block = block
        self._batch = batch
        self._machine = machine
        first, middle, last, lanes = block.first, block.middle, block.last, machine.lanes
        high, wide, depth = block.inner
        self._out_h, self._out_w = middle.geometry.result_size(high, wide)
        # The bytes of a number that a dense convolution reads, and of one that the middle convolution reads in a block.
        self._number = 4 // block.group
        self._middle_number = 4 if middle.depthwise else self._number
        pixels = self._out_h * self._out_w
        first_tile, middle_tile, last_tile = chosen
        numbers = machine.vectors
        epilogue = _EPILOGUE / numbers.multiply_adds
        # `_first`: cycles per pixel of the middle convolution's input. `_middle`, `_last`: per pixel of its result.
        self._copy = -(-depth // lanes) * (1 / numbers.loads + 1 / numbers.stores)
        self._first = self._copy
        if first and first_tile:
            sums = self._steps(block.depth) * first.geometry.kernel[0] * first.geometry.kernel[1]
            self._first = self._results(depth, sums, first_tile) + -(-depth // lanes) * epilogue
        taps, vectors = middle.geometry.kernel[0] * middle.geometry.kernel[1], middle.channels // lanes
        if middle.winograd:
            size, stride = middle.winograd, middle.geometry.strides[0]
            shape = winograd.Shape(self._out_h, self._out_w, depth, middle.channels, stride)
            whole = winograd.cycles(size, shape, machine)
            self._middle = whole / pixels + vectors * epilogue
            taps = winograd.side_of(size, stride) ** 2
        elif middle.depthwise:
            strip = middle_tile.rows
            self._middle = vectors * (taps * cost.step(strip, 1, machine) / strip + 1 / numbers.stores + epilogue)
        else:
            self._middle = self._results(middle.channels, taps * self._steps(depth), middle_tile) + vectors * epilogue
        self._last = 0.0
        if last and last_tile:
            self._last = (
                self._results(last.channels, self._steps(middle.channels), last_tile)
                + -(-last.channels // lanes) * epilogue
            )
        self._weights = 0
        if not middle.depthwise:
            self._weights = self._number * taps * depth * middle.channels
            self._weights += self._number * block.depth * depth if first else 0
            self._weights += self._number * middle.channels * last.channels if last else 0
        # The pixels of the widest tile of the middle and the last convolution.
        self._tile = max(middle_tile.rows * (middle.winograd or 1), last_tile.rows if last_tile else 1)

    def _steps(self, depth: int) -> int:
        """The products that a lane adds one after another, for a sum over `depth` channels."""
        return -(-depth // self._block.group)

    def _results(self, channels: int, depth: int, tile: tiles.Tile) -> float:
        """The cycles of a pixel's `channels`, each a sum of `depth` products."""
        return cost.results(-(-channels // self._machine.lanes), depth, tile.rows * tile.vectors, self._machine)

    def _share(self, tasks: int) -> int:
        """The number of tasks of the busiest core."""
        return -(-tasks // self._machine.cores)

    def whole(self, lines: int, columns: int, first: tiles.Tile | None) -> float | None:
        """Return the cycles of the block as one function, in patches of `lines` by `columns` pixels.

        None where a patch exceeds the cache. `first` is the register tile of the first convolution, None where the
        block has none.
        """
        block, machine = self._block, self._machine
        middle = block.middle
        lines_in, columns_in = middle.geometry.window(lines, columns)
        channels = machine.lanes * first.vectors if first and middle.depthwise else block.inner[2]
        # Winograd's algorithm processes one line of output tiles at a time.
        step = middle.winograd or lines
        bytes_in_cache = self._middle_number * lines_in * columns_in * channels
        bytes_in_cache += self._number * step * columns * middle.channels if block.last else 0
        if middle.winograd:
            taps = winograd.side_of(middle.winograd, middle.geometry.strides[0]) ** 2
            bytes_in_cache += 4 * taps * columns // middle.winograd * (channels + middle.channels)
        if not cost.fits(bytes_in_cache, machine) and lines > (middle.winograd or 1):
            return None
        before = self._middle_number * lines_in * columns_in * block.inner[2]
        after = self._number * lines * columns * middle.channels
        computing = lines_in * columns_in * self._first
        cycles = cost.compute_and_move_cycles(computing, before, before, bytes_in_cache, machine)
        result = lines * columns * (self._middle + self._last)
        cycles += cost.compute_and_move_cycles(result, after, after, bytes_in_cache, machine) if block.last else result
        if self._weights + bytes_in_cache > machine.own_cache:
            # Each patch reads all weights again.
            cycles += cost.weight_read_cycles(max(self._weights, machine.own_cache + 1), machine)
        counts = [-(-size // part) for size, part in ((self._out_h, lines), (self._out_w, columns))]
        share: float = self._share(self._batch * math.prod(counts))
        # Where the image's size is free, the last patch of a strip computes no more than it needs. Its last tiles are
        # half empty on average.
        tiles = (middle.winograd or 1, self._tile)
        for count, size, tile, part, free in zip(
            counts, (self._out_h, self._out_w), tiles, (lines, columns), block.free, strict=True
        ):
            if free:
                share *= min(1, (size + (tile - 1) / 2) / (count * part))
        return share * cycles

    def apart(self) -> float:
        """Return the cycles of the block's convolutions as separate functions."""
        block, batch, cores, machine = self._block, self._batch, self._machine.cores, self._machine
        first, middle, last = block.first, block.middle, block.last
        high, wide, depth = block.inner
        padded = wide + middle.geometry.padding[1] + middle.geometry.padding[3]
        cycles: float = batch * high * wide * self._first
        cycles += batch * self._out_h * self._out_w * (self._middle + self._last)
        cycles /= cores
        if first:
            cycles += machine.region + batch * high * padded * self._copy / cores
            cycles += cost.exchange_cycles(self._number * self._share(batch * high) * padded * depth, machine)
        if last:
            cycles += machine.region
            pixels = self._share(batch * self._out_h) * self._out_w
            cycles += cost.exchange_cycles(self._number * pixels * middle.channels, machine)
        return cycles


def decide(block: Block, ranked: Sequence[Plan], machine: Machine, decisions: Decisions) -> Plan:
    """Return the first of the `ranked` plans, changed where the `decisions` about the block name other options.

    They may name another of the first few plans, by its lines, and other register tiles of the first and of the last
    convolution. The plan's `cycles` are not estimated again.
    """

    def name(plan: Plan) -> str:
        return f"{plan.lines}x{plan.columns}" if block.free[1] else str(plan.lines)

    plan = decisions.choose("lines", {name(plan): plan for plan in ranked[:_CHOICES]})
    first_tiles, _, last_tiles = _tiles(block, plan.columns, machine)
    first, last = (
        decisions.choose(kind, {f"{tile.rows}x{tile.vectors}" if tile else "": tile for tile in ranked_tiles})
        for kind, ranked_tiles in (("first", first_tiles), ("last", last_tiles))
    )
    return replace(plan, first=first, last=last)


def _tiles(
    block: Block, columns: int, machine: Machine
) -> tuple[Sequence[tiles.Tile | None], Sequence[tiles.Tile], Sequence[tiles.Tile | None]]:
    """Rank the register tiles of each of the three convolutions, the fastest first; None for a missing convolution.

    A patch of the block's result has `columns` columns, which the tiles of the middle and the last convolution divide.
    A line of the first convolution is filled up to a multiple of its tile.
    """
    first, middle, last = block.first, block.middle, block.last
    if middle.depthwise:
        pixels = max(size for size in range(1, tiles.most_pixels(machine) + 1) if columns % size == 0)
        between = [tiles.Tile(pixels, 1)]
    else:
        between = _rank(columns // (middle.winograd or 1), middle.channels, machine)
    return (
        _rank_filled(middle.geometry.window(1, columns)[1], block.inner[2], machine) if first else [None],
        between,
        _rank(columns, last.channels, machine) if last else [None],
    )


def _rank_filled(pixels: int, channels: int, machine: Machine) -> list[tiles.Tile]:
    """Rank tiles that divide `pixels`, or the next number of pixels for which a tile keeps a core busy."""
    ranked = [_rank(pixels + more, channels, machine) for more in range(_FILLED + 1)]
    return next((best for best in ranked if best[0].rows * best[0].vectors >= cost.in_flight(machine)), ranked[0])


@cache
def _rank(rows: int, channels: int, machine: Machine) -> list[tiles.Tile]:
    best, *others = tiles.rank(rows, -(-channels // machine.lanes), machine, exact=True)
    busy = [tile for tile in others if tile.rows * tile.vectors >= cost.in_flight(machine)]
    return [best, *busy][:_CHOICES]
