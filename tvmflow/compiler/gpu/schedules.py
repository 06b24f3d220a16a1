"""Schedules the functions of a lowered model for a GPU."""

import math
from contextlib import suppress
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import dlight
from tvm.tirx import PrimFunc

from tvmflow.compiler.gpu.kernels import product_kernel
from tvmflow.compiler.gpu.tiling import Gpu, gpu_of
from tvmflow.compiler.operators.common import static
from tvmflow.compiler.statements import is_one_of, uses
from tvmflow.hardware.target import Target

# The threads of a block where each thread computes elements of its own.
_THREADS = 256
# The threads of a block that adds up one element.
_BLOCK_THREADS = 256
# A reduction of at most so many numbers is one thread's work; TVM's rules share out longer ones.
_LONGEST_REDUCTION = 64
# Windows slide over two dimensions of images of four. A thread computes so many neighbouring pixels if the threads that
# are left are this share of those that reside on the GPU. Loops of at most so many steps are unrolled.
_WINDOW_DIMENSIONS, _IMAGE_DIMENSIONS = 2, 4
_NEIGHBOURS, _BUSY_SHARE = (4, 2), 8
_LONGEST_UNROLLED = 16
# So many results or more occupy a GPU with a thread each, whatever they reduce.
_MANY_RESULTS = 1 << 14


def schedule_functions(mod: tvm.IRModule, target: Target) -> tuple[tvm.IRModule, list[tuple[str, str]]]:
    """Schedule the functions of a module in place; return it and pairs of a function's name and its rule's."""
    rules = []
    for variable, function in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(function, PrimFunc) and not (function.attrs or {}).get("tirx.is_scheduled", False):
            scheduled, rule = schedule(function, target)
            mod.update_func(variable, scheduled)
            rules.append((str(variable.name_hint), rule))
    return mod, rules


def schedule(function: PrimFunc, target: Target) -> tuple[PrimFunc, str]:
    """Return the scheduled function and the name of the rule that scheduled it."""
    if _has_threads(function):
        return _complete(function), "dlight"
    kernel = product_kernel(function)
    if kernel is not None:
        return kernel, "tensor_cores"
    kernel = _reduce_in_threads(function, gpu_of(target)) or _reduce_in_blocks(function)
    if kernel is not None:
        return kernel, "threads"
    gpu = dlight.gpu
    rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    try:
        with tvm.target.Target(target.tvm):
            mod = dlight.ApplyDefaultSchedule(*rules)(tvm.IRModule({"main": function}))
    except Exception:
        # TVM's rules fail on empty tensors, each in its own way.
        return _run_in_a_thread(function), "serial"
    return mod["main"], "dlight"


def _has_threads(function: PrimFunc) -> bool:
    """Whether a function is a kernel already, as TVM defines scattering and sorting for GPUs."""
    attributes: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, attributes.append))
    return any(item.attr_key == "thread_extent" for item in attributes)


def _complete(function: PrimFunc) -> PrimFunc:
    """Bind the loops beside the kernels of a function of TVM, as they would run on the CPU."""
    schedule = s_tir.Schedule(function)
    # A function of one block has no others.
    with suppress(s_tir.ScheduleError):
        for block in schedule.get_child_blocks(schedule.get_sblock("root")):
            loops = schedule.get_loops(block)
            if loops:
                _bind(schedule, loops)
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True)


def _bind(schedule: s_tir.Schedule, loops: list[Any]) -> Any:
    """Give each step of some loops a thread, and return the loop of the threads of a block."""
    outer, inner = schedule.split(schedule.fuse(*loops), [None, _THREADS])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    return inner


def _run_in_a_thread(function: PrimFunc) -> PrimFunc:
    """Schedule a function for one thread, block by block."""
    schedule = s_tir.Schedule(function)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        loops = schedule.get_loops(block)
        schedule.bind(schedule.add_unit_loop(loops[0] if loops else block), "threadIdx.x")
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True)


def _reduce_in_threads(function: PrimFunc, gpu: Gpu) -> PrimFunc | None:
    """Schedule a function of one reduction and element-wise operators: a thread adds up an element in a register.

    Returns None for other functions, and for long reductions to few results.
    """
    schedule = s_tir.Schedule(function)
    parts = _single_reduction(schedule)
    if parts is None:
        return None
    reduction, others, inlined = parts
    length = _reduced(schedule, reduction)
    results = math.prod(static(axis.dom.extent) or 0 for axis in _spatial(schedule, reduction))
    if not length or (length > _LONGEST_REDUCTION and results < _MANY_RESULTS):
        return None
    try:
        for block in inlined:
            schedule.compute_inline(block)
        store = others[0] if others else schedule.cache_write(reduction, 0, "local")
        # One number has no loop.
        loops = schedule.get_loops(store) or [schedule.add_unit_loop(store)]
        neighbours = _neighbours(schedule, reduction, loops, results, gpu)
        if neighbours > 1:
            *outer, across, channel = loops
            across, neighbour = schedule.split(across, [None, neighbours])
            schedule.reorder(*outer, across, channel, neighbour)
            loops = [*outer, across, channel]
        schedule.compute_at(reduction, _bind(schedule, loops), preserve_unit_loops=True)
        for place in range(len(schedule.get(reduction).writes)):
            schedule.set_scope(reduction, place, "local")
        if neighbours > 1:
            _unroll_window(schedule, reduction, neighbours)
            schedule.unroll(schedule.get_loops(store)[-1])
        elif length <= _LONGEST_REDUCTION:
            # Many numbers are on their way from memory at once.
            for loop in schedule.get_loops(reduction)[-len(_reduction_axes(schedule, reduction)) :]:
                schedule.unroll(loop)
    except s_tir.ScheduleError:
        return None
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True)


def _reduce_in_blocks(function: PrimFunc) -> PrimFunc | None:
    """Schedule a function of one reduction and element-wise operators: a block of threads adds up an element.

    Returns None for other functions, for short reductions, and where neighbouring threads would not read neighbours.
    """
    schedule = s_tir.Schedule(function)
    parts = _single_reduction(schedule)
    if parts is None:
        return None
    reduction, others, inlined = parts
    if not _reads_along(schedule, reduction) or 0 < (_reduced(schedule, reduction) or 0) <= _LONGEST_REDUCTION:
        return None
    # Sums of products are matrix products. Numbers with their places, as of a maximum, are not added up by threads.
    if len(schedule.get(reduction).reads) > 1 or len(schedule.get(reduction).writes) > 1:
        return None
    try:
        for block in inlined:
            schedule.compute_inline(block)
        store = others[0] if others else schedule.cache_write(reduction, 0, "local")
        if not schedule.get_loops(store):
            # TVM's `rfactor` fails beside a block without a loop.
            schedule.add_unit_loop(store)
        count = len(_reduction_axes(schedule, reduction))
        loops = schedule.get_loops(reduction)
        if loops[:-count]:
            schedule.fuse(*loops[:-count])
        _, thread = schedule.split(schedule.fuse(*loops[-count:]), [None, _BLOCK_THREADS])
        part = schedule.rfactor(thread, 0)
        *results, step, thread = schedule.get_loops(part)
        schedule.reorder(thread, step)
        # One number has no loop.
        block = results[0] if results else schedule.add_unit_loop(thread)
        schedule.bind(block, "blockIdx.x")
        schedule.bind(thread, "threadIdx.x")
        # TVM forgets the end of the last step where it moves the block with the steps instead.
        schedule.reverse_compute_at(reduction, block)
        schedule.bind(schedule.get_loops(reduction)[1], "threadIdx.x")
        # Threads beyond the end have no step that would begin their sums.
        schedule.decompose_reduction(part, step)
        schedule.reverse_compute_at(store, block, preserve_unit_loops=True)
        for block in (part, reduction):
            schedule.set_scope(block, 0, "local")
    except s_tir.ScheduleError:
        return None
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True)


def _single_reduction(schedule: s_tir.Schedule) -> tuple[Any, list[Any], list[Any]] | None:
    """The only reduction of a function, the block that stores its results if there is one, and the other blocks.

    Returns None where a function has several of them, and where results are stored more than once each.
    """
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    reductions = [block for block in blocks if _reduced(schedule, block) is not None]
    if len(reductions) != 1:
        return None
    (reduction,) = reductions
    others = [block for block in blocks if block is not reduction and _writes_result(schedule, block)]
    if len(others) > 1 or bool(others) == _writes_result(schedule, reduction):
        return None
    if others and not _have_equal_sizes(schedule, reduction, others[0]):
        return None
    return reduction, others, [block for block in blocks if block is not reduction and block not in others]


def _reads_along(schedule: s_tir.Schedule, reduction: Any) -> bool:
    """Whether the last reduced dimension is the last one of a tensor that a reduction reads."""
    last = _reduction_axes(schedule, reduction)[-1].var
    return any(uses(read.region[-1].min, last) for read in schedule.get(reduction).reads if read.region)


def _have_equal_sizes(schedule: s_tir.Schedule, reduction: s_tir.schedule.SBlockRV, store: Any) -> bool:
    """Whether a block stores as many elements as another computes: each is computed once then."""
    results, elements = (
        math.prod((axis.dom.extent for axis in _spatial(schedule, block)), start=tirx.IntImm("int64", 1))
        for block in (reduction, store)
    )
    return bool(tvm.sym.Analyzer().can_prove_equal(results, elements))


def _neighbours(schedule: s_tir.Schedule, reduction: Any, loops: list[Any], results: int, gpu: Gpu) -> int:
    """How many neighbouring pixels of a window that slides over images a thread computes; 1 for other reductions.

    Neighbours read the same weights and, for the most part, the same pixels.
    """
    axes = _reduction_axes(schedule, reduction)
    if len(axes) < _WINDOW_DIMENSIONS or len(loops) != _IMAGE_DIMENSIONS:
        return 1
    width = static(schedule.get(loops[-2]).extent) or 1
    busy = gpu.processors[1] * gpu.threads // _BUSY_SHARE
    fitting = (count for count in _NEIGHBOURS if width % count == 0 and results >= count * busy)
    return next(fitting, 1)


def _unroll_window(schedule: s_tir.Schedule, reduction: Any, neighbours: int) -> None:
    """Run through the pixels of a thread within those of the window, without loops along the width."""
    loops = schedule.get_loops(reduction)
    count = len(_reduction_axes(schedule, reduction))
    window = loops[-count:]
    pixels = next(loop for loop in reversed(loops[:-count]) if static(schedule.get(loop).extent) == neighbours)
    schedule.reorder(*window, pixels)
    for loop in (*window[1:], pixels):
        if (static(schedule.get(loop).extent) or 0) <= _LONGEST_UNROLLED:
            schedule.unroll(loop)
    # Where the places of a block are no simple function of the thread, the first step sets the sums to zero.
    with suppress(s_tir.ScheduleError):
        schedule.decompose_reduction(reduction, window[0])


def _spatial(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> list[tvm.tirx.IterVar]:
    return [axis for axis in schedule.get(block).iter_vars if axis.iter_type == axis.DataPar]


def _reduction_axes(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> list[tvm.tirx.IterVar]:
    return [axis for axis in schedule.get(block).iter_vars if axis.iter_type == axis.CommReduce]


def _reduced(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> int | None:
    """The number of elements that a block reduces to one; 0 if unknown, None if it reduces nothing."""
    axes = _reduction_axes(schedule, block)
    return math.prod(static(axis.dom.extent) or 0 for axis in axes) if axes else None


def _writes_result(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> bool:
    return is_one_of(schedule.get(block).writes[0].source, schedule.mod["main"].params)
