"""The release flow: from a release file to a released, verified bundle per target."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, Literal

from prefect import flow

from tasks.benchmark import BenchmarkResult, Point, benchmark, gate_failures
from tasks.build import build
from tasks.export import ExportResult, export
from tasks.package import package
from tasks.publish import PublishResult, publish
from tasks.relax_import import ImportResult, relax_import
from tasks.step import Context, slug
from tasks.track import TargetOutcomes, TrackResult, track
from tasks.train import TrainResult, train
from tasks.tune import tune
from tasks.validate import ReferenceResult, reference, unable, validate
from tvmflow import process
from tvmflow import settings as machine
from tvmflow import spec as release_file
from tvmflow.errors import TargetError, VerdictError
from tvmflow.services import open_services
from tvmflow.spec import Spec
from tvmflow.target import Target, host
from tvmflow.workspace import Outcome, Record, Workspace


class StepSummary(Record):
    """Whether a step ran or was found done, and the seconds that took."""

    status: Literal["ran", "cached"]
    seconds: float


class TargetSummary(Record):
    """One target of a release; figures are None where this machine could not run the bundle."""

    target: str
    bundle_uri: str
    bundle_sha256: str
    bundle_path: str
    bundle_size: int
    max_abs_error: float | None
    top1_agreement: float | None
    metric: dict[str, float] | None
    latency_ms: dict[str, float] | None
    ratio: dict[str, float]
    runs: int | None
    measurements: tuple[Point, ...]
    tuning: str
    schedules: dict[str, int]
    steps: dict[str, StepSummary]


class ReleaseSummary(Record):
    """What a release came to: what `tvmflow release --json` prints."""

    name: str
    version: str
    release_uri: str
    mlflow_run_id: str
    mlflow_model: str
    targets: tuple[TargetSummary, ...]


@flow(name="release", flow_run_name="release {file}", validate_parameters=True)
def release(
    file: str,
    targets: list[str] | None = None,
    trials: int | None = None,
    runs: int | None = None,
) -> dict[str, Any]:
    """Release the model that a release file describes; `targets`, `trials` and `runs` override what it says.

    Returns a ReleaseSummary as JSON. Raises VerdictError when a bundle is out of bounds: nothing is published then.
    """
    spec = override(release_file.load(Path(file)), targets, trials, runs)
    settings = machine.load()
    workspace = Workspace(settings.state)
    with open_services(settings, spec.store, spec.registry) as services:
        context = Context(spec, settings, workspace, services)
        return _release(context).model_dump(mode="json")


def override(spec: Spec, targets: list[str] | None, trials: int | None, runs: int | None) -> Spec:
    """The release file with the overrides of one run; `runs` is the number of timed runs of each runner in all."""
    document = spec.model_dump(mode="json", by_alias=True)
    if targets:
        document["targets"] = targets
    if trials is not None:
        document["tune"] |= {"trials": trials, "minutes": None}
    if runs is not None:
        document["benchmark"]["repeats"] = max(1, -(-runs // spec.benchmark.rounds))
    return release_file.parse(document, spec.folder)


def _release(context: Context) -> ReleaseSummary:
    spec = context.spec
    targets = spec.resolved_targets()
    _refuse_unverifiable(spec, targets)
    trained = train(context) if spec.train is not None else None
    exported = export(context, trained)
    imported = relax_import(context, exported)
    held_out = reference(context, exported, trained) if spec.validation.task is not None else None
    made = _each(context, targets, lambda target: _make(context, exported, imported, held_out, target))
    # One at a time and last: nothing else of this release competes for the machine while it is measured.
    outcomes = tuple(_measured(context, exported, trained, outcome) for outcome in made)
    tracked = track(context, exported, imported, outcomes)
    reasons = [reason for outcome in outcomes for reason in outcome.reasons]
    if reasons:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise VerdictError(
            f"{spec.name} is not released: {reasons[0]}{more}; "
            f"the verdict is kept in MLflow run {tracked.result.run_id}"
        )
    published = publish(context, exported, outcomes, tracked)
    shared = {
        "train": trained,
        "export": exported,
        "relax_import": imported,
        "reference": held_out,
        "track": tracked,
        "publish": published,
    }
    return _summary(context, outcomes, tracked.result, published.result, shared)


def _refuse_unverifiable(spec: Spec, targets: tuple[Target, ...]) -> None:
    """Say before any work is spent that a target could not pass here."""
    for target in targets:
        reason = unable(target)
        if reason is not None and spec.gates.unverified_targets == "refuse":
            raise TargetError(f"{reason}; release it where it runs, or set gates.unverified_targets to allow")


def _make(
    context: Context,
    exported: Outcome[ExportResult],
    imported: Outcome[ImportResult],
    held_out: Outcome[ReferenceResult] | None,
    target: Target,
) -> TargetOutcomes:
    """Tune, build, package and validate for one target."""
    tuned = tune(context, imported, target)
    built = build(context, imported, tuned, target)
    packaged = package(context, exported, imported, tuned, built, target)
    verdict = validate(context, exported, packaged, target, held_out)
    return TargetOutcomes(target, tuned, built, packaged, verdict, None, ())


def _measured(
    context: Context,
    exported: Outcome[ExportResult],
    trained: Outcome[TrainResult] | None,
    outcome: TargetOutcomes,
) -> TargetOutcomes:
    """The same with its measurements and what the gates say, where the bundle runs here and passed."""
    verdict = outcome.verdict.result
    if not (verdict.passed and verdict.verified):
        return outcome
    measured: Outcome[BenchmarkResult] = benchmark(context, exported, outcome.packaged, outcome.target, trained)
    gates = tuple(gate_failures(context, measured.result, outcome.bundle, outcome.target))
    return TargetOutcomes(
        outcome.target, outcome.tuned, outcome.built, outcome.packaged, outcome.verdict, measured, gates
    )


def _each(
    context: Context, targets: tuple[Target, ...], make: Callable[[Target], TargetOutcomes]
) -> tuple[TargetOutcomes, ...]:
    """Make every target, several at a time when there are cores for it: a build keeps about one and a half busy."""
    workers = min(len(targets), context.settings.parallel_targets or max(1, host().cores // 2))
    if workers == 1:
        return tuple(make(target) for target in targets)
    # Prefect finds the flow run of a task in context variables, which threads do not inherit.
    with ThreadPoolExecutor(workers) as pool:
        try:
            return tuple(pool.map(lambda item: item[1].run(make, item[0]), [(t, copy_context()) for t in targets]))
        except Exception:
            raise
        except BaseException:
            # An interrupt: the pool waits for its threads, and those wait for the processes of their steps.
            process.end_all()
            raise


def _summary(
    context: Context,
    outcomes: tuple[TargetOutcomes, ...],
    tracked: TrackResult,
    published: PublishResult,
    shared: dict[str, Outcome[Any] | None],
) -> ReleaseSummary:
    return ReleaseSummary(
        name=context.spec.name,
        version=tracked.version or "",
        release_uri=published.release_uri,
        mlflow_run_id=tracked.run_id,
        mlflow_model=f"models:/{tracked.model}/{tracked.version}",
        targets=tuple(
            _target_summary(context, outcome, tracked.version or "", published.bundle_uris[outcome.target.name], shared)
            for outcome in outcomes
        ),
    )


def _target_summary(
    context: Context,
    outcome: TargetOutcomes,
    version: str,
    bundle_uri: str,
    shared: dict[str, Outcome[Any] | None],
) -> TargetSummary:
    verdict = outcome.verdict.result
    measured = outcome.measured.result if outcome.measured is not None else None
    metric = None
    if verdict.metric_original is not None and verdict.metric_bundle is not None:
        metric = {"original": verdict.metric_original, "bundle": verdict.metric_bundle}
    own: dict[str, Outcome[Any] | None] = {
        "tune": outcome.tuned,
        "build": outcome.built,
        "package": outcome.packaged,
        "validate": outcome.verdict,
        "benchmark": outcome.measured,
    }
    before = {name: shared[name] for name in ("train", "export", "relax_import", "reference")}
    after = {name: shared[name] for name in ("track", "publish")}
    return TargetSummary(
        target=outcome.target.name,
        bundle_uri=bundle_uri,
        bundle_sha256=outcome.bundle.sha256,
        bundle_path=os.path.relpath(_named(context, outcome, version)),
        bundle_size=outcome.bundle.size,
        max_abs_error=verdict.original.max_abs_error if verdict.original is not None else None,
        top1_agreement=verdict.original.top1_agreement if verdict.original is not None else None,
        metric=metric,
        latency_ms=measured.typical.runners["tvm"].latency_ms.model_dump() if measured is not None else None,
        ratio={str(peer): value for peer, value in measured.typical.ratio.items()} if measured is not None else {},
        runs=measured.runs if measured is not None else None,
        measurements=measured.points if measured is not None else (),
        tuning=outcome.tuned.result.coverage,
        schedules=outcome.built.result.schedules,
        steps={
            name: StepSummary(status=step.status, seconds=round(step.seconds, 3))
            for name, step in (before | own | after).items()
            if step is not None
        },
    )


def _named(context: Context, outcome: TargetOutcomes, version: str) -> Path:
    """The bundle under a name for people, linked to the artifact."""
    folder = context.workspace.folder / "bundles"
    folder.mkdir(exist_ok=True)
    link = folder / f"{context.spec.name}-{version}-{slug(outcome.target.name)}.tar.gz"
    place = Path(os.path.relpath(context.file(outcome.bundle), folder))
    if not (link.is_symlink() and link.readlink() == place):
        link.unlink(missing_ok=True)
        link.symlink_to(place)
    return link
