"""The schedule for Winograd's convolution: transforms in registers around matrix products."""

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler import cost
from tvmflow.compiler.annotations import LANES, TILE, WINOGRAD
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import BF16, use
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, prefetch, registers, tails
from tvmflow.compiler.winograd import error_bound


def apply(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule a 3x3 convolution by Winograd's algorithm; return False for other functions.

    Where the transformed weights fit a core's cache, one core takes a line of tiles through all stages, and the line
    stays in its cache. Otherwise every stage is a parallel loop of its own, so that one core reads each weight once.
    `choices` may name the other of these two orders.
    """
    return _apply(sch, machine, choices, "winograd")


def apply_dot(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule a 3x3 convolution by Winograd's algorithm with products of bfloat16; return False for others."""
    return _apply(sch, machine, choices, "dot_winograd")


def transform_back(sch: Schedule, back: SBlockRV, outer: LoopRV, inner: Sequence[LoopRV]) -> None:
    """Transform a tile of products to a tile of the output in registers, in the block that writes the output.

    `back` is the first half of the transform. `outer` is the loop over tiles and vectors of channels, and `inner` are
    the loops within it, over the elements of a tile and the lanes of a vector.
    """
    registers.keep_in_registers(sch, inner)
    sch.compute_at(back, outer, preserve_unit_loops=True)
    registers.keep_in_registers(sch, _own_loops(sch, back))


def transform_input(sch: Schedule, vertical: SBlockRV, transformed: SBlockRV, machine: Machine) -> list[LoopRV]:
    """Transform a tile of the input in registers, and return the loops over tiles, which become the outermost ones.

    `vertical` is the block of the first half of the transform, `transformed` of the second half.
    """
    a, b, *places, c = _own_loops(sch, transformed)
    outer, lane = sch.split(c, [None, math.gcd(common.extent(sch, c) or 1, machine.lanes)])
    sch.reorder(*places, outer, a, b, lane)
    registers.keep_in_registers(sch, [a, b, lane])
    sch.compute_at(vertical, outer, preserve_unit_loops=True)
    registers.keep_in_registers(sch, _own_loops(sch, vertical))
    return places


def _own_loops(sch: Schedule, block: SBlockRV) -> list[LoopRV]:
    """The loops of a block itself, one per dimension, without the loops at which it is computed."""
    return list(sch.get_loops(block))[-len(sch.get(block).iter_vars) :]


def _apply(sch: Schedule, machine: Machine, choices: Choices, kind: str) -> bool:
    product = common.find_kernel(sch, kind)
    if product is None:
        return False
    annotations = sch.get(product).annotations
    rows, lanes, size = (int(annotations[name]) for name in (TILE, LANES, WINOGRAD))
    variables = sch.get(product).iter_vars
    # Output tiles have one dimension, or four: images, lines, groups of tiles in a line, and tiles of a group.
    places = sum(variable.iter_type == tirx.IterVar.DataPar for variable in variables) - 3
    sizes = [variable.dom.extent for variable in variables]
    side, channels, steps = int(sizes[0]), int(sizes[places + 2]), int(sizes[places + 3])
    (vertical,), (transformed,), (back,) = (
        common.find_blocks(sch, name) for name in ("input_vertical", "input", "output_vertical")
    )
    out = common.inline_epilogue(sch, back)
    stages = {"together": True, "apart": False}
    if places == 1:
        wide = -(-int(sch.get(out).iter_vars[2].dom.extent) // size)
        if wide % rows:
            del stages["together"]
    elif kind == "dot_winograd" and not isinstance(sizes[places], tirx.IntImm):
        # TVM would put a condition around the products of a line of unknown length, which the instruction cannot have.
        del stages["together"]
    if 4 * side**2 * channels * steps > machine.own_cache:
        stages = dict(reversed(stages.items()))
    whole = choices.choose("stages", "", stages)
    result = sch.cache_write(product, 0, "global")

    n, h, w, c = sch.get_loops(out)
    high, h = sch.split(h, [None, size])
    *far, w = sch.split(w, [None, size] if places == 1 else [None, rows, size])
    outer, pieces, lane = common.split_channels(sch, c, 1, lanes)
    sch.reorder(n, high, *far, outer, h, w, pieces, lane)
    task = sch.fuse(n, high)
    common.parallel(sch, task, machine)
    transform_back(sch, back, outer, [h, w, pieces, lane])

    if whole:
        sch.compute_at(result, task, preserve_unit_loops=True)
    a, b, *tiles, c = list(sch.get_loops(result))[-places - 3 :]
    count = registers.choose_vectors(rows, channels // lanes, machine, choices)
    *line, near = sch.split(tiles[0], [None, rows]) if places == 1 else tiles
    outer, pieces, lane = sch.split(c, [None, count, lanes])
    at = line[-1]
    # Either one core reads each weight once, or each core continues with the lines of tiles that it transformed.
    if whole or choices.choose("order", "", {"weights": True, "rows": False}):
        sch.reorder(a, b, outer, *line, near, pieces, lane)
        if not whole:
            common.parallel(sch, sch.fuse(a, b, outer), machine)
    else:
        sch.reorder(*line, a, b, outer, near, pieces, lane)
        common.parallel(sch, common.fuse(sch, line), machine)
        at = outer
    sch.compute_at(product, at, preserve_unit_loops=True)
    registers.keep_in_registers(sch, [near, pieces, lane])
    grouped = len(sizes) - places - 4
    *around, row, channel, k = list(sch.get_loops(product))[: -grouped or None]
    group = list(sch.get_loops(product))[len(around) + 3 :]
    tile = registers.split_tile(sch, row, channel, rows, count, lanes)
    reductions = [k]
    if kind == "winograd":
        *chunks, k = [k] if whole else prefetch.split_chunks(sch, k, choices)
        reductions = [*chunks, *registers.split_steps(sch, k, choices)]
    registers.accumulate(sch, product, tile.loops, reductions, group)

    if whole:
        sch.compute_at(transformed, task, preserve_unit_loops=True)
    tile_loops = transform_input(sch, vertical, transformed, machine)
    if kind == "winograd" and places > 1:
        tails.mark_tail(sch, near, size)
    if not whole:
        if places == 1:
            task, _ = sch.split(tile_loops[0], [None, wide])
        else:
            task = sch.fuse(*tile_loops[:-1])
        common.parallel(sch, task, machine)
    if kind == "winograd":
        # The output tiles from one tap to the next: those of a line or of all images.
        count = wide if whole and places == 1 else _count(sizes[2 : places + 2])
        for stage, depth in ((transformed, steps), (result, channels)):
            _separate_taps(sch, stage, 4 * count * depth, side**2, machine)
    for pad in common.find_blocks(sch, "pad"):
        sch.compute_at(pad, task, preserve_unit_loops=True)
        common.vectorize_inner(sch, pad, machine)
    if kind == "dot_winograd":
        # This comes last, because no stage can be moved to a block that an instruction has replaced.
        use(sch, BF16, lanes, around[0], tile.lane)
    return True


def _count(sizes: Sequence[tirx.Expr]) -> int:
    """The product of sizes; 0 where one is unknown."""
    return math.prod(int(size) if isinstance(size, tirx.IntImm) else 0 for size in sizes)


def _separate_taps(sch: Schedule, block: SBlockRV, distance: int, taps: int, machine: Machine) -> None:
    """Move the taps of a tile in a block's result to different sets of the first-level cache, if too many share one.

    `taps` is their number, and `distance` the bytes from one to the next; 0: unknown. A transform reads or writes
    all of them at a time, and in a set without room they would evict each other.
    """
    if cost.lines_in_set(taps, distance, machine) > cost.rows_in_set(machine):
        sch.storage_align(block, 0, 1, machine.first.span // machine.number, machine.first.line // machine.number)


def bound(sch: Schedule) -> float | None:
    """Return `compiler.winograd.error_bound` of a function with Winograd's algorithm in float32; None for others."""
    product = common.find_kernel(sch, "winograd") or common.find_kernel(sch, "block.winograd")
    if product is None:
        return None
    block = sch.get(product)
    size, side = int(block.annotations[WINOGRAD]), int(block.iter_vars[0].dom.extent)
    return error_bound(size, (side - 3) // (size - 1), int(block.iter_vars[-1].dom.extent))
