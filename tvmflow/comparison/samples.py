"""Samples: where the warm-up in a series of times ends, and how many runs a percentile needs."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# The batches into which a series is cut to look for the end of its warm-up, and the fewest that tell anything.
_BATCHES, _FEWEST_BATCHES = 40, 6
# MLPerf's early stopping: the confidence of a percentile, and the number of slower runs that its smallest sample has.
_CONFIDENCE, _SLOWER = 0.99, 1


def find_steady(times: Sequence[float]) -> int:
    """Return the index of the first run after the warm-up; at most about half of the runs are warm-up.

    The rule is MSER (K. P. White, An effective truncation heuristic for bias reduction in simulation output, 1997): the
    runs that are left must have the smallest standard error of their mean. It is applied to the medians of batches of
    runs, so that a single disturbed run is no warm-up. Returns 0 for fewer than six runs.
    """
    size = max(1, len(times) // _BATCHES)
    batches = np.array([np.median(times[start : start + size]) for start in range(0, len(times) - size + 1, size)])
    if len(batches) < _FEWEST_BATCHES:
        return 0
    errors = [float(np.var(batches[start:])) / (len(batches) - start) for start in range(len(batches) // 2 + 1)]
    return int(np.argmin(errors)) * size


def runs_needed(percentile: float) -> int:
    """Return the fewest runs whose percentile can be trusted: 11 for p50, 64 for p90, 662 for p99.

    The rule is MLPerf's early stopping: with a probability of 99 %, more than one of the runs is slower than the
    percentile. Raises ValueError for a percentile below 0, and for one of 100 or more, which no number of runs reaches.
    """
    if not 0 <= percentile < 100:
        raise ValueError(f"a percentile is at least 0 and below 100, not {percentile:g}")
    slower = 1 - percentile / 100
    runs = 1
    while _few_slower(runs, slower) > 1 - _CONFIDENCE:
        runs += 1
    return runs


def percentile(times: "Sequence[float] | npt.NDArray[np.float64]", which: float) -> float | None:
    """Return the percentile `which` (at least 0, below 100) of the times; None for fewer than `runs_needed` times."""
    return float(np.percentile(times, which)) if len(times) >= runs_needed(which) else None


def _few_slower(runs: int, share: float) -> float:
    """The probability that at most one of the runs is among the slowest `share`."""
    return sum(
        math.comb(runs, count) * share**count * (1 - share) ** (runs - count) for count in range(min(runs, _SLOWER) + 1)
    )
