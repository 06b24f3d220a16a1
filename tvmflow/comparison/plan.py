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

    A ratio lies between 0 and infinity, null in JSON, while too few pairs are measured.
    """

    low: float
    high: Extended

    def __str__(self) -> str:
        return "unknown" if math.isinf(self.high) else f"{self.low:.3f} to {self.high:.3f}"

    def judge(self, bound: float) -> Verdict:
        """Return "pass" for a ratio of at most `bound`, "fail" for one above it, else "undecided"."""
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

        Each look comes after 1.25 times the pairs of the look before. The first is after so many that an interval
        narrower than 0 to infinity is possible; with a budget below that, no interval is narrower.
        """
        looks = [pairs]
        # With this probability all pairs lie on one side of the median; so much of the error may be spent by then.
        while (look := math.floor(looks[0] / _GROWTH)) and 0.5**look <= look / pairs * error / 2:
            looks.insert(0, look)
        return cls(looks=tuple(looks), error=error)

    @property
    def budget(self) -> int:
        """The largest number of pairs."""
        return self.looks[-1]

    def interval(self, ratios: Sequence[float]) -> Interval:
        """Return the interval of the median ratio at the last look that the pairs with these `ratios` have reached.

        It is 0 to infinity where there are too few pairs for one.
        """
        reached = [look for look in self.looks if look <= len(ratios)]
        rank = ranks(self.looks, self.error)[len(reached) - 1] if reached else 0
        if not rank:
            return Interval(low=0.0, high=math.inf)
        ascending = sorted(ratios[: reached[-1]])
        return Interval(low=ascending[rank - 1], high=ascending[-rank])

    def pairs_missing(self, pairs: int) -> int:
        """Return how many more than `pairs` it takes until an interval is narrower than 0 to infinity.

        A plan whose budget is too small for any counts those of the smallest budget that is not.
        """
        looks = [look for look, rank in zip(self.looks, ranks(self.looks, self.error), strict=True) if rank]
        first = looks[0] if looks else math.ceil(1 - math.log2(self.error))
        return max(0, first - pairs)

    def pairs_needed(self, ratios: Sequence[float], bound: float) -> int | None:
        """Estimate the pairs after which a single look at `bound` would decide, from the share of ratios above it.

        Returns None where more than 10,000 would be needed: the ratio is at the bound, as far as can be seen.
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
    """Return for each look the rank of the interval's lower end, counted from 1; 0 where there is no interval yet.

    The upper end has the same rank, counted from the largest. `error` is that of both sides over all looks.
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
