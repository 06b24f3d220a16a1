"""The schedule for functions that pack weights when a library is loaded."""

from tvm.s_tir import Schedule

from tvmflow.compiler.annotations import GROUPS, KERNEL
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply(sch: Schedule, machine: Machine, _choices: Choices) -> bool:
    """Schedule a function that `operators.packing` defines, in parallel over channels; return False for others.

    All packed values of one vector of weights are computed together, so that the weights are read once.
    """
    blocks = common.blocks(sch)
    *stages, packed = blocks
    annotations = sch.get(packed).annotations
    if annotations.get(KERNEL) != "packing":
        return False
    # Integers are packed in groups of neighbours in depth.
    form, vector, depth, lane, *group = sch.get_loops(packed)
    vectors, form = sch.split(form, [int(annotations.get(GROUPS, 1)), None])
    sch.reorder(vectors, vector, depth, form, *group, lane)
    for stage in reversed(stages):
        sch.compute_at(stage, depth)
    for stage in stages[1:]:
        *forms, lane_of_stage = sch.get_loops(stage)[3:]
        for loop in forms:
            sch.unroll(loop)
        sch.vectorize(lane_of_stage)
    for loop in sch.get_loops(stages[0])[3:] if stages else ():
        sch.unroll(loop)
    for loop in (form, *group):
        sch.unroll(loop)
    sch.vectorize(lane)
    task = sch.fuse(vectors, vector, depth)
    if machine.cores > 1:
        sch.parallel(task)
    return True
