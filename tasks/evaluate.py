"""Evaluate: compare a retrained model, the challenger, with the release that a channel holds, the champion."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from tasks.reference import ReferenceResult, join, score, split
from tasks.step import Job, Step, StepRunner
from tvmflow import samples
from tvmflow.arrays import Array, NamedArrays
from tvmflow.documents import verdict
from tvmflow.documents.encoding import Document, encode
from tvmflow.errors import BundleError, InputError
from tvmflow.processes.children import Emit
from tvmflow.registry import Registry
from tvmflow.spec import Retrain, Spec, TaskMetric
from tvmflow.store import ReleaseStore, channels, resolve
from tvmflow.tolerance import is_at_least
from tvmflow.usercode import imported_sources
from tvmflow.workspace import StepResult, Workspace


class EvaluateJob(Job):
    """The challenger's outputs on the held-out data, the rule, and the champion.

    `rule` is the section `retrain` of the release file. `champion` is the release's version and `bundle` the path of
    its bundle for this machine; both are None where the channel holds nothing.
    """

    not_in_key: ClassVar[Mapping[str, Any]] = {"bundle": True, "reference": {"sources"}}

    name: str
    reference: ReferenceResult
    task: TaskMetric
    rule: Retrain
    champion: str | None
    bundle: Path | None

    def cache_key(self) -> Mapping[str, Any]:
        """Return the fields, with the bundle's digest, which is its file name, in the place of its path."""
        return {**super().cache_key(), "bundle": self.bundle and self.bundle.name}

    @classmethod
    def of(
        cls, spec: Spec, rule: Retrain, reference: ReferenceResult, store: ReleaseStore, cache: Path
    ) -> "EvaluateJob":
        """Return the job that evaluates a retrained model; the champion's bundle is fetched into the folder `cache`.

        Raises InputError for a release file without held-out data, BundleError when no bundle of the champion runs
        here, StatementError for a champion without the signatures that this machine demands.
        """
        task = spec.validation.task
        if task is None:
            raise InputError("the release file names no held-out data; add validate.task")
        version = channels.find_checked(store, spec.name, rule.channel).version
        bundle = None if version is None else next(resolve.fetch_bundles(store, spec.name, version, cache))
        return cls(name=spec.name, reference=reference, task=task, rule=rule, champion=version, bundle=bundle)


class Scores(StepResult):
    """The champion's metric; None without a champion."""

    champion: float | None


class Evaluation(verdict.Evaluation, StepResult):
    """The verdict on a retrained model."""


def scores_work(job: EvaluateJob, emit: Emit) -> Scores:
    """Run the champion's bundle on the held-out data; return its metric, None without a champion.

    The step calls this in a child process. Raises BundleError when the bundle does not run here, InputError when it
    takes other inputs than the data has.
    """
    if job.bundle is None:
        return Scores(champion=None)
    workspace, reference = job.workspace, job.reference
    held_out = [sample for sample, _ in samples.load(workspace.path(reference.original))]
    inputs = join(held_out, reference.count, one_by_one=reference.one_by_one)
    labels: Array = np.load(workspace.path(reference.labels))
    outputs = _run(job.bundle, inputs, reference, job.task.batch, emit)
    metric = score(job.task, join(outputs, reference.count, one_by_one=reference.one_by_one), labels)
    return Scores(champion=metric, sources=imported_sources(job.folder))


def work(job: EvaluateJob, runner: StepRunner) -> Evaluation:
    """Compare the challenger's metric on the held-out data with the champion's, and return the verdict.

    The challenger passes when its metric is at least the champion's plus `min_gain` of the rule, or when the channel
    holds no release; a metric of NaN never passes. Raises BundleError when the champion does not run here, InputError
    when it takes other inputs than the held-out data has, StepError when its process crashes.
    """
    rule, champion = job.rule, f"{job.name} {job.champion}"
    try:
        scores = runner.call(scores_work, job, Scores)
    except (BundleError, InputError) as error:
        raise type(error)(
            f"{champion}, which {rule.channel} holds, cannot be run on the held-out data "
            f"({str(error).rstrip('.')}); release the model once by hand with `tvmflow release`"
        ) from error
    passed, reason = _judge(rule, job.task.metric, job.reference, scores.champion, champion)
    return Evaluation(
        passed=passed,
        reason=reason,
        metric=job.task.metric,
        challenger=job.reference.metric,
        champion_metric=scores.champion,
        champion=job.champion,
        channel=rule.channel,
        min_gain=rule.min_gain,
        samples=job.reference.count,
        held_out=job.reference.data,
        sources=scores.sources,
    )


evaluate = Step("evaluate", Evaluation, work)


def keep_verdict(
    registry: Registry,
    workspace: Workspace,
    spec: Spec,
    kind: Literal["retrain", "retune"],
    document: Document,
    *,
    outcome: str,
    reason: str,
    metrics: Mapping[str, float],
    params: Mapping[str, object],
    version: str | None = None,
    files: Mapping[str, Path] | None = None,
) -> str:
    """Write a verdict into a new MLflow run, as its artifact `verdict.json`, and return the run's id.

    The run is named after `kind` and the model of `spec`. `document` is the verdict, `outcome` says it in a word or
    two, and `reason` in a sentence. Metrics that are not finite are left out. `version` is the release that the verdict
    is about, None where it is about no release. `files` gives local files by their paths among the run's artifacts;
    None for none. `workspace` is used for a temporary file. Raises RegistryError when the registry fails.
    """
    name = spec.name
    tags = {
        **spec.registry.tags,
        "tvmflow.kind": kind,
        "tvmflow.name": name,
        "tvmflow.verdict": outcome,
        "tvmflow.reason": reason,
    }
    if version is not None:
        tags["tvmflow.version"] = version
    run_id = registry.start_run(f"{kind} {name}", params, tags)
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    registry.log_metrics(run_id, finite)
    with workspace.scratch() as folder:
        path = folder / "verdict.json"
        path.write_bytes(encode(document))
        registry.log_artifacts(run_id, {"verdict.json": path, **(files or {})})
    registry.finish_run(run_id, "FINISHED")
    return run_id


def _judge(
    rule: Retrain, metric: str, reference: ReferenceResult, champion: float | None, release: str
) -> tuple[bool, str]:
    """Return whether the challenger is good enough, and the reason with both figures."""
    reason = f"the retrained model's {metric} on {reference.count} held-out samples is {reference.metric:.4f}"
    if math.isnan(reference.metric):
        return False, f"{reason}, which is no number"
    if champion is None:
        return True, f"{reason}, and {rule.channel} holds nothing to compare with"
    reason += f"; {release}, which {rule.channel} holds, has {champion:.4f}, and min_gain is {rule.min_gain:g}"
    return math.isnan(champion) or is_at_least(reference.metric, champion + rule.min_gain), reason


def _run(bundle: Path, inputs: NamedArrays, reference: ReferenceResult, batch: int, emit: Emit) -> list[NamedArrays]:
    """Run a bundle on the held-out data, in chunks of as many samples as it takes; return the outputs of each chunk."""
    from tvmflow import runtime

    with runtime.load(bundle) as model:
        shape = model.inputs[0].shape
        first = shape[0] if shape else 1
        is_fixed = isinstance(first, int)
        largest = None if isinstance(first, int) else model.manifest.dimensions.get(first, (1, None))[1]
        size = first if isinstance(first, int) else min(batch, largest or batch)
        chunks = split(inputs, reference.count, None if reference.one_by_one else size, fixed=is_fixed)
        outputs: list[NamedArrays] = []
        for index, chunk in enumerate(chunks):
            emit(index, len(chunks), "the champion on held-out data")
            outputs.append(model(**chunk))
        return outputs
