"""Schedules for matrix products and dense convolutions: a register tile of rows by vectors of output channels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler import cost
from tvmflow.compiler.annotations import LANES, LEAD, ROWS, SHARED, TILE
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import static, typical_pixels
from tvmflow.compiler.schedules import common, prefetch, registers, remainder, tails, transposes
from tvmflow.compiler.schedules.registers import RegisterTile

# The cycles of a tile of which two divisions of 64-bit integers are a twentieth.
_SHORT_TILE = 800
# One task that reads weights alone has no other one to fetch the next weights for.
_FEWEST_READERS = 2


def apply_rows(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule dense layers, 1x1 convolutions and batched matrix products; return False for other functions."""
    return _apply(sch, machine, choices, "rows")


def apply_conv2d(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule convolutions that are not depthwise; return False for other functions."""
    return _apply(sch, machine, choices, "conv2d")


def _apply(sch: Schedule, machine: Machine, choices: Choices, kind: str) -> bool:
    reduced = 1 if kind == "rows" else 3
    product = tile_product(sch, machine, choices, kind, lead_dimensions=kind == "rows", reduced=reduced, grouped=0)
    if product is None:
        return False
    *outer, last = product.reductions
    *chunks, last = prefetch.split_chunks(sch, last, choices) if product.streams else [last]
    if not chunks:
        *chunks, last = prefetch.spread_fetches(sch, product.task, outer, last)
    steps = [*outer, *chunks, *registers.split_steps(sch, last, choices)]
    registers.accumulate(sch, product.block, product.tile.loops, steps)
    registers.write_tile(sch, product.out, product.result_tile.loops)
    tails.mark_tail(sch, product.result_tile.row, single=kind == "rows")
    return True


@dataclass(frozen=True)
class TiledProduct:
    """A product scheduled down to its register tile.

    `task` is the loop that runs in parallel. `tile` is the register tile in the product's `block`; the `reductions` are
    still inside its loops. `result_tile` is the same tile in the block `out`, which writes the result. `streams` is
    true where the weights are too large for the cache.
    """

    block: SBlockRV
    out: SBlockRV
    task: LoopRV
    tile: RegisterTile
    reductions: tuple[LoopRV, ...]
    result_tile: RegisterTile
    streams: bool


def tile_product(
    sch: Schedule,
    machine: Machine,
    choices: Choices,
    kind: str,
    *,
    lead_dimensions: bool,
    reduced: int,
    grouped: int,
    choose_vectors: Callable[[int, int], int] | None = None,
    spreads_fetches: bool = False,
) -> TiledProduct | None:
    """Tile the product whose kernel is `kind`, and compute it in the parallel loop over tiles of the result.

    Where each core reads a part of the weights once, the padded input has a parallel loop before that one, as copies of
    operands have; else it is computed in the loop over tiles. The product has `reduced` reductions, the last `grouped`
    of which run within one 32-bit element of the weights. With `lead_dimensions` the result is
    `[*batch, rows, channels]`, else an image. `choose_vectors` takes the number of vectors of
    channels of the whole result, and that of the tiles one above the other that cover all rows of it (one where it is
    unknown), and returns the number of vectors of a tile. By default the `choices` and the registers decide about it.
    With `spreads_fetches` the code of a tile fetches the next weights evenly while it computes, which costs it nothing
    even where they come late; else they are fetched where tasks are long enough to hide it.
    Returns None for a function without such a product.
    """
    product = common.find_kernel(sch, kind)
    if product is None:
        return None
    annotations = sch.get(product).annotations
    rows, lead_count, lanes = (int(annotations[name]) for name in (TILE, LEAD, LANES))
    sizes = [variable.dom.extent for variable in sch.get(product).iter_vars]
    channels = static(sizes[-reduced - 1])
    vectors = None if channels is None else channels // lanes
    out = common.inline_epilogue(sch, product)
    common.put_channels_last(sch, out, product)
    if lead_dimensions:
        last = len(sch.get_loops(out)) - 1
        common.join_dimensions(sch, out, [int(place) for place in annotations.get(ROWS, range(lead_count, last))])
    loops = list(sch.get_loops(out))
    lead, channel = loops[:lead_count], loops[-1]
    extents = [common.extent(sch, loop) for loop in loops[:-1]]
    above = [*extents[:-1], -(-(extents[-1] or 0) // rows)] if lead_dimensions else extents[:-1]
    tasks = math.prod(size or 0 for size in above)
    if choose_vectors is None:
        count = registers.choose_vectors(rows, vectors, machine, choices, tasks or None)
    else:
        count = choose_vectors(vectors or 1, tasks or 1)
    outer, pieces, lane = remainder.split(sch, channel, count, lanes)
    far, near = sch.split(loops[-2], [None, rows])
    weights = [static(size) or 1 for size in sizes[-reduced : len(sizes) - grouped]]
    # To find a tile in a batch of matrices of free sizes takes divisions, unless a matrix is one task.
    is_free_batch = len(lead) > 1 and all(common.extent(sch, loop) is None for loop in (lead[-1], far))
    by_matrices = is_free_batch and math.prod(weights) * cost.step(rows, count, machine) < _SHORT_TILE
    # A task packs the columns that it multiplies, once for all rows. Of a free depth, tiles of shuffles may need room
    # that the task's part of the copy does not have.
    to_pack = common.find_blocks(sch, "pack_transposed")
    by_matrices = by_matrices or bool(to_pack and all(static(extent) for extent in sizes[-reduced:]))
    tiles_outer, at_inner = ([*lead, far], []) if lead_dimensions and not by_matrices else (loops[:-2], [far])
    by_weights = [outer, *tiles_outer] if annotations[SHARED] else [*lead, outer, *tiles_outer[lead_count:]]
    # Of rows and weights, the smaller stay in the cache and the larger are read once. Weights that do not fit are read
    # once in any case, and those of a larger kernel in no other: padding would be a pass of its own.
    orders = {"rows": [*tiles_outer, outer], "weights": by_weights}
    bytes_of_vector = 4 * lanes * math.prod(weights)
    size = bytes_of_vector * (vectors or 1)
    streams = not cost.fits(size, machine)
    has_fewer_rows = annotations[SHARED] and common.bytes_of(sch.get(product).reads[0].source) < size
    if streams or (lead_dimensions and has_fewer_rows):
        orders = dict(reversed(orders.items()))
    order = choices.choose("order", "", orders)
    parts = common.extent(sch, outer)
    sch.reorder(*order, *at_inner, near, pieces, lane)
    # The tiles of a line read the same padded pixels: a task pads them once, if the lines are enough for all cores.
    lines = math.prod(typical_pixels(sch.get(loop).extent) for loop in tiles_outer)
    pads_lines = order is not by_weights and bool(at_inner and common.find_blocks(sch, "pad"))
    is_even = cost.evenness(lines, machine) >= cost.EVEN
    task = _fuse_tasks(sch, tiles_outer if pads_lines and is_even else order)
    common.parallel(sch, task, machine)
    sch.compute_at(product, at_inner[0] if at_inner else task, preserve_unit_loops=True)
    for block in to_pack:
        if by_matrices and static(sizes[-1]):
            sch.compute_at(block, task, preserve_unit_loops=True)
        else:
            common.parallel(sch, common.fuse(sch, list(sch.get_loops(block))[:-2]), machine)
        transposes.pack_columns(sch, block, machine)
    # Tasks that read the same pixels would each pad them again.
    _schedule_copies(sch, None if order is by_weights else task, machine)
    inner = list(sch.get_loops(product))
    (row, column), reductions = inner[-reduced - 2 : -reduced], inner[-reduced:]
    tile = registers.split_tile(sch, row, column, rows, count, lanes)
    prefetch.fetch_result(sch, out, near, machine, choices)
    is_known = all(static(extent) is not None for extent in sizes[-reduced:])
    is_one_call = not at_inner or (spreads_fetches and common.extent(sch, far) == 1)
    if order is by_weights and annotations[SHARED] and is_one_call and is_known and parts is not None:
        size = bytes_of_vector * count
        computing = cost.step(rows, count, machine) * math.prod(weights)
        least = _FEWEST_READERS if spreads_fetches else cost.tasks_to_fetch(size, computing, machine)
        prefetch.fetch_next_weights(sch, task, parts, size, least, machine)
    return TiledProduct(product, out, task, tile, tuple(reductions), RegisterTile(near, pieces, lane), streams)


def _fuse_tasks(sch: Schedule, loops: Sequence[LoopRV]) -> LoopRV:
    """Fuse the loops over tiles into one.

    Of n lines of `size - 2` pixels and several tiles, fused at once, TVM cannot prove that lines divide their number.
    """
    extents = [sch.get(loop).extent for loop in loops]
    if all(isinstance(extent, tirx.IntImm | tirx.Var) for extent in extents) or static(extents[-1]) in (None, 1):
        return common.fuse(sch, loops)
    *outer, line, last = loops
    return common.fuse(sch, [*outer, common.fuse(sch, [line, last])])


def _schedule_copies(sch: Schedule, task: LoopRV | None, machine: Machine) -> None:
    """Compute the padded input of a product in the loop `task`, and copies of its operands in parallel loops before it.

    Where `task` is None, the padded input has a parallel loop of its own, too.
    """
    for block in common.find_blocks(sch, "pad"):
        if task is None:
            common.parallel(sch, common.fuse(sch, list(sch.get_loops(block))[:-2]), machine)
        else:
            sch.compute_at(block, task, preserve_unit_loops=True)
        common.vectorize_inner(sch, block, machine)
    # One copy of the left operand (`dot`) serves all tiles of channels, one of the right operand all tiles of rows.
    for name in ("panel", "pack"):
        for block in common.find_blocks(sch, name):
            common.parallel(sch, common.fuse(sch, list(sch.get_loops(block))[:-1]), machine)
            common.vectorize_padded(sch, block, machine)
    for block in common.find_blocks(sch, "pack_pairs"):
        transposes.pack_pairs(sch, block, machine)
    # The rows of each tile stand side by side.
    for block in common.find_blocks(sch, "packed_rows"):
        *outer, k, row = sch.get_loops(block)
        sch.unroll(row)
        common.parallel(sch, common.fuse(sch, [*outer, k]), machine)
