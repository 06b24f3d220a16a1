"""Workloads and the traces that schedule them.

A workload is a function regardless of its names; a trace is TVM's list of the steps of a schedule, which can be
replayed.
"""

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
    """Return the structural hash of a function in hex: of its parameters and body, not of its name or attributes."""
    import tvm_ffi

    return f"{tvm_ffi.structural_hash(normalize(func), map_free_vars=True):016x}"


def normalize(func: "PrimFunc") -> "PrimFunc":
    """Return the function with the name `main` and only the attributes that every PrimFunc has."""
    import tvm
    from tvm.tirx import PrimFunc

    attrs = tvm.ir.make_node("ir.DictAttrs", **{"s_tir": True, "tirx.noalias": True, "global_symbol": "main"})
    return PrimFunc(func.params, func.body, func.ret_type, attrs)


def trace_of(schedule: "Schedule") -> str:
    """Return the trace of a schedule as JSON, for `replay`."""
    return json.dumps(schedule.trace.as_json(), default=lambda leaf: leaf.value)


def replay(trace: str, func: "PrimFunc") -> "PrimFunc":
    """Schedule `func` by a trace (JSON), and return it with its own attributes, marked as scheduled.

    Raises TVM's own errors for a trace that does not fit the function.
    """
    from tvmflow.compiler.schedules import complete

    scheduled = complete(_schedule(json.loads(trace), normalize(func)).mod["main"])
    scheduled = scheduled.without_attr("global_symbol")
    for name, value in (func.attrs or {}).items():
        scheduled = scheduled.with_attr(name, value)
    return scheduled.with_attr("tirx.is_scheduled", True)


def apply(record: Record, func: "PrimFunc") -> "PrimFunc | None":
    """Schedule `func` (unscheduled, with any names) by the trace of a record, and return it.

    The result has the parameters and attributes of `func` and the attribute `tirx.is_scheduled`. Returns None and logs
    a warning for a record that does not replay, so that the caller can use the next best schedule.
    """
    try:
        return replay(adapt_record(record, func).trace, func)
    except Exception as error:  # TVM raises errors of many types for a trace that does not fit.
        reason = str(error).strip().splitlines()
        logger.warning("record %s (%s) does not replay: %s", record.key, record.created_at, reason[-1:] or error)
        return None


def adapt_record(record: Record, func: "PrimFunc") -> Record:
    """Return `record` with the block names in its trace replaced by those of `func`.

    `func` is the record's workload, perhaps under other names. A trace refers to blocks by name; a block that the trace
    itself makes has a name derived from those of blocks and buffers. Raises TVM's own errors for a trace that does not
    fit the function.
    """
    from tvm import ir

    instructions, decisions = json.loads(record.trace)
    if not record.workload or not any(kind == "GetSBlock" for kind, *_ in instructions):
        return record
    recorded_func, renamed_func = ir.load_json(record.workload), normalize(func)
    if _names(recorded_func) == _names(renamed_func):
        return record
    new_instructions: list[Any] = []
    for index, (kind, inputs, attributes, outputs) in enumerate(instructions):
        if kind == "GetSBlock":
            # At this point of the trace both functions have the same blocks, in the same order.
            earlier = [decision for decision in decisions if decision[0] < index]
            old = [block.name_hint for block in _blocks(_schedule([instructions[:index], earlier], recorded_func))]
            new = [block.name_hint for block in _blocks(_schedule([new_instructions, earlier], renamed_func))]
            attributes = [new[old.index(attributes[0])], *attributes[1:]]
        new_instructions.append([kind, inputs, attributes, outputs])
    return replace(record, workload=ir.save_json(renamed_func), trace=json.dumps([new_instructions, decisions]))


def schedule_steps(record: Record) -> str:
    """Return the schedule of a record as the Python code of its steps.

    Raises TVM's own errors for a trace that does not replay.
    """
    from tvm import ir

    return str(_schedule(json.loads(record.trace), ir.load_json(record.workload)).trace)


def _schedule(trace: Any, func: "PrimFunc") -> Any:
    """TVM's schedule of a normalized function after the steps of a trace (parsed JSON)."""
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


def _blocks(schedule: Any) -> list[Any]:
    """The blocks of a schedule's function in the order of the program, each before the blocks inside it."""
    blocks: list[Any] = []

    def visit(block: Any) -> None:
        blocks.append(schedule.get(block))
        for child in schedule.get_child_blocks(block):
            visit(child)

    visit(schedule.get_sblock("root"))
    return blocks


def _names(func: "PrimFunc") -> list[str]:
    """The names that a trace may depend on: of blocks, and of the buffers that they read and write."""
    names: list[str] = []
    for block in _blocks(_schedule([[], []], func)):
        names += [block.name_hint, *(str(region.source.name) for region in (*block.writes, *block.reads))]
    return names
