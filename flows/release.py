"""The release flow: from a release file to a released, verified bundle per target."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, Literal

from prefect import flow

from flows.deployments import one_at_a_time
from flows.make import Made, make_here, make_on_pool, measured_here, pools_of, refuse_unverifiable
from flows.promote import PromotionSummary, automatic
from tasks.benchmark import Point
from tasks.choose import Choice
from tasks.export import export
from tasks.publish import PublishResult, publish
from tasks.relax_import import relax_import
from tasks.step import Context, slug
from tasks.track import TargetOutcomes, TrackResult, track
from tasks.train import TrainResult, train
from tasks.validate import reference
from tvmflow import settings as machine
from tvmflow import spec as release_file
from tvmflow import supervisor
from tvmflow.errors import VerdictError
from tvmflow.services import open_services, open_workspace
from tvmflow.spec import Spec
from tvmflow.target import Target, host
from tvmflow.workspace import Outcome, Record


class StepSummary(Record):
    """Whether a step ran or was found done, and the seconds that took."""

    status: Literal["ran", "cached"]
    seconds: float


class TargetSummary(Record):
    """One target of a release; figures are None where this machine could not run the bundle.

    `choice` says which of the tuned and the untuned build is shipped, None where tuning changed nothing.
    """

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
    choice: Choice | None
    schedules: dict[str, int]
    steps: dict[str, StepSummary]


class ReleaseSummary(Record):
    """What a release came to, also on its automatic channels: what `tvmflow release --json` prints."""

    name: str
    version: str
    release_uri: str
    mlflow_run_id: str
    mlflow_model: str
    targets: tuple[TargetSummary, ...]
    promotions: tuple[PromotionSummary, ...] = ()


@flow(name="release", flow_run_name="release {file}", validate_parameters=True)
def release(
    file: str,
    targets: list[str] | None = None,
    trials: int | None = None,
    runs: int | None = None,
    source: str | None = None,
) -> dict[str, Any]:
    """Release the model that a release file describes; `targets`, `trials` and `runs` override what it says.

    `source` is a version of a registered PyTorch or ONNX model, as MODEL/3, to release in the place of the file's.

    What is released is then promoted to the file's automatic channels; a refusal there leaves the release be. Returns a
    ReleaseSummary as JSON. Raises VerdictError when a bundle is out of bounds: nothing is published then.
    """
    spec = override(release_file.load(Path(file)), targets, trials, runs, source)
    settings = machine.load()
    with one_at_a_time(spec.name), open_services(settings, spec.store, spec.registry) as services:
        workspace = open_workspace(settings, services.store, spec.store)
        context = Context(spec, settings, workspace, services)
        return release_model(context).model_dump(mode="json")


def override(
    spec: Spec, targets: list[str] | None, trials: int | None, runs: int | None, source: str | None = None
) -> Spec:
    """The release file with the overrides of one run; `runs` is the number of timed runs of each runner in all."""
    changes: dict[str, object] = {}
    if targets:
        changes["targets"] = targets
    if trials is not None:
        changes |= {"tune.trials": trials, "tune.minutes": None, "tune.until": None}
    if runs is not None:
        changes["benchmark.repeats"] = max(1, -(-runs // spec.benchmark.rounds))
    if source is not None:
        changes |= {"model": {"mlflow": f"models:/{source}"}, "train": None, "retrain": None}
    return release_file.amend(spec, changes)


def release_model(
    context: Context, trained: Outcome[TrainResult] | None = None, source: str | None = None
) -> ReleaseSummary:
    """Release the model of a context's release file, and promote it to the file's automatic channels.

    `trained` are weights that are known already, in the place of training; `source`, as MODEL/3, is the version of a
    registered model that they are.
    """
    spec = context.spec
    targets = spec.resolve_targets()
    pools = pools_of(context.settings, targets)
    refuse_unverifiable(spec, tuple(target for target in targets if target.name not in pools))
    if trained is None and spec.train is not None:
        trained = train(context)
    exported = export(context, trained)
    if source is not None:
        exported = replace(exported, result=exported.result.model_copy(update={"registered": source}))
    imported = relax_import(context, exported)
    held_out = reference(context, exported, trained) if spec.validation.task is not None else None
    interrupted = Event()

    def make(target: Target) -> Made | TargetOutcomes:
        pool = pools.get(target.name)
        if pool is None:
            return make_here(context, exported, imported, held_out, target)
        return make_on_pool(context, pool, exported, imported, held_out, trained, target, interrupted)

    made = _each(context, targets, make, pools, interrupted)
    # One at a time and last: nothing else of this release competes for the machine while it is measured.
    outcomes = tuple(
        measured_here(context, exported, trained, item) if isinstance(item, Made) else item for item in made
    )
    tracked = track(context, exported, imported, outcomes, trained)
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
    summary = _summary(context, outcomes, tracked.result, published.result, shared)
    return summary.model_copy(update={"promotions": automatic(context, summary.version)})


def _each(
    context: Context,
    targets: tuple[Target, ...],
    make: Callable[[Target], Made | TargetOutcomes],
    pools: Mapping[str, str],
    interrupted: Event,
) -> tuple[Made | TargetOutcomes, ...]:
    """Make every target, those on pools all at once, of the others several where there are cores for them.

    A build keeps about one and a half cores busy. `interrupted` is set when all are to end.
    """
    here = sum(target.name not in pools for target in targets)
    workers = min(here, context.settings.parallel_targets or max(1, host().cores // 2))
    if workers == 1 and not pools:
        return tuple(make(target) for target in targets)
    with ThreadPoolExecutor(workers or 1) as local, ThreadPoolExecutor(len(pools) or 1) as elsewhere:
        # Prefect finds the flow run of a task in context variables, which threads do not inherit.
        made = [
            (elsewhere if target.name in pools else local).submit(copy_context().run, make, target)
            for target in targets
        ]
        try:
            return tuple(item.result() for item in made)
        except BaseException as error:
            for item in made:
                item.cancel()
            if not isinstance(error, Exception):
                # An interrupt: the pools wait for their threads, and those wait for processes and flow runs.
                interrupted.set()
                supervisor.kill_all()
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
        "choose": outcome.choice,
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
        tuning=str(outcome.tuned.result.coverage),
        choice=outcome.choice.result if outcome.choice is not None else None,
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
