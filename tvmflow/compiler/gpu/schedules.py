"""Schedules the functions of a lowered model for a GPU."""

import math

import tvm
from tvm import s_tir
from tvm.s_tir import dlight
from tvm.tirx import PrimFunc

from tvmflow.compiler.gpu.kernels import product_kernel
from tvmflow.compiler.operators.common import static

# The threads of a block where each thread computes elements of its own.
_THREADS = 256
# A reduction of at most so many numbers is one thread's work; TVM's rules share out longer ones.
_LONGEST_REDUCTION = 64
# So many results or more occupy a GPU with a thread each, whatever they reduce.
_MANY_RESULTS = 1 << 14


def schedule_functions(mod: tvm.IRModule, target: tvm.target.Target) -> tuple[tvm.IRModule, list[tuple[str, str]]]:
    """Schedule the functions of a module in place; return it and pairs of a function's name and its rule's."""
    rules = []
    for variable, function in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(function, PrimFunc) and not (function.attrs or {}).get("tirx.is_scheduled", False):
            scheduled, rule = schedule(function, target)
            mod.update_func(variable, scheduled)
            rules.append((str(variable.name_hint), rule))
    return mod, rules


def schedule(function: PrimFunc, target: tvm.target.Target) -> tuple[PrimFunc, str]:
    """Return the scheduled function and the name of the rule that scheduled it."""
    kernel = product_kernel(function)
    if kernel is not None:
        return kernel, "tensor_cores"
    kernel = _reduce_in_threads(function)
    if kernel is not None:
        return kernel, "threads"
    gpu = dlight.gpu
    rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    with target:
        mod = dlight.ApplyDefaultSchedule(*rules)(tvm.IRModule({"main": function}))
    return mod["main"], "dlight"


def _reduce_in_threads(function: PrimFunc) -> PrimFunc | None:
    """Schedule a function of one reduction and element-wise operators: a thread adds up an element in a register.

    Returns None for other functions, and for long reductions to few results.
    """
    schedule = s_tir.Schedule(function)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    reductions = [block for block in blocks if _reduced(schedule, block) is not None]
    if len(reductions) != 1:
        return None
    (reduction,) = reductions
    length = _reduced(schedule, reduction)
    results = math.prod(static(axis.dom.extent) or 0 for axis in _spatial(schedule, reduction))
    if not length or (length > _LONGEST_REDUCTION and results < _MANY_RESULTS):
        return None
    others = [block for block in blocks if block is not reduction and _writes_result(schedule, block)]
    if len(others) > 1 or bool(others) == _writes_result(schedule, reduction):
        return None
    inlined = [block for block in blocks if block is not reduction and block not in others]
    try:
        for block in inlined:
            schedule.compute_inline(block)
        store = others[0] if others else schedule.cache_write(reduction, 0, "local")
        fused = schedule.fuse(*schedule.get_loops(store))
        outer, inner = schedule.split(fused, [None, _THREADS])
        schedule.bind(outer, "blockIdx.x")
        schedule.bind(inner, "threadIdx.x")
        schedule.compute_at(reduction, inner, preserve_unit_loops=True)
        schedule.set_scope(reduction, 0, "local")
    except s_tir.ScheduleError:
        return None
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True)


def _spatial(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> list[tvm.tirx.IterVar]:
    return [axis for axis in schedule.get(block).iter_vars if axis.iter_type == axis.DataPar]


def _reduced(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> int | None:
    """The number of elements that a block reduces to one; 0 if unknown, None if it reduces nothing."""
    axes = [axis for axis in schedule.get(block).iter_vars if axis.iter_type == axis.CommReduce]
    return math.prod(static(axis.dom.extent) or 0 for axis in axes) if axes else None


def _writes_result(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> bool:
    function = schedule.mod["main"]
    return any(schedule.get(block).writes[0].source.same_as(item) for item in function.params)
