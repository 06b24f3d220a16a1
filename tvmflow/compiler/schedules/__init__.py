"""Schedules every fused function: by the rule for its kind of loops, or by a fallback that takes any function."""

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import tvm
import tvm_ffi
from tvm.s_tir import SBlock, Schedule, ScheduleError
from tvm.s_tir.schedule import _type_checker
from tvm.tirx import PrimFunc

from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.choices import Choices, shape_text
from tvmflow.compiler.dotproduct import use_rounding
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.messages import shorten
from tvmflow.compiler.schedules import (
    attention,
    blocks,
    common,
    conditions,
    depthwise,
    dot,
    fallback,
    guards,
    lines,
    packing,
    padding,
    patches,
    pooling,
    prefetch,
    products,
    reductions,
    remainder,
    resize,
    rowwise,
    tails,
    transposes,
    winograd,
)
from tvmflow.compiler.short_loops import PARALLEL_CYCLES

# TVM checks the types of a schedule primitive's arguments at each call, and each time it takes the annotations apart
# again: the answers for one annotation are always the same.
_type_checker._dispatcher = cache(_type_checker._dispatcher)

# Below this multiple of `Machine.parallel_cycles` a function may still be faster on one core, and tuning tries it.
_CLOSE = 8

# Kernels of several stages. A search that schedules each loop by itself would separate their stages.
_OF_STAGES = {"block", "winograd", "dot_winograd", "attention", "dot_conv2d", "dot_rows"}

# A rule schedules a function in place, with the options that the choices name. It returns False, and changes nothing,
# for a function of another kind. The kind of a kernel begins with the name of its rule; a dot and more may follow.
Rule = Callable[[Schedule, Machine, Choices], bool]


class ScheduleWarning(RuntimeWarning):
    """A schedule rule failed on a function of its kind. Another rule scheduled it: results are right, but slower."""


RULES: dict[str, Rule] = {
    "block": blocks.apply,
    "conv2d": products.apply_conv2d,
    "rows": products.apply_rows,
    "dot_conv2d": dot.apply_conv2d,
    "dot_rows": dot.apply_rows,
    "dot_winograd": winograd.apply_dot,
    "winograd": winograd.apply,
    "depthwise": depthwise.apply,
    "rowwise": rowwise.apply,
    "attention": attention.apply,
    "reduction": reductions.apply,
    "pooling": pooling.apply,
    "resize": resize.apply,
    "packing": packing.apply,
}


def schedule(
    func: PrimFunc, machine: Machine, rules: Mapping[str, Rule] = MappingProxyType(RULES)
) -> tuple[PrimFunc, str]:
    """Schedule a fused function for a machine, and return it with the name of the rule that scheduled it.

    The first rule of `rules` that fits the function schedules it, and `fallback` where none fits. A rule that raises is
    skipped with a `ScheduleWarning`. A function without blocks is returned unchanged: with the name of its kernel if
    this project defines it, with the name `none` if TVM does, such as sorting.
    """
    scheduled, name = _scheduled(func, machine, rules, Choices(), _cycles(func, machine), joins=True)
    finished = _finish(func if scheduled is None else scheduled.mod["main"], func, machine)
    return with_other_form(finished, func, machine), name


def with_other_form(scheduled: PrimFunc, func: PrimFunc, machine: Machine) -> PrimFunc:
    """Return a scheduled function with the second form that `func` has where a free size is one, or unchanged.

    `scheduled` is a schedule of `func`, complete, and may come from tuning.
    """
    form = attention.single_query_form(func, machine)
    return scheduled if form is None else attention.with_single_query(scheduled, schedule(form, machine)[0])


def variants(func: PrimFunc, machine: Machine, most: int = 128) -> list[Schedule]:
    """List the schedules that a function's rule can make: the default one first, then those with other options.

    Schedules with fewer options other than the default come first. The list has at most `most` entries; it is empty for
    a function without blocks.
    """
    schedules: dict[int, Schedule] = {}
    queue: deque[dict[str, str]] = deque([{}])
    cycles = _cycles(func, machine)
    while queue and len(schedules) < most:
        choices = Choices(queue.popleft())
        scheduled, _ = _scheduled(func, machine, RULES, choices, cycles)
        if scheduled is not None:
            # Different options may lead to the same schedule.
            schedules.setdefault(tvm_ffi.structural_hash(scheduled.mod["main"]), scheduled)
        prefix = dict(choices.overrides)
        for key, site in choices.sites.items():
            if key in choices.overrides:
                continue
            queue.extend({**prefix, key: option} for option in site.options[1:])
            prefix[key] = site.options[0]
    return list(schedules.values())


def is_of_stages(func: PrimFunc) -> bool:
    """Whether a fused function's kernel has several stages, so that only its own rule schedules it well."""
    return any(kernel in _OF_STAGES for kernel in kernels_of(func))


def kernels_of(func: PrimFunc) -> list[str]:
    """List the kinds of the kernels in a fused function, one for each kernel; empty for a function of TVM's own."""
    sch = _with_blocks(func)
    return [] if sch is None else _kernels(sch)


def iterations_of(func: PrimFunc) -> list[tuple[list[Any], Any]]:
    """List, for each block of a fused function, the extents of its loops and the expression that an iteration stores.

    The list is empty for a function without blocks. The expression is None for a block that does not end in a store.
    """
    sch = _with_blocks(func)
    blocks_of_func = [] if sch is None else [sch.get(block) for block in common.blocks(sch)]
    return [
        ([variable.dom.extent for variable in block.iter_vars], getattr(block.body, "value", None))
        for block in blocks_of_func
    ]


def is_elementwise(func: PrimFunc) -> bool:
    """Whether a fused function computes each element of its result from its operands' elements at the same index.

    An operand may be broadcast. False for a function without blocks.
    """
    sch = _with_blocks(func)
    return sch is not None and all(common.is_elementwise(sch, block) for block in common.blocks(sch))


def _cycles(func: PrimFunc, machine: Machine) -> float:
    """The cycles of a function on one core; infinite where the machine has only one core."""
    return common.cycles(func, machine) if machine.cores > 1 else math.inf


def _scheduled(
    func: PrimFunc, machine: Machine, rules: Mapping[str, Rule], choices: Choices, cycles: float, *, joins: bool = False
) -> tuple[Schedule | None, str]:
    unscheduled = _with_blocks(func)
    if unscheduled is None:
        return None, str((func.attrs or {}).get(KERNEL, "none"))
    threads = {"all": machine}
    if cycles < _CLOSE * machine.parallel_cycles:
        threads["one"] = replace(machine, cores=1)
    if cycles < machine.parallel_cycles:
        threads = dict(reversed(threads.items()))
    machine = choices.choose("threads", "", threads)
    kinds = {kind.partition(".")[0] for kind in _kernels(unscheduled)}
    rules_of_kinds = ((name, rule) for name, rule in rules.items() if name in kinds)
    for name, rule in (*rules_of_kinds, ("fallback", fallback.apply)):
        # A new schedule would analyse the loops of the function again.
        trial = unscheduled.copy()
        try:
            if name == "fallback" and joins:
                trial = lines.join(trial, machine)
            if rule(trial, machine, choices):
                return trial, name
        except Exception as error:  # A schedule primitive refuses in many ways.
            shapes = ", ".join(shape_text(parameter.shape) for parameter in func.params if hasattr(parameter, "shape"))
            next_step = "it runs as TVM wrote it" if name == "fallback" else "another rule takes it"
            message = f"schedule rule {name!r} failed on a function of {shapes}, {next_step}: {shorten(error)}"
            warnings.warn(message, ScheduleWarning, stacklevel=1)
    return None, "none"


def _kernels(sch: Schedule) -> list[str]:
    # A copy, because each look is an entry in the schedule's trace.
    sch = sch.copy()
    kernels = (sch.get(block).annotations.get(KERNEL) for block in common.blocks(sch))
    return [str(kernel) for kernel in kernels if kernel is not None]


def _with_blocks(func: PrimFunc) -> Schedule | None:
    """Start a schedule of a function; None for a function that TVM wrote without blocks, such as sorting."""
    try:
        sch = Schedule(func)
        # A copy, because each look is an entry in the schedule's trace.
        sch.copy().get_sblock("root")
    except ScheduleError:
        return None
    return sch


def subject(func: PrimFunc) -> str:
    """Return the subject of the compiler's decisions about a fused function, such as a convolution's shapes as text.

    Tuning records a decision under this text, which equal functions share (see the module `choices`). It is empty for
    a function without such decisions.
    """
    sch = _with_blocks(func)
    subjects = [] if sch is None else [common.subject_of(sch, block) for block in common.blocks(sch)]
    return next(filter(None, subjects), "")


def error_bounds(func: PrimFunc) -> dict[str, float]:
    """Return bounds on a fused function's rounding errors, by the algorithm with fewer multiplications that it uses.

    `winograd.error_bound` says what its bound is relative to.
    """
    kernels = set()
    tvm_ffi.structural_walk(func.body, (SBlock, lambda block: kernels.add(block.annotations.get(KERNEL))))
    # Few functions use one of these, and the schedule of a function takes longer than this look.
    if kernels.isdisjoint(("winograd", "block.winograd")):
        return {}
    bound = winograd.bound(Schedule(func))
    return {} if bound is None else {"winograd": bound}


def complete(scheduled: PrimFunc) -> PrimFunc:
    """Add to a scheduled function the code that schedule primitives cannot write, and return the function.

    That code is prefetches, smaller tiles for the last rows of a line, smaller vectors for the last channels,
    conditions that leave out padding and pixels beyond the image, transposes of tiles, roundings to bfloat16 and guards
    of reads. Conditions that always hold are left out. The result is in SSA form: schedule primitives copy bindings of
    variables, and TVM's passes would mix up the values of such a variable in different parts of a loop.
    """
    tiled = padding.skip(
        remainder.expand(tails.expand(patches.expand(prefetch.expand(conditions.simplify(scheduled)))))
    )
    completed = lines.separate(guards.guard_reads(use_rounding(transposes.expand(tiled))))
    return tvm.tirx.transform.ConvertSSA()(tvm.IRModule({"main": completed}))["main"]


def _finish(scheduled: PrimFunc, func: PrimFunc, machine: Machine) -> PrimFunc:
    scheduled = complete(scheduled).with_attr("tirx.is_scheduled", True)
    if "global_symbol" in (func.attrs or {}):
        scheduled = scheduled.with_attr("global_symbol", func.attrs["global_symbol"])
    if machine.parallel_cycles > 0 and not common.has_fixed_sizes(func):
        scheduled = scheduled.with_attr(PARALLEL_CYCLES, machine.parallel_cycles)
    return scheduled
