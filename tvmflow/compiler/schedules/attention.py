"""The schedule for attention: strip by strip of queries, both products in register tiles with softmax between them."""

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tvmflow.compiler.annotations import DOT, LANES, TILE, VECTORS
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, registers, remainder
from tvmflow.compiler.schedules.dot import inline_exact, use_dot_products

_PACKED = ("keys", "values", "mask")


def apply(sch: Schedule, machine: Machine, _choices: Choices) -> bool:
    """Schedule a function that `operators.attention` defines; return False for other functions."""
    scores = common.find_kernel(sch, "attention")
    if scores is None:
        return False
    annotations = sch.get(scores).annotations
    inline_exact(sch)
    rows, lanes = int(annotations[TILE]), int(annotations[LANES])
    key_vectors, value_vectors = (int(count) for count in annotations[VECTORS])
    (mixed,) = common.find_blocks(sch, "mixed")
    (logits,) = common.find_blocks(sch, "logits")
    out = common.inline_epilogue(sch, mixed)

    batch, position, head, channel = sch.get_loops(out)
    strip, near = sch.split(position, [None, rows])
    width = common.extent(sch, channel) or 0
    value_lanes = min(lanes, (common.extent(sch, sch.get_loops(mixed)[3]) or 0) // value_vectors)
    by_pairs = DOT in annotations
    outer, pieces, lane = remainder.split(sch, channel, value_vectors, value_lanes)
    sch.reorder(batch, head, strip, outer, near, pieces, lane)
    task = sch.fuse(batch, head, strip)
    common.parallel(sch, task, machine)
    sch.compute_at(mixed, outer, preserve_unit_loops=True)
    registers.keep_in_registers(sch, [near, pieces, lane])
    _tile(sch, mixed, rows, value_vectors, value_lanes)

    for name in ("inverse", "sum_row", "exponential", "max_row"):
        (block,) = common.find_blocks(sch, name)
        sch.compute_at(block, task, preserve_unit_loops=True)
        if name == "exponential":
            common.vectorize_inner(sch, block, machine)
        elif name != "inverse":
            (lanes_of,) = common.find_blocks(sch, name.replace("row", "lanes"))
            _reduce_row(sch, block, lanes_of)
    sch.compute_at(logits, task, preserve_unit_loops=True)
    near, wide = list(sch.get_loops(logits))[-2:]
    outer, pieces, lane = sch.split(wide, [None, key_vectors, lanes])
    sch.reorder(outer, near, pieces, lane)
    sch.compute_at(scores, outer, preserve_unit_loops=True)
    registers.keep_in_registers(sch, [near, pieces, lane])
    _tile(sch, scores, rows, key_vectors, lanes)
    for name in _PACKED:
        for block in common.find_blocks(sch, name):
            if by_pairs and name != "mask":
                _pack_pairs(sch, block, machine)
            else:
                common.parallel_vectorized(sch, block, machine)
    use_dot_products(sch, machine)
    return width > 0


def _pack_pairs(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Copy pairs of numbers of keys or values side by side, a row of the panel for each task."""
    *outer, _, group = sch.get_loops(block)
    common.parallel(sch, common.fuse(sch, outer), machine)
    sch.unroll(group)


def _tile(sch: Schedule, product: SBlockRV, rows: int, vectors: int, lanes: int) -> None:
    """Keep a product's innermost loops in registers while it accumulates."""
    loops = list(sch.get_loops(product))
    group = [loops.pop()] if DOT in sch.get(product).annotations else []
    near, wide, reduced = loops[-3:]
    tile = registers.split_tile(sch, near, wide, rows, vectors, lanes)
    registers.accumulate(sch, product, tile.loops, [reduced], group)


def _reduce_row(sch: Schedule, row: SBlockRV, in_lanes: SBlockRV) -> None:
    """Reduce row by row: its vectors, then their lanes. Otherwise LLVM would gather the lanes of several rows."""
    *_, near, lane = sch.get_loops(row)
    sch.compute_at(in_lanes, near, preserve_unit_loops=True)
    sch.decompose_reduction(row, lane)
    *_, lane, reduced = sch.get_loops(in_lanes)
    registers.accumulate(sch, in_lanes, [lane], [reduced])
