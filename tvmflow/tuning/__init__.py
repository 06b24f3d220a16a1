"""Tuning: schedules that were searched, measured and checked, and the records they are kept in."""

from tvmflow.tuning.measure import Device
from tvmflow.tuning.records import Decision, Record, RecordStore, Trial, apply, current, workload_key
from tvmflow.tuning.space import TunerName
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
    "current",
    "tune",
    "workload_key",
]
