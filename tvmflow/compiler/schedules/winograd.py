"""The schedule for Winograd's convolution: transforms in registers around matrix products."""

import math

from tvm.s_tir import Schedule

from tvmflow.compiler import choices
from tvmflow.compiler.annotations import LANES, TILE, WINOGRAD
from tvmflow.compiler.dotproduct import BF16, use
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, prefetch
from tvmflow.compiler.winograd import error_bound


def apply(sch: Schedule, machine: Machine) -> bool:
    """3x3 convolutions that the compiler chose Winograd's algorithm for.

    Where the transformed weights fit a core's cache, a line of tiles goes through all stages at once and stays there
    too; else every stage is a parallel loop of its own, so that each weight is read by one core once.
    """
    return _apply(sch, machine, "winograd")


def apply_dot(sch: Schedule, machine: Machine) -> bool:
    """The same with products of bfloat16."""
    return _apply(sch, machine, "dot_winograd")


def _apply(sch: Schedule, machine: Machine, kind: str) -> bool:
    product = common.kernel(sch, kind)
    if product is None:
        return False
    annotations = sch.get(product).annotations
    rows, lanes, size = (int(annotations[name]) for name in (TILE, LANES, WINOGRAD))
    sizes = [variable.dom.extent for variable in sch.get(product).iter_vars]
    side, channels, steps = int(sizes[0]), int(sizes[3]), int(sizes[4])
    depth = math.prod(int(size) for size in sizes[4:])
    (vertical,), (transformed,), (back,) = (
        common.named(sch, name) for name in ("input_vertical", "input", "output_vertical")
    )
    out = common.inline_epilogue(sch, back)
    wide = -(-int(sch.get(out).iter_vars[2].dom.extent) // size)
    stages = {"together": True, "apart": False} if wide % rows == 0 else {"apart": False}
    if 4 * side**2 * channels * steps > machine.cache:
        stages = dict(reversed(stages.items()))
    whole = choices.choose("stages", "", stages)
    result = sch.cache_write(product, 0, "global")

    n, h, w, c = sch.get_loops(out)
    (high, h), (far, w) = sch.split(h, [None, size]), sch.split(w, [None, size])
    outer, pieces, lane = common.split_channels(sch, c, 1, lanes)
    sch.reorder(n, high, far, outer, h, w, pieces, lane)
    task = sch.fuse(n, high)
    common.parallel(sch, task, machine)
    common.in_registers(sch, [h, w, pieces, lane])
    sch.compute_at(back, outer, preserve_unit_loops=True)
    common.in_registers(sch, list(sch.get_loops(back))[-4:])

    if whole:
        sch.compute_at(result, task, preserve_unit_loops=True)
    a, b, p, c = list(sch.get_loops(result))[-4:]
    count = common.widest_tile(rows, channels // lanes, machine)
    line, near = sch.split(p, [None, rows])
    outer, pieces, lane = sch.split(c, [None, count, lanes])
    at = line
    # Each weight is read by one core once, or each core goes on with the lines of tiles that it has transformed.
    if whole or choices.choose("order", "", {"weights": True, "rows": False}):
        sch.reorder(a, b, outer, line, near, pieces, lane)
        if not whole:
            common.parallel(sch, sch.fuse(a, b, outer), machine)
    else:
        sch.reorder(line, a, b, outer, near, pieces, lane)
        common.parallel(sch, line, machine)
        at = outer
    sch.compute_at(product, at, preserve_unit_loops=True)
    common.in_registers(sch, [near, pieces, lane])
    *around, near, lane, k = list(sch.get_loops(product))[: 5 - len(sizes) or None]
    pieces, lane = sch.split(lane, [count, lanes])
    group = list(sch.get_loops(product))[len(around) + 4 :]
    *chunks, k = prefetch.in_chunks(sch, k) if kind == "winograd" and not whole else [k]
    reductions = [*chunks, *(common.in_steps(sch, k) if kind == "winograd" else [k])]
    sch.reorder(*reductions, near, pieces, lane, *group)
    sch.unroll(near)
    sch.unroll(pieces)
    if kind == "winograd":
        sch.vectorize(lane)
    start = sch.decompose_reduction(product, reductions[0])
    common.in_registers(sch, list(sch.get_loops(start))[-3:])
    instruction = around[0], lane

    if whole:
        sch.compute_at(transformed, task, preserve_unit_loops=True)
    a, b, p, c = list(sch.get_loops(transformed))[-4:]
    if not whole:
        task, p = sch.split(p, [None, wide])
    outer, lane = sch.split(c, [None, math.gcd(depth, machine.lanes)])
    sch.reorder(*([] if whole else [task]), p, outer, a, b, lane)
    if not whole:
        common.parallel(sch, task, machine)
    common.in_registers(sch, [a, b, lane])
    sch.compute_at(vertical, outer, preserve_unit_loops=True)
    common.in_registers(sch, list(sch.get_loops(vertical))[-4:])
    for pad in common.named(sch, "pad"):
        sch.compute_at(pad, task, preserve_unit_loops=True)
        common.vectorize_inner(sch, pad, machine)
    if kind == "dot_winograd":
        # Last: no stage can be moved to a block that stands for an instruction.
        use(sch, BF16, lanes, *instruction)
    return True


def bound(sch: Schedule) -> float | None:
    """The error bound of a function that uses the algorithm in float32, None for others."""
    product = common.kernel(sch, "winograd") or common.kernel(sch, "block.winograd")
    if product is None:
        return None
    block = sch.get(product)
    size, side = int(block.annotations[WINOGRAD]), int(block.iter_vars[0].dom.extent)
    return error_bound(size, (side - 3) // (size - 1), int(block.iter_vars[-1].dom.extent))
