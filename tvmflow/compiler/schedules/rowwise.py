"""The schedule for softmax and norms: a row at a time, every stage in vectors."""

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply(sch: Schedule, machine: Machine) -> bool:
    """Functions whose result needs several passes over each row of the last dimension."""
    last = common.kernel(sch, "rowwise")
    if last is None:
        return False
    if sch.get_consumers(last):
        last = common.inline_epilogue(sch, last)
    *rows, _ = sch.get_loops(last)
    if not rows:
        return False
    task = common.fuse(sch, rows)
    sch.parallel(task)
    for block in reversed([block for block in common.blocks(sch) if sch.get_consumers(block)]):
        sch.compute_at(block, task, preserve_unit_loops=True)
        _in_vectors(sch, block, len(rows), machine)
    common.vectorize_inner(sch, last, machine)
    return True


def _in_vectors(sch: Schedule, block: SBlockRV, rows: int, machine: Machine) -> None:
    inner = list(sch.get_loops(block))[1 + rows :]
    if not inner:
        return
    if not common.is_reduction(sch, block):
        common.vectorize_inner(sch, block, machine)
        return
    reduced = inner[-1]
    if len(inner) == 2:
        lane = inner[0]
        sch.reorder(reduced, lane)
        sch.vectorize(lane)
    start = sch.decompose_reduction(block, reduced)
    if len(inner) == 2:
        sch.vectorize(sch.get_loops(start)[-1])
