"""Changes: what differs between two releases, by their documents."""

from collections.abc import Iterator, Mapping
from statistics import median

from tvmflow.comparison import Comparison
from tvmflow.release import Release, ReleaseTarget
from tvmflow.workspace import Record

Value = float | int | str | None
REFERENCE = "reference kernel, us"
"""The name of the figure that is the same for every model: it shows whether the machine itself was slower."""


class Change(Record):
    """A figure or a fact of a target, or of the whole release where `target` is "", now and before; None is unknown.

    `ratio` is the figure over the one before; None for a fact, and where one of the two is missing or zero.
    """

    target: str
    name: str
    now: Value
    before: Value
    ratio: float | None


def figures(target: ReleaseTarget) -> dict[str, float | None]:
    """Return the figures of a release's target, by name with the unit; None where they were not measured."""
    speed: tuple[float | None, ...] = (None,) * 6
    if target.measurements is not None:
        bundle = target.measurements.typical.bundle
        latency = bundle.latency_ms
        speed = (latency.p50, latency.p90, latency.p99, latency.throughput, bundle.peak_memory, bundle.load_seconds)
    p50, p90, p99, throughput, peak_memory, load_seconds = speed
    comparison = _comparison(target)
    deviation = target.verdict.original
    return {
        "p50 latency, ms": p50,
        "p90 latency, ms": p90,
        "p99 latency, ms": p99,
        "runs per second": throughput,
        "task metric": target.verdict.metric_bundle,
        "largest error": None if deviation is None else deviation.max_abs_error,
        "top-1 agreement": None if deviation is None else deviation.top1_agreement,
        "bundle, bytes": target.bundle.size,
        "peak memory, bytes": peak_memory,
        "load, s": load_seconds,
        REFERENCE: None if comparison is None else median(pair.reference for pair in comparison.pairs) * 1e6,
    }


def _comparison(target: ReleaseTarget) -> Comparison | None:
    """The comparison with a peer, which knows its conditions; None where there was no peer."""
    return None if target.measurements is None else next(iter(target.measurements.comparisons.values()), None)


def facts(release: Release) -> dict[str, str]:
    """Return what a release was made from, by name."""
    return {
        "model (ONNX)": release.provenance.onnx,
        "operator set": str(release.provenance.opset),
        "registered source": release.provenance.source or "-",
        "tvmflow": release.tvmflow,
    }


def target_facts(target: ReleaseTarget) -> dict[str, str]:
    """Return what a target's bundle was built with, and measured on, by name."""
    comparison = _comparison(target)
    return {
        "processor": "-" if comparison is None else comparison.conditions.processor,
        "threads": "-" if comparison is None else str(comparison.conditions.threads[0]),
        "precision": target.verdict.precision,
        "tuning": "-" if target.tuning is None else f"{target.tuning.shipped}, {target.tuning.coverage}",
        "algorithms": ", ".join(sorted(target.verdict.algorithms)) or "-",
        "bundle": target.bundle.sha256,
    }


def compare_releases(now: Release, before: Release) -> Iterator[Change]:
    """Yield the facts and figures of two releases, those of the whole release first; equal ones as well."""
    old_facts = facts(before)
    for name, fact in facts(now).items():
        yield _compare("", name, fact, old_facts[name])
    old_targets = {item.target: item for item in before.targets}
    for target in now.targets:
        old = old_targets.get(target.target)
        old_values: Mapping[str, Value] = {} if old is None else {**target_facts(old), **figures(old)}
        values: Mapping[str, Value] = {**target_facts(target), **figures(target)}
        for name, value in values.items():
            yield _compare(target.target, name, value, old_values.get(name))


def _compare(target: str, name: str, now: Value, before: Value) -> Change:
    ratio = None
    if isinstance(now, int | float) and isinstance(before, int | float) and before != 0:
        ratio = now / before
    return Change(target=target, name=name, now=now, before=before, ratio=ratio)
