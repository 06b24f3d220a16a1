"""The schedule of every fused function: a rule by the kind of its loops, and a fallback that takes them all."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tvm.s_tir import Schedule, ScheduleError
from tvm.tirx import PrimFunc

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import (
    attention,
    blocks,
    common,
    depthwise,
    dot,
    fallback,
    pooling,
    products,
    reductions,
    rowwise,
    strassen,
    winograd,
)

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
    tiny = common.is_tiny(func, machine)
    for name, rule in (*rules.items(), ("fallback", fallback.apply)):
        trial = Schedule(func)
        try:
            taken = rule(trial, machine)
        except Exception:  # noqa: S112  # A schedule primitive refuses in many ways; the next rule takes over.
            continue
        if taken:
            scheduled = trial.mod["main"]
            return _finish(common.without_threads(scheduled) if tiny else scheduled, func), name
    return _finish(func, func), "none"


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


def _finish(scheduled: PrimFunc, func: PrimFunc) -> PrimFunc:
    scheduled = scheduled.with_attr("tirx.is_scheduled", True)
    if "global_symbol" in (func.attrs or {}):
        scheduled = scheduled.with_attr("global_symbol", func.attrs["global_symbol"])
    return scheduled
