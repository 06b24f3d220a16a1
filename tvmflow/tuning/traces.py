"""A workload is a function whatever its names; a trace is a schedule of it as TVM writes it down and replays it."""

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tvmflow.tuning.records import Record

if TYPE_CHECKING:
    from tvm.s_tir import Schedule
    from tvm.tirx import PrimFunc

logger = logging.getLogger(__name__)


def workload_key(func: "PrimFunc") -> str:
    """The structural hash of `func` in hex: of its parameters and body, not of its name or other attributes."""
    import tvm_ffi

    return f"{tvm_ffi.structural_hash(normalize(func), map_free_vars=True):016x}"


def normalize(func: "PrimFunc") -> "PrimFunc":
    """`func` under the name `main`, with no attributes but those that say what kind of function it is."""
    import tvm
    from tvm.tirx import PrimFunc

    attrs = tvm.ir.make_node("ir.DictAttrs", **{"s_tir": True, "tirx.noalias": True, "global_symbol": "main"})
    return PrimFunc(func.params, func.body, func.ret_type, attrs)


def trace_of(schedule: "Schedule") -> str:
    """The trace of a schedule as JSON, for `replay`."""
    return json.dumps(schedule.trace.as_json(), default=lambda leaf: leaf.value)


def replay(trace: str, func: "PrimFunc") -> "PrimFunc":
    """Schedule `func` as `trace` (JSON) says; the result keeps the attributes of `func` and is marked as scheduled.

    Whatever TVM raises when the trace does not fit is passed on.
    """
    from tvmflow.compiler.schedules import complete

    scheduled = complete(_scheduled(json.loads(trace), normalize(func)).mod["main"])
    scheduled = scheduled.without_attr("global_symbol")
    for name, value in (func.attrs or {}).items():
        scheduled = scheduled.with_attr(name, value)
    return scheduled.with_attr("tirx.is_scheduled", True)


def adapt_record(record: Record, func: "PrimFunc") -> Record:
    """`record` with its trace in the names of `func`, which is the same workload by other names.

    A trace finds blocks by name, and those that it makes itself get names derived from those of blocks and buffers.
    Whatever TVM raises when the trace does not fit is passed on.
    """
    from tvm import ir

    instructions, decisions = json.loads(record.trace)
    if not record.workload or not any(kind == "GetSBlock" for kind, *_ in instructions):
        return record
    known, wanted = ir.load_json(record.workload), normalize(func)
    if _names(known) == _names(wanted):
        return record
    renamed: list[Any] = []
    for index, (kind, inputs, attributes, outputs) in enumerate(instructions):
        if kind == "GetSBlock":
            # At this point of the trace both functions have the same blocks, in the same order.
            made = [decision for decision in decisions if decision[0] < index]
            old = [block.name_hint for block in _blocks(_scheduled([instructions[:index], made], known))]
            new = [block.name_hint for block in _blocks(_scheduled([renamed, made], wanted))]
            attributes = [new[old.index(attributes[0])], *attributes[1:]]
        renamed.append([kind, inputs, attributes, outputs])
    return replace(record, workload=ir.save_json(wanted), trace=json.dumps([renamed, decisions]))


def _scheduled(trace: Any, func: "PrimFunc") -> Any:
    """TVM's schedule of a normalized function after the steps of a trace (JSON, parsed)."""
    from tvm import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    from tvmflow.compiler import amx, dotproduct, groups

    for kind, _, attributes, _ in trace[0]:
        if kind == "Tensorize":
            for unit in (amx, dotproduct, groups):
                unit.register(str(attributes[0]))
    schedule = Schedule(IRModule({"main": func}))
    Trace.apply_json_to_schedule(trace, schedule)
    return schedule


def schedule_steps(record: Record) -> str:
    """The schedule of a record as the steps that make it, in Python. TVM raises whatever it likes for a bad trace."""
    from tvm import ir

    return str(_scheduled(json.loads(record.trace), ir.load_json(record.workload)).trace)


def _blocks(schedule: Any) -> list[Any]:
    """The blocks of a schedule's function, in the order of the program, outer ones first."""
    found: list[Any] = []

    def visit(block: Any) -> None:
        found.append(schedule.get(block))
        for child in schedule.get_child_blocks(block):
            visit(child)

    visit(schedule.get_sblock("root"))
    return found


def _names(func: "PrimFunc") -> list[str]:
    """The names that a trace may depend on: of blocks, and of the buffers that they read and write."""
    names: list[str] = []
    for block in _blocks(_scheduled([[], []], func)):
        names += [block.name_hint, *(str(region.source.name) for region in (*block.writes, *block.reads))]
    return names


def apply(record: Record, func: "PrimFunc") -> "PrimFunc | None":
    """Schedule `func` (unscheduled, any name) with the trace of `record`.

    The result has the parameters and attributes of `func` and the attribute `tirx.is_scheduled`. A record which does
    not replay is no error: a warning is logged and None returned, and the caller goes on with the next best schedule.
    """
    try:
        return replay(adapt_record(record, func).trace, func)
    except Exception as error:  # TVM raises whatever it likes for a trace that does not fit.
        reason = str(error).strip().splitlines()
        logger.warning("record %s (%s) does not replay: %s", record.key, record.created_at, reason[-1:] or error)
        return None
