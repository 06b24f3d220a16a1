"""The schedule for any function: what can be inlined is, every remaining block is parallel and vectorised."""

from tvm.s_tir import Schedule

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply(sch: Schedule, machine: Machine) -> bool:
    """Schedule every block on its own; never steps aside."""
    common.inline_elementwise(sch)
    for block in common.blocks(sch):
        common.parallel_vectorized(sch, block, machine)
    return True
