"""What a cost model knows before a run: the measurements of earlier ones, of all workloads."""

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tvmflow.tuning.space import runner_result, without_tensor_intrinsics

if TYPE_CHECKING:
    from tvmflow.tuning.records import Record, Trial

# To replay a schedule and extract its features takes ten milliseconds: so many are learnt in one or two seconds.
MEASUREMENTS = 160

logger = logging.getLogger(__name__)


def warm_up(cost_model: Any, measured: "Iterable[Record | Trial]", target: str, *, limit: int = MEASUREMENTS) -> int:
    """Teach MetaSchedule's `XGBModel` what was measured for `target` (TVM target as JSON); return of how many.

    At most `limit`, of each workload as many as of any other, the fastest and the slowest first. Which ones they are
    does not depend on the order of `measured`. Schedules that do not replay any more are passed over.
    """
    import tvm
    from tvm.s_tir import meta_schedule as ms

    learnt: list[tuple[Any, list[Any], list[Any]]] = []
    with without_tensor_intrinsics():
        for group in _chosen(measured, limit):
            # Equal workloads may come with other names, which their schedules refer to.
            modules = {text: tvm.IRModule({"main": tvm.ir.load_json(text)}) for text in {e.workload for e in group}}
            found = [(_candidate(entry, modules[entry.workload]), entry.seconds) for entry in group]
            pairs = [(candidate, seconds) for candidate, seconds in found if candidate is not None]
            if pairs:
                module = modules[group[0].workload]
                context = ms.TuneContext(
                    module, target=tvm.target.Target(json.loads(target)), num_threads=1, logger=logger
                )
                learnt.append((context, [pair[0] for pair in pairs], [runner_result(pair[1]) for pair in pairs]))
    for index, (context, candidates, results) in enumerate(learnt, 1):
        # It trains anew when it knows enough more than when it last did: only with the last of them.
        cost_model.last_train_size = 0 if index == len(learnt) else 2**62
        cost_model.update(context, candidates, results)
    return sum(len(candidates) for _, candidates, _ in learnt)


def _chosen(measured: "Iterable[Record | Trial]", limit: int) -> "list[list[Record | Trial]]":
    """What to learn from, by workload."""
    workloads: dict[str, dict[str, Record | Trial]] = {}
    for entry in sorted(measured, key=lambda entry: entry.created_at):
        workloads.setdefault(entry.key, {})[entry.trace] = entry
    turns = itertools.zip_longest(*(_from_both_ends(workloads[key].values()) for key in sorted(workloads)))
    chosen: dict[str, list[Record | Trial]] = {}
    for entry in itertools.islice((entry for turn in turns for entry in turn if entry is not None), limit):
        chosen.setdefault(entry.key, []).append(entry)
    return list(chosen.values())


def _from_both_ends(entries: "Iterable[Record | Trial]") -> "Iterator[Record | Trial]":
    """The fastest, the slowest, the next fastest, and so on; what failed counts as the slowest."""
    left = sorted(entries, key=lambda entry: (math.inf if entry.seconds is None else entry.seconds, entry.trace))
    while left:
        yield left.pop(0)
        if left:
            yield left.pop()


def _candidate(entry: "Record | Trial", module: Any) -> Any | None:
    """The measured schedule as MetaSchedule has it, None where it does not replay."""
    from tvm.s_tir import Schedule
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.schedule import Trace

    try:
        schedule = Schedule(module, error_render_level="none")
        Trace.apply_json_to_schedule(json.loads(entry.trace), schedule)
        arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
    except Exception as error:  # TVM raises whatever it likes for what another version recorded.
        logger.debug("a schedule of workload %s is not learnt from: %s", entry.key, error)
        return None
    return ms.search_strategy.MeasureCandidate(schedule, arguments)
