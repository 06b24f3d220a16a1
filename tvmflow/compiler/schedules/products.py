"""Schedules for matrix products and dense convolutions: a register tile of rows by vectors of output channels."""

import math

from tvm import tirx
from tvm.s_tir import Schedule

from tvmflow.compiler.annotations import LANES, LEAD, ROWS, SHARED, TILE
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply_rows(sch: Schedule, machine: Machine) -> bool:
    """Dense layers, 1x1 convolutions and batched matrix products."""
    return _apply(sch, machine, "rows")


def apply_conv2d(sch: Schedule, machine: Machine) -> bool:
    """Convolutions that are not depthwise."""
    return _apply(sch, machine, "conv2d")


def _apply(sch: Schedule, machine: Machine, kind: str) -> bool:
    product = common.kernel(sch, kind)
    if product is None:
        return False
    annotations = sch.get(product).annotations
    rows, lead_count = int(annotations[TILE]), int(annotations[LEAD])
    sizes = [variable.dom.extent for variable in sch.get(product).iter_vars]
    reduced = 1 if kind == "rows" else 3
    lanes, channels = int(annotations[LANES]), _static(sizes[-reduced - 1])
    vectors = None if channels is None else channels // lanes
    out = common.inline_epilogue(sch, product)
    if kind == "rows":
        last = len(sch.get_loops(out)) - 1
        common.join_dimensions(sch, out, [int(place) for place in annotations.get(ROWS, range(lead_count, last))])
    loops = list(sch.get_loops(out))
    lead, channel = loops[:lead_count], loops[-1]
    count = common.widest_tile(rows, vectors, machine)
    outer, pieces, lane = common.split_channels(sch, channel, count, lanes)
    far, near = sch.split(loops[-2], [None, rows])
    if kind == "rows":
        tiles_outer, at_inner = [*lead, far], []
    else:
        tiles_outer, at_inner = loops[:-2], [far]
    weight_bytes = 4 * lanes * (vectors or 1) * math.prod(_static(size) or 1 for size in sizes[-reduced:])
    # Small weights stay in the cache while each core works through rows it wrote itself; large ones are read once.
    order = [*tiles_outer, outer]
    if weight_bytes > machine.cache:
        order = [outer, *tiles_outer] if annotations[SHARED] else [*lead, outer, *tiles_outer[lead_count:]]
    sch.reorder(*order, *at_inner, near, pieces, lane)
    task = common.fuse(sch, order)
    sch.parallel(task)
    at = at_inner[0] if at_inner else task
    sch.compute_at(product, at, preserve_unit_loops=True)
    for name in ("pad", "panel", "pack"):
        for block in common.named(sch, name):
            sch.compute_at(block, task, preserve_unit_loops=True)
            common.vectorize_inner(sch, block, machine)
    inner = list(sch.get_loops(product))
    spatial, reductions = inner[-reduced - 2 : -reduced], inner[-reduced:]
    if [common.extent(sch, loop) for loop in spatial] != [rows, count * lanes]:
        raise ValueError("the tile's extents are not constant")
    spatial = [spatial[0], *sch.split(spatial[1], [count, lanes])]
    sch.reorder(*reductions, *spatial)
    common.in_registers(sch, spatial)
    start = sch.decompose_reduction(product, reductions[0])
    common.in_registers(sch, list(sch.get_loops(start))[-3:])
    common.in_registers(sch, [near, pieces, lane])
    return True


def _static(size: tirx.Expr) -> int | None:
    return int(size) if isinstance(size, tirx.IntImm) else None
