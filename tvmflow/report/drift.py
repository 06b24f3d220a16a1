"""Drift: whether the figures of a model's releases rise or fall over several of them, and at which one they stepped."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tvmflow.arrays import Array
from tvmflow.documents.release import Release
from tvmflow.report.changes import figures
from tvmflow.report.numbers import format_number
from tvmflow.workspace import Record

# The last releases that are looked at together; all of them are the last window. Fewer than six show no trend.
_WINDOWS, _FEWEST = (6, 12, 24), 6
# The probability that figures which only vary at random are called a drift, over all windows of one figure.
_ERROR = 0.02
# The fewest releases on each side of a step, and the random orders of the releases that a step is compared with.
_LASTS, _ORDERS = 2, 9999


class Drift(Record):
    """A figure of a target that rises or falls over the last `releases` releases, from `first` to `last`.

    `chance` is the probability of as clear a trend by chance.
    """

    target: str
    figure: str
    releases: int
    first: float
    last: float
    chance: float

    def __str__(self) -> str:
        verb = "rises" if self.last > self.first else "falls"
        return (
            f"{self.target}: {self.figure} {verb} over the last {self.releases} releases, from "
            f"{format_number(self.first)} to {format_number(self.last)} "
            f"(by chance with a probability of {self.chance:.1g})"
        )


class Step(Record):
    """A figure of a target that changed at one release and stayed so.

    `version` is that release, and `when` the time at which it was made (UTC, ISO 8601). `before` is the figure's mean
    from the step before to this one, and `since` its mean from this step to the next. `releases` is the number of
    releases with the figure from that release on, itself included. `chance` is the probability of as clear a step by
    chance.
    """

    target: str
    figure: str
    version: str
    when: str
    releases: int
    before: float
    since: float
    chance: float

    def __str__(self) -> str:
        return (
            f"{self.target}: {self.figure} stepped from {format_number(self.before)} to {format_number(self.since)} at "
            f"release {self.version} of {self.when[:10]} (by chance with a probability of {self.chance:.1g})"
        )


def list_figures(releases: Sequence[Release]) -> dict[tuple[str, str], list[tuple[str, float]]]:
    """Return, by target and name of a figure, the versions in which it was measured and their values.

    The versions keep the order of `releases`, which is the oldest first.
    """
    series: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for release in releases:
        for target in release.targets:
            for name, value in figures(target).items():
                if value is not None:
                    series.setdefault((target.target, name), []).append((release.version, value))
    return series


def find_drifts(releases: Sequence[Release]) -> Iterator[Drift]:
    """Yield the drifts in the figures of a model's releases, at most one for each figure of a target.

    `releases` begin with the oldest. A drift is a clear rank correlation (Kendall) of the values with the order of the
    releases, over the last 6, 12, 24 or all of them. Ranks show a trend of small steps in one direction, and a single
    outlier has little influence.
    """
    for (target, name), points in list_figures(releases).items():
        drift = _find(target, name, [value for _, value in points])
        if drift is not None:
            yield drift


def _find(target: str, name: str, values: Sequence[float]) -> Drift | None:
    """The drift of the window with the clearest trend, None where no window has one."""
    windows = sorted({min(size, len(values)) for size in (*_WINDOWS, len(values))})
    drifts = []
    for size in windows:
        window = values[-size:]
        if size < _FEWEST or len(set(window)) < 2:
            continue
        # The import takes seconds, and most models have too few releases for it.
        from scipy.stats import kendalltau

        chance = float(kendalltau(range(size), window).pvalue)
        if not math.isnan(chance) and chance < _ERROR / len(windows):
            drifts.append(
                Drift(target=target, figure=name, releases=size, first=window[0], last=window[-1], chance=chance)
            )
    return min(drifts, key=lambda drift: drift.chance, default=None)


def find_steps(releases: Sequence[Release]) -> Iterator[Step]:
    """Yield the steps in the figures of a model's releases, which begin with the oldest.

    The method is binary segmentation. The releases are split where the means of both sides differ most (CUSUM), if a
    random order of the releases gives as large a difference with a probability below 2 %. Then each side is split in
    the same way. Releases whose values a straight line fits better than a step are not split: they change gradually.
    """
    created = {release.version: release.created_at for release in releases}
    for (target, name), points in list_figures(releases).items():
        values = np.array([value for _, value in points])
        splits = sorted(_split(values, 0))
        ends = [*(index for index, _ in splits), len(values)]
        for start, (index, chance), end in zip([0, *ends], splits, ends[1:], strict=False):
            yield Step(
                target=target,
                figure=name,
                version=points[index][0],
                when=created[points[index][0]],
                releases=len(values) - index,
                before=float(values[start:index].mean()),
                since=float(values[index:end].mean()),
                chance=chance,
            )


def _split(values: Array, offset: int) -> Iterator[tuple[int, float]]:
    """Yield the index of each step, counted from `offset`, with its probability by chance."""
    if len(values) < 2 * _LASTS or np.ptp(values) == 0:
        return
    split = _LASTS + int(np.argmax(_differences(values)))
    if _residuals(values, split) >= _residuals_of_line(values):
        return
    from scipy.stats import permutation_test

    result = permutation_test(
        (values,),
        lambda order, axis: _differences(order).max(axis),
        permutation_type="pairings",
        alternative="greater",
        n_resamples=_ORDERS,
        vectorized=True,
        rng=0,
    )
    if result.pvalue < _ERROR:
        yield offset + split, float(result.pvalue)
        yield from _split(values[:split], offset)
        yield from _split(values[split:], offset + split)


def _differences(values: Array) -> Array:
    """The difference of the means before and after each place for a split, in units of its standard deviation.

    The last axis has the releases.
    """
    count = values.shape[-1]
    before = np.arange(_LASTS, count - _LASTS + 1)
    sums = np.cumsum(values, -1)[..., before - 1]
    total = values.sum(-1, keepdims=True)
    scale = np.sqrt(before * (count - before) / count)
    differences: Array = np.abs(sums / before - (total - sums) / (count - before)) * scale
    return differences


def _residuals(values: Array, split: int) -> float:
    """The squared distances from the means before and after a split."""
    return sum(float(((side - side.mean()) ** 2).sum()) for side in (values[:split], values[split:]))


def _residuals_of_line(values: Array) -> float:
    """The squared distances from the straight line that fits best."""
    places = np.arange(len(values))
    return float(((values - np.polyval(np.polyfit(places, values, 1), places)) ** 2).sum())
