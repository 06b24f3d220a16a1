"""Tuning: schedules that were searched, measured and checked, and the records they are kept in."""

from tvmflow.tuning.records import Record, RecordStore, apply, workload_key
from tvmflow.tuning.space import TunerName
from tvmflow.tuning.tuner import Budget, Progress, Task, TaskReport, TuneReport, tune

__all__ = [
    "Budget",
    "Progress",
    "Record",
    "RecordStore",
    "Task",
    "TaskReport",
    "TuneReport",
    "TunerName",
    "apply",
    "tune",
    "workload_key",
]
