"""The schedule for Winograd's convolution: transforms in registers around matrix products."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler import cost
from tvmflow.compiler.annotations import DOT, GROUPS, LANES, TILE, WINOGRAD
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import DOTS, Dot, tensorize
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, prefetch, registers, remainder, tails
from tvmflow.compiler.winograd import error_bound, tiles_of_task


def apply(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule a 3x3 convolution by Winograd's algorithm; return False for other functions.

    Where the transformed weights of a group of channels fit a core's cache, one core takes a line of tiles, or as many
    of them as its cache holds, through all stages for a group, and they stay in its cache. Otherwise every stage is a
    parallel loop of its own, so that one core reads each weight once.
    `choices` may name the other of these two orders.
    """
    return _apply(sch, machine, choices, "winograd")


def apply_dot(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule a 3x3 convolution by Winograd's algorithm by dot-product instructions; return False for others."""
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


@dataclass(frozen=True)
class _Form:
    """The form of a convolution by Winograd's algorithm, as its product has it.

    `rows` and `lanes` are those of the product's register tile, `size` is the side of an output tile in pixels and
    `side` that of an input tile. `places` are the sizes of the dimensions of the output tiles, of which there is one,
    or four: images, lines, groups of tiles in a line, and tiles of a group. The convolution has `groups` groups of
    `channels` output channels. Each is a sum of `steps` terms, with the dot-product instruction `dot` of groups of
    them.
    """

    product: SBlockRV
    dot: Dot | None
    rows: int
    lanes: int
    size: int
    side: int
    places: tuple[tirx.Expr, ...]
    groups: int
    channels: int
    steps: int

    @classmethod
    def of(cls, sch: Schedule, product: SBlockRV) -> "_Form":
        """Read the form from the product's annotations and loops: two of taps, the places, channels, and the sum's."""
        annotations = sch.get(product).annotations
        rows, lanes, size = (int(annotations[name]) for name in (TILE, LANES, WINOGRAD))
        groups = int(annotations.get(GROUPS, 1))
        sizes = [variable.dom.extent for variable in sch.get(product).iter_vars]
        dot = DOTS[str(annotations[DOT])] if DOT in annotations else None
        _, side, *places, channels, steps = sizes if dot is None else sizes[:-1]
        depth = int(channels) // groups
        return cls(product, dot, rows, lanes, size, int(side), tuple(places), groups, depth, int(steps))

    @property
    def weight_bytes(self) -> int:
        """The bytes of a group's weights in float32."""
        return 4 * self.side**2 * self.channels * self.steps

    @property
    def is_flat(self) -> bool:
        """Whether the output tiles have one dimension."""
        return len(self.places) == 1


def _apply(sch: Schedule, machine: Machine, choices: Choices, kind: str) -> bool:
    product = common.find_kernel(sch, kind)
    if product is None:
        return False
    form = _Form.of(sch, product)
    (vertical,), (transformed,), (back,) = (
        common.find_blocks(sch, name) for name in ("input_vertical", "input", "output_vertical")
    )
    out = common.inline_epilogue(sch, back)
    # The output tiles of a line of the image; where these have one dimension, the width is known.
    columns = -(-int(sch.get(out).iter_vars[2].dom.extent) // form.size) if form.is_flat else 0
    whole = choices.choose("stages", "", _rank_stages(form, columns, machine))
    result = sch.cache_write(product, 0, "global")
    if form.is_flat and whole:
        columns = tiles_of_task(columns, form.rows, 4 * form.side**2 * (form.steps + form.channels), machine)
    task = _schedule_output(sch, form, out, back, columns, whole, machine)
    if whole:
        sch.compute_at(result, task, preserve_unit_loops=True)
    near, outermost, lane = _schedule_product(sch, form, result, whole, machine, choices)
    if whole:
        sch.compute_at(transformed, task, preserve_unit_loops=True)
    tile_loops = transform_input(sch, vertical, transformed, machine)
    if not form.is_flat:
        tails.mark_tiles(sch, tile_loops[-1], form.size)
        if form.dot is None:
            tails.mark_tail(sch, near, form.size)
    if not whole:
        if form.is_flat:
            task, _ = sch.split(tile_loops[0], [None, columns])
        else:
            task = sch.fuse(*tile_loops[:-1])
        common.parallel(sch, task, machine)
    if form.dot is None:
        # The output tiles from one tap to the next: those of a group, of a line or of all images.
        in_groups = whole and not form.is_flat
        count = form.rows if in_groups else columns if whole else form.groups * _count(form.places)
        for stage, depth in ((transformed, form.steps), (result, form.channels)):
            if in_groups:
                sch.transform_layout(stage, ("write", 0), _taps_within_groups)
            _separate_taps(sch, stage, 4 * count * depth, form.side**2, machine, axis=4 if in_groups else 1)
    for pad in common.find_blocks(sch, "pad"):
        sch.compute_at(pad, task, preserve_unit_loops=True)
        common.vectorize_inner(sch, pad, machine)
    if whole and form.groups > 1:
        # A line of unknown length has one group of output tiles at least.
        products = form.side**2 * (columns or form.rows) * form.channels * form.steps
        computing = products / form.lanes / machine.vectors.multiply_adds
        least = cost.tasks_to_fetch(form.weight_bytes, computing, machine)
        prefetch.fetch_next_weights(sch, task, form.groups, form.weight_bytes, least, machine)
    if form.dot is not None:
        # This comes last, because no stage can be moved to a block that an instruction has replaced.
        tensorize(sch, machine.arch, form.dot, form.lanes, outermost, lane)
    return True


def _rank_stages(form: _Form, columns: int, machine: Machine) -> dict[str, bool]:
    """The options of a line of output tiles: through all stages on one core, or every stage by itself; best first.

    `columns` is the number of tiles in a line, where they have one dimension.
    """
    stages = {"together": True, "apart": False}
    # TVM would put a condition around the products of a line of unknown length, which the instruction cannot have.
    has_condition = not form.is_flat and form.dot is not None and not isinstance(form.places[-2], tirx.IntImm)
    if has_condition or (form.is_flat and columns % form.rows):
        del stages["together"]
    if form.weight_bytes > machine.own_cache:
        stages = dict(reversed(stages.items()))
    return stages


def _schedule_output(
    sch: Schedule, form: _Form, out: SBlockRV, back: SBlockRV, columns: int, whole: bool, machine: Machine
) -> LoopRV:
    """Write the output in parallel, by `columns` tiles of a line, or by lines where their length is free.

    Where a core goes through all stages (`whole`), it does so for one group of channels, and the tasks of a group
    follow each other, so that its weights stay in the core's cache. Returns the parallel loop.
    """
    n, h, w, c = sch.get_loops(out)
    high, h = sch.split(h, [None, form.size])
    parts = []
    if form.is_flat:
        part, *far, w = sch.split(w, [None, columns, form.size])
        parts = [part]
    else:
        *far, w = sch.split(w, [None, form.rows, form.size])
    outer, pieces, lane = remainder.split(sch, c, 1, form.lanes)
    around = [n, high, *parts]
    if whole and form.groups > 1:
        group, outer = sch.split(outer, [form.groups, None])
        around.insert(0, group)
    sch.reorder(*around, *far, outer, h, w, pieces, lane)
    task = sch.fuse(*around)
    common.parallel(sch, task, machine)
    if not form.is_flat:
        tails.mark_tiles(sch, far[-1], form.size)
    transform_back(sch, back, outer, [h, w, pieces, lane])
    return task


def _schedule_product(
    sch: Schedule, form: _Form, result: SBlockRV, whole: bool, machine: Machine, choices: Choices
) -> tuple[LoopRV, LoopRV, LoopRV]:
    """Compute the products in register tiles; `result` is the block that stores them.

    `whole` is true where one core takes a line of output tiles through all stages. Returns the loop over a tile's rows
    in the result, and the outermost loop and the loop over lanes of the product.
    """
    a, b, *tiles, c = list(sch.get_loops(result))[-len(form.places) - 3 :]
    count = registers.choose_vectors(form.rows, form.channels // form.lanes, machine, choices)
    *line, near = sch.split(tiles[0], [None, form.rows]) if form.is_flat else tiles
    outer, pieces, lane = sch.split(c, [None, count, form.lanes])
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
    product = form.product
    sch.compute_at(product, at, preserve_unit_loops=True)
    registers.keep_in_registers(sch, [near, pieces, lane])
    loops = list(sch.get_loops(product))
    group = [] if form.dot is None else [loops.pop()]
    *around, row, channel, k = loops
    tile = registers.split_tile(sch, row, channel, form.rows, count, form.lanes)
    reductions = [k]
    if form.dot is None:
        *chunks, k = [k] if whole else prefetch.split_chunks(sch, k, choices)
        reductions = [*chunks, *registers.split_steps(sch, k, choices)]
    registers.accumulate(sch, product, tile.loops, reductions, group)
    return near, around[0], tile.lane


def _count(sizes: Sequence[tirx.Expr]) -> int:
    """The product of sizes; 0 where one is unknown."""
    return math.prod(int(size) if isinstance(size, tirx.IntImm) else 0 for size in sizes)


def _taps_within_groups(a: Any, b: Any, image: Any, line: Any, group: Any, tile: Any, channel: Any) -> list[Any]:
    """The order of a stage's dimensions in which the taps of a group are side by side, at distances that are known."""
    return [image, line, group, a, b, tile, channel]


def _separate_taps(sch: Schedule, block: SBlockRV, distance: int, taps: int, machine: Machine, *, axis: int) -> None:
    """Move the taps of a tile in a block's result to different sets of the first-level cache, if too many share one.

    `taps` is their number, and `distance` the bytes from one to the next; 0: unknown. A transform reads or writes
    all of them at a time, and in a set without room they would evict each other.
    """
    if cost.lines_in_set(taps, distance, machine.first) > cost.rows_in_set(machine):
        sch.storage_align(block, 0, axis, machine.first.span // machine.number, machine.first.line // machine.number)


def bound(sch: Schedule) -> float | None:
    """Return `compiler.winograd.error_bound` of a function with Winograd's algorithm in float32; None for others."""
    product = common.find_kernel(sch, "winograd") or common.find_kernel(sch, "block.winograd")
    if product is None:
        return None
    block = sch.get(product)
    size, side = int(block.annotations[WINOGRAD]), int(block.iter_vars[0].dom.extent)
    return error_bound(size, (side - 3) // (size - 1), int(block.iter_vars[-1].dom.extent))
