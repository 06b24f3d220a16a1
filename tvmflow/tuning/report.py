"""What a tuning run reports: its progress after each trial, and at its end what became of each function."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Latency:
    """The estimated seconds of a run of the model, untuned and now: of all calls of the functions with a time."""

    untuned: float
    now: float


@dataclass(frozen=True)
class Standing:
    """One function during a run: the seconds of a call without tuning and now, None if not measured, and its trials."""

    name: str
    weight: int
    baseline_seconds: float | None
    best_seconds: float | None
    trials: int


@dataclass(frozen=True)
class Progress:
    """The state of a run after a trial.

    `task` is the function that the trial was about, `best_seconds` and `baseline_seconds` the times of one of its
    calls. `elapsed` and `total_seconds` are of the run. `expected` is the part of the model's time that another minute
    is expected to save; `standings` are those of all functions, the costliest first.
    """

    trials: int
    total_trials: int | None
    elapsed: float
    total_seconds: float | None
    task: str
    best_seconds: float
    baseline_seconds: float | None
    latency: Latency
    expected: float
    standings: tuple[Standing, ...]


Status = Literal["tuned", "record", "baseline", "skipped"]


@dataclass(frozen=True)
class TaskReport:
    """What a run did for one function.

    `status` is "tuned" where this run has found a faster schedule, "record" where an earlier run has, "baseline" where
    no schedule is known that is faster than the analytic one, and "skipped" where the function could not be tuned;
    `reason` says why. Seconds are those of one call, None where not measured.
    """

    name: str
    weight: int
    status: Status
    reason: str | None
    baseline_seconds: float | None
    best_seconds: float | None
    trials: int


@dataclass(frozen=True)
class TuneReport:
    """What a run did: one entry for each function, the trials of all, and the seconds that the run took.

    `latency` is None where no function has a time. `curve` is the estimated seconds of a run of the model after some of
    the trials, from 0 to the last, at most a few hundred points; it is empty where nothing was measured.
    """

    tasks: tuple[TaskReport, ...]
    trials: int
    seconds: float
    latency: Latency | None = None
    curve: tuple[tuple[int, float], ...] = ()
