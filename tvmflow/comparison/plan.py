"""Plan: after which pairs a comparison looks at its interval, and how sure each interval is.

The interval of the median ratio consists of two order statistics. The numbers of pairs below and above the true median
are binomial, so that the interval holds for every distribution of the noise, with one peak or several. A comparison
that looks several times and ends at the first clear interval would be wrong more often than it says. The ranks of the
order statistics are therefore computed for all looks together: the probability that the interval of any look misses
the median is at most `error`. It is exact, by the number of walks that leave the bounds, and spent in proportion to the
pairs (K. K. G. Lan and D. L. DeMets, Discrete sequential boundaries for clinical trials, 1983).
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator, PlainSerializer

from tvmflow.workspace import Record

Verdict = Literal["pass", "fail", "undecided"]

# The number of pairs grows by this factor from one look to the next.
_GROWTH = 1.25
# With this probability the number of pairs that `pairs_needed` returns is enough.
_POWER = 0.9
# An estimate of more pairs than this says no more than that they are too many.
_MOST_PAIRS = 10_000


def _read_end(value: object) -> object:
    return math.inf if value is None else value


def write_finite(value: float | None) -> float | None:
    """Return `value` as JSON can hold it: None for a number that is not finite, as for None."""
    return value if value is not None and math.isfinite(value) else None


Extended = Annotated[float, BeforeValidator(_read_end), PlainSerializer(write_finite, float | None, when_used="json")]
"""A number that may be infinity, which is null in JSON."""


class Interval(Record):
    """The bounds between which a ratio or a difference lies.

    While too few pairs are measured, the interval of a ratio is 0 to infinity. JSON has null for infinity.
    """

    low: float
    high: Extended

    def __str__(self) -> str:
        return "unknown" if math.isinf(self.high) else f"{self.low:.3f} to {self.high:.3f}"

    def judge(self, bound: float) -> Verdict:
        """Return "pass" if no value of the interval is above `bound`, "fail" if all are above it, else "undecided"."""
        if self.high <= bound:
            return "pass"
        return "fail" if self.low > bound else "undecided"


class Plan(Record):
    """The looks of a comparison, declared before it begins.

    After each number of pairs in `looks`, ascending, the interval is computed. `error` is the largest probability that
    any of these intervals misses the median ratio.
    """

    looks: tuple[int, ...]
    error: float = 0.01

    @classmethod
    def up_to(cls, pairs: int, error: float = 0.01) -> "Plan":
        """Return the plan with a budget of `pairs`, at least 1: its last look is after all of them.

        Each look comes after 1.25 times the pairs of the look before. The first look is the earliest one whose interval
        is narrower than 0 to infinity. A budget too small for such a look gives a plan whose only look has the interval
        0 to infinity.
        """
        looks = [pairs]
        # With this probability all pairs lie on one side of the median; so much of the error may be spent by then.
        while (look := math.floor(looks[0] / _GROWTH)) and 0.5**look <= look / pairs * error / 2:
            looks.insert(0, look)
        return cls(looks=tuple(looks), error=error)

    @property
    def budget(self) -> int:
        """The number of pairs of measurements after which the comparison ends at the latest."""
        return self.looks[-1]

    def interval(self, ratios: Sequence[float]) -> Interval:
        """Return the interval of the median ratio at the last look that is after at most `len(ratios)` pairs.

        `ratios` has one ratio for each measured pair, in order; those after the look are ignored. The interval is 0 to
        infinity where there are too few pairs.
        """
        reached = [look for look in self.looks if look <= len(ratios)]
        rank = ranks(self.looks, self.error)[len(reached) - 1] if reached else 0
        if not rank:
            return Interval(low=0.0, high=math.inf)
        ascending = sorted(ratios[: reached[-1]])
        return Interval(low=ascending[rank - 1], high=ascending[-rank])

    def pairs_missing(self, pairs: int) -> int:
        """Return how many pairs beyond the measured `pairs` the first interval narrower than 0 to infinity takes.

        If the budget is too small for such an interval, the result counts up to the smallest budget that allows one. It
        is 0 where `pairs` are enough.
        """
        looks = [look for look, rank in zip(self.looks, ranks(self.looks, self.error), strict=True) if rank]
        first = looks[0] if looks else math.ceil(1 - math.log2(self.error))
        return max(0, first - pairs)

    def pairs_needed(self, ratios: Sequence[float], bound: float) -> int | None:
        """Estimate how many pairs would decide about `bound` at a single look, from the share of `ratios` above it.

        The result includes the measured pairs. It is None where more than 10,000 would be needed: the median ratio
        cannot be told from the bound.
        """
        share = (sum(ratio > bound for ratio in ratios) + 0.5) / (len(ratios) + 1)
        distance = abs(share - 0.5)
        normal = NormalDist()
        deviations = normal.inv_cdf(1 - self.error / 2) / 2
        deviations += normal.inv_cdf(_POWER) * math.sqrt(share * (1 - share))
        if deviations > distance * math.sqrt(_MOST_PAIRS):
            return None
        return max(len(ratios) + 1, math.ceil((deviations / distance) ** 2))


@cache
def ranks(looks: tuple[int, ...], error: float) -> tuple[int, ...]:
    """Return, for each look, the rank of the ratio that is the lower end of the median's confidence interval.

    Each pair of measurements gives one ratio of times. `looks` are the numbers of pairs after which an interval is
    computed, ascending. Rank 1 is the smallest ratio; 0 means that there are too few pairs for an interval. The upper
    end has the same rank, counted from the largest ratio. `error` bounds the probability that at least one of all these
    intervals does not contain the true median: half of it for medians below the interval, half for those above.
    """
    # The probability of each number of ratios below the median, for the walks whose upper end has not missed it yet.
    walks = np.ones(1)
    spent, places = 0.0, []
    for before, look in zip((0, *looks), looks, strict=False):
        for _ in range(look - before):
            walks = np.convolve(walks, [0.5, 0.5])
        tails = np.cumsum(walks[::-1])
        rank = int(np.searchsorted(tails, error / 2 * look / looks[-1] - spent, side="right"))
        if rank:
            spent += float(tails[rank - 1])
            walks[-rank:] = 0.0
        places.append(rank)
    return tuple(places)
