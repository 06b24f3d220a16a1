"""The schedule for reductions: accumulators in registers, the work split among all cores."""

from contextlib import suppress

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler import cost
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, registers


def apply(sch: Schedule, machine: Machine, _choices: Choices) -> bool:
    """Schedule the sums, means, extremes and variances that `operators.reductions` defines; return False for others."""
    if not any(_kind(sch, block) == "reduction" for block in common.blocks(sch)):
        return False
    inline_around(sch)
    for block in common.blocks(sch):
        kind = _kind(sch, block)
        if kind == "reduction_inner":
            _along_results(sch, block, machine)
        elif not common.is_reduction(sch, block) and not _after_rows(sch, block, machine):
            with suppress(Exception):
                common.parallel_vectorized(sch, block, machine)
    return True


def _kind(sch: Schedule, block: SBlockRV) -> str:
    return str(sch.get(block).annotations.get(KERNEL, ""))


def inline_around(sch: Schedule) -> None:
    """Inline the blocks that are no reductions, except those that read the result of a reduction.

    If such a block were inlined, each block that reads it would compute it again. Blocks that TVM refuses to inline
    stay, and so do blocks whose copies would make a very large expression.
    """
    for block in common.blocks(sch):
        if common.is_reduction(sch, block) or not sch.get_consumers(block) or common.multiplies(sch, block):
            continue
        if not any(common.is_reduction(sch, producer) for producer in sch.get_producers(block)):
            with suppress(Exception):
                sch.compute_inline(block)
    for block in reversed(common.blocks(sch)):
        producers = list(sch.get_producers(block))
        if common.is_reduction(sch, block) or any(common.is_reduction(sch, producer) for producer in producers):
            continue
        if producers:
            with suppress(Exception):
                sch.reverse_compute_inline(block)


def _is_worth_threads(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    return common.iterations(sch, sch.get_loops(block), machine) >= machine.parallel_iterations


def _along_results(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Vectorise along neighbouring results; each core has its part of the reduction or of the results."""
    parallel = _is_worth_threads(sch, block, machine)
    *outer, c, r = sch.get_loops(block)
    size = common.extent(sch, c)
    inner: list[LoopRV] = []
    if size is None:
        # Plain loops add one line after the other to the sums, as memory has them.
        pass
    elif size <= machine.lanes:
        # TVM refuses vectors of some widths; LLVM takes any.
        inner = [c] if size & (size - 1) == 0 else []
    elif size % machine.lanes == 0:
        vectors = size // machine.lanes
        count = cost.side_by_side(vectors, machine)
        part = _part_of_line(vectors, common.iterations(sch, outer, machine) if parallel else machine.cores, machine)
        if count < vectors and count < part:
            chunk, c = sch.split(c, [None, part * machine.lanes])
        else:
            chunk, vector, lane = sch.split(c, [None, count, machine.lanes])
            inner = [vector, lane]
        outer.append(chunk)
    if parallel:
        common.parallel(sch, common.fuse(sch, outer), machine)
    if inner:
        registers.accumulate(sch, block, inner, [r])
    else:
        # LLVM vectorises such plain loops, and their remainder.
        sch.reorder(r, c)
        sch.decompose_reduction(block, r)


def _part_of_line(vectors: int, tasks: int, machine: Machine) -> int:
    """The most of a line's vectors of sums that a task adds whole parts of lines to, as memory has them.

    Half of the first-level cache holds them, and all cores have a part where there are `tasks` tasks of whole lines.
    """
    most = machine.first.size // (2 * machine.lanes * machine.number)
    divisors = (part for part in range(min(vectors, most), 1, -1) if vectors % part == 0)
    return next((part for part in divisors if vectors // part * tasks >= machine.cores), 1)


def _after_rows(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    """Compute the accumulators of each row in the loop that combines them to its result."""
    folds = [producer for producer in sch.get_producers(block) if _kind(sch, producer) == "reduction_fold"]
    if not folds:
        return False
    # A single result has no loop.
    loops = list(sch.get_loops(block)) or [sch.add_unit_loop(block)]
    lanes = [producer for fold in folds for producer in sch.get_producers(fold)]
    is_parallel = any(_is_worth_threads(sch, block, machine) for block in lanes)
    task = common.fuse(sch, loops)
    if is_parallel:
        common.parallel(sch, task, machine)
    for fold in folds:
        (accumulators,) = sch.get_producers(fold)
        for stage in (fold, accumulators):
            sch.compute_at(stage, task, preserve_unit_loops=True)
            accumulate(sch, stage)
    return True


def accumulate(sch: Schedule, block: SBlockRV) -> None:
    """Keep the accumulators of a block annotated `reduction_lanes` or `reduction_fold` in registers."""
    *outer, lane, reduced = sch.get_loops(block)
    is_fold = _kind(sch, block) == "reduction_fold"
    tile = [lane] if is_fold else [outer[-1], lane]
    registers.accumulate(sch, block, tile, [reduced], unrolled=[reduced] if is_fold else [])
