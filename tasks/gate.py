"""Gate: whether a release may be promoted to a channel, by what it was measured at and by what it does here and now."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from tasks.sidebyside import Beside, side_by_side
from tasks.step import step
from tvmflow import promotion
from tvmflow.bundle import extract, public_key
from tvmflow.bundle.signature import trusted_keys
from tvmflow.errors import BundleError, InputError, VerdictError
from tvmflow.fetch import cache_folder
from tvmflow.progress import reporter
from tvmflow.services import Services
from tvmflow.settings import Settings
from tvmflow.spec import Channel
from tvmflow.store import channels
from tvmflow.store.channels import Pointer
from tvmflow.store.resolve import TargetEntry, fetch_bundle
from tvmflow.target import host
from tvmflow.verification import verify
from tvmflow.workspace import Outcome, Record, StepResult, Workspace, run_step

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A release on its way to a channel: its document, what the channel asks, and what the channel holds by now."""

    services: Services
    settings: Settings
    workspace: Workspace
    release: Document
    channel: str
    policy: Channel
    pointer: Pointer | None
    held: Document | None

    @property
    def name(self) -> str:
        """The name of the release."""
        return str(self.release["name"])

    @property
    def version(self) -> str:
        """The version of the release."""
        return str(self.release["version"])

    @property
    def label(self) -> str:
        """The promotion in words."""
        return f"{self.name} {self.version} to {self.channel}"


class Check(Record):
    """One thing that was looked at: what, how it came out in words, and whether it keeps the release back."""

    name: str
    told: str
    passed: bool
    value: float | None = None
    bound: float | None = None


class GateResult(StepResult):
    """What was found; `compared` is the version that the channel held."""

    checks: tuple[Check, ...]
    compared: str | None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the release may not be promoted; empty when it may."""
        return tuple(check.told for check in self.checks if not check.passed)


def candidate(
    services: Services, settings: Settings, workspace: Workspace, name: str, version: str, channel: str
) -> Candidate:
    """A release on its way to a channel. Raises StoreError for an unknown release, SpecError for an unknown channel."""
    release = services.store.get_release(name, version)
    policy = promotion.read_policy(release, channel)
    pointer = channels.find(services.store, name, channel)
    known = pointer is not None and services.store.has_release(name, pointer.version)
    held = services.store.get_release(name, pointer.version) if pointer is not None and known else None
    return Candidate(services, settings, workspace, release, channel, policy, pointer, held)


@step
def whole(item: Candidate) -> Outcome[GateResult]:
    """Read every blob of the release back and compare its digest; look at signatures where they count.

    Never found done: what was whole may be damaged by now.
    """

    def work() -> GateResult:
        checks = [_digests(item), *_order(item)]
        if all(check.passed for check in checks):
            checks += _signatures(item)
        return GateResult(checks=tuple(checks), compared=_held_version(item))

    reads = {"release": promotion.hash_release(item.release), "channel": item.channel}
    return run_step(item.workspace, "whole", reads, GateResult, work, target=item.label, valid=lambda _: False)


@step
def gate(item: Candidate) -> Outcome[GateResult]:
    """Run golden samples and the channel's gates.

    What passed is found done for the same release, the same one on the channel and the same policy, also by a flow run
    that was suspended; what was refused is looked at anew.
    """

    def work() -> GateResult:
        checks = [*_golden_samples(item), *figures(item)]
        if all(check.passed for check in checks):
            checks += _side_by_side(item)
        return GateResult(checks=tuple(checks), compared=_held_version(item))

    reads: dict[str, Any] = {
        "release": promotion.hash_release(item.release),
        "held": item.held and promotion.hash_release(item.held),
        "policy": item.policy,
        "trusted": [public_key(key) for key in trusted_keys()],
        "host": [host().arch, sorted(host().features), host().cores],
    }
    return run_step(
        item.workspace, "gate", reads, GateResult, work, target=item.label, valid=lambda found: not found.reasons
    )


def _digests(item: Candidate) -> Check:
    reporter().progressed("whole", item.label, 0, 0, "reading")
    fault = item.services.store.find_fault(item.release)
    if fault is not None:
        return Check(name="whole", told=f"the release is not whole: {fault.rstrip('.')}", passed=False)
    return Check(name="whole", told="every blob is there and has the digest that the release says", passed=True)


def _order(item: Candidate) -> Iterator[Check]:
    """Whether the channel that must come before has held the release."""
    before = item.policy.after
    if before is None:
        return
    pointer = channels.find(item.services.store, item.name, before)
    passed = pointer is not None and pointer.has_held(item.version)
    told = f"{before} has {'' if passed else 'never '}held it" + ("" if passed else ": promote it there first")
    yield Check(name="after", told=told, passed=passed)


def _signatures(item: Candidate) -> Iterator[Check]:
    """Whether a trusted key has signed every bundle, where the channel or this machine takes only such."""
    keys = trusted_keys()
    if item.policy.signature != "required" and not keys:
        return
    if not keys:
        told = f"{item.channel} takes signed releases only and no key is trusted here: set TVMFLOW_TRUSTED_KEYS"
        yield Check(name="signature", told=told, passed=False)
        return
    for entry in TargetEntry.read_all(item.release):
        try:
            with item.workspace.scratch() as folder:
                extract(_bundle(item, entry), folder, trusted=keys)
        except BundleError as error:
            yield Check(name="signature", told=f"target {entry.target!r}: {error}", passed=False)
        else:
            yield Check(name="signature", told=f"target {entry.target!r} is signed with a trusted key", passed=True)


def _golden_samples(item: Candidate) -> Iterator[Check]:
    """Each bundle that this machine can run gives the original's outputs on its golden sample."""
    for entry in TargetEntry.read_all(item.release):
        try:
            entry.check_host()
        except BundleError as error:
            yield Check(name="golden sample", told=f"target {entry.target!r} is not run here: {error}", passed=True)
            continue
        reporter().progressed("gate", item.label, 0, 0, f"golden sample of {entry.target}")
        try:
            worst = verify(_bundle(item, entry), timeout=item.settings.step_timeout_minutes * 60).max_abs_error
        except (BundleError, VerdictError) as error:
            yield Check(name="golden sample", told=f"target {entry.target!r}: {error}", passed=False)
        else:
            told = f"target {entry.target!r} gives the original's outputs within {worst:.1e}"
            yield Check(name="golden sample", told=told, passed=True, value=worst)


def figures(item: Candidate) -> Iterator[Check]:
    """What the gates say of what was measured when the release was made."""
    gates = item.policy.gates
    if gates.max_latency_ms is not None:
        yield from _latencies(item.release, gates.max_latency_ms)
    metric = _metric(item.release)
    if gates.min_metric is not None:
        yield _metric_check("min_metric", metric, gates.min_metric, f"gate min_metric asks for {gates.min_metric:g}")
    if gates.max_metric_drop is not None:
        before = None if item.held is None else _metric(item.held)
        if before is None:
            why = _nothing(item) if item.held is None else f"{_held_version(item)} on {item.channel} has none"
            told = f"there is no task metric to compare with: {why}"
            yield Check(name="max_metric_drop", told=told, passed=True, bound=gates.max_metric_drop)
        else:
            lowest = before - gates.max_metric_drop
            against = (
                f"that of {_held_version(item)} on {item.channel} is {before:.4f}, "
                f"gate max_metric_drop allows a drop of {gates.max_metric_drop:g}"
            )
            yield _metric_check("max_metric_drop", metric, lowest, against)


def _metric_check(name: str, metric: float | None, lowest: float, against: str) -> Check:
    if metric is None:
        told = f"gate {name} cannot be checked: the release has no task metric; add validate.task to its file"
        return Check(name=name, told=told, passed=False, bound=lowest)
    # Two decimal fractions may differ by less than either has digits.
    passed = metric >= lowest - 1e-9
    told = f"the task metric is {metric:.4f}, {against}"
    return Check(name=name, told=told, passed=passed, value=metric, bound=lowest)


def _latencies(release: Document, bound: float) -> Iterator[Check]:
    measured = {item["target"]: item["measurements"] for item in release["targets"] if item["measurements"]}
    if not measured:
        told = "gate max_latency_ms cannot be checked: no target was measured; release it on a machine that runs one"
        yield Check(name="max_latency_ms", told=told, passed=False, bound=bound)
    for target, found in measured.items():
        value = float(found["points"][0]["runners"]["tvm"]["latency_ms"]["p50"])
        told = f"target {target!r}: p50 latency was {value:.4g} ms, gate max_latency_ms allows {bound:g}"
        yield Check(name="max_latency_ms", told=told, passed=value <= bound, value=value, bound=bound)


def _metric(release: Document) -> float | None:
    """The task metric of a release, the lowest of its targets; None where none was validated with one."""
    found = [item["verdict"].get("metric_bundle") for item in release["targets"]]
    return min((float(value) for value in found if value is not None), default=None)


def _side_by_side(item: Candidate) -> Iterator[Check]:
    """The gate on the latency beside what the channel holds, measured here and now."""
    name, bound = "max_ratio_current", item.policy.gates.max_ratio_current
    if bound is None:
        return
    if item.held is None:
        told = f"there is no latency to compare with: {_nothing(item)}"
        yield Check(name=name, told=told, passed=True, bound=bound)
        return
    try:
        new, old = _best(item.release), _best(item.held)
        beside = None if new.sha256 == old.sha256 else _compare(item, new, old)
    except (BundleError, InputError) as error:
        told = f"gate {name} cannot be checked here: {error}"
        yield Check(name=name, told=told, passed=False, bound=bound)
        return
    against = f"{_held_version(item)} on {item.channel}"
    if beside is None:
        told = f"target {new.target!r}: its bundle is that of {against}"
        yield Check(name=name, told=told, passed=True, value=1.0, bound=bound)
        return
    low, _, high = quantiles(beside.ratios, n=4)
    told = (
        f"target {new.target!r}: latency is {beside.ratio:.3f} of that of {against}, gate {name} allows {bound:g} "
        f"({len(beside.ratios)} pairs of rounds, half of them between {low:.3f} and {high:.3f})"
    )
    yield Check(name=name, told=told, passed=beside.ratio <= bound, value=beside.ratio, bound=bound)


def _best(release: Document) -> TargetEntry:
    """The target of a release that this machine runs."""
    from tvmflow.runtime.selection import select_runnable

    fitting, refusals = select_runnable((entry, entry) for entry in TargetEntry.read_all(release))
    if not fitting:
        raise BundleError(
            f"no bundle of {release['name']} {release['version']} runs on this machine ({'; '.join(refusals)}); "
            "promote it where one does"
        )
    return fitting[0]


def _compare(item: Candidate, new: TargetEntry, old: TargetEntry) -> Beside:
    """The two bundles in turn. Raises InputError where the old one takes other inputs."""

    def progressed(done: int, total: int) -> None:
        reporter().progressed("gate", item.label, done, total, f"beside {_held_version(item)}")

    return side_by_side(
        item.workspace,
        f"{item.name}-gate",
        _bundle(item, new),
        _bundle(item, old),
        timeout=item.settings.step_timeout_minutes * 60,
        progress=progressed,
    )


def _bundle(item: Candidate, entry: TargetEntry) -> Path:
    return fetch_bundle(item.services.store, entry.sha256, cache_folder(item.settings))


def _nothing(item: Candidate) -> str:
    """Why there is no release to compare with."""
    if item.pointer is None:
        return f"{item.channel} holds nothing"
    return f"{item.pointer.version}, which {item.channel} holds, is gone from the store"


def _held_version(item: Candidate) -> str | None:
    return None if item.pointer is None else item.pointer.version
