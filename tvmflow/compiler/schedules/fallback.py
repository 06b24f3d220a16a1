"""The schedule for any function: what can be inlined is, every remaining block is parallel and vectorised."""

from contextlib import suppress

from tvm.s_tir import Schedule

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply(sch: Schedule, machine: Machine) -> bool:
    """Schedule every block on its own; never steps aside."""
    common.inline_elementwise(sch)
    for block in common.blocks(sch):
        # What TVM refuses for a block leaves it correct, only less fast.
        with suppress(Exception):
            common.parallel_vectorized(sch, block, machine)
    return True
