"""Schedules for products of narrow numbers: the register tile of `products`, filled by dot-product instructions."""

import math

from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.annotations import DOT, LANES, LEAD, ROWS, SHARED, TILE
from tvmflow.compiler.dotproduct import DOTS, use
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply_rows(sch: Schedule, machine: Machine) -> bool:
    """Dense layers, 1x1 convolutions and batched matrix products."""
    return _apply(sch, machine, "dot_rows")


def apply_conv2d(sch: Schedule, machine: Machine) -> bool:
    """Convolutions that are not depthwise."""
    return _apply(sch, machine, "dot_conv2d")


def _apply(sch: Schedule, machine: Machine, kind: str) -> bool:
    product = common.kernel(sch, kind)
    if product is None:
        return False
    annotations = sch.get(product).annotations
    dot = DOTS[str(annotations[DOT])]
    rows, lead_count, lanes = (int(annotations[name]) for name in (TILE, LEAD, LANES))
    sizes = [variable.dom.extent for variable in sch.get(product).iter_vars]
    reduced = 2 if kind == "dot_rows" else 4
    channels = _static(sizes[-reduced - 1])
    vectors = None if channels is None else channels // lanes
    out = common.inline_epilogue(sch, product)
    if kind == "dot_rows":
        last = len(sch.get_loops(out)) - 1
        common.join_dimensions(sch, out, [int(place) for place in annotations.get(ROWS, range(lead_count, last))])
    loops = list(sch.get_loops(out))
    lead, channel = loops[:lead_count], loops[-1]
    count = common.widest_tile(rows, vectors, machine)
    outer, pieces, lane = common.split_channels(sch, channel, count, lanes)
    far, near = sch.split(loops[-2], [None, rows])
    tiles_outer, at_inner = ([*lead, far], []) if kind == "dot_rows" else (loops[:-2], [far])
    # Numbers of 32 bits hold one group.
    weight_bytes = 4 * lanes * (vectors or 1) * math.prod(_static(size) or 1 for size in sizes[-reduced:-1])
    order = [*tiles_outer, outer]
    if weight_bytes > machine.cache:
        order = [outer, *tiles_outer] if annotations[SHARED] else [*lead, outer, *tiles_outer[lead_count:]]
    sch.reorder(*order, *at_inner, near, pieces, lane)
    task = common.fuse(sch, order)
    sch.parallel(task)
    sch.compute_at(product, at_inner[0] if at_inner else task, preserve_unit_loops=True)
    for name in ("pad", "panel", "pack"):
        for block in common.named(sch, name):
            sch.compute_at(block, task, preserve_unit_loops=True)
            common.vectorize_inner(sch, block, machine)
    inner = list(sch.get_loops(product))
    spatial, (*steps, group) = inner[-reduced - 2 : -reduced], inner[-reduced:]
    if [common.extent(sch, loop) for loop in spatial] != [rows, count * lanes]:
        raise ValueError("the tile's extents are not constant")
    row, vector = spatial
    vector, product_lane = sch.split(vector, [count, lanes])
    sch.reorder(*steps, row, vector, product_lane, group)
    sch.unroll(row)
    sch.unroll(vector)
    start = sch.decompose_reduction(product, steps[0])
    common.in_registers(sch, list(sch.get_loops(start))[-3:])
    use(sch, dot, lanes, task, product_lane)
    common.in_registers(sch, [near, pieces, lane])
    return True


def _static(size: tirx.Expr) -> int | None:
    return int(size) if isinstance(size, tirx.IntImm) else None
