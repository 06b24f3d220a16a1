"""Forecasts: how much time further tuning of a workload is expected to save, judged by the savings so far."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvmflow.tuning.records import Effort, Record

# The trials of a round, and the seconds of one trial where none was timed yet.
ROUND = 16
TRIAL_SECONDS = 0.25
_MINUTE = 60
# A workload is expected to lose half of its time in its first round, and the last of several rounds counts as much as
# all the rounds before it.
_HALF = 0.5


@dataclass
class Forecast:
    """The expected saving of another round of trials on one workload.

    `gain` is the part of the workload's time, 0 to 1, that the next round is expected to save: one half before the
    first round, then the mean of two parts, the one that the last round was expected to save and the one that it saved.
    `stale` counts the trials since the last one that was faster than all before it. `trials` counts the timed trials,
    which took `seconds` in all.
    """

    gain: float = _HALF
    stale: int = 0
    trials: int = 0
    seconds: float = 0.0

    def update(self, trials: int, saved: float, seconds: float = 0.0) -> None:
        """Learn from `trials` trials that saved the part `saved` of the workload's time.

        They took `seconds`; 0 means that they were not timed.
        """
        rounds = max(1.0, trials / ROUND)
        weight = _HALF**rounds
        self.gain = weight * self.gain + (1 - weight) * (1 - (1 - saved) ** (1 / rounds))
        self.stale = 0 if saved > 0 else self.stale + trials
        if seconds:
            self.trials += trials
            self.seconds += seconds

    def gain_per_second(self, usual_trial_seconds: float) -> float:
        """Return the part of the workload's time that a second of tuning is expected to save.

        `usual_trial_seconds` is the duration of a trial, for a workload without a timed trial.
        """
        trial_seconds = self.seconds / self.trials if self.seconds else usual_trial_seconds
        return float(1 - (1 - self.gain) ** (1 / (ROUND * trial_seconds)))


def forecast_from_records(efforts: Iterable[Effort], records: Iterable[Record]) -> Forecast:
    """Return the forecast for a workload from the efforts of earlier runs and their records."""
    forecast, best = Forecast(), math.inf
    later = sorted(records, key=lambda record: record.created_at)
    for effort in sorted(efforts, key=lambda effort: effort.created_at):
        if not effort.trials:
            continue
        own = [record for record in later if record.created_at <= effort.created_at]
        later = later[len(own) :]
        if math.isinf(best):
            baselines = [effort.baseline_seconds, *(record.baseline_seconds for record in own)]
            best = next((seconds for seconds in baselines if seconds is not None), math.inf)
        fastest = min((record.seconds for record in own), default=math.inf)
        saving = _HALF if math.isinf(best) and own else 1 - min(1.0, fastest / best) if own else 0.0
        best = min(best, fastest)
        forecast.update(effort.trials, saving, effort.seconds or 0.0)
    return forecast


def mean_trial_seconds(forecasts: Iterable[Forecast]) -> float:
    """Return the mean seconds of the timed trials; `TRIAL_SECONDS` where there are none."""
    timed_forecasts = [forecast for forecast in forecasts if forecast.seconds]
    trials = sum(forecast.trials for forecast in timed_forecasts)
    return sum(forecast.seconds for forecast in timed_forecasts) / trials if trials else TRIAL_SECONDS


def saving_of_next_minute(workloads: Sequence[tuple[float, Forecast]]) -> float:
    """Return the seconds of a model's run that another minute of tuning is expected to save.

    `workloads` are those that can still be tuned, each as the seconds that it takes of the model's run and its
    forecast. Each second of the minute is spent where it is expected to save most.
    """
    usual = mean_trial_seconds([forecast for _, forecast in workloads])
    seconds = [share for share, _ in workloads]
    gains = [forecast.gain_per_second(usual) for _, forecast in workloads]
    total = 0.0
    for _ in range(_MINUTE if workloads else 0):
        index = max(range(len(seconds)), key=lambda index: seconds[index] * gains[index])
        saving = seconds[index] * gains[index]
        seconds[index] -= saving
        total += saving
    return total
