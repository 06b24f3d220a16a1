"""Schedules for products of narrow numbers: the register tile of `products`, filled by dot-product instructions."""

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tvmflow.compiler import amx
from tvmflow.compiler.annotations import AMX, DOT, LANES, TILE
from tvmflow.compiler.dotproduct import DOTS, use
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, products


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
    if AMX in annotations:
        return _by_tiles(sch, machine, kind, product)
    dot, lanes = DOTS[str(annotations[DOT])], int(annotations[LANES])
    rows = kind == "dot_rows"
    tile = products.tiled(sch, machine, kind, lead_dimensions=rows, reduced=2 if rows else 4, grouped=1)
    if tile is None:
        return False
    row, vector, lane = tile.spatial
    *steps, group = tile.reductions
    sch.reorder(*steps, row, vector, lane, group)
    sch.unroll(row)
    sch.unroll(vector)
    start = sch.decompose_reduction(product, steps[0])
    common.in_registers(sch, list(sch.get_loops(start))[-3:])
    use(sch, dot, lanes, tile.task, lane)
    common.in_registers(sch, list(tile.written))
    return True


def _by_tiles(sch: Schedule, machine: Machine, kind: str, product: SBlockRV) -> bool:
    """The same by a processor's unit for whole tiles, a call for the whole depth of one or a few of them."""
    annotations = sch.get(product).annotations
    rows = kind == "dot_rows"
    tile = products.tiled(
        sch,
        machine,
        kind,
        lead_dimensions=rows,
        reduced=2 if rows or annotations[AMX][1] == 1 else 3,
        grouped=1,
        vectors_of=amx.vectors_of,
    )
    if tile is None:
        return False
    row, vector, lane = tile.spatial
    vectors = common.extent(sch, vector) or 1
    kernel = amx.Kernel(int(annotations[TILE]), vectors, *(int(item) for item in annotations[AMX]))
    start = sch.decompose_reduction(product, row)
    common.in_registers(sch, list(sch.get_loops(start))[-2:])
    sch.fuse(vector, lane)
    amx.use(sch, DOTS[str(annotations[DOT])], kernel, tile.task, row)
    common.in_registers(sch, list(tile.written)[1:])
    return True
