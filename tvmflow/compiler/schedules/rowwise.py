"""The schedule for softmax and norms: a row at a time, every stage in vectors."""

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tvmflow.compiler.annotations import GROUP, KERNEL, LEAD
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, prefetch, reductions, registers


def apply(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule a function that passes several times over each row of its last dimensions; return False for others."""
    last = common.find_kernel(sch, "rowwise")
    if last is None:
        return False
    annotations = sch.get(last).annotations
    lead, group = int(annotations[LEAD]), int(annotations.get(GROUP, 1))
    if sch.get_consumers(last):
        last = common.inline_epilogue(sch, last)
    rows = list(sch.get_loops(last))[:lead]
    if not rows:
        return False
    if group > 1:
        rows[-1], _ = sch.split(rows[-1], [None, group])
    task = common.fuse(sch, rows)
    common.parallel(sch, task, machine)
    stages = [block for block in common.blocks(sch) if sch.get_consumers(block)]
    for block in reversed(stages):
        sch.compute_at(block, task, preserve_unit_loops=True)
    for block in stages:
        _vectorize(sch, block, lead, machine)
    is_whole = not (common.extent(sch, sch.get_loops(last)[-1]) or 1) % machine.lanes
    common.vectorize_last(sch, last, machine)
    if is_whole:
        prefetch.fetch_rows(sch, last, machine, choices)
    return True


def _vectorize(sch: Schedule, block: SBlockRV, rows: int, machine: Machine) -> None:
    inner = list(sch.get_loops(block))[1 + rows :]
    if not inner:
        return
    if sch.get(block).name_hint.startswith("padded"):
        common.vectorize_padded(sch, block, machine)
    elif not common.is_reduction(sch, block):
        common.vectorize_last(sch, block, machine)
    elif KERNEL in sch.get(block).annotations:
        reductions.accumulate(sch, block)
    elif sch.get(block).name_hint.endswith("_lanes"):
        lane, *reduced = inner
        registers.accumulate(sch, block, [lane], reduced)
    else:
        sch.decompose_reduction(block, inner[0])
