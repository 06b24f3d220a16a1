"""The data of the page of a release."""

from collections.abc import Iterator, Mapping, Sequence

from tvmflow.comparison import runs_needed
from tvmflow.documents.figures import Measurements
from tvmflow.documents.release import Release
from tvmflow.documents.verdict import Check
from tvmflow.report.changes import (
    Change,
    PeerRatio,
    Slowdown,
    Spread,
    compare_releases,
    figures,
    find_slowdowns,
    peer_ratios,
    spreads,
)
from tvmflow.report.drift import Drift, Step, find_drifts, find_steps
from tvmflow.report.insight import FunctionTime, Insight
from tvmflow.report.layers import LayerRow, SlowerLayer, compare_layers, layer_rows, times_of
from tvmflow.workspace import Record


class HistoryRow(Record):
    """The median latency `p50` in ms of a target in one release; None where it was not measured.

    `position` is the place of the release on an axis: its version, or 0 where the version is not a number.
    """

    version: str
    position: int
    target: str
    p50: float | None


class FunctionRow(Record):
    """A function of a bundle: the time of its calls in a run, in ms and as a share of all functions' time.

    `megabytes` are what these calls move, in 1e6 bytes, and `gigabytes_per_second` is the rate of it.
    """

    name: str
    calls: int
    ms: float
    share: float
    megabytes: float
    gigabytes_per_second: float


class ProfileSum(Record):
    """The ms of the calls of a profiled run together, beside `p50`, the median ms of a run that is not profiled.

    `calls` is the number of the calls. `p50` is None where the bundle was not measured.
    """

    ms: float
    calls: int
    p50: float | None


class Quietness(Record):
    """How quiet the machine was while a target was measured, in `runs` timed runs of `rounds` rounds.

    `noise` is how much longer the bundle's median was in slow rounds than in fast ones, as a share, and `unevenness`
    the same of the reference kernel, None where no peer was measured. `busyness` is a sentence where these are too
    large for sure times, else None. `missing` is the number of runs that a percentile lacks, as by "p99"; it has only
    those that lack some.
    """

    runs: int
    missing: dict[str, int]
    rounds: int | None
    noise: float
    unevenness: float | None
    busyness: str | None


class PageData(Record):
    """All data that a release's page shows; the page embeds it as JSON.

    `production` is the version that `channel` holds, None where it holds nothing. `changes` are the facts and figures
    of both releases. `checks` are those of the channel's gates on figures. `history` ends with the release itself.
    `insights` and the rows of `functions` and `layers` are by target. `slower` are the layers by target, sorted by the
    change of their time since `production`. `slowdowns` are the targets that are slower than in `production`. `ratios`
    are the latencies over those of the peers, and `spreads` the loading times and peak memory, both in `production` and
    in the release. `drifts` and `steps` are those of the figures in the history. `figures` are those of the release by
    target, with their units, `profiles` the sums of the functions' times, and `quietness` tells how quiet the machine
    was, each by target.
    """

    release: Release
    channel: str
    production: str | None
    checks: tuple[Check, ...]
    changes: tuple[Change, ...]
    history: tuple[HistoryRow, ...]
    insights: dict[str, Insight]
    functions: dict[str, tuple[FunctionRow, ...]]
    layers: dict[str, tuple[LayerRow, ...]]
    slower: dict[str, tuple[SlowerLayer, ...]]
    slowdowns: tuple[Slowdown, ...]
    ratios: tuple[PeerRatio, ...]
    spreads: tuple[Spread, ...]
    drifts: tuple[Drift, ...]
    steps: tuple[Step, ...]
    figures: dict[str, dict[str, float | None]]
    profiles: dict[str, ProfileSum]
    quietness: dict[str, Quietness]


def make_data(
    release: Release,
    channel: str,
    production: Release | None,
    history: Sequence[Release],
    insights: Mapping[str, Insight],
    checks: Sequence[Check],
    layers_before: Mapping[str, Mapping[str, float]] | None = None,
) -> PageData:
    """Return the data of the page of a release.

    `production` is the release that `channel` holds, None where it holds nothing; `history` are the releases
    before, the oldest first; `insights` are by target; `checks` are those of the channel's gates on figures.
    `layers_before` are the ms of production's layers by target and name; None where its page has none.
    """
    before = layers_before or {}
    now = times_of({"insights": {name: insight.model_dump() for name, insight in insights.items()}})
    return PageData(
        release=release,
        channel=channel,
        production=None if production is None else production.version,
        checks=tuple(checks),
        changes=() if production is None else tuple(compare_releases(release, production)),
        history=tuple(row for each in (*history, release) for row in _history_rows(each)),
        insights=dict(insights),
        functions={name: _function_rows(insight.functions) for name, insight in insights.items()},
        layers={name: layer_rows(insight) for name, insight in insights.items()},
        slower={name: compare_layers(now.get(name, {}), before.get(name, {})) for name, insight in insights.items()},
        slowdowns=() if production is None else tuple(find_slowdowns(release, production)),
        ratios=() if production is None else tuple(peer_ratios(release, production)),
        spreads=tuple(spreads(release, production)),
        drifts=tuple(find_drifts((*history, release))),
        steps=tuple(find_steps((*history, release))),
        figures={item.target: figures(item) for item in release.targets},
        profiles=dict(_profile_sums(release, insights)),
        quietness={
            item.target: _quietness(item.measurements) for item in release.targets if item.measurements is not None
        },
    )


def _profile_sums(release: Release, insights: Mapping[str, Insight]) -> Iterator[tuple[str, ProfileSum]]:
    medians = {item.target: item.p50 for item in release.targets}
    for target, insight in insights.items():
        calls, ms = (sum(getattr(item, name) for item in insight.functions) for name in ("calls", "ms"))
        yield target, ProfileSum(ms=ms, calls=calls, p50=medians.get(target))


def _quietness(measurements: Measurements) -> Quietness:
    comparison = next(iter(measurements.comparisons.values()), None)
    lacks = {f"p{which}": runs_needed(which) - measurements.runs for which in (90, 99)}
    return Quietness(
        runs=measurements.runs,
        missing={name: lack for name, lack in lacks.items() if lack > 0},
        rounds=None if comparison is None else len(comparison.pairs),
        noise=measurements.noise,
        unevenness=measurements.unevenness,
        busyness=measurements.describe_busyness(),
    )


def _history_rows(release: Release) -> Iterator[HistoryRow]:
    position = int(release.version) if release.version.isdigit() else 0
    for item in release.targets:
        yield HistoryRow(version=release.version, position=position, target=item.target, p50=item.p50)


def _function_rows(functions: Sequence[FunctionTime]) -> tuple[FunctionRow, ...]:
    total = sum(item.ms for item in functions) or 1.0
    return tuple(
        FunctionRow(
            name=item.name,
            calls=item.calls,
            ms=item.ms,
            share=item.ms / total,
            megabytes=item.bytes / 1e6,
            gigabytes_per_second=item.bytes / item.ms / 1e6 if item.ms else 0.0,
        )
        for item in functions
    )
