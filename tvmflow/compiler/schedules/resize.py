"""The schedule for resizing: one parallel loop nest for each stored step, in vectors along the last dimension."""

from tvm.s_tir import Schedule

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply(sch: Schedule, machine: Machine, _choices: Choices) -> bool:
    """Schedule a resize with the element-wise operations after it; return False for other functions."""
    last = common.find_kernel(sch, "resize")
    if last is None:
        return False
    lines = common.find_blocks(sch, "line")
    if sch.get_consumers(last):
        step, last = last, common.inline_epilogue(sch, last)
        sch.compute_inline(step)
    for block in (*lines, last):
        *outer, inner = sch.get_loops(block)
        if common.iterations(sch, [*outer, inner], machine) >= machine.parallel_iterations:
            common.parallel(sch, common.fuse(sch, outer), machine)
        common.vectorize_last(sch, block, machine)
    return True
