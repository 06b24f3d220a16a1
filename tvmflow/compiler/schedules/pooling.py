"""The schedule for pooling: a line of the result at a time, channels in vectors."""

from tvm.s_tir import Schedule

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply(sch: Schedule, machine: Machine, _choices: Choices) -> bool:
    """Schedule pooling with the element-wise operations after it; return False for other functions.

    With large windows, the columns are pooled first, per line.
    """
    last = common.find_kernel(sch, "pooling")
    if last is None:
        return False
    columns = common.find_blocks(sch, "columns")
    if sch.get_consumers(last):
        pool, last = last, common.inline_epilogue(sch, last)
        sch.compute_inline(pool)
    loops = list(sch.get_loops(last))
    task = common.fuse(sch, loops[:-2])
    tasks = common.extent(sch, task) or machine.cores
    if tasks * common.iterations(sch, loops[-2:], machine) >= machine.parallel_iterations:
        common.parallel(sch, task, machine)
    for block in columns:
        sch.compute_at(block, task, preserve_unit_loops=True)
    for block in (*columns, last):
        common.vectorize_last(sch, block, machine)
    return True
