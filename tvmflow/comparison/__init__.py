"""Comparison: how the latencies of two builds relate, as an interval of their ratio and a verdict on a bound.

What measures a pair is elsewhere; here is what decides from pairs, without a clock.
"""

from tvmflow.comparison.answers import find_drop
from tvmflow.comparison.pairs import Comparison, Conditions, Pair, compare
from tvmflow.comparison.plan import Extended, Interval, Plan, Verdict, write_finite
from tvmflow.comparison.samples import find_steady, percentile, runs_needed

__all__ = [
    "Comparison",
    "Conditions",
    "Extended",
    "Interval",
    "Pair",
    "Plan",
    "Verdict",
    "compare",
    "find_drop",
    "find_steady",
    "percentile",
    "runs_needed",
    "write_finite",
]
