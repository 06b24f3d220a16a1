"""Answers: how far the share of right answers has dropped between two models that were asked the same questions."""

from tvmflow.comparison.plan import Interval


def find_drop(lost: int, won: int, count: int, error: float = 0.01) -> Interval:
    """Return the interval of the drop in accuracy, from the answers that changed.

    Of `count` questions, `lost` were answered rightly by the first model alone and `won` by the second alone; what both
    answered alike says nothing about the difference. Both shares have exact intervals of Clopper and Pearson, each of
    which is wrong with a probability of half the `error`, so that their difference is wrong with one of at most
    `error`.
    """
    from scipy.stats import binomtest

    first, second = (binomtest(changed, count).proportion_ci(1 - error / 2) for changed in (lost, won))
    return Interval(low=float(first.low - second.high), high=float(first.high - second.low))
