"""The schedule of every fused function: a rule by the kind of its loops, and a fallback that takes them all."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import tvm_ffi
from tvm.s_tir import Schedule, ScheduleError
from tvm.tirx import PrimFunc

from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.choices import Choices, choose, using
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import (
    attention,
    blocks,
    common,
    depthwise,
    dot,
    fallback,
    guards,
    pooling,
    prefetch,
    products,
    reductions,
    rowwise,
    strassen,
    winograd,
)

# A function of so many times the cycles that are worth threads may still be faster on one core.
_CLOSE = 8

# Kernels of several stages, which a search that knows each loop by itself only takes apart.
_OF_STAGES = {"block", "winograd", "dot_winograd", "strassen", "attention", "dot_conv2d", "dot_rows"}

Rule = Callable[[Schedule, Machine], bool]

RULES: dict[str, Rule] = {
    "block": blocks.apply,
    "conv2d": products.apply_conv2d,
    "rows": products.apply_rows,
    "dot_conv2d": dot.apply_conv2d,
    "dot_rows": dot.apply_rows,
    "dot_winograd": winograd.apply_dot,
    "winograd": winograd.apply,
    "strassen": strassen.apply,
    "depthwise": depthwise.apply,
    "rowwise": rowwise.apply,
    "attention": attention.apply,
    "reduction": reductions.apply,
    "pooling": pooling.apply,
}


def schedule(
    func: PrimFunc, machine: Machine, rules: Mapping[str, Rule] = MappingProxyType(RULES)
) -> tuple[PrimFunc, str]:
    """Schedule a fused function for a machine; returns it with the name of the rule that took it.

    A rule that does not know the function steps aside, and one that fails is passed over: the fallback takes the
    rest.
    """
    with using(Choices()):
        scheduled, name = _scheduled(func, machine, rules, _cycles(func, machine))
    return _finish(func if scheduled is None else scheduled.mod["main"], func), name


def variants(func: PrimFunc, machine: Machine, most: int = 128) -> list[Schedule]:
    """The ways in which the rule that takes a function may schedule it: its own choice, then the others.

    Those that differ in fewer choices come first; there are at most `most`. What no rule takes has none.
    """
    found: dict[int, Schedule] = {}
    waiting: deque[dict[str, str]] = deque([{}])
    cycles = _cycles(func, machine)
    while waiting and len(found) < most:
        choices = Choices(waiting.popleft())
        with using(choices):
            scheduled, _ = _scheduled(func, machine, RULES, cycles)
        if scheduled is not None:
            # Two choices may come to the same.
            found.setdefault(tvm_ffi.structural_hash(scheduled.mod["main"]), scheduled)
        settled = dict(choices.made)
        for key, site in choices.met.items():
            if key in choices.made:
                continue
            waiting.extend({**settled, key: option} for option in site.options[1:])
            settled[key] = site.options[0]
    return list(found.values())


def is_of_stages(func: PrimFunc) -> bool:
    """Whether a fused function's kernel has several stages, which its own rule alone schedules well."""
    try:
        sch = Schedule(func)
        return any(sch.get(block).annotations.get(KERNEL) in _OF_STAGES for block in common.blocks(sch))
    except ScheduleError:  # TVM writes some functions, such as sorting, without blocks.
        return False


def _cycles(func: PrimFunc, machine: Machine) -> float:
    """What decides whether a function is worth threads; infinite where there are none."""
    return common.cycles(func, machine) if machine.cores > 1 else math.inf


def _scheduled(
    func: PrimFunc, machine: Machine, rules: Mapping[str, Rule], cycles: float
) -> tuple[Schedule | None, str]:
    threads = {"all": machine}
    if cycles < _CLOSE * machine.parallel_cycles:
        threads["one"] = replace(machine, cores=1)
    if cycles < machine.parallel_cycles:
        threads = dict(reversed(threads.items()))
    machine = choose("threads", "", threads)
    for name, rule in (*rules.items(), ("fallback", fallback.apply)):
        trial = Schedule(func)
        try:
            taken = rule(trial, machine)
        except Exception:  # noqa: S112  # A schedule primitive refuses in many ways; the next rule takes over.
            continue
        if taken:
            return trial, name
    return None, "none"


def subject(func: PrimFunc) -> str:
    """What the decisions about a fused function are about; empty where there are none."""
    try:
        sch = Schedule(func)
        found = (common.subject_of(sch, block) for block in common.blocks(sch))
        return next(filter(None, found), "")
    except ScheduleError:  # TVM writes some functions, such as sorting, without blocks.
        return ""


def error_bounds(func: PrimFunc) -> dict[str, float]:
    """The bounds of a fused function's rounding errors, by algorithm of fewer multiplications that it uses."""
    try:
        found = {name: rule.bound(Schedule(func)) for name, rule in (("strassen", strassen), ("winograd", winograd))}
    except ScheduleError:  # TVM writes some functions, such as sorting, without blocks.
        return {}
    return {name: bound for name, bound in found.items() if bound is not None}


def complete(scheduled: PrimFunc) -> PrimFunc:
    """What a schedule's primitives cannot write: the prefetches that it asks for, and guards of memory reads."""
    return guards.guard_reads(prefetch.expand(scheduled))


def _finish(scheduled: PrimFunc, func: PrimFunc) -> PrimFunc:
    scheduled = complete(scheduled).with_attr("tirx.is_scheduled", True)
    if "global_symbol" in (func.attrs or {}):
        scheduled = scheduled.with_attr("global_symbol", func.attrs["global_symbol"])
    return scheduled
