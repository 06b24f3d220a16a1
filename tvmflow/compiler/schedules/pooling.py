"""The schedule for pooling: a line of the result at a time, channels in vectors."""

import math

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
    *lines, column, channel = sch.get_loops(last)
    tasks = math.prod(common.extent(sch, line) or machine.cores for line in lines)
    if tasks * common.iterations(sch, [column, channel], machine) >= machine.parallel_iterations:
        part, _ = common.split_for_cores(sch, lines, column, machine)
        task = common.fuse(sch, [*lines, part])
        common.parallel(sch, task, machine)
    else:
        task = common.fuse(sch, lines)
    for block in columns:
        sch.compute_at(block, task, preserve_unit_loops=True)
    for block in (*columns, last):
        common.vectorize_last(sch, block, machine)
    return True
