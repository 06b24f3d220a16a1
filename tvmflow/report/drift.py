"""Drift: whether the figures of a model's releases rise or fall over several releases, also by small steps."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tvmflow.release import Release
from tvmflow.report.changes import figures

# The last releases that are looked at together; all of them are the last window. Fewer than six show no trend.
_WINDOWS, _FEWEST = (6, 12, 24), 6
# The probability that figures which only vary at random are called a drift, over all windows of one figure.
_ERROR = 0.02


class Drift(NamedTuple):
    """A figure of a target that rises or falls: over how many releases, its first and last value, and the probability
    of as clear a trend by chance."""

    target: str
    figure: str
    releases: int
    first: float
    last: float
    chance: float

    def __str__(self) -> str:
        verb = "rises" if self.last > self.first else "falls"
        return (
            f"{self.target}: {self.figure} {verb} over the last {self.releases} releases, from {self.first:.4g} to "
            f"{self.last:.4g} (by chance with a probability of {self.chance:.1g})"
        )


def list_figures(releases: Sequence[Release]) -> dict[tuple[str, str], list[tuple[str, float]]]:
    """Return by target and figure the versions with their values, the oldest first; without what was not measured."""
    series: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for release in releases:
        for target in release.targets:
            for name, value in figures(target).items():
                if value is not None:
                    series.setdefault((target.target, name), []).append((release.version, value))
    return series


def find_drifts(releases: Sequence[Release]) -> Iterator[Drift]:
    """Yield the drifts of a model's releases, the oldest first, by Kendall's rank correlation with their order.

    Ranks see a trend of small steps in one direction and are blind to a single far value.
    """
    for (target, name), points in list_figures(releases).items():
        drift = _find(target, name, [value for _, value in points])
        if drift is not None:
            yield drift


def _find(target: str, name: str, values: Sequence[float]) -> Drift | None:
    """The drift of the window with the clearest trend, None where no window has one."""
    from scipy.stats import kendalltau

    windows = sorted({min(size, len(values)) for size in (*_WINDOWS, len(values))})
    drifts = []
    for size in windows:
        window = values[-size:]
        if size < _FEWEST or len(set(window)) < 2:
            continue
        chance = float(kendalltau(range(size), window).pvalue)
        if not math.isnan(chance) and chance < _ERROR / len(windows):
            drifts.append(Drift(target, name, size, window[0], window[-1], chance))
    return min(drifts, key=lambda drift: drift.chance, default=None)
