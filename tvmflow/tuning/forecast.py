"""What more tuning is expected to bring, judged by what it brought so far."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvmflow.tuning.records import Effort, Record

# The trials of a round, and the seconds of one trial where none was timed yet.
ROUND = 16
TRIAL_SECONDS = 0.25
_MINUTE = 60
# Before its first round a workload is expected to lose half of its time, and of two rounds the later one says as much
# as all before it.
_HALF = 0.5


@dataclass
class Forecast:
    """What another round of trials is expected to bring one workload.

    `gain` is the part of its time that the next round is expected to save: the mean of what was expected before the
    last round and what that saved, one half before the first. `stale` counts the trials since one of them was faster;
    `trials` took `seconds` in all, as far as they were timed.
    """

    gain: float = _HALF
    stale: int = 0
    trials: int = 0
    seconds: float = 0.0

    def note(self, trials: int, saved: float, seconds: float = 0.0) -> None:
        """Take note of `trials` that took `seconds` and saved this part of the workload's time."""
        rounds = max(1.0, trials / ROUND)
        weight = _HALF**rounds
        self.gain = weight * self.gain + (1 - weight) * (1 - (1 - saved) ** (1 / rounds))
        self.stale = 0 if saved > 0 else self.stale + trials
        if seconds:
            self.trials += trials
            self.seconds += seconds

    def per_second(self, mean_trial_seconds: float) -> float:
        """The part of the workload's time that a second of tuning is expected to save.

        `mean_trial_seconds` is what a trial takes where none of this workload was timed.
        """
        if self.seconds:
            mean_trial_seconds = self.seconds / self.trials
        return float(1 - (1 - self.gain) ** (1 / (ROUND * mean_trial_seconds)))


def forecast_from_records(efforts: Iterable[Effort], records: Iterable[Record]) -> Forecast:
    """The outlook of a workload after what earlier runs spent on it and found."""
    outlook, best = Forecast(), math.inf
    left = sorted(records, key=lambda record: record.created_at)
    for effort in sorted(efforts, key=lambda effort: effort.created_at):
        if not effort.trials:
            continue
        found = [record for record in left if record.created_at <= effort.created_at]
        left = left[len(found) :]
        if math.isinf(best):
            known = [effort.baseline_seconds, *(record.baseline_seconds for record in found)]
            best = next((seconds for seconds in known if seconds is not None), math.inf)
        fastest = min((record.seconds for record in found), default=math.inf)
        saved = _HALF if math.isinf(best) and found else 1 - min(1.0, fastest / best) if found else 0.0
        best = min(best, fastest)
        outlook.note(effort.trials, saved, effort.seconds or 0.0)
    return outlook


def mean_trial_seconds(outlooks: Iterable[Forecast]) -> float:
    """The seconds that a trial takes, of all that were timed."""
    spent = [outlook for outlook in outlooks if outlook.seconds]
    trials = sum(outlook.trials for outlook in spent)
    return sum(outlook.seconds for outlook in spent) / trials if trials else TRIAL_SECONDS


def saving_of_next_minute(workloads: Sequence[tuple[float, Forecast]]) -> float:
    """The seconds of a model's run that another minute of tuning is expected to save.

    `workloads` are those that can still be tuned, each with the seconds that it takes of the model's run. Each second
    of the minute goes where it is expected to save most.
    """
    usual = mean_trial_seconds([outlook for _, outlook in workloads])
    left = [[seconds, outlook.per_second(usual)] for seconds, outlook in workloads]
    saved = 0.0
    for _ in range(_MINUTE if left else 0):
        most = max(left, key=lambda item: item[0] * item[1])
        gain = most[0] * most[1]
        most[0] -= gain
        saved += gain
    return saved
