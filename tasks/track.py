"""Track: the release in MLflow, with parameters, metrics, artifacts and, when it passed, a model version."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from tasks.benchmark import BenchmarkResult
from tasks.build import BuildResult
from tasks.choose import Choice
from tasks.curve import PICTURE, latencies, log_curve, picture
from tasks.export import ExportResult
from tasks.package import PackageResult
from tasks.relax_import import ImportResult
from tasks.step import Context, slug, step
from tasks.train import TrainResult
from tasks.tune import TuneResult
from tasks.validate import Verdict
from tvmflow import __version__, samples
from tvmflow.errors import RegistryError
from tvmflow.registry import Registry
from tvmflow.target import Target
from tvmflow.workspace import Artifact, Outcome, StepResult, run_step

WEIGHTS = "weights.pt"
"""The artifact of a release's run that holds the weights which were trained for it."""


@dataclass(frozen=True)
class TargetOutcomes:
    """All that was made and measured for one target; `measured` is None where this machine cannot run it.

    `built`, `packaged` and `verdict` are of the build that is shipped; `choice` says why it is this one, None where
    tuning has changed nothing.
    """

    target: Target
    tuned: Outcome[TuneResult]
    built: Outcome[BuildResult]
    packaged: Outcome[PackageResult]
    verdict: Outcome[Verdict]
    choice: Outcome[Choice] | None
    measured: Outcome[BenchmarkResult] | None
    gates: tuple[str, ...]

    @property
    def bundle(self) -> Artifact:
        """The bundle."""
        return self.packaged.result.bundle

    @property
    def shipped(self) -> Literal["tuned", "untuned"]:
        """Which build is shipped."""
        return "untuned" if self.choice is None else self.choice.result.shipped

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this target is not released; empty when it is."""
        return (*self.verdict.result.reasons, *self.gates)


class TrackResult(StepResult):
    """The MLflow run, the nested runs by target, and the model version, which is the release's version.

    `version` is None for a release that did not pass. `created_at` is the UTC time in ISO 8601.
    """

    run_id: str
    target_runs: dict[str, str]
    model: str
    version: str | None
    created_at: str


@step
def track(
    context: Context,
    exported: Outcome[ExportResult],
    imported: Outcome[ImportResult],
    outcomes: tuple[TargetOutcomes, ...],
    trained: Outcome[TrainResult] | None = None,
) -> Outcome[TrackResult]:
    """Log the release to MLflow: one run, a nested run per target, and a model version when every verdict passed.

    A refused release is logged too, without a version, so that its verdict is kept. Raises RegistryError.
    """
    spec, registry = context.spec, context.registry
    passed = not any(outcome.reasons for outcome in outcomes)
    model = spec.registry.model or spec.name

    def still_there(result: TrackResult) -> bool:
        return registry.run_exists(result.run_id) and (
            result.version is None or registry.version_exists(result.model, result.version)
        )

    reads: dict[str, Any] = {
        "registry": registry.config.address,
        "spec": spec,
        "onnx": exported.result.onnx,
        # Each version of a source model has a release or a verdict of its own, also where two hold the same weights.
        "source": exported.result.registered,
        "outcomes": [
            [outcome.bundle, outcome.verdict.result, outcome.measured and outcome.measured.result, outcome.gates]
            for outcome in outcomes
        ],
        # The release says so too, also where the bundle is one that was released before.
        "tuning": [
            [outcome.tuned.result.trials, outcome.tuned.result.coverage, outcome.choice and outcome.choice.result]
            for outcome in outcomes
        ],
    }
    return run_step(
        context.workspace,
        "track",
        reads,
        TrackResult,
        lambda: _log(context, model, passed, exported.result, imported.result, outcomes, trained),
        valid=still_there,
    )


def _log(
    context: Context,
    model: str,
    passed: bool,
    exported: ExportResult,
    imported: ImportResult,
    outcomes: tuple[TargetOutcomes, ...],
    trained: Outcome[TrainResult] | None,
) -> TrackResult:
    spec, registry = context.spec, context.registry
    params = {
        "opset": exported.opset,
        "targets": ", ".join(outcome.target.name for outcome in outcomes),
        "tuner": spec.tune.tuner,
        "onnx_sha256": exported.onnx.sha256,
        "tvmflow": __version__,
    }
    tags = {**spec.registry.tags, "tvmflow.name": spec.name, "tvmflow.verdict": "passed" if passed else "refused"}
    if exported.registered is not None:
        tags["tvmflow.source"] = exported.registered
    run_id = registry.start_run(spec.name, params, tags)
    with _closing(registry, run_id):
        if exported.max_abs_error is not None:
            registry.log_metrics(run_id, {"export_max_abs_error": exported.max_abs_error})
        files = {
            "model.onnx": context.file(exported.onnx),
            "relax/imported.txt": context.file(imported.text),
        }
        if trained is not None:
            # What a later build of the same model starts from, wherever it runs.
            files[WEIGHTS] = context.file(trained.result.weights)
        for outcome in outcomes:
            folder = slug(outcome.target.name)
            files[f"{folder}/lowered.txt"] = context.file(outcome.built.result.text)
            files[f"{folder}/pass_timings.json"] = context.file(outcome.built.result.pass_timings)
            files[f"{folder}/records.jsonl"] = context.file(outcome.tuned.result.records)
        with context.workspace.scratch() as scratch:
            written = {
                "release.json": spec.model_dump(mode="json", by_alias=True),
                "verdict.json": {outcome.target.name: verdict_document(outcome) for outcome in outcomes},
                "workloads.json": {
                    outcome.target.name: [item.model_dump() for item in outcome.tuned.result.workloads]
                    for outcome in outcomes
                },
            }
            for name, document in written.items():
                (scratch / name).write_text(json.dumps(document, indent=2))
                files[name] = scratch / name
            for outcome in outcomes:
                if curve := outcome.tuned.result.curve:
                    folder = slug(outcome.target.name)
                    path = scratch / f"{folder}-{PICTURE}"
                    path.write_text(picture(curve, f"{spec.name}, {outcome.target.name}"))
                    files[f"{folder}/{PICTURE}"] = path
            registry.log_artifacts(run_id, files)
            runs = {outcome.target.name: _log_target(registry, run_id, outcome) for outcome in outcomes}
            version = _register(context, model, run_id, imported, exported, outcomes) if passed else None
    return TrackResult(
        run_id=run_id,
        target_runs=runs,
        model=model,
        version=version,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _log_target(registry: Registry, parent: str, outcome: TargetOutcomes) -> str:
    target = outcome.target
    params = {
        "target": target.canonical,
        "threads": target.threads,
        "tuning_trials": outcome.tuned.result.trials,
        "tuning_coverage": str(outcome.tuned.result.coverage),
        "bundle_sha256": outcome.bundle.sha256,
    }
    tags = {"tvmflow.verdict": "refused" if outcome.reasons else "passed", "tvmflow.shipped": outcome.shipped}
    run_id = registry.start_target_run(parent, target.name, params, tags)
    with _closing(registry, run_id):
        registry.log_metrics(run_id, metrics(outcome))
        log_curve(registry, run_id, outcome.tuned.result)
    return run_id


def _register(
    context: Context,
    model: str,
    run_id: str,
    imported: ImportResult,
    exported: ExportResult,
    outcomes: tuple[TargetOutcomes, ...],
) -> str:
    registry = context.registry
    bundles = {outcome.target.name: context.file(outcome.bundle) for outcome in outcomes}
    prefixed = {
        f"{slug(outcome.target.name)}.{key}": value for outcome in outcomes for key, value in metrics(outcome).items()
    }
    reference = registry.log_model(
        run_id,
        context.spec.name,
        bundles,
        imported.inputs,
        imported.outputs,
        input_example=samples.load(context.file(exported.samples))[0][0],
        metrics=prefixed,
    )
    # Until it is published the version says so; readers of the registry see what is half-way.
    return registry.register(model, reference, run_id, {**context.spec.registry.tags, "tvmflow.status": "unpublished"})


def metrics(outcome: TargetOutcomes) -> dict[str, float]:
    """The figures of one target: errors, latency in ms, ratios, sizes in bytes, seconds."""
    found: dict[str, float] = {"bundle_bytes": outcome.bundle.size, "tuning_trials": outcome.tuned.result.trials}
    coverage = outcome.tuned.result.coverage
    found |= {"tuned_workloads": coverage.tuned, "workloads": coverage.workloads, **latencies(outcome.tuned.result)}
    if coverage.share_of_time is not None:
        found["tuned_share_of_time"] = coverage.share_of_time
    if outcome.choice is not None and outcome.choice.result.ratio is not None:
        # Also where the untuned build is shipped: what tuning would have come to.
        found["ratio_untuned"] = outcome.choice.result.ratio
    compared = outcome.verdict.result.original
    if compared is not None:
        found |= {
            "max_abs_error": compared.max_abs_error,
            "max_rel_error": compared.max_rel_error,
            "cosine": compared.cosine,
        }
        if compared.top1_agreement is not None:
            found["top1_agreement"] = compared.top1_agreement
    verdict = outcome.verdict.result
    if verdict.metric_bundle is not None and verdict.metric_original is not None:
        found |= {"task_metric": verdict.metric_bundle, "task_metric_original": verdict.metric_original}
    for index, point in enumerate(outcome.measured.result.points if outcome.measured is not None else ()):
        # The typical sizes have the plain names; the others say theirs.
        suffix = "" if index == 0 else "".join(f"_{name}{size}" for name, size in point.sizes.items())
        for runner, measured in point.runners.items():
            for name, value in measured.latency_ms.model_dump().items():
                figure = "throughput" if name == "throughput" else f"latency_ms_{name}"
                found[f"{runner}_{figure}{suffix}"] = value
            found[f"{runner}_load_seconds"] = measured.load_seconds
            found[f"{runner}_peak_memory_bytes"] = measured.peak_memory
        found |= {f"ratio_{peer}{suffix}": value for peer, value in point.ratio.items()}
    return found


def verdict_document(outcome: TargetOutcomes) -> dict[str, Any]:
    """The verdict of one target as it is kept with the release."""
    document = outcome.verdict.result.model_dump(mode="json", exclude={"sources"})
    choice = outcome.choice and outcome.choice.result.model_dump(mode="json", exclude={"sources"})
    return {**document, "passed": not outcome.reasons, "reasons": list(outcome.reasons), "choice": choice}


@contextmanager
def _closing(registry: Registry, run_id: str) -> Iterator[None]:
    """Leave no run open: one that is interrupted or fails is marked so."""
    try:
        yield
    except BaseException as error:
        try:
            registry.finish_run(run_id, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        except RegistryError as second:
            error.add_note(str(second))
        raise
    registry.finish_run(run_id, "FINISHED")
