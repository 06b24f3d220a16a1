"""Tuning: the search, the measurement and the records of faster schedules."""

from tvmflow.tuning.budget import Budget
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import Decision, Record, Trial, current_context
from tvmflow.tuning.report import Progress, TaskReport, TuneReport
from tvmflow.tuning.runner import Device
from tvmflow.tuning.space import TunerName
from tvmflow.tuning.traces import apply, workload_key
from tvmflow.tuning.tuner import tune
from tvmflow.tuning.workloads import Task

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
