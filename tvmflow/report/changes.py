"""Changes: what differs between two releases, by their documents."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Document = Mapping[str, Any]


class Change(NamedTuple):
    """A figure or a fact of a target, or of the whole release where `target` is "", now and before; None is unknown."""

    target: str
    name: str
    now: float | str | None
    before: float | str | None

    @property
    def ratio(self) -> float | None:
        """The figure over the one before; None for a fact, and where one of the two is missing or zero."""
        if isinstance(self.now, str) or isinstance(self.before, str) or self.now is None or not self.before:
            return None
        return self.now / self.before


def figures(target: Document) -> dict[str, float | None]:
    """Return the figures of a release's target, by name with the unit; None where they were not measured."""
    measurements = target.get("measurements")
    ours = measurements["points"][0]["runners"]["tvm"] if measurements else {}
    latency, verdict = ours.get("latency_ms", {}), target["verdict"]
    comparison: Document = next(iter(verdict.get("comparisons", ())), {})
    return {
        "p50 latency, ms": latency.get("p50"),
        "p90 latency, ms": latency.get("p90"),
        "p99 latency, ms": latency.get("p99"),
        "runs per second": latency.get("throughput"),
        "task metric": verdict.get("metric_bundle"),
        "largest error": comparison.get("max_abs_error"),
        "top-1 agreement": comparison.get("top1_agreement"),
        "bundle, bytes": target["bundle"].get("size"),
        "peak memory, bytes": ours.get("peak_memory"),
        "load, s": ours.get("load_seconds"),
    }


def facts(release: Document) -> dict[str, str]:
    """Return what a release was made from, by name."""
    provenance = release.get("provenance", {})
    return {
        "model (ONNX)": str(provenance.get("onnx", "-")),
        "operator set": str(provenance.get("opset", "-")),
        "registered source": str(provenance.get("source") or "-"),
        "tvmflow": str(release.get("tvmflow", "-")),
    }


def target_facts(target: Document) -> dict[str, str]:
    """Return what a target's bundle was built with, by name."""
    tuning, verdict = target.get("tuning", {}), target["verdict"]
    return {
        "precision": str(verdict.get("precision", "fp32")),
        "tuning": f"{tuning.get('shipped', '-')}, {tuning.get('coverage', '-')}",
        "algorithms": ", ".join(sorted(verdict.get("algorithms", {}))) or "-",
        "bundle": str(target["bundle"].get("sha256", "-")),
    }


def compare_releases(now: Document, before: Document) -> Iterator[Change]:
    """Yield the facts and figures of two releases, those of the whole release first; equal ones as well."""
    old_facts = facts(before)
    for name, fact in facts(now).items():
        yield Change("", name, fact, old_facts[name])
    old_targets = {item["target"]: item for item in before["targets"]}
    for target in now["targets"]:
        old = old_targets.get(target["target"])
        old_values: Mapping[str, float | str | None] = {} if old is None else {**target_facts(old), **figures(old)}
        values: Mapping[str, float | str | None] = {**target_facts(target), **figures(target)}
        for name, value in values.items():
            yield Change(target["target"], name, value, old_values.get(name))
