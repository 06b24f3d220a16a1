"""Changes: what differs between two releases, by their documents."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from tvmflow.comparison import Comparison, Conditions, Interval, Pair
from tvmflow.documents.figures import Concurrency, Point
from tvmflow.documents.release import Release, ReleaseTarget
from tvmflow.workspace import Record

Value = float | int | str | None
NOT_RECORDED = "not recorded"
"""A fact that a release does not tell, because it was made before it was recorded."""
REFERENCE = "reference kernel, us"
"""The name of the figure that is the same for every model: it shows whether the machine itself was slower."""
# Times are longer than others where chance makes them so with at most this probability: 1 in 20 for three beside three.
_CHANCE = 0.0501


class Change(Record):
    """A figure or a fact of a target in two releases, `now` and `before`; None where it is unknown.

    `target` is "" for a fact of the whole release. `ratio` is `now` over `before`; it is None for a fact, where one of
    the two is unknown, and where `before` is zero. `same` says whether the two are equal, None where one of them is
    unknown or not recorded.
    """

    target: str
    name: str
    now: Value
    before: Value
    ratio: float | None
    same: bool | None

    @property
    def is_shown(self) -> bool:
        """Whether a list of what differs has it: what is equal, or unknown in both releases, is left out."""
        return not self.same and (self.now, self.before) != (None, None)


class PeerRatio(Record):
    """The latency of a target in the release `version` over the latency of another runtime, the peer.

    The turns of the two alternated in each round. `ratio` is the median over the `rounds`, and `interval` is the
    interval of that median. It is None where the rounds are too few; `missing` is the number of further rounds that an
    interval takes, 0 where there is one.
    """

    target: str
    peer: str
    version: str
    ratio: float
    interval: Interval | None
    rounds: int
    missing: int


def peer_ratios(now: Release, before: Release) -> Iterator[PeerRatio]:
    """Yield the ratios of a release's targets to each peer of the release `now`.

    The ratio of the release `before` comes first, where its target was measured beside the same peer.
    """
    old_targets = {item.target: item for item in before.targets}
    for target in now.targets:
        old = old_targets.get(target.target)
        for peer in _comparisons(target):
            for version, item in ((before.version, old), (now.version, target)):
                comparison = None if item is None else _comparisons(item).get(peer)
                if comparison is not None:
                    missing = comparison.plan.pairs_missing(len(comparison.pairs))
                    yield PeerRatio(
                        target=target.target,
                        peer=peer,
                        version=version,
                        ratio=comparison.ratio,
                        interval=None if missing else comparison.interval,
                        rounds=len(comparison.pairs),
                        missing=missing,
                    )


class Slowdown(Record):
    """A target that is slower than in the release `before`, and how the machine has changed meanwhile.

    `bundle`, `reference` and `peers` are the median times of the bundle, of the reference kernel and of the peers by
    name, each divided by its median time in the release before. `slower` names the peers, and the reference kernel
    (`REFERENCE`), whose times have become longer than chance explains. `terms` are the changes of processor, cores and
    threads, as "threads 2 to 1"; "" where there are none. The time of a peer tells about the machine only where both
    releases are of the same ONNX model (`same_model`) and `same_terms` is true: processor, cores and the threads of the
    peers are the same.
    """

    target: str
    before: str
    same_model: bool
    same_terms: bool
    terms: str
    bundle: float
    reference: float
    peers: dict[str, float]
    slower: tuple[str, ...]

    @property
    def share(self) -> float:
        """The share of the slowdown that the machine explains: log(its slowdown) / log(`bundle`); it may be above 1.

        The machine's slowdown is the largest of those in `slower` that tell about the machine, 1 without any.
        """
        return self._share({REFERENCE: self.reference, **(self.peers if self.same_model and self.same_terms else {})})

    @property
    def share_of_peers(self) -> float:
        """The share of the slowdown that the peers explain: log(their slowdown) / log(`bundle`); it may be above 1.

        Their slowdown is the largest of those in `peers` whose name is in `slower`. The reference kernel does not
        count. If no peer is in `slower`, the share is 0. If `same_model` is false, the peers may be slower because of
        the other model instead of the machine.
        """
        return self._share(self.peers)

    def _share(self, ratios: Mapping[str, float]) -> float:
        explained = max((ratios[name] for name in self.slower if name in ratios), default=1.0)
        return math.log(explained) / math.log(self.bundle)

    def __str__(self) -> str:
        model = "the same model" if self.same_model else "this release's model, which is another one"
        peers = " and ".join(f"{name} {ratio:.2f} times" for name, ratio in self.peers.items())
        kernel = f"the reference kernel, which is the same for every release, took {self.reference:.2f} times as long"
        if self.share >= 0.5:
            conclusion = "The machine was slower" if REFERENCE in self.slower else "Other work held the processors"
        elif not self.same_terms and self.same_model and self.share_of_peers >= 0.5:
            conclusion = f"It was measured on other terms ({self.terms}), which explains it"
        elif not self.same_model and self.share_of_peers >= 0.5:
            conclusion = "The model, which is another one, or other work on the machine explains it"
        else:
            conclusion = "The machine does not explain it"
        if self.terms and self.terms not in conclusion:
            conclusion += f", and it was measured on other terms ({self.terms})"
        return (
            f"{self.target} takes {self.bundle:.2f} times as long as in {self.before}. {conclusion}: {kernel}, "
            f"and with {model}, {peers}."
        )


def find_slowdowns(now: Release, before: Release) -> Iterator[Slowdown]:
    """Yield the targets that are slower than in the release `before`.

    Only targets that were measured beside a common peer in both releases are compared. A target is slower if the
    bundle's times in the rounds of fresh processes are longer by a one-sided rank test (p of at most 5 %) and in the
    median.
    """
    old_targets = {item.target: item for item in before.targets}
    for target in now.targets:
        pairs = _pairs(target)
        old_pairs = _pairs(old_targets[target.target]) if target.target in old_targets else {}
        peers = [name for name in pairs if name in old_pairs]
        if not peers:
            continue
        first = peers[0]
        times = {
            "": [[pair.candidate for pair in each[first]] for each in (pairs, old_pairs)],
            REFERENCE: [[pair.reference for pair in each[first]] for each in (pairs, old_pairs)],
            **{name: [[pair.baseline for pair in each[name]] for each in (pairs, old_pairs)] for name in peers},
        }
        slower = [name for name, (new, old) in times.items() if _is_longer(new, old)]
        if "" in slower:
            ratios = {name: median(new) / median(old) for name, (new, old) in times.items()}
            conditions = [_comparisons(item)[first].conditions for item in (target, old_targets[target.target])]
            yield Slowdown(
                target=target.target,
                before=before.version,
                same_model=now.provenance.onnx == before.provenance.onnx,
                same_terms=not _compare_terms(*conditions, with_bundle=False),
                terms=_compare_terms(*conditions, with_bundle=True),
                bundle=ratios[""],
                reference=ratios[REFERENCE],
                peers={name: ratios[name] for name in peers},
                slower=tuple(name for name in slower if name),
            )


def _compare_terms(now: Conditions, before: Conditions, *, with_bundle: bool) -> str:
    """The changes of the terms on which a target was measured, in words; "" where there are none.

    The bundle's own threads count `with_bundle` only.
    """
    figures = {
        "processor": (now.processor, before.processor),
        "threads": (now.threads[0], before.threads[0]),
        "threads of the peers": (now.threads[1], before.threads[1]),
        "cores": (len(now.cores), len(before.cores)),
    }
    if not with_bundle:
        del figures["threads"]
    changes = {name: pair for name, pair in figures.items() if pair[0] != pair[1]}
    return ", ".join(f"{name} {theirs} to {ours}" for name, (ours, theirs) in changes.items())


def _pairs(target: ReleaseTarget) -> dict[str, tuple[Pair, ...]]:
    """The pairs of a target by peer."""
    return {name: comparison.pairs for name, comparison in _comparisons(target).items()}


def _comparisons(target: ReleaseTarget) -> dict[str, Comparison]:
    """The comparisons of a target by peer; none where it was not measured."""
    comparisons = {} if target.measurements is None else target.measurements.comparisons
    return {str(name): comparison for name, comparison in comparisons.items()}


def _is_longer(times: Sequence[float], before: Sequence[float]) -> bool:
    """Whether times are longer than those before, by the rank test of Mann and Whitney and by their medians."""
    from scipy.stats import mannwhitneyu

    chance = float(mannwhitneyu(times, before, alternative="greater").pvalue)
    return chance <= _CHANCE and median(times) > median(before)


def figures(target: ReleaseTarget) -> dict[str, float | None]:
    """Return the figures of a release's target, by name with the unit; None where they were not measured.

    They are those at the typical sizes of the symbolic dimensions, and the median latency at each other choice of them.
    Energy is left out where the machine does not tell it.
    """
    speed: tuple[float | None, ...] = (None,) * 8
    concurrency: tuple[Concurrency, ...] = ()
    if target.measurements is not None:
        bundle, concurrency = target.measurements.typical.bundle, target.measurements.concurrency
        latency = bundle.latency_ms
        first, joules = (median(each) if each else None for each in (bundle.firsts, bundle.joules))
        speed = (latency.p50, latency.p90, latency.p99, latency.throughput)
        speed += (bundle.peak_memory, bundle.load_seconds, first, joules)
    p50, p90, p99, throughput, peak_memory, load_seconds, first_seconds, energy = speed
    others = () if target.measurements is None else target.measurements.points[1:]
    comparison = _comparison(target)
    deviation = target.verdict.original
    return {
        "p50 latency, ms": p50,
        "p90 latency, ms": p90,
        "p99 latency, ms": p99,
        "runs per second": throughput,
        **{f"p50 at {_name_sizes(point)}, ms": point.bundle.latency_ms.p50 for point in others},
        **{f"runs per second of {item.callers} callers": item.runners["tvm"].throughput for item in concurrency},
        "task metric": target.verdict.metric_bundle,
        "largest error": None if deviation is None else deviation.max_abs_error,
        "top-1 agreement": None if deviation is None else deviation.top1_agreement,
        "bundle, bytes": target.bundle.size,
        "peak memory, bytes": peak_memory,
        "load, s": load_seconds,
        "first run, ms": None if first_seconds is None else first_seconds * 1e3,
        **({} if energy is None else {"energy of a run, J": energy}),
        REFERENCE: None if comparison is None else median(pair.reference for pair in comparison.pairs) * 1e6,
    }


def _name_sizes(point: Point) -> str:
    return " and ".join(f"{name} {size}" for name, size in sorted(point.sizes.items()))


class Spread(Record):
    """A figure of a target in the release `version`, measured in fresh processes in each of `rounds` rounds.

    `low` and `high` are the least and the greatest of the rounds' values.
    """

    target: str
    figure: str
    version: str
    median: float
    low: float
    high: float
    rounds: int


def spreads(now: Release, before: Release | None) -> Iterator[Spread]:
    """Yield the times of loading and of the first run, and the peak memory, of each target, as far as recorded.

    Those of the same target in the release `before` come first; it is None where there is no such release.
    """
    old_targets = {} if before is None else {item.target: item for item in before.targets}
    for target in now.targets:
        items = [(now.version, target)]
        if before is not None and target.target in old_targets:
            items.insert(0, (before.version, old_targets[target.target]))
        for figure, name, scale in (
            ("load, s", "loads", 1.0),
            ("first run, ms", "firsts", 1e3),
            ("peak memory, MB", "peaks", 1e-6),
        ):
            for version, item in items:
                values = [] if item.measurements is None else getattr(item.measurements.typical.bundle, name)
                if values:
                    yield Spread(
                        target=target.target,
                        figure=figure,
                        version=version,
                        median=median(values) * scale,
                        low=min(values) * scale,
                        high=max(values) * scale,
                        rounds=len(values),
                    )


def _comparison(target: ReleaseTarget) -> Comparison | None:
    """The comparison with a peer, which knows its conditions; None where there was no peer."""
    return None if target.measurements is None else next(iter(target.measurements.comparisons.values()), None)


def facts(release: Release) -> dict[str, str]:
    """Return what a release was made from, by name."""
    origin = release.provenance
    training = origin.training
    # An older release does not say whether there was any.
    absent = NOT_RECORDED if origin.code is None else "-"
    return {
        "model (ONNX)": origin.onnx,
        "operator set": str(origin.opset),
        "registered source": origin.source or "-",
        "training function": absent if training is None else training.function,
        "training arguments": absent if training is None else json.dumps(training.arguments, sort_keys=True),
        "held-out data": origin.held_out or absent,
        "tvmflow": release.tvmflow,
    }


def parts(release: Release) -> dict[str, Mapping[str, str] | None]:
    """Return the files and packages that a release was made from, by kind and name.

    The kinds are "training file", "code file" and "package". The value is a digest for a file and a version for a
    package. A kind is None where it was not recorded.
    """
    origin = release.provenance
    untrained: Mapping[str, str] | None = None if origin.code is None else {}
    files = untrained if origin.training is None else origin.training.files
    return {"training file": files, "code file": origin.code, "package": origin.packages}


def target_facts(target: ReleaseTarget) -> dict[str, str]:
    """Return what a target's bundle was built with, and measured on, by name."""
    comparison, making, tuning = _comparison(target), target.making, target.tuning
    compiler = {} if making is None else making.compiler
    return {
        "processor": NOT_RECORDED if comparison is None else comparison.conditions.processor,
        "threads": NOT_RECORDED if comparison is None else str(comparison.conditions.threads[0]),
        "precision": target.verdict.precision,
        "tuning": NOT_RECORDED if tuning is None else f"{tuning.shipped}, {tuning.coverage}",
        "tuning records": NOT_RECORDED if making is None else making.records,
        "build options": NOT_RECORDED if making is None else making.options,
        "compiler": ", ".join(f"{name} {compiler[name]}" for name in sorted(compiler)) or NOT_RECORDED,
        "compiler's code": NOT_RECORDED if making is None else making.code,
        "algorithms": ", ".join(sorted(target.verdict.algorithms)) or "-",
        "bundle": target.bundle.sha256,
    }


def compare_releases(now: Release, before: Release) -> Iterator[Change]:
    """Yield the facts and figures of two releases, also equal ones; those of the whole release come first.

    Of the files and packages, only those that differ are yielded. Where a release did not record a kind of them, one
    change says so. The values of a target that only one of the releases has are None in the other.
    """
    old_facts, old_parts = facts(before), parts(before)
    for name, fact in facts(now).items():
        yield _compare("", name, fact, old_facts[name])
    for kind, items in parts(now).items():
        old_items = old_parts[kind]
        if items is None or old_items is None:
            yield _compare(
                "", f"{kind}s", *(NOT_RECORDED if each is None else "recorded" for each in (items, old_items))
            )
            continue
        for name in sorted({*items, *old_items}):
            if items.get(name) != old_items.get(name):
                yield _compare("", f"{kind} {name}", items.get(name, "-"), old_items.get(name, "-"))
    values, old_values = _target_values(now), _target_values(before)
    for target in {**values, **old_values}:
        ours, theirs = values.get(target, {}), old_values.get(target, {})
        for name in {**ours, **theirs}:
            yield _compare(target, name, ours.get(name), theirs.get(name))


def _target_values(release: Release) -> dict[str, Mapping[str, Value]]:
    """The facts and figures of each target."""
    return {item.target: {**target_facts(item), **figures(item)} for item in release.targets}


def _compare(target: str, name: str, now: Value, before: Value) -> Change:
    ratio = None
    if isinstance(now, int | float) and isinstance(before, int | float) and before != 0:
        ratio = now / before
    is_known = not {now, before} & {None, NOT_RECORDED}
    same = now == before if is_known else None
    return Change(target=target, name=name, now=now, before=before, ratio=ratio, same=same)
