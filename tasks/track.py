"""Track: log the release in MLflow, with parameters, metrics, artifacts and, when it passed, a model version."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tasks.benchmark import BenchmarkResult
from tasks.build import BuildResult
from tasks.choose import Choice
from tasks.curve import PICTURE, latencies, log_curve, picture
from tasks.export import ExportResult
from tasks.package import PackageResult
from tasks.relax_import import ImportResult
from tasks.step import Job, Step, StepRunner, slug
from tasks.tune import TuneResult
from tasks.validate import Verdict
from tvmflow import __version__, samples
from tvmflow.advisories import list_installed
from tvmflow.documents import release
from tvmflow.documents.encoding import encode, narrow
from tvmflow.documents.figures import PEERS, Validation
from tvmflow.documents.release import TargetVerdict
from tvmflow.documents.verdict import Choices, ReleaseVerdict, samples_of
from tvmflow.errors import RegistryError
from tvmflow.hardware.target import Target
from tvmflow.promotion.verdicts import VERDICT
from tvmflow.registry import Registry
from tvmflow.spec import Spec
from tvmflow.store.leases import HeldLease
from tvmflow.workspace import Artifact, StepResult, StepSummary, Workspace

CHOICES = "choices.json"
"""The artifact of a release's run that holds its `Choices`, the checks which have decided on the builds."""
WEIGHTS = "weights.pt"
"""The artifact of a release's run that holds the weights which were trained for it."""


# The tag that MLflow's UI shows as the description of a run.
_DESCRIPTION = "mlflow.note.content"


class TargetResult(StepResult):
    """All results of one target.

    `build`, `packaged` and `verdict` belong to the build that is shipped. `choice` says why it is this build, None
    where tuning changed nothing. `measurement` is None where the bundle was not benchmarked; `gates` has a sentence for
    each gate that failed. `steps` says for each step, by name, whether it ran or was cached.
    """

    target: Target
    tuned: TuneResult
    build: BuildResult
    packaged: PackageResult
    verdict: Verdict
    choice: Choice | None
    measurement: BenchmarkResult | None
    gates: tuple[str, ...]
    steps: dict[str, StepSummary]

    @property
    def bundle(self) -> Artifact:
        """The bundle that is released for this target, a `.tar.gz`."""
        return self.packaged.bundle

    @property
    def shipped(self) -> Literal["tuned", "untuned"]:
        """The build that is shipped, `tuned` or `untuned`."""
        return "untuned" if self.choice is None else self.choice.shipped

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why this target is not released; empty when it is."""
        return (*self.verdict.reasons, *self.gates)


class TrackResult(StepResult):
    """The id of the MLflow run, and the model version.

    `version` is the release's version, None for a release that did not pass. `created_at` is the UTC time in ISO 8601.
    `packages` are the versions of all installed Python packages by name.
    """

    run_id: str
    model: str
    version: str | None
    created_at: str
    packages: dict[str, str]


class TrackJob(Job):
    """All results of a release; `registry` is the address of the registry that logs them."""

    spec: Spec
    exported: ExportResult
    imported: ImportResult
    targets: tuple[TargetResult, ...]
    weights: Artifact | None
    registry: str

    @property
    def passed(self) -> bool:
        """Whether every target may be released."""
        return not any(item.reasons for item in self.targets)

    @property
    def model(self) -> str:
        """The name of the registered model."""
        return self.spec.registered_model

    def cache_key(self) -> Mapping[str, Any]:
        """Return the registry, the release file, the model, and the values that the MLflow run of each target shows."""
        return {
            "registry": self.registry,
            "spec": self.spec,
            "onnx": self.exported.onnx,
            # Each version of a source model has a release or a verdict of its own, also when two hold the same weights.
            "source": self.exported.registered,
            "targets": [[item.bundle, item.verdict, item.measurement, item.gates] for item in self.targets],
            # The same bundle may have been released before, with another tuning.
            "tuning": [[item.tuned.trials, item.tuned.coverage, item.choice] for item in self.targets],
        }


def work(job: TrackJob, runner: StepRunner, registry: Registry, lease: HeldLease) -> TrackResult:
    """Log the release to MLflow: one run, a nested run per target, and a model version when every verdict passed.

    A refused release is logged without a version, so that its verdict is kept. If a process that died has already made
    runs or a version for the same cache key, these are used and completed; open runs of the release with other keys are
    ended. `lease` is the lease on the release's name, which the caller holds. Raises RegistryError, and StoreError when
    the lease has been lost.
    """
    spec, exported, workspace = job.spec, job.exported, runner.workspace
    params = {
        "opset": exported.opset,
        "targets": ", ".join(item.target.name for item in job.targets),
        "tuner": spec.tune.tuner,
        "onnx_sha256": exported.onnx.sha256,
        "tvmflow": __version__,
    }
    tags = {
        _DESCRIPTION: describe(job.targets),
        **spec.registry.tags,
        "tvmflow.name": spec.name,
        "tvmflow.verdict": "passed" if job.passed else "refused",
    }
    if exported.registered is not None:
        tags["tvmflow.source"] = exported.registered
    registry.end_abandoned_runs({"tvmflow.name": spec.name})
    run_id = registry.start_run(spec.name, params, tags, key=runner.key)
    with _closing(registry, run_id):
        if exported.max_abs_error is not None:
            registry.log_metrics(run_id, {"export_max_abs_error": exported.max_abs_error})
        with workspace.scratch() as scratch:
            registry.log_artifacts(run_id, _files(job, workspace, scratch))
        for item in job.targets:
            _log_target(registry, run_id, item, runner.key)
        version = _register(registry, run_id, job, workspace, lease) if job.passed else None
    return TrackResult(
        run_id=run_id,
        model=job.model,
        version=version,
        created_at=registry.read_start(run_id).isoformat(timespec="seconds"),
        packages=list_installed(),
    )


def _is_there(result: TrackResult, job: TrackJob, registry: Registry, lease: HeldLease) -> bool:
    return registry.run_exists(result.run_id) and (
        result.version is None or registry.version_exists(result.model, result.version)
    )


track = Step("track", TrackResult, work, is_current=_is_there)


def _files(job: TrackJob, workspace: Workspace, scratch: Path) -> dict[str, Path]:
    """Return the files to log as artifacts, by artifact path; documents are written into `scratch`."""
    files = {
        "model.onnx": workspace.path(job.exported.onnx),
        "relax/imported.txt": workspace.path(job.imported.text),
    }
    if job.exported.onnx.data is not None:
        # The ONNX file names it so.
        files[job.exported.onnx.data.sha256] = workspace.path(job.exported.onnx.data)
    if job.weights is not None:
        # A later build of the same model starts from them, wherever it runs.
        files[WEIGHTS] = workspace.path(job.weights)
    choices = Choices(targets={item.target.name: item.choice.checks for item in job.targets if item.choice is not None})
    for checks in choices.targets.values():
        files |= samples_of(workspace, checks)
    workloads = {item.target.name: [workload.model_dump() for workload in item.tuned.workloads] for item in job.targets}
    documents = {
        CHOICES: encode(choices),
        VERDICT: encode(ReleaseVerdict(targets={item.target.name: make_verdict(item) for item in job.targets})),
        # The release file, and a table for people.
        "release.json": json.dumps(job.spec.model_dump(mode="json", by_alias=True), indent=2).encode(),
        "workloads.json": json.dumps(workloads, indent=2).encode(),
    }
    for name, content in documents.items():
        files[name] = scratch / name
        files[name].write_bytes(content)
    for item in job.targets:
        folder = slug(item.target.name)
        files[f"{folder}/lowered.txt"] = workspace.path(item.build.text)
        files[f"{folder}/pass_timings.json"] = workspace.path(item.build.pass_timings)
        files[f"{folder}/records.jsonl"] = workspace.path(item.tuned.records)
        if item.tuned.curve:
            files[f"{folder}/{PICTURE}"] = scratch / f"{folder}-{PICTURE}"
            title = f"{job.spec.name}, {item.target.name}"
            files[f"{folder}/{PICTURE}"].write_text(picture(item.tuned.curve, title))
    return files


def _log_target(registry: Registry, parent: str, item: TargetResult, key: str) -> None:
    params = {
        "target": item.target.canonical,
        "threads": item.target.threads,
        "tuning_trials": item.tuned.trials,
        "tuning_coverage": str(item.tuned.coverage),
        "bundle_sha256": item.bundle.sha256,
    }
    tags = {"tvmflow.verdict": "refused" if item.reasons else "passed", "tvmflow.shipped": item.shipped}
    busyness = None if item.measurement is None else item.measurement.describe_busyness()
    if busyness is not None:
        tags["tvmflow.machine"] = busyness
    run_id = registry.start_target_run(parent, item.target.name, params, tags, key=f"{key}/{item.target.name}")
    with _closing(registry, run_id):
        registry.log_metrics(run_id, metrics(item))
        log_curve(registry, run_id, item.tuned)


def _register(registry: Registry, run_id: str, job: TrackJob, workspace: Workspace, lease: HeldLease) -> str:
    version = registry.find_version(job.model, run_id)
    if version is not None:
        return version
    logged_model = registry.log_model(
        run_id,
        job.spec.name,
        {item.target.name: workspace.path(item.bundle) for item in job.targets},
        job.imported.inputs,
        job.imported.outputs,
        input_example=samples.load(workspace.path(job.exported.samples))[0][0],
        metrics={
            f"{slug(item.target.name)}.{name}": value for item in job.targets for name, value in metrics(item).items()
        },
    )
    # Readers of the registry can see the version before the release is published: this tag says so.
    tags = {**job.spec.registry.tags, "tvmflow.status": "unpublished"}
    lease.require()
    return registry.register(job.model, logged_model, run_id, tags)


def describe(targets: Sequence[TargetResult]) -> str:
    """Return a release in words, in Markdown: its verdict, and the figures and the reasons of each target."""
    passed = not any(item.reasons for item in targets)
    lines = ["Passed; `report.html` says more." if passed else "Refused; `verdict.json` says more.", ""]
    for item in targets:
        words = list(item.reasons)
        if item.measurement is not None:
            point = item.measurement.typical
            words.append(f"p50 {point.bundle.latency_ms.p50:.4g} ms")
            words += [f"{ratio:.3g} of the latency of {PEERS[peer]}" for peer, ratio in point.ratio.items()]
        if item.verdict.metric_bundle is not None:
            words.append(f"task metric {item.verdict.metric_bundle:.4f}")
        busyness = None if item.measurement is None else item.measurement.describe_busyness()
        lines.append(f"- {item.target.name}: {', '.join(words)}{'' if busyness is None else f'; {busyness}'}")
    return "\n".join(lines)


def metrics(item: TargetResult) -> dict[str, float]:
    """Return the figures of one target by MLflow name: errors, latency in ms, ratios, sizes in bytes, seconds."""
    coverage = item.tuned.coverage
    figures: dict[str, float] = {
        "bundle_bytes": item.bundle.size,
        "tuning_trials": item.tuned.trials,
        "tuned_workloads": coverage.tuned,
        "workloads": coverage.workloads,
        **latencies(item.tuned),
    }
    if coverage.share_of_time is not None:
        figures["tuned_share_of_time"] = coverage.share_of_time
    if item.choice is not None and item.choice.ratio is not None:
        # Also where the untuned build is shipped: the ratio says how much tuning would have gained.
        figures["ratio_untuned"] = item.choice.ratio
    comparison = item.verdict.original
    if comparison is not None:
        figures |= {
            "max_abs_error": comparison.max_abs_error,
            "max_rel_error": comparison.max_rel_error,
            "cosine": comparison.cosine,
        }
        if comparison.top1_agreement is not None:
            figures["top1_agreement"] = comparison.top1_agreement
    verdict = item.verdict
    if verdict.metric_bundle is not None and verdict.metric_original is not None:
        figures |= {"task_metric": verdict.metric_bundle, "task_metric_original": verdict.metric_original}
    if item.measurement is not None:
        figures["noise"] = item.measurement.noise
        if item.measurement.unevenness is not None:
            figures["unevenness"] = item.measurement.unevenness
    for index, point in enumerate(item.measurement.points if item.measurement is not None else ()):
        # The typical sizes have the plain names; the others name their sizes.
        suffix = "" if index == 0 else "".join(f"_{name}{size}" for name, size in point.sizes.items())
        for runner, measurement in point.runners.items():
            for name, value in measurement.latency_ms.model_dump(exclude_none=True).items():
                figure = "throughput" if name == "throughput" else f"latency_ms_{name}"
                figures[f"{runner}_{figure}{suffix}"] = value
            figures[f"{runner}_load_seconds"] = measurement.load_seconds
            figures[f"{runner}_peak_memory_bytes"] = measurement.peak_memory
            if measurement.firsts and index == 0:
                figures[f"{runner}_first_seconds"] = median(measurement.firsts)
            if measurement.joules:
                figures[f"{runner}_joules"] = median(measurement.joules)
        figures |= {f"ratio_{peer}{suffix}": value for peer, value in point.ratio.items()}
    for concurrency in item.measurement.concurrency if item.measurement is not None else ():
        for runner, latency in concurrency.runners.items():
            figures[f"{runner}_throughput_callers{concurrency.callers}"] = latency.throughput
            figures[f"{runner}_latency_ms_p50_callers{concurrency.callers}"] = latency.p50
    return figures


def make_verdict(item: TargetResult) -> TargetVerdict:
    """Return the verdict on one target as release.json and MLflow keep it."""
    choice = item.choice and narrow(release.Choice, item.choice)
    validation = dict(narrow(Validation, item.verdict))
    return TargetVerdict(**{**validation, "passed": not item.reasons, "reasons": item.reasons}, choice=choice)


@contextmanager
def _closing(registry: Registry, run_id: str) -> Iterator[None]:
    """End the run when the body ends: as FINISHED, FAILED or, on an interrupt, KILLED."""
    try:
        yield
    except BaseException as error:
        try:
            registry.finish_run(run_id, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        except RegistryError as second:
            error.add_note(str(second))
        raise
    registry.finish_run(run_id, "FINISHED")
