"""The schedule for attention: strip by strip of queries, both products in register tiles with softmax between them."""

import math
from collections.abc import Sequence

from tvm import te, tirx
from tvm.s_tir import SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import PrimFunc

from tvmflow.compiler import amx
from tvmflow.compiler.annotations import AMX, DOT, LANES, SINGLE_QUERY, TILE, VECTORS
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.operators.attention import Plan
from tvmflow.compiler.schedules import common, prefetch, registers, remainder, tails, transposes
from tvmflow.compiler.schedules.dot import inline_exact, use_dot_products
from tvmflow.compiler.statements import replace_variables, run_either, with_body

# The stages that copy operands, by their blocks' names: numbers are rounded to bfloat16, keys and values are put side
# by side, queries fill whole strips (`panel`), and a mask fills whole tiles.
_COPIES = ("rounded", "keys", "panel", "values", "mask")


def apply(sch: Schedule, machine: Machine, _choices: Choices) -> bool:
    """Schedule a function that `operators.attention` defines; return False for other functions."""
    scores = common.find_kernel(sch, "attention")
    products = common.find_kernel(sch, "attention.single")
    if scores is None and products is None:
        return False
    annotations = sch.get(scores or products).annotations
    inline_exact(sch)
    strip, lanes = [int(size) for size in annotations[TILE]], int(annotations[LANES])
    key_vectors, value_vectors = (int(count) for count in annotations[VECTORS])
    (mixed,) = common.find_blocks(sch, "mixed")
    (logits,) = common.find_blocks(sch, "logits")
    out = common.inline_epilogue(sch, mixed)

    batch, position, shared, *heads, channel = sch.get_loops(out)
    shared, head = (shared, *heads) if heads else sch.split(shared, [None, 1])
    (position, near), (head, beside) = (
        sch.split(loop, [None, size]) for loop, size in zip((position, head), strip, strict=True)
    )
    width = common.extent(sch, channel) or 0
    value_lanes = min(lanes, (common.extent(sch, sch.get_loops(mixed)[4]) or 0) // value_vectors)
    by_pairs, by_amx = DOT in annotations, AMX in annotations
    outer, pieces, lane = remainder.split(sch, channel, value_vectors, value_lanes)
    sch.reorder(batch, shared, position, head, outer, near, beside, pieces, lane)
    task = sch.fuse(batch, shared, position, head)
    common.parallel(sch, task, machine)
    sch.compute_at(mixed, outer, preserve_unit_loops=True)
    registers.keep_in_registers(sch, [pieces, lane] if by_amx else [near, beside, pieces, lane])
    tails.mark_whole(sch, near, always=True)
    if not by_amx:
        _tile(sch, mixed, math.prod(strip), value_vectors, value_lanes)

    for name in ("inverse", "sum_row", "exponential", "max_row"):
        (block,) = common.find_blocks(sch, name)
        sch.compute_at(block, task, preserve_unit_loops=True)
        if name == "exponential":
            common.vectorize_inner(sch, block, machine)
        elif name != "inverse":
            (lanes_of,) = common.find_blocks(sch, name.replace("row", "lanes"))
            _reduce_row(sch, block, lanes_of)
    if by_amx:
        _score_by_amx(sch, scores, logits, task, machine)
    else:
        sch.compute_at(logits, task, preserve_unit_loops=True)
        beside, near, wide = list(sch.get_loops(logits))[-3:]
        if products is not None:
            prefetch.fetch_ahead(sch, sch.get_loops(mixed)[-4], 4 * value_vectors * value_lanes)
            _single_query(sch, products, [near, beside, wide], max(lanes // (2 * math.prod(strip)), 1))
        else:
            outer, pieces, lane = sch.split(wide, [None, key_vectors, lanes])
            sch.reorder(outer, beside, near, pieces, lane)
            sch.compute_at(scores, outer, preserve_unit_loops=True)
            registers.keep_in_registers(sch, [beside, near, pieces, lane])
            _tile(sch, scores, math.prod(strip), key_vectors, lanes)
    for name in _COPIES:
        # AMX's strips copy their own queries.
        for block in () if by_amx and name == "panel" else common.find_blocks(sch, name):
            places = (3, 4, 5) if by_pairs else (3, 4)
            if name == "keys" and transposes.fits_packing(sch, block, places):
                _pack_keys(sch, block, places, machine)
            elif by_amx and name == "values":
                transposes.pack_pairs(sch, block, machine)
            elif by_pairs and name in ("keys", "values"):
                _pack_pairs(sch, block, machine)
            else:
                common.parallel_vectorized(sch, block, machine)
    if by_amx:
        _use_amx(sch, [scores, mixed], key_vectors * lanes, task)
    else:
        use_dot_products(sch, machine)
    return width > 0


def single_query_form(func: PrimFunc, machine: Machine) -> PrimFunc | None:
    """Return the form of attention of a free number of queries that serves a single one, not scheduled.

    It has the same operands. None for other functions.
    """
    text = (func.attrs or {}).get(SINGLE_QUERY)
    if text is None:
        return None
    *operands, _ = (param for param in func.params if tirx.is_buffer_var(param))
    tensors = [te.placeholder(item.shape, item.dtype, name=f"operand{place}") for place, item in enumerate(operands)]
    return te.create_prim_func([*tensors, Plan.read(text).define(tensors, machine, is_single=True)])


def with_single_query(scheduled: PrimFunc, form: PrimFunc) -> PrimFunc:
    """Return scheduled attention of a free number of queries that runs `form`, scheduled too, for a single query."""
    plan = Plan.read(scheduled.attrs[SINGLE_QUERY])
    tensors = [param for param in scheduled.params if tirx.is_buffer_var(param)]
    body = replace_variables(form.body, dict(zip(form.params, tensors, strict=True)))
    root = scheduled.body
    either = run_either(plan.count_queries(tensors) == 1, body, root.block.body)
    block = with_body(root.block, either, [])
    return scheduled.with_body(SBlockRealize(root.iter_values, root.predicate, block)).without_attr(SINGLE_QUERY)


def _single_query(sch: Schedule, products: SBlockRV, loops: list[LoopRV], keys: int) -> None:
    """Compute the scores of a few keys at a time: their products in vectors, of which the lanes are added up."""
    near, beside, wide = loops
    outer, key = sch.split(wide, [None, keys])
    sch.reorder(outer, near, beside, key)
    registers.keep_in_registers(sch, [near, beside, key])
    channels = [common.extent(sch, loop) or 1 for loop in sch.get_loops(products)[-2:]]
    prefetch.fetch_ahead(sch, outer, 4 * keys * math.prod(channels))
    (scores,) = common.find_blocks(sch, "scores")
    sums = sch.get_producers(scores)
    sch.compute_inline(scores)
    while sums:
        (block,) = sums
        sums = sch.get_producers(block)
        sch.compute_at(block, outer, preserve_unit_loops=True)
        own = list(sch.get_loops(block))
        if sch.get(block).name_hint == sch.get(products).name_hint:
            *_, beside, near, key, lane, step = own
            registers.accumulate(sch, block, [beside, near, key, lane], [step])
        else:
            registers.keep_in_registers(sch, own[-4:])


def _pack_keys(sch: Schedule, block: SBlockRV, places: Sequence[int], machine: Machine) -> None:
    """Copy the keys of a head side by side, by shuffles of tiles: each line of the cache is read once."""
    batch, head, tile, channel, key, *pair = sch.get_loops(block)
    width = math.gcd(common.extent(sch, channel) or 1, machine.lanes)
    (channel, near), (key, lane) = sch.split(channel, [None, width]), sch.split(key, [None, machine.lanes])
    sch.reorder(batch, head, tile, key, channel, near, lane, *pair)
    common.parallel(sch, sch.fuse(batch, head, tile), machine)
    if width >= NARROWEST:
        transposes.mark_packing(sch, places, near)
    if pair:
        sch.unroll(*pair)
    else:
        sch.vectorize(lane)


def _pack_pairs(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Copy pairs of numbers of keys or values side by side, a row of the panel for each task."""
    *outer, _, group = sch.get_loops(block)
    common.parallel(sch, common.fuse(sch, outer), machine)
    sch.unroll(group)


def _tile(sch: Schedule, product: SBlockRV, rows: int, vectors: int, lanes: int) -> None:
    """Keep a product's innermost loops in registers while it accumulates."""
    loops = list(sch.get_loops(product))
    group = [loops.pop()] if DOT in sch.get(product).annotations else []
    beside, near, wide, reduced = loops[-4:]
    tile = registers.split_tile(sch, sch.fuse(beside, near), wide, rows, vectors, lanes)
    registers.accumulate(sch, product, tile.loops, [reduced], group)


def _score_by_amx(sch: Schedule, scores: SBlockRV, logits: SBlockRV, task: LoopRV, machine: Machine) -> None:
    """Compute all scores of a strip, after a copy of its queries. Their readers scale and mask them."""
    sch.compute_inline(logits)
    sch.compute_at(scores, task, preserve_unit_loops=True)
    (panel,) = common.find_blocks(sch, "panel")
    sch.compute_at(panel, task, preserve_unit_loops=True)
    common.vectorize_inner(sch, panel, machine)


def _use_amx(sch: Schedule, products: Sequence[SBlockRV], keys: int, task: LoopRV) -> None:
    """Compute each product of a strip of queries by a call of AMX's kernel, or by one for each `keys` keys.

    That comes last: such a call is a block for TVM, in which it finds no other one.
    """
    kernels = []
    for product in products:
        *_, row, column = [loop for loop, kind in _loops_of(sch, product) if kind != tirx.IterVar.CommReduce]
        *call, _, _ = [loop for loop, kind in _loops_of(sch, product) if kind == tirx.IterVar.CommReduce]
        if common.extent(sch, column) is None:
            outer, column = sch.split(column, [None, keys])
            sch.reorder(outer, row, column)
        sch.reorder(*call, row, column)
        rows, columns = (common.extent(sch, loop) or 1 for loop in (row, column))
        (groups,) = (int(item) for item in sch.get(product).annotations[AMX])
        kernel = amx.Kernel(rows, columns // amx.LANES, groups, adds=len(call))
        kernels.append(kernel)
        start, lane = list(sch.get_loops(sch.decompose_reduction(product, (call or [row])[0])))[-2:]
        if call:
            sch.vectorize(sch.split(lane, [None, amx.LANES])[1])
        amx.tensorize(sch, BF16, kernel, row, None if call else start)
    amx.attach(sch, BF16, kernels, task)


def _loops_of(sch: Schedule, block: SBlockRV) -> list[tuple[LoopRV, int]]:
    """The innermost loops around a block, one for each of its iteration variables, and the kinds of these."""
    kinds = [item.iter_type for item in sch.get(block).iter_vars]
    return list(zip(list(sch.get_loops(block))[-len(kinds) :], kinds, strict=True))


def _reduce_row(sch: Schedule, row: SBlockRV, in_lanes: SBlockRV) -> None:
    """Reduce row by row: its vectors, then their lanes. Otherwise LLVM would gather the lanes of several rows."""
    *_, near, lane = sch.get_loops(row)
    sch.compute_at(in_lanes, near, preserve_unit_loops=True)
    sch.decompose_reduction(row, lane)
    *_, lane, reduced = sch.get_loops(in_lanes)
    registers.accumulate(sch, in_lanes, [lane], [reduced])
