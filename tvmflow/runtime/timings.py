"""The times of calls of a model."""

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Timings:
    """The times of calls: `seconds` per run, one value per measurement, each the mean over `number` runs."""

    seconds: tuple[float, ...]
    number: int = 1

    @property
    def mean(self) -> float:
        """The mean, in seconds."""
        return statistics.fmean(self.seconds)

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def std(self) -> float:
        """The standard deviation of the measurements, in seconds; 0 for a single one."""
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0

    @property
    def min(self) -> float:
        """The smallest time, in seconds."""
        return min(self.seconds)

    @property
    def max(self) -> float:
        """The largest time, in seconds."""
        return max(self.seconds)

    def percentile(self, percent: float) -> float:
        """Return the time, in seconds, below which `percent` per cent of the measurements lie."""
        return float(np.percentile(self.seconds, percent))
