"""The workloads of a model, each with the record, the efforts and the measurements of earlier runs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvmflow.hardware.target import Target, host, missing_features
from tvmflow.tuning.budget import Budget
from tvmflow.tuning.candidates import arguments_of
from tvmflow.tuning.forecast import Forecast, forecast_from_records
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import SPACE_VERSION, Effort, Record, Trial
from tvmflow.tuning.report import Latency, Standing, Status, TaskReport
from tvmflow.tuning.traces import adapt_record, workload_key

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A function of the model to tune: fused and unscheduled; `weight` is the number of its call sites."""

    name: str
    func: "PrimFunc"
    weight: int


@dataclass
class Workload:
    """A function to tune, with the results of earlier runs and of this run.

    `key` is its `workload_key`. `record` is the best record of the workload, with the names that the function uses;
    None without one. `measurements` are all schedules that earlier runs measured. `reason` says why the function cannot
    be tuned, None if it can. `baseline_seconds` and `best_seconds` are the seconds of a call with the analytic schedule
    and with the best one, perhaps measured at different times. `untuned_seconds` and `seconds` estimate both under the
    same load of the machine. All four are None where they were not measured. `trials` is the number of trials of this
    run; `is_tuned` is true once this run has found a faster schedule.
    """

    task: Task
    key: str
    record: Record | None
    efforts: list[Effort]
    measurements: list[Record | Trial]
    forecast: Forecast
    reason: str | None = None
    baseline_seconds: float | None = None
    best_seconds: float | None = None
    untuned_seconds: float | None = None
    seconds: float | None = None
    trials: int = 0
    is_tuned: bool = False

    @property
    def share(self) -> float:
        """The seconds of all calls of the function in one run of the model, 0 where it was not measured."""
        return self.task.weight * (self.seconds or 0.0)

    def standing(self) -> Standing:
        """Return the state of the function: its times without tuning and now, and the trials of this run."""
        return Standing(self.task.name, self.task.weight, self.untuned_seconds, self.seconds, self.trials)

    def report(self) -> TaskReport:
        """Return the result of the run for the function."""
        status: Status
        if self.is_tuned:
            status = "tuned"
        elif self.record is not None:
            status = "record"
        else:
            status = "baseline" if self.reason is None else "skipped"
        return TaskReport(
            self.task.name,
            self.task.weight,
            status,
            self.reason if status == "skipped" else None,
            self.baseline_seconds,
            self.best_seconds,
            self.trials,
        )


def load_workloads(
    tasks: Sequence[Task], target: Target, store: RecordStore, budget: Budget, reason: str | None
) -> list[Workload]:
    """Return the workloads of a model's functions; equal functions are one workload with the sum of their weights.

    Each has what `store` knows about it for `target`. Its forecast starts from earlier runs if the `budget` counts them
    (`counts_earlier_runs`). A `reason` other than None says why none of them can be tuned.
    """
    records: dict[str, list[Record]] = {}
    for record in sorted(store.records(target), key=lambda record: -record.seconds):
        records.setdefault(record.key, []).append(record)
    measurements: dict[str, list[Record | Trial]] = {}
    for entry in store.measurements(target):
        if entry.space_version == SPACE_VERSION:
            measurements.setdefault(entry.key, []).append(entry)
    efforts: dict[str, list[Effort]] = {}
    for effort in store.efforts(target):
        efforts.setdefault(effort.key, []).append(effort)
    workloads: dict[str, Workload] = {}
    for task in tasks:
        key = workload_key(task.func)
        if (same := workloads.get(key)) is not None:
            same.task = replace(same.task, weight=same.task.weight + task.weight)
            continue
        own_records, own_efforts = records.get(key, []), efforts.get(key, [])
        workload = workloads[key] = Workload(
            task,
            key,
            _adapt(own_records[-1], task) if own_records else None,
            own_efforts,
            measurements.get(key, []),
            forecast_from_records(own_efforts, own_records) if budget.counts_earlier_runs else Forecast(),
            _why_not_tunable(task) or reason,
        )
        if workload.record is not None:
            workload.best_seconds = workload.record.seconds
            workload.baseline_seconds = workload.record.baseline_seconds
        elif own_efforts:
            workload.baseline_seconds = max(own_efforts, key=lambda effort: effort.created_at).baseline_seconds
        workload.seconds = workload.best_seconds or workload.baseline_seconds
        workload.untuned_seconds = workload.baseline_seconds or workload.best_seconds
    return list(workloads.values())


def estimate_latency(workloads: Sequence[Workload]) -> Latency | None:
    """Return the estimated latency of the model in seconds, None where no workload has a time."""
    timed_workloads = [workload for workload in workloads if workload.seconds]
    if not timed_workloads:
        return None
    untuned = sum(workload.task.weight * (workload.untuned_seconds or 0.0) for workload in timed_workloads)
    return Latency(untuned, sum(workload.share for workload in timed_workloads))


def why_not_measurable_here(target: Target) -> str | None:
    """Return why candidates for `target` cannot be measured on this machine, None if they can."""
    if target.tvm.get("kind") != "llvm":
        return f"candidates are measured on this machine's CPU, which cannot run {target.name}"
    if target.arch != host().arch:
        return f"it needs a machine of {target.arch}, and this one is {host().arch}"
    missing = missing_features(target.features)
    return f"this machine's CPU lacks {', '.join(missing)}" if missing else None


def why_not_measurable_on_device(target: Target) -> str | None:
    """Return why candidates for `target` cannot be measured on a device, None if they can."""
    if target.tvm.get("kind") != "llvm":
        return f"candidates are measured on a device's CPU, which cannot run {target.name}"
    return None


def last_line(error: Exception) -> str:
    """Return the last line of an error's message, which is the cause in TVM's errors."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _why_not_tunable(task: Task) -> str | None:
    if arguments_of(task.func) is None:
        return "its shapes are symbolic, and MetaSchedule needs static ones"
    if task.func.attrs and task.func.attrs.get("tirx.is_scheduled", False):
        return "it is scheduled already"
    return None


def _adapt(record: Record, task: Task) -> Record | None:
    try:
        return adapt_record(record, task.func)
    except Exception as error:  # TVM raises errors of many types for a trace that does not fit.
        logger.warning("%s: the best record does not replay: %s", task.name, last_line(error))
        return None
