"""The reports of a tuning run: its progress after each trial, and at its end the result for each function."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Latency:
    """The estimated seconds of one run of the model, untuned and now; functions without a time do not count."""

    untuned: float
    now: float


@dataclass(frozen=True)
class Standing:
    """The state of one function during a run, which has `weight` call sites.

    `baseline_seconds` and `best_seconds` are the seconds of a call without tuning and now, None if not measured;
    `trials` are those of this run.
    """

    name: str
    weight: int
    baseline_seconds: float | None
    best_seconds: float | None
    trials: int


@dataclass(frozen=True)
class Progress:
    """The state of a run after a trial.

    `task` is the name of the function that the trial was about, `best_seconds` and `baseline_seconds` the times of one
    of its calls. `trials` and `elapsed` (seconds) are spent, of `total_trials` and `total_seconds`; these are None
    where the budget has no such bound. `expected` is the part of the model's time, 0 to 1, that another minute is
    expected to save; `standings` are the states of all functions, the costliest first.
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
    """The result of a run for one function, which has `weight` call sites.

    `status` is "tuned" where this run has found a faster schedule, "record" where an earlier run has, "baseline" where
    no schedule is known that is faster than the analytic one, and "skipped" where the function could not be tuned, for
    the `reason`. Seconds are those of one call, None where not measured.
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
    """The result of a run: one entry for each function, the trials of all, and the seconds that the run took.

    `latency` is None where no function has a time. `curve` is the estimated seconds of a run of the model after some of
    the trials, from 0 to the last, at most a few hundred points; it is empty where nothing was measured.
    """

    tasks: tuple[TaskReport, ...]
    trials: int
    seconds: float
    latency: Latency | None = None
    curve: tuple[tuple[int, float], ...] = ()
