"""Schedules for products of bfloat16 or 8-bit integers, by dot-product instructions or AMX.

With dot-product instructions, a product has the same register tile as in `products`.
"""

from dataclasses import replace

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tvmflow.compiler import amx, tiles
from tvmflow.compiler.annotations import AMX, DOT, GROUPS, LANES, PADDING, TILE
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import DOTS, tensorize
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, prefetch, products, registers


def apply_rows(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule dense layers, 1x1 convolutions and batched matrix products of bfloat16 or 8-bit integers.

    Returns False for other functions.
    """
    return _apply(sch, machine, choices, "dot_rows")


def apply_conv2d(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule convolutions of bfloat16 or 8-bit integers, but not depthwise ones; return False for other functions."""
    return _apply(sch, machine, choices, "dot_conv2d")


def _apply(sch: Schedule, machine: Machine, choices: Choices, kind: str) -> bool:
    product = common.find_kernel(sch, kind)
    if product is None:
        return False
    annotations = sch.get(product).annotations
    if AMX in annotations:
        return _by_amx(sch, machine, choices, kind, product)
    dot, lanes = DOTS[str(annotations[DOT])], int(annotations[LANES])
    rows = kind == "dot_rows"
    reduced = 2 if rows else 4
    reserving = tiles.reserve_register(dot, machine)
    tiling = products.tile_product(sch, reserving, choices, kind, lead_dimensions=rows, reduced=reduced, grouped=1)
    if tiling is None:
        return False
    *outer, last, group = tiling.reductions
    steps = [*outer, *prefetch.spread_fetches(sch, tiling.task, outer, last)]
    registers.accumulate(sch, product, tiling.tile.loops, steps, [group])
    tensorize(sch, machine.arch, dot, lanes, tiling.task, tiling.tile.lane)
    if PADDING in annotations:
        # The block around the instruction is a new one.
        (block,) = sch.get_child_blocks(steps[0])
        sch.annotate(block, PADDING, [int(item) for item in annotations[PADDING]])
    registers.write_tile(sch, tiling.out, tiling.result_tile.loops)
    return True


def _by_amx(sch: Schedule, machine: Machine, choices: Choices, kind: str, product: SBlockRV) -> bool:
    """Schedule a product for AMX: one call multiplies the whole depth of one or a few of its tiles."""
    annotations = sch.get(product).annotations
    rows = kind == "dot_rows"
    kernel = amx.Kernel(int(annotations[TILE]), 1, *(int(item) for item in annotations[AMX]))
    groups = int(annotations.get(GROUPS, 1))
    reduced = sum(item.iter_type == tirx.IterVar.CommReduce for item in sch.get(product).iter_vars)
    tiling = products.tile_product(
        sch,
        machine,
        choices,
        kind,
        lead_dimensions=rows,
        reduced=reduced,
        grouped=1,
        choose_vectors=lambda vectors, tasks: amx.choose_vectors(kernel, vectors // groups, tasks * groups, machine),
        spreads_fetches=True,
    )
    if tiling is None:
        return False
    row, vector, lane = tiling.tile.loops
    fetches = int(prefetch.fetches_next(sch, tiling.task))
    kernel = replace(kernel, vectors=common.extent(sch, vector) or 1, fetches=fetches)
    sch.fuse(vector, lane)
    start, _ = list(sch.get_loops(sch.decompose_reduction(product, row)))[-2:]
    dot = DOTS[str(annotations[DOT])]
    amx.attach(sch, dot, [kernel], tiling.task)
    amx.tensorize(sch, dot, kernel, row, start)
    registers.keep_in_registers(sch, tiling.result_tile.loops[1:])
    return True


def inline_exact(sch: Schedule) -> None:
    """Inline the numbers that `operators.dot.stage` rounds to bfloat16 into their roundings."""
    for exact in common.find_blocks(sch, "exact"):
        sch.compute_inline(exact)


def use_dot_products(sch: Schedule, machine: Machine) -> None:
    """Replace the innermost loops of products by dot-product instructions, where the products are annotated so.

    That comes last: such a loop is a block for TVM, in which it finds no other one.
    """
    for product in common.blocks(sch):
        annotations, kinds = sch.get(product).annotations, [item.iter_type for item in sch.get(product).iter_vars]
        if DOT in annotations and tirx.IterVar.CommReduce in kinds:
            task, *_, lane, _group = sch.get_loops(product)
            tensorize(sch, machine.arch, DOTS[str(annotations[DOT])], int(annotations[LANES]), task, lane)
