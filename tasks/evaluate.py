"""Evaluate: a retrained model, the challenger, beside what a channel holds, the champion, on the same held-out data."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tasks.step import Context, Job, step
from tasks.validate import ReferenceResult, join, score, split
from tvmflow import samples
from tvmflow.errors import BundleError, InputError
from tvmflow.fetch import cache_folder
from tvmflow.process import Emit
from tvmflow.samples import Array, Named
from tvmflow.spec import Retrain, TaskMetric
from tvmflow.store import channels, resolve
from tvmflow.usercode import imported_sources
from tvmflow.workspace import Outcome, StepResult, run_step

# Two decimal fractions may differ by less than either has digits.
_ROUNDING = 1e-9


class EvaluateJob(Job):
    """The champion's bundle, None where there is none, the held-out data with its metric, and the user's folder."""

    folder: Path
    champion: Path | None
    reference: ReferenceResult
    task: TaskMetric


class Scores(StepResult):
    """The champion's metric, None where there is none, and the SHA-256 of the held-out data, inputs and labels."""

    champion: float | None
    held_out: str


class Evaluation(StepResult):
    """The verdict on a retrained model: the metric of both sides on `samples` held-out samples, and why.

    `champion` is the release that `channel` holds, and None, as its metric, where it holds none. `held_out` is the
    SHA-256 of the data that both were judged by.
    """

    passed: bool
    reason: str
    metric: str
    challenger: float
    champion_metric: float | None
    champion: str | None
    channel: str
    min_gain: float
    samples: int
    held_out: str


def work(job: EvaluateJob, emit: Emit) -> Scores:
    """Run the champion as a device would and score it, in a process of its own."""
    workspace, known = job.workspace, job.reference
    inputs = join([given for given, _ in samples.load(workspace.path(known.original))], known.count)
    labels: Array = np.load(workspace.path(known.labels))
    metric = None
    if job.champion is not None:
        outputs = _run(job.champion, inputs, known.count, job.task.batch, emit)
        metric = score(job.task, join(outputs, known.count), labels)
    return Scores(champion=metric, held_out=_digest(inputs, labels), sources=imported_sources(job.folder))


@step
def evaluate(context: Context, held_out: Outcome[ReferenceResult], rule: Retrain) -> Outcome[Evaluation]:
    """Judge the retrained model, whose outputs on the held-out data are known, beside the champion's bundle.

    Being worse is a verdict, not an error. Raises BundleError when no bundle of the champion runs here, InputError when
    it takes other inputs than the held-out data has.
    """
    spec, known = context.spec, held_out.result
    task = spec.validation.task
    if task is None:
        raise InputError("the release file names no held-out data; give validate.task")
    pointer = channels.find(context.store, spec.name, rule.channel)
    version = None if pointer is None else pointer.version
    bundle = None
    if version is not None:
        found = resolve.fetch_bundles(context.store, spec.name, version, cache_folder(context.settings))
        bundle = next(found)
    job = EvaluateJob(home=context.workspace.folder, folder=spec.folder, champion=bundle, reference=known, task=task)

    def judged() -> Evaluation:
        try:
            scores = context.call("tasks.evaluate:work", job, Scores)
        except (BundleError, InputError) as error:
            raise type(error)(
                f"{spec.name} {version}, which {rule.channel} holds, cannot be run on the held-out data "
                f"({str(error).rstrip('.')}); release the model once by hand with `tvmflow release`"
            ) from error
        passed, reason = _judge(rule, task.metric, known, scores.champion, f"{spec.name} {version}")
        return Evaluation(
            passed=passed,
            reason=reason,
            metric=task.metric,
            challenger=known.metric,
            champion_metric=scores.champion,
            champion=version,
            channel=rule.channel,
            min_gain=rule.min_gain,
            samples=known.count,
            held_out=scores.held_out,
            sources=scores.sources,
        )

    reads: dict[str, Any] = {
        "reference": known.model_dump(mode="json", exclude={"sources"}),
        "champion": bundle and [version, bundle.name],
        "task": task,
        "rule": rule,
    }
    return run_step(context.workspace, "evaluate", reads, Evaluation, judged, folder=spec.folder)


def keep_verdict(
    context: Context,
    kind: str,
    verdict: str,
    document: Mapping[str, Any],
    metrics: Mapping[str, float],
    params: Mapping[str, object],
) -> str:
    """Keep a verdict for ever, in an MLflow run of its own with `verdict.json`; return the run's id.

    `kind` is what was judged, as `retrain`. Raises RegistryError.
    """
    registry, name = context.registry, context.spec.name
    tags = {
        **context.spec.registry.tags,
        "tvmflow.kind": kind,
        "tvmflow.name": name,
        "tvmflow.verdict": verdict,
        "tvmflow.reason": str(document["reason"]),
    }
    run_id = registry.start_run(f"{kind} {name}", params, tags)
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    registry.log_metrics(run_id, finite)
    with context.workspace.scratch() as folder:
        path = folder / "verdict.json"
        path.write_text(json.dumps(document, indent=2))
        registry.log_artifacts(run_id, {"verdict.json": path})
    registry.finish_run(run_id, "FINISHED")
    return run_id


def _judge(
    rule: Retrain, metric: str, known: ReferenceResult, champion: float | None, release: str
) -> tuple[bool, str]:
    """Whether the challenger is good enough, and why, with both figures."""
    told = f"the retrained model's {metric} on {known.count} held-out samples is {known.metric:.4f}"
    if math.isnan(known.metric):
        return False, f"{told}, which is no number"
    if champion is None:
        return True, f"{told}, and {rule.channel} holds nothing to compare with"
    told += f"; {release}, which {rule.channel} holds, has {champion:.4f}, and min_gain is {rule.min_gain:g}"
    return not known.metric < champion + rule.min_gain - _ROUNDING, told


def _run(bundle: Path, inputs: Named, count: int, batch: int, emit: Emit) -> list[Named]:
    """The outputs of a bundle on the held-out data, in chunks of as many samples as it takes."""
    from tvmflow import runtime

    with runtime.load(bundle) as model:
        shape = model.inputs[0].shape
        first = shape[0] if shape else 1
        fixed = isinstance(first, int)
        high = None if isinstance(first, int) else model.manifest.dimensions.get(first, (1, None))[1]
        size = first if isinstance(first, int) else min(batch, high or batch)
        chunks = split(inputs, count, size, fixed=fixed)
        outputs: list[Named] = []
        for index, chunk in enumerate(chunks):
            emit(index, len(chunks), "the champion on held-out data")
            outputs.append(model(**chunk))
        return outputs


def _digest(inputs: Named, labels: Array) -> str:
    digest = hashlib.sha256()
    for name, array in (*sorted(inputs.items()), ("labels", labels)):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
