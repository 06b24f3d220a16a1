"""Answers: how far the share of right answers has dropped between two models that were asked the same questions."""

from tvmflow.comparison.plan import Interval


def find_drop(lost: int, won: int, count: int, error: float = 0.01) -> Interval:
    """Return the interval of the drop in accuracy from the first model to the second, as a share of the questions.

    Of `count` questions, `lost` were answered rightly by the first model alone and `won` by the second alone. A
    negative drop means that the second model is better. The shares `lost / count` and `won / count` have exact
    intervals (Clopper and Pearson), each with an error probability of `error / 2`. The interval of their difference
    therefore misses the true drop with a probability of at most `error`.
    """
    from scipy.stats import binomtest

    first, second = (binomtest(changed, count).proportion_ci(1 - error / 2) for changed in (lost, won))
    return Interval(low=float(first.low - second.high), high=float(first.high - second.low))
