"""The budget of a tuning run."""

import math
from dataclasses import dataclass

from tvmflow.errors import TuneError

# A workload is not tuned further after so many trials in a row that were not faster.
EARLY_STOPPING = 256


@dataclass(frozen=True)
class Budget:
    """The limit of a run: `trials` over all workloads, `minutes` of wall-clock time, or `until` little is gained.

    `until` ends the run when another minute is expected to save less than this part of the model's time, between 0 and
    1; with it, `trials` or `minutes` is an upper bound. A workload is not tuned further after `early_stopping` trials
    in a row that were not faster, and the run ends when no workload is left. Raises TuneError for a budget that names
    nothing or both trials and minutes, and for a value out of range.
    """

    trials: int | None = None
    minutes: float | None = None
    until: float | None = None
    early_stopping: int = EARLY_STOPPING

    def __post_init__(self) -> None:
        if self.trials is not None and self.minutes is not None:
            raise TuneError("a tuning budget is either `trials` or `minutes`; give one of them")
        if self.trials is None and self.minutes is None and self.until is None:
            raise TuneError("a tuning budget is empty; give `trials`, `minutes` or `until`")
        if self.trials is not None and self.trials < 0:
            raise TuneError(f"a tuning budget of {self.trials} trials was given; expected 0 or more")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise TuneError(f"a tuning budget of {self.minutes} minutes was given; expected more than 0")
        if self.until is not None and not 0 < self.until < 1:
            raise TuneError(f"a tuning budget until {self.until} was given; expected a part of 1 such as 0.02")
        if self.early_stopping < 1:
            raise TuneError(
                f"a tuning budget with early stopping at {self.early_stopping} was given; expected 1 or more"
            )

    @property
    def counts_earlier_runs(self) -> bool:
        """Whether forecasts and early stopping take earlier runs' trials into account; false for minutes alone."""
        return self.minutes is None or self.until is not None
