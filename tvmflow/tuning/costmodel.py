"""Trains a cost model before a run, with the measurements of earlier runs on all workloads."""

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tvmflow.tuning.space import runner_result, without_tensor_intrinsics

if TYPE_CHECKING:
    from tvmflow.tuning.records import Record, Trial

# To replay a schedule and extract its features takes ten milliseconds, so these take one or two seconds.
MEASUREMENTS = 160

logger = logging.getLogger(__name__)


def warm_up(
    cost_model: Any, measurements: "Iterable[Record | Trial]", target: str, *, limit: int = MEASUREMENTS
) -> int:
    """Train MetaSchedule's `XGBModel` with measurements for `target` (TVM target as JSON) and return their number.

    The model learns at most `limit` of them, equally many of each workload, the fastest and the slowest first; the
    order of `measurements` does not matter. Schedules that no longer replay are skipped.
    """
    import tvm
    from tvm.s_tir import meta_schedule as ms

    lessons: list[tuple[Any, list[Any], list[Any]]] = []
    with without_tensor_intrinsics():
        for group in _select(measurements, limit):
            # Functions of one workload may differ in their names, which their schedules refer to.
            modules = {text: tvm.IRModule({"main": tvm.ir.load_json(text)}) for text in {e.workload for e in group}}
            replays = [(_candidate(entry, modules[entry.workload]), entry.seconds) for entry in group]
            pairs = [(candidate, seconds) for candidate, seconds in replays if candidate is not None]
            if pairs:
                module = modules[group[0].workload]
                context = ms.TuneContext(
                    module, target=tvm.target.Target(json.loads(target)), num_threads=1, logger=logger
                )
                lessons.append((context, [pair[0] for pair in pairs], [runner_result(pair[1]) for pair in pairs]))
    for index, (context, candidates, results) in enumerate(lessons, 1):
        # The model trains when it has much more data than at its last training: here only with the last lesson.
        cost_model.last_train_size = 0 if index == len(lessons) else 2**62
        cost_model.update(context, candidates, results)
    return sum(len(candidates) for _, candidates, _ in lessons)


def _select(measurements: "Iterable[Record | Trial]", limit: int) -> "list[list[Record | Trial]]":
    """The measurements to learn from, grouped by workload."""
    workloads: dict[str, dict[str, Record | Trial]] = {}
    for entry in sorted(measurements, key=lambda entry: entry.created_at):
        workloads.setdefault(entry.key, {})[entry.trace] = entry
    turns = itertools.zip_longest(*(_from_both_ends(workloads[key].values()) for key in sorted(workloads)))
    selection: dict[str, list[Record | Trial]] = {}
    for entry in itertools.islice((entry for turn in turns for entry in turn if entry is not None), limit):
        selection.setdefault(entry.key, []).append(entry)
    return list(selection.values())


def _from_both_ends(entries: "Iterable[Record | Trial]") -> "Iterator[Record | Trial]":
    """Yield the fastest, the slowest, the next fastest, and so on; failures count as the slowest."""
    rest = sorted(entries, key=lambda entry: (math.inf if entry.seconds is None else entry.seconds, entry.trace))
    while rest:
        yield rest.pop(0)
        if rest:
            yield rest.pop()


def _candidate(entry: "Record | Trial", module: Any) -> Any | None:
    """MetaSchedule's candidate of a measured schedule, None for a schedule that does not replay."""
    from tvm.s_tir import Schedule
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.schedule import Trace

    try:
        schedule = Schedule(module, error_render_level="none")
        Trace.apply_json_to_schedule(json.loads(entry.trace), schedule)
        arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
    except Exception as error:  # TVM raises errors of many types for what another version recorded.
        logger.debug("a schedule of workload %s is not learnt from: %s", entry.key, error)
        return None
    return ms.search_strategy.MeasureCandidate(schedule, arguments)
