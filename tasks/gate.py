"""Gate: whether a release may be promoted to a channel, by its measurements and by runs on this machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasks.comparison import compare_in_step
from tasks.step import Job, Step, StepRunner
from tvmflow.bundle import public_key
from tvmflow.bundle.signature import trusted_keys
from tvmflow.comparison import Comparison, Pair, find_drop
from tvmflow.comparison.pairs import Samples
from tvmflow.documents.figures import PEERS, Answers, Measurement, Runner, Validation
from tvmflow.documents.release import Release, ReleaseTarget
from tvmflow.documents.verdict import Check
from tvmflow.errors import BundleError, InputError, VerdictError
from tvmflow.hardware.target import host
from tvmflow.promotion import policies, verdicts
from tvmflow.store import ReleaseStore
from tvmflow.store.channel_document import Channel
from tvmflow.store.resolve import TargetEntry, fetch_target
from tvmflow.tolerance import is_at_least
from tvmflow.verification import verify
from tvmflow.workspace import StepResult


class GateJob(Job):
    """A release to promote to a channel: the release, the channel, the policy that applies, and the current release.

    `current` is the release that the channel holds; None where the channel holds nothing, or the release is gone from
    the store.
    """

    release: Release
    destination: Channel
    policy: policies.EffectivePolicy
    current: Release | None

    @property
    def channel(self) -> str:
        """The name of the channel."""
        return self.destination.channel

    @property
    def name(self) -> str:
        """The name of the release."""
        return self.release.name

    @property
    def version(self) -> str:
        """The version of the release."""
        return self.release.version

    @property
    def current_version(self) -> str | None:
        """The version that the channel holds; None where it holds nothing."""
        return self.destination.version

    @property
    def label(self) -> str:
        """The promotion in words, as "digits 3 to production"."""
        return f"{self.name} {self.version} to {self.channel}"

    def cache_key(self) -> Mapping[str, Any]:
        """Return the values that decide the result.

        These are the digest of the release and of the one that the channel holds, the channel, its policy, the trusted
        keys and this processor.
        """
        return {
            "release": verdicts.hash_release(self.release),
            "current": self.current and verdicts.hash_release(self.current),
            "channel": self.channel,
            "policy": self.policy.policy,
            "trusted": [public_key(key) for key in trusted_keys()],
            "host": [host().arch, sorted(host().features), host().cores],
        }

    @classmethod
    def of(cls, store: ReleaseStore, destination: Channel, version: str, *, who: str) -> "GateJob":
        """Return the job that checks a release for a channel, which `who` asks for.

        Raises StoreError for an unknown release, SpecError for a channel that nobody has used or proposed.
        """
        release = store.get_release(destination.name, version)
        current = policies.read_current(store, destination)
        policy = policies.find_policy(destination, release, current, who=who)
        return cls(release=release, destination=destination, policy=policy, current=current)


class GateResult(StepResult):
    """The checks that were made; `compared` is the version that the channel held, None where it held nothing."""

    checks: tuple[Check, ...]
    compared: str | None

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why the release may not be promoted; empty when it may."""
        return tuple(check.message for check in self.checks if not check.passed)


def gate_work(job: GateJob, runner: StepRunner, store: ReleaseStore, cache: Path) -> GateResult:
    """Run each bundle's golden sample, apply the channel's gates, and return all checks.

    The latency is compared with the current release's only if all other checks have passed. Bundles are fetched into
    the folder `cache`. Raises StoreError when the store fails.
    """
    checks = [*_golden_samples(job, runner, store, cache), *check_figures(job)]
    if all(check.passed for check in checks):
        checks += _check_ratio(job, runner, store, cache)
    return GateResult(checks=tuple(checks), compared=job.current_version)


def has_passed(result: GateResult, *_: object, **__: object) -> bool:
    """Whether a result has no reason against the promotion."""
    return not result.reasons


# A release that passed is cached, also for a flow run that was suspended; a refused one is checked again.
gate = Step("gate", GateResult, gate_work, is_current=has_passed)


def _golden_samples(job: GateJob, runner: StepRunner, store: ReleaseStore, cache: Path) -> Iterator[Check]:
    """Check that each bundle that this machine can run gives the original's outputs on its golden sample."""
    for entry in TargetEntry.read_all(job.release):
        target = f"target {entry.target!r}"
        try:
            entry.check_host()
        except BundleError as error:
            yield Check(name="golden sample", message=f"{target} is not run here: {error}", passed=True)
            continue
        runner.emit(0, 0, f"golden sample of {entry.target}")
        try:
            worst = verify(fetch_target(store, entry, cache), timeout=runner.timeout).max_abs_error
        except (BundleError, VerdictError) as error:
            yield Check(name="golden sample", message=f"{target}: {error}", passed=False)
        else:
            message = f"{target} gives the original's outputs within {worst:.1e}"
            yield Check(name="golden sample", message=message, passed=True, value=worst)


def check_figures(job: GateJob) -> Iterator[Check]:
    """Yield a check for each gate of the channel on figures that were measured when the release was made."""
    gates = job.policy.policy.gates
    for figure in _FIGURES:
        bound = getattr(gates, figure.gate)
        if bound is not None:
            yield from _check_figure(job.release, figure, bound)
    for peer in PEERS:
        bound = getattr(gates, f"max_ratio_{peer}")
        if bound is not None:
            yield from _check_peer(job.release, peer, bound)
    worst = _worst(job.release)
    metric = None if worst is None else worst.metric_bundle
    if gates.min_metric is not None:
        yield _metric_check("min_metric", metric, gates.min_metric, f"gate min_metric asks for {gates.min_metric:g}")
    if gates.max_metric_drop is not None:
        old = None if job.current is None else _worst(job.current)
        if old is None or old.metric_bundle is None:
            why = _why_no_current(job) if job.current is None else f"{job.current_version} on {job.channel} has none"
            message = f"there is no task metric to compare with: {why}"
            yield Check(name="max_metric_drop", message=message, passed=True, bound=gates.max_metric_drop)
        else:
            against = (
                f"that of {job.current_version} on {job.channel} is {old.metric_bundle:.4f}, "
                f"gate max_metric_drop allows a drop of {gates.max_metric_drop:g}"
            )
            check = _metric_check("max_metric_drop", metric, old.metric_bundle - gates.max_metric_drop, against)
            yield _with_answers(check, None if worst is None else worst.answers, old.answers)


def _with_answers(check: Check, now: Answers | None, before: Answers | None) -> Check:
    """Return the check of a drop with its interval, where both releases were asked the same questions."""
    if now is None or before is None or now.data != before.data:
        return check
    new, old = now.is_right(), before.is_right()
    lost, won = int((old & ~new).sum()), int((new & ~old).sum())
    drop = find_drop(lost, won, now.count)
    message = f"{check.message}; of {now.count} answers {lost} became wrong and {won} right: a drop of {drop}"
    return check.model_copy(update={"message": message, "interval": drop})


def _metric_check(name: str, metric: float | None, lowest: float, against: str) -> Check:
    if metric is None:
        message = f"gate {name} cannot be checked: the release has no task metric; add validate.task to its file"
        return Check(name=name, message=message, passed=False, bound=lowest)
    message = f"the task metric is {metric:.4f}, {against}"
    return Check(name=name, message=message, passed=is_at_least(metric, lowest), value=metric, bound=lowest)


class _Figure(NamedTuple):
    """A figure of a target that the gate `gate` bounds.

    `read` returns it, or None for a target without it; `words` say it, and `lack` why no target has it.
    """

    gate: str
    read: Callable[[ReleaseTarget], float | None]
    words: str
    lack: str


def _of_bundle(read: Callable[[Measurement], float]) -> Callable[[ReleaseTarget], float | None]:
    """Return the reader of a figure of the bundle at the typical sizes, which is None where nothing was measured."""
    return lambda target: None if target.measurements is None else read(target.measurements.typical.bundle)


def _read_agreement(target: ReleaseTarget) -> float | None:
    original = target.verdict.original
    return None if original is None else original.top1_agreement


def _read_megabytes(target: ReleaseTarget) -> float:
    return (target.bundle.size + (0 if target.weights is None else target.weights.size)) / 1e6


_NOT_MEASURED = "no target was measured; release it on a machine that runs one"
_FIGURES = (
    _Figure("max_latency_ms", _of_bundle(lambda item: item.latency_ms.p50), "p50 latency was {:.4g} ms", _NOT_MEASURED),
    _Figure("min_throughput", _of_bundle(lambda item: item.latency_ms.throughput), "{:.4g} runs/s", _NOT_MEASURED),
    _Figure("max_load_ms", _of_bundle(lambda item: item.load_seconds * 1e3), "loaded in {:.4g} ms", _NOT_MEASURED),
    _Figure(
        "max_memory_mb", _of_bundle(lambda item: item.peak_memory / 1e6), "its process took {:.4g} MB", _NOT_MEASURED
    ),
    _Figure("max_bundle_mb", _read_megabytes, "the bundle has {:.4g} MB", "it has no target"),
    _Figure(
        "max_relative_error",
        lambda target: None if target.verdict.original is None else target.verdict.original.max_rel_error,
        "an output is off by {:.2e} of its largest value",
        "no target was compared",
    ),
    _Figure(
        "min_top1_agreement",
        _read_agreement,
        "the largest output was the original's in {:.4%} of the samples",
        "no target was compared, or the outputs are not class scores",
    ),
)


def _check_figure(release: Release, figure: _Figure, bound: float) -> Iterator[Check]:
    values = {item.target: value for item in release.targets if (value := figure.read(item)) is not None}
    if not values:
        message = f"gate {figure.gate} cannot be checked: {figure.lack}"
        yield Check(name=figure.gate, message=message, passed=False, bound=bound)
    is_least = figure.gate.startswith("min_")
    for target, value in values.items():
        wish = f"gate {figure.gate} {'asks for' if is_least else 'allows'} {bound:g}"
        message = f"target {target!r}: {figure.words.format(value)}, {wish}"
        passed = value >= bound if is_least else value <= bound
        yield Check(name=figure.gate, message=message, passed=passed, value=value, bound=bound)


def _check_peer(release: Release, peer: Runner, bound: float) -> Iterator[Check]:
    """Check the ratio of each target's latency to a peer's, which were measured in turn when the release was made."""
    name, is_measured = f"max_ratio_{peer}", False
    for target in release.targets:
        comparison = None if target.measurements is None else target.measurements.comparisons.get(peer)
        if comparison is None:
            continue
        is_measured = True
        message = comparison.describe_gate(f"target {target.target!r}:", f"{PEERS[peer]}'s", name, bound)
        yield Check.of_ratio(name, message, comparison, bound)
    if not is_measured:
        message = f"gate {name} cannot be checked: no target was measured beside it; add {peer} to benchmark.peers"
        yield Check(name=name, message=message, passed=False, bound=bound)


def _worst(release: Release) -> Validation | None:
    """Return the validation of the target with the lowest task metric; None where no target has one."""
    metrics = ((item.verdict.metric_bundle, item.verdict) for item in release.targets)
    scores = [(metric, verdict) for metric, verdict in metrics if metric is not None]
    return min(scores, key=lambda pair: pair[0])[1] if scores else None


def _check_ratio(job: GateJob, runner: StepRunner, store: ReleaseStore, cache: Path) -> Iterator[Check]:
    """Measure the release in turn with the channel's current one, and check the gate on the ratio of latencies."""
    name, bound = "max_ratio_current", job.policy.policy.gates.max_ratio_current
    if bound is None:
        return
    if job.current is None:
        message = f"there is no latency to compare with: {_why_no_current(job)}"
        yield Check(name=name, message=message, passed=True, bound=bound)
        return
    try:
        new, old = _best(job.release), _best(job.current)
        comparison, samples = None, None
        if new.sha256 != old.sha256:
            comparison, samples = compare_in_step(
                runner,
                fetch_target(store, new, cache),
                fetch_target(store, old, cache),
                bounds=(bound,),
                message=f"beside {job.current_version}",
            )
    except (BundleError, InputError) as error:
        message = f"gate {name} cannot be checked here: {error}"
        yield Check(name=name, message=message, passed=False, bound=bound)
        return
    against = f"{job.current_version} on {job.channel}"
    if comparison is None:
        message = f"target {new.target!r}: its bundle is that of {against}"
        yield Check(name=name, message=message, passed=True, value=1.0, bound=bound)
        return
    check = check_ratio(comparison, f"target {new.target!r}:", f"that of {against}", bound)
    yield check.model_copy(update={"samples": samples})


def decide_again(check: Check, samples: Sequence[Samples] = ()) -> Check:
    """Return a check of a ratio with its interval, value and verdict computed again from its kept measurements.

    With `samples`, the times of every run of each pair, the pairs are computed again as well. A check without a
    comparison or without a bound is returned unchanged.
    """
    comparison = check.comparison
    if comparison is None or check.bound is None:
        return check
    if samples:
        comparison = comparison.model_copy(update={"pairs": tuple(map(Pair.of, samples))})
    interval = comparison.interval
    changes = {"interval": interval, "value": comparison.ratio, "passed": interval.judge(check.bound) == "pass"}
    return check.model_copy(update={**changes, "comparison": comparison})


def check_ratio(comparison: Comparison, candidate: str, baseline: str, bound: float) -> Check:
    """Return the check of the gate `max_ratio_current`, which allows a ratio of at most `bound`.

    An undecided comparison does not pass. `candidate` and `baseline` name the two sides in the check's message.
    """
    name = "max_ratio_current"
    return Check.of_ratio(name, comparison.describe_gate(candidate, baseline, name, bound), comparison, bound)


def _best(release: Release) -> TargetEntry:
    """Return the target of a release that runs best on this machine. Raises BundleError when none runs."""
    from tvmflow.runtime.selection import select_runnable

    fitting, refusals = select_runnable((entry, entry) for entry in TargetEntry.read_all(release))
    if not fitting:
        raise BundleError(
            f"no bundle of {release.name} {release.version} runs on this machine ({'; '.join(refusals)}); "
            "promote it where one does"
        )
    return fitting[0]


def _why_no_current(job: GateJob) -> str:
    """Return why there is no release to compare with, as part of a sentence."""
    if job.current_version is None:
        return f"{job.channel} holds nothing"
    return f"{job.current_version}, which {job.channel} holds, is gone from the store"
