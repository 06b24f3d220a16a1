"""The release flow: from a release file to a released, verified bundle per target."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any

from prefect import flow

from flows.automatic_promotion import promote_automatically
from flows.context import RunContext, open_context
from flows.local import LocalBuilds, ModelSteps, build_here, measure_here, refuse_unverifiable
from flows.promote import PromotionSummary
from flows.remote import make_on_pool, pools_of
from tasks.export import ExportJob, ExportResult, export
from tasks.insight import Insight, InsightJob, insight
from tasks.publish import PublishJob, PublishResult, keep_published_origin, publish, release_document
from tasks.reference import ReferenceJob, reference
from tasks.relax_import import ImportJob, relax_import
from tasks.report import PAGE, ReportJob, report
from tasks.show import ShowJob, TextsJob, find_show, texts
from tasks.step import slug
from tasks.track import TargetResult, TrackJob, TrackResult, track
from tasks.train import TrainJob, TrainResult, train
from tvmflow import spec as release_file
from tvmflow.documents.encoding import narrow
from tvmflow.documents.figures import Point
from tvmflow.documents.release import Choice, Release
from tvmflow.errors import VerdictError
from tvmflow.hardware.target import Target, host
from tvmflow.processes import supervisor
from tvmflow.promotion import people
from tvmflow.spec import Spec
from tvmflow.store import ReleaseStore, leases
from tvmflow.workspace import Artifact, Outcome, Record, StepSummary


class TargetSummary(Record):
    """One target of a release; figures are None where this machine could not run the bundle.

    `bundle_size` is in bytes. `notes` are sentences about what the comparison with the original cannot show.
    `metric` is the task metric of the `original` and of the `bundle`. `latency_ms` has the figures of
    `Latency` by name, None for a percentile without enough runs, and `ratio` the bundle's latency
    over each peer's. `busyness` is a sentence on other work on the machine while it was measured, None where
    nothing was noticed. `choice` says which of the tuned and the untuned build is shipped, None where tuning
    changed nothing.
    """

    target: str
    bundle_uri: str
    bundle_sha256: str
    bundle_path: str
    bundle_size: int
    notes: tuple[str, ...] = ()
    max_abs_error: float | None
    top1_agreement: float | None
    metric: dict[str, float] | None
    latency_ms: dict[str, float | None] | None
    ratio: dict[str, float]
    runs: int | None
    measurements: tuple[Point, ...]
    busyness: str | None = None
    tuning: str
    choice: Choice | None
    schedules: dict[str, int]
    steps: dict[str, StepSummary]


class ReleaseSummary(Record):
    """The outcome of a release and of its automatic promotions, which `tvmflow release --json` prints.

    `warnings` are sentences about limits of the release.
    """

    name: str
    version: str
    release_uri: str
    mlflow_run_id: str
    mlflow_model: str
    targets: tuple[TargetSummary, ...]
    promotions: tuple[PromotionSummary, ...] = ()
    warnings: tuple[str, ...] = ()


@flow(name="release", flow_run_name="release {file}", validate_parameters=True)
def release(
    file: str,
    targets: list[str] | None = None,
    trials: int | None = None,
    runs: int | None = None,
    source: str | None = None,
) -> dict[str, Any]:
    """Release the model of a release file, and promote it to the file's automatic channels.

    `targets`, `trials` and `runs` replace those of the file; `source`, the version of a registered PyTorch or ONNX
    model as MODEL/3, replaces its model. None replaces nothing. A channel that refuses the release does not undo it.
    Returns a ReleaseSummary as JSON. Raises VerdictError when a bundle is out of bounds or fails a gate: nothing is
    published then.
    """
    spec = override(release_file.load(Path(file)), targets, trials, runs, source)
    with open_context(spec) as context:
        return release_model(context).model_dump(mode="json")


def override(
    spec: Spec, targets: list[str] | None, trials: int | None, runs: int | None, source: str | None = None
) -> Spec:
    """Return the release file with the changes of one run: other `targets`, `trials` of tuning, `runs` or `source`.

    `runs` is each runner's total number of timed runs, `source` a version of a registered model, as MODEL/3. None
    changes nothing. Raises SpecError for a value that no release file may have.
    """
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
    context: RunContext, trained: Outcome[TrainResult] | None = None, source: str | None = None
) -> ReleaseSummary:
    """Release the model of the context's release file, and promote it to the file's automatic channels.

    `trained` is the outcome of a training that has already run: without it, the model is trained if the file says so.
    `source` is the registered version of these weights, as MODEL/3; the release's provenance names it. A channel that
    refuses the release does not undo it. Raises VerdictError when a bundle is out of bounds or fails a gate: nothing is
    published then.
    """
    spec, runner = context.spec, context.runner
    targets = spec.resolve_targets()
    pools = pools_of(context.settings, targets)
    refuse_unverifiable(spec, tuple(target for target in targets if target.name not in pools))
    if spec.validation.show is not None:
        find_show(runner, ShowJob(function=spec.validation.show))
    if trained is None and spec.train is not None:
        trained = train(runner, TrainJob.of(spec))
    weights = None if trained is None else trained.result.weights
    model, steps = _prepare(context, weights, source)
    if trained is not None:
        steps = {"train": trained.summary, **steps}

    def make(target: Target) -> LocalBuilds | TargetResult:
        pool = pools.get(target.name)
        if pool is None:
            return build_here(context, model, target)
        return make_on_pool(context, pool, model, weights, target)

    builds = _make_all(context, targets, make, pools)
    # Measured one after the other when all are built: nothing else of this release uses the machine meanwhile.
    results = tuple(measure_here(context, model, item) if isinstance(item, LocalBuilds) else item for item in builds)
    tracked, published = _publish(context, model, trained, results)
    steps |= {"track": tracked.summary, "publish": published.summary}
    summary = _summary(context, results, tracked.result, published.result, steps)
    _post_artifact(summary)
    warnings = _warnings(spec, model.exported)
    promotions = promote_automatically(context, summary.version)
    return summary.model_copy(update={"promotions": promotions, "warnings": warnings})


def _prepare(
    context: RunContext, weights: Artifact | None, source: str | None
) -> tuple[ModelSteps, dict[str, StepSummary]]:
    """Export the model with these weights, None for its own, and import it; return that and the steps by name.

    `source` is the registered version of the weights, None where they have none.
    """
    spec, runner = context.spec, context.runner
    original = context.find_original(weights)
    exported = export(runner, ExportJob.of(spec, original))
    export_result = exported.result
    if source is not None:
        export_result = export_result.model_copy(update={"registered": source})
    imported = relax_import(runner, ImportJob.of(spec, export_result))
    steps = {"export": exported.summary, "relax_import": imported.summary}
    held_out = None
    if spec.validation.task is not None:
        outcome = reference(runner, ReferenceJob.of(spec, original, export_result))
        held_out, steps["reference"] = outcome.result, outcome.summary
    return ModelSteps(original, export_result, imported.result, held_out), steps


def _publish(
    context: RunContext,
    model: ModelSteps,
    trained: Outcome[TrainResult] | None,
    results: tuple[TargetResult, ...],
) -> tuple[Outcome[TrackResult], Outcome[PublishResult]]:
    """Log the targets in MLflow and publish them as a release, while no other process publishes one of this model.

    Raises VerdictError when a target is out of bounds or fails a gate: that is logged, and nothing is published.
    """
    spec, runner = context.spec, context.runner
    job = TrackJob(
        spec=spec,
        exported=model.exported,
        imported=model.imported,
        targets=results,
        weights=None if trained is None else trained.result.weights,
        registry=context.registry.config.address,
    )
    with ExitStack() as stack:
        who = people.identify_user()
        lease = context.outlast(lambda: stack.enter_context(leases.hold(context.store, spec.name, who)))
        tracked = track(runner, job, context.registry, lease)
        reasons = [reason for result in results for reason in result.reasons]
        if reasons:
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            raise VerdictError(
                f"{spec.name} is not released: {reasons[0]}{more}; "
                f"the verdict is kept in MLflow run {tracked.result.run_id}"
            )
        document = release_document(
            spec,
            context.workspace,
            model.exported,
            None if trained is None else trained.result,
            model.reference,
            results,
            tracked.result,
        )
        published_release = context.outlast(lambda: _find_release(context.store, spec.name, document.version))
        if published_release is not None:
            document = keep_published_origin(document, published_release)
        page = _page_of(published_release) or _report(context, model, results, document)
        endpoint = context.settings.s3_endpoint
        publishing = PublishJob.of(context.store, endpoint, document, results, tracked.result, page)
        return tracked, publish(runner, publishing, context.store, context.registry, lease)


def _report(context: RunContext, model: ModelSteps, results: tuple[TargetResult, ...], document: Release) -> Artifact:
    """Return a new page of a release."""
    insights = {
        item.target.name: _look_into(context, model, item)
        for item in results
        if item.verdict.verified and item.target.tvm.get("kind") == "llvm"
    }
    job = context.outlast(lambda: ReportJob.of(context.spec, context.store, document, insights))
    return report(context.runner, job).result.page


def _look_into(context: RunContext, model: ModelSteps, item: TargetResult) -> Insight:
    """Return the insight into a bundle, with its samples as text where the release file names a function for that."""
    threads = None if item.measurement is None else item.measurement.threads
    job = InsightJob.of(model.exported, model.reference, item.bundle, item.target, threads)
    profile, show = insight(context.runner, job).result, context.spec.validation.show
    return profile if show is None else texts(context.runner, TextsJob.of(show, job, profile)).result.add_to(profile)


def _find_release(store: ReleaseStore, name: str, version: str) -> Release | None:
    """Return a release, None if it is not published."""
    return store.get_release(name, version) if store.has_release(name, version) else None


def _page_of(release: Release | None) -> Artifact | None:
    """Return the page that a published release has and keeps, None if it is not published or has none."""
    page = None if release is None else release.report
    return None if page is None else Artifact(name=PAGE, sha256=page.sha256, size=page.size)


def _post_artifact(summary: ReleaseSummary) -> None:
    """Leave a short table of a release as an artifact of the flow run, which Prefect's UI shows."""
    from prefect.artifacts import create_markdown_artifact

    lines = ["| target | p50 ms | / ONNX Runtime | task metric |", "|---|---|---|---|"]
    for item in summary.targets:
        p50, metric = (item.latency_ms or {}).get("p50"), (item.metric or {}).get("bundle")
        figures = (p50, item.ratio.get("onnxruntime"), metric)
        lines.append(
            " | ".join([f"| {item.target}", *("-" if value is None else f"{value:.4g}" for value in figures), ""])
        )
    title = f"{summary.name} {summary.version}"
    lines += ["", *(f"- {item.target}: {note}" for item in summary.targets for note in item.notes)]
    lines += ["", *(f"- {item.target}: {item.busyness}" for item in summary.targets if item.busyness is not None)]
    lines += [
        "",
        f"`tvmflow report {title} --open` shows its report, which is {PAGE} of MLflow run {summary.mlflow_run_id}.",
    ]
    create_markdown_artifact("\n".join(lines), key="release", description=title)


def _warnings(spec: Spec, exported: ExportResult) -> tuple[str, ...]:
    """Return sentences about what the release cannot guarantee or returns in another form than the original."""
    warnings = exported.notes()
    if not exported.is_repeatable:
        warnings.append(
            f"the model's weights differ between two calls of its factory {spec.model.factory!r}, so that "
            "`tvmflow verify --rebuild` cannot prove the bundles; seed the factory, or give model.weights"
        )
    return tuple(warnings)


def _make_all(
    context: RunContext,
    targets: tuple[Target, ...],
    make: Callable[[Target], LocalBuilds | TargetResult],
    pools: Mapping[str, str],
) -> tuple[LocalBuilds | TargetResult, ...]:
    """Make every target: those on pools all at once, the others two or more at a time if there are cores for it.

    A build keeps about one and a half cores busy. The first failure, or an interrupt, stops the others at once: it sets
    `context.stop` and kills child processes.
    """
    local_count = sum(target.name not in pools for target in targets)
    workers = min(local_count, context.settings.parallel_targets or max(1, host().cores // 2))
    if workers == 1 and not pools:
        return tuple(make(target) for target in targets)
    with ThreadPoolExecutor(workers or 1) as local, ThreadPoolExecutor(len(pools) or 1) as remote:
        # Prefect finds the flow run of a task in context variables, which threads do not inherit.
        futures = [
            (remote if target.name in pools else local).submit(copy_context().run, make, target) for target in targets
        ]
        try:
            for future in as_completed(futures):
                future.result()
            return tuple(future.result() for future in futures)
        except BaseException:
            for future in futures:
                future.cancel()
            # The executors wait for their threads, and these for processes and flow runs.
            context.stop.set()
            supervisor.kill_all()
            raise


def _summary(
    context: RunContext,
    results: tuple[TargetResult, ...],
    tracked: TrackResult,
    published: PublishResult,
    steps: Mapping[str, StepSummary],
) -> ReleaseSummary:
    version = tracked.version or ""
    return ReleaseSummary(
        name=context.spec.name,
        version=version,
        release_uri=published.release_uri,
        mlflow_run_id=tracked.run_id,
        mlflow_model=f"models:/{tracked.model}/{tracked.version}",
        targets=tuple(
            _target_summary(context, result, version, published.bundle_uris[result.target.name], steps)
            for result in results
        ),
    )


def _target_summary(
    context: RunContext, result: TargetResult, version: str, bundle_uri: str, steps: Mapping[str, StepSummary]
) -> TargetSummary:
    """The summary of one target; `steps` are those that all targets share, before and after its own."""
    verdict, figures = result.verdict, result.measurement
    metric = None
    if verdict.metric_original is not None and verdict.metric_bundle is not None:
        metric = {"original": verdict.metric_original, "bundle": verdict.metric_bundle}
    last = {name: steps[name] for name in ("track", "publish")}
    first = {name: step for name, step in steps.items() if name not in last}
    return TargetSummary(
        target=result.target.name,
        bundle_uri=bundle_uri,
        bundle_sha256=result.bundle.sha256,
        bundle_path=os.path.relpath(_link_bundle(context, result, version)),
        bundle_size=result.bundle.size,
        notes=verdict.notes,
        max_abs_error=verdict.original.max_abs_error if verdict.original is not None else None,
        top1_agreement=verdict.original.top1_agreement if verdict.original is not None else None,
        metric=metric,
        latency_ms=figures.typical.runners["tvm"].latency_ms.model_dump() if figures is not None else None,
        ratio={str(peer): value for peer, value in figures.typical.ratio.items()} if figures is not None else {},
        runs=figures.runs if figures is not None else None,
        measurements=figures.points if figures is not None else (),
        busyness=figures.describe_busyness() if figures is not None else None,
        tuning=str(result.tuned.coverage),
        choice=result.choice and narrow(Choice, result.choice),
        schedules=result.build.schedules,
        steps={
            name: step.model_copy(update={"seconds": round(step.seconds, 3)})
            for name, step in (first | result.steps | last).items()
        },
    )


def _link_bundle(context: RunContext, result: TargetResult, version: str) -> Path:
    """Link the bundle's artifact under a name for people, and return the link."""
    folder = context.workspace.folder / "bundles"
    folder.mkdir(exist_ok=True)
    link = folder / f"{context.spec.name}-{version}-{slug(result.target.name)}.tar.gz"
    place = Path(os.path.relpath(context.workspace.path(result.bundle), folder))
    if not (link.is_symlink() and link.readlink() == place):
        link.unlink(missing_ok=True)
        link.symlink_to(place)
    return link
