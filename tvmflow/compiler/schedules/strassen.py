"""The schedule for Strassen's matrix product: sums of panels, seven products in registers, sums of the products."""

import math

from tvm.s_tir import Schedule

from tvmflow.compiler.annotations import CHUNK, LANES, TILE
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.strassen import error_bound, goes_together
from tvmflow.compiler.schedules import common, registers


def apply(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule a matrix product by Strassen's algorithm; return False for other functions.

    Where the packed weights fit a core's cache, each core sums the quarters of its own rows just before the products.
    Otherwise all quarters are summed first, and each core reads its own part of the weights once. `choices` may name
    the other of these two orders.
    """
    product = common.find_kernel(sch, "strassen")
    if product is None:
        return False
    annotations = sch.get(product).annotations
    rows, count, lanes = (int(annotations[name]) for name in (TILE, CHUNK, LANES))
    _, half_rows, half_units, depth = (int(variable.dom.extent) for variable in sch.get(product).iter_vars)
    (panels,) = common.find_blocks(sch, "panels")
    (quarters,) = common.find_blocks(sch, "quarters")
    sch.reverse_compute_inline(common.inline_epilogue(sch, quarters))
    result = sch.cache_write(product, 0, "global")
    stages = {"together": True, "apart": False}
    if not goes_together(half_rows, rows, depth, half_units, machine):
        stages = dict(reversed(stages.items()))
    in_cache = choices.choose("stages", "", stages)

    upper, row, left, unit = sch.get_loops(quarters)
    far, near = sch.split(row, [None, rows])
    outer, pieces, lane = sch.split(unit, [None, count, lanes])
    sch.reorder(*([far, outer] if in_cache else [outer, far]), upper, left, near, pieces, lane)
    task = far if in_cache else outer
    common.parallel(sch, task, machine)
    registers.keep_in_registers(sch, [upper, left, near, pieces, lane])

    sch.compute_at(result, outer if in_cache else far, preserve_unit_loops=True)
    term, near, channel = list(sch.get_loops(result))[-3:]
    pieces, lane = sch.split(channel, [count, lanes])
    sch.compute_at(product, term, preserve_unit_loops=True)
    registers.keep_in_registers(sch, [near, pieces, lane])
    *_, near, channel, k = sch.get_loops(product)
    tile = registers.split_tile(sch, near, channel, rows, count, lanes)
    registers.accumulate(sch, product, tile.loops, registers.split_steps(sch, k, choices))

    if in_cache:
        sch.compute_at(panels, task, preserve_unit_loops=True)
    term, near, k = list(sch.get_loops(panels))[-3:]
    outer, lane = sch.split(k, [None, math.gcd(depth, machine.lanes)])
    sch.reorder(near, outer, term, lane)
    registers.keep_in_registers(sch, [term, lane])
    if not in_cache:
        common.parallel(sch, near, machine)
    return True


def bound(sch: Schedule) -> float | None:
    """Return `operators.strassen.error_bound` of a function that uses Strassen's algorithm; None for others."""
    product = common.find_kernel(sch, "strassen")
    return None if product is None else error_bound(2 * int(sch.get(product).iter_vars[-1].dom.extent))
