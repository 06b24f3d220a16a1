"""Tuning: schedules that were searched, measured and checked, and the records they are kept in."""

from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import Decision, Record, Trial, current_context
from tvmflow.tuning.runner import Device
from tvmflow.tuning.space import TunerName
from tvmflow.tuning.traces import apply, workload_key
from tvmflow.tuning.tuner import Budget, Progress, Task, TaskReport, TuneReport, tune

__all__ = [
    "Budget",
    "Decision",
    "Device",
    "Progress",
    "Record",
    "RecordStore",
    "Task",
    "TaskReport",
    "Trial",
    "TuneReport",
    "TunerName",
    "apply",
    "current_context",
    "tune",
    "workload_key",
]
