"""Validate: compare the bundle's outputs with those of PyTorch and ONNX Runtime, on samples and held-out data."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasks.export import ExportResult
from tasks.package import PackageResult
from tasks.reference import ReferenceResult, is_right, join, score
from tasks.rounding import Rounding
from tasks.step import Job, Step, StepRunner, TargetJob
from tvmflow import samples
from tvmflow.arrays import Array, NamedArrays
from tvmflow.documents.figures import Algorithm, Answers, Deviation, Validation
from tvmflow.hardware.target import Precision, Target, host, missing_features, needed_features
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.onnx_model.ties import Ties
from tvmflow.processes.children import Emit
from tvmflow.samples import constant_outputs
from tvmflow.spec import Spec, TaskMetric, Validate
from tvmflow.tolerance import Bounds, are_close, describe_bounds, is_at_least, largest_error
from tvmflow.workspace import Artifact, StepResult


class DeviceJob(Job):
    """A bundle and the inputs to run it on; `held_out` is None without held-out data."""

    bundle: Artifact
    samples: Artifact
    held_out: Artifact | None


class DeviceResult(StepResult):
    """The bundle's outputs on the samples and on the held-out data; the latter are None without such data."""

    samples: Artifact
    held_out: Artifact | None


class JudgeJob(Job):
    """The bundle's and the originals' outputs on samples and held-out data, and in `bounds` the allowed differences.

    `reference` is None without held-out data. `has_bounds` is true where the user gave the bounds.
    """

    exported: ExportResult
    device: DeviceResult
    reference: ReferenceResult | None
    bounds: Validate
    has_bounds: bool
    precision: Precision
    algorithms: dict[str, Algorithm]
    target: str


class Verdict(Validation, StepResult):
    """The outcome of validating one bundle."""


def device_work(job: DeviceJob, emit: Emit) -> DeviceResult:
    """Run the bundle on the samples and the held-out data by the runtime alone, as a device would; return its outputs.

    The step calls this in a child process. Raises BundleError when the bundle does not run.
    """
    from tvmflow import runtime

    workspace = job.workspace
    with runtime.load(workspace.path(job.bundle)) as model, workspace.scratch() as folder:

        def run(artifact: Artifact, name: str) -> Artifact:
            pairs = samples.load(workspace.path(artifact))
            outputs: list[tuple[NamedArrays, NamedArrays]] = []
            for index, (inputs, _) in enumerate(pairs):
                emit(index, len(pairs), name)
                outputs.append(({}, model(**inputs)))
            samples.save(folder / f"{name}.npz", outputs)
            return workspace.keep(folder / f"{name}.npz")

        return DeviceResult(
            samples=run(job.samples, "samples"),
            held_out=run(job.held_out, "held-out") if job.held_out is not None else None,
        )


def judge_work(job: JudgeJob, emit: Emit) -> Verdict:
    """Compare the bundle's outputs with the originals' and score the task metric.

    The step calls this in a child process. Raises ExportError when the user's own metric fails.
    """
    workspace, bounds, reference = job.workspace, job.bounds, job.reference
    task = bounds.task
    originals = samples.load(workspace.path(job.exported.samples))
    # Of a model that is an ONNX file, ONNX Runtime computed the original's outputs.
    session = open_session(workspace.path(job.exported.onnx)) if job.exported.max_abs_error is not None else None
    ties = Ties(workspace.path(job.exported.onnx))
    errors = Bounds(bounds.rtol, bounds.atol, bounds.max_relative_error)
    pairs, peers = [], []
    for (inputs, expected), outputs in zip(originals, _outputs(job, job.device.samples), strict=True):
        pairs.append((expected, ties.settle(inputs, expected, outputs, errors)))
        if session is not None:
            peer = run_session(session, inputs)
            peers.append((peer, ties.settle(inputs, peer, outputs, errors)))
    metric: float | None = None
    answers: Answers | None = None
    if reference is not None and job.device.held_out is not None and task is not None:
        held_out = _outputs(job, job.device.held_out)
        pairs.append(_pair_held_out(job, reference, reference.original, held_out, ties, errors))
        if session is not None:
            peers.append(_pair_held_out(job, reference, reference.onnxruntime, held_out, ties, errors))
        outputs = join(held_out, reference.count, one_by_one=reference.one_by_one)
        labels = np.load(workspace.path(reference.labels))
        metric = score(task, outputs, labels)
        if task.metric == "accuracy":
            answers = Answers.of(is_right(outputs, labels), reference.data)
    peers = pairs if session is None else peers
    comparisons = [] if session is None else [_compare("pytorch", pairs)]
    comparisons.append(_compare("onnxruntime", peers))
    reasons = _reasons(bounds, comparisons[0], pairs)
    notes = _notes([expected for expected, _ in pairs])
    if reasons:
        # Outputs for held-out data follow those for the samples.
        theirs, ours = ([peer[place] for peer in peers[: len(originals)]] for place in range(2))
        rounding = Rounding(workspace.path(job.exported.onnx), [inputs for inputs, _ in originals], theirs)
        justification = None
        if _may_be_right(job, comparisons[0], pairs, theirs, errors):
            justification = rounding.justify(ours, errors)
        if justification is not None:
            reasons, notes = [], (*notes, justification)
        else:
            cause = rounding.explain(comparisons[-1].max_abs_error)
            reasons = [f"{reason}{cause}" for reason in reasons]
    if reference is not None and metric is not None and task is not None:
        reasons += _metric_reasons(task, metric, reference.metric)
    precision = "" if job.precision == "fp32" else f" in precision {job.precision}"
    return Verdict(
        passed=not reasons,
        verified=True,
        reasons=tuple(f"target {job.target!r}{precision}: {reason}" for reason in reasons),
        notes=notes,
        precision=job.precision,
        algorithms=job.algorithms,
        max_relative_error=bounds.max_relative_error,
        comparisons=tuple(comparisons),
        metric_name=task.metric if task is not None else None,
        metric_original=reference.metric if reference is not None else None,
        metric_bundle=metric,
        answers=answers,
    )


def _may_be_right(
    job: JudgeJob,
    comparison: Deviation,
    pairs: list[tuple[NamedArrays, NamedArrays]],
    theirs: Sequence[NamedArrays],
    errors: Bounds,
) -> bool:
    """Whether outputs out of bounds may still be right: the bounds are the defaults, and classes are the original's.

    There is no held-out data, and `theirs`, ONNX Runtime's outputs, are within the bounds of a PyTorch original's.
    """
    return (
        not job.has_bounds
        and job.bounds.max_relative_error is None
        and job.reference is None
        and not _disagreement(job.bounds, comparison)
        and all(
            errors.is_met(expected[name], outputs[name])
            for (expected, _), outputs in zip(pairs, theirs, strict=True)
            for name in expected
        )
    )


def _outputs(job: JudgeJob, artifact: Artifact) -> list[NamedArrays]:
    """The outputs in a file of samples."""
    return [outputs for _, outputs in samples.load(job.workspace.path(artifact))]


def _pair_held_out(
    job: JudgeJob,
    reference: ReferenceResult,
    artifact: Artifact,
    held_out: list[NamedArrays],
    ties: Ties,
    errors: Bounds,
) -> tuple[NamedArrays, NamedArrays]:
    """The outputs on all held-out data: an original's, which `artifact` has, and the bundle's, which are `held_out`."""
    chunks = [inputs for inputs, _ in samples.load(job.workspace.path(reference.original))]
    expected = _outputs(job, artifact)
    settled = [ties.settle(*arrays, errors) for arrays in zip(chunks, expected, held_out, strict=True)]
    first, second = (join(items, reference.count, one_by_one=reference.one_by_one) for items in (expected, settled))
    return first, second


class ValidateJob(TargetJob):
    """The exported model, the bundle, the bounds, and the originals' outputs on the held-out data, if there are any.

    `bounds` are the allowed differences; `has_bounds` is true where the user gave them. With `allow_unverified`, a
    bundle that this machine cannot run passes. `refusal` is the sentence that says why this machine cannot run the
    bundle; None when it can.
    """

    exported: ExportResult
    packaged: PackageResult
    reference: ReferenceResult | None
    bounds: Validate
    has_bounds: bool
    precision: Precision
    allow_unverified: bool
    refusal: str | None

    def cache_key(self) -> Mapping[str, Any]:
        """Return the digests of the bundle, the ONNX file and the samples, and the fields that decide the verdict.

        These are `bounds`, `has_bounds`, `precision`, `allow_unverified`, `refusal` and `reference`, the last without
        the digests of the user's modules: a changed module counts only if it changes the outputs on the held-out data.
        """
        fields = {"bounds", "has_bounds", "precision", "allow_unverified", "refusal", "reference"}
        return {
            **self.model_dump(mode="json", include=fields, exclude={"reference": {"sources"}}),
            "bundle": self.packaged.bundle.sha256,
            "onnx": self.exported.onnx.sha256,
            "samples": self.exported.samples.sha256,
        }

    @classmethod
    def of(
        cls,
        spec: Spec,
        exported: ExportResult,
        packaged: PackageResult,
        reference: ReferenceResult | None,
        target: Target,
    ) -> "ValidateJob":
        """Return the job that validates one bundle of a release file's model.

        `reference` is None without held-out data.
        """
        return cls(
            exported=exported,
            packaged=packaged,
            reference=reference,
            # How a sample is shown changes no verdict.
            bounds=spec.bounds(rounds_activations=exported.rounds_activations).model_copy(update={"show": None}),
            has_bounds=spec.validation.has_bounds,
            precision=spec.build.precision,
            allow_unverified=spec.gates.unverified_targets == "allow",
            refusal=why_not_here(target, spec.build.precision),
            target=target,
        )


def validate_work(job: ValidateJob, runner: StepRunner) -> Verdict:
    """Run one bundle as a device would, compare its outputs with the originals', and return the verdict.

    Outputs out of bounds give a verdict that did not pass. A bundle that this machine cannot run passes unverified if
    the release file allows it. Raises BundleError when the bundle cannot be loaded, StepError when it crashes.
    """
    if job.refusal is not None:
        return Verdict(
            passed=job.allow_unverified,
            verified=False,
            reasons=() if job.allow_unverified else (job.refusal,),
            precision=job.precision,
            algorithms=job.packaged.algorithms,
            comparisons=(),
            metric_name=None,
            metric_original=None,
            metric_bundle=None,
        )
    held_out = job.reference.original if job.reference is not None else None
    device = DeviceJob(bundle=job.packaged.bundle, samples=job.exported.samples, held_out=held_out)
    judge = JudgeJob(
        exported=job.exported,
        device=runner.call(device_work, device, DeviceResult),
        reference=job.reference,
        bounds=job.bounds,
        has_bounds=job.has_bounds,
        precision=job.precision,
        algorithms=job.packaged.algorithms,
        target=job.target.name,
    )
    return runner.call(judge_work, judge, Verdict)


validate = Step("validate", Verdict, validate_work)


def why_not_here(target: Target, precision: Precision) -> str | None:
    """Return the sentence that says why this machine cannot run a target's bundles of a precision; None when it can."""
    machine = host()
    if target.arch == "cuda":
        return None if Path("/dev/nvidia0").exists() else f"target {target.name!r}: this machine has no NVIDIA GPU"
    if target.arch != machine.arch:
        return f"target {target.name!r} is {target.arch}, this machine is {machine.arch}: not verified"
    missing = missing_features(needed_features(target, precision))
    return (
        f"target {target.name!r} needs {', '.join(missing)}, which this machine lacks: not verified"
        if missing
        else None
    )


def _compare(against: Literal["pytorch", "onnxruntime"], pairs: list[tuple[NamedArrays, NamedArrays]]) -> Deviation:
    absolute, relative, cosine = 0.0, 0.0, 1.0
    agreements = comparisons = 0
    for expected, outputs in pairs:
        for name, array in expected.items():
            theirs, ours = array.astype(np.float64), outputs[name].astype(np.float64)
            error = largest_error(theirs, ours)
            if theirs.shape != ours.shape:
                return Deviation(
                    against=against,
                    max_abs_error=error,
                    max_rel_error=error,
                    cosine=0.0,
                    top1_agreement=0.0,
                    samples=len(pairs),
                )
            absolute = max(absolute, error)
            # Relative to the output's own scale: element by element, values near zero would decide alone.
            scale = float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0))
            relative = max(relative, error / scale if scale else 0.0)
            cosine = min(cosine, _cosine(theirs, ours))
        theirs, ours = next(iter(expected.values())), next(iter(outputs.values()))
        if theirs.ndim >= 1 and theirs.shape == ours.shape and theirs.shape[-1] > 1:
            same = theirs.argmax(-1) == ours.argmax(-1)
            agreements, comparisons = agreements + int(same.sum()), comparisons + int(same.size)
    return Deviation(
        against=against,
        max_abs_error=absolute,
        max_rel_error=relative,
        cosine=cosine,
        top1_agreement=agreements / comparisons if comparisons else None,
        samples=len(pairs),
    )


def _cosine(theirs: Array, ours: Array) -> float:
    norms = float(np.linalg.norm(theirs) * np.linalg.norm(ours))
    if norms == 0.0 or not np.isfinite(norms):
        return 1.0 if np.array_equal(theirs, ours, equal_nan=True) else 0.0
    return min(1.0, float(np.vdot(theirs, ours)) / norms)


def _reasons(bounds: Validate, comparison: Deviation, pairs: list[tuple[NamedArrays, NamedArrays]]) -> list[str]:
    """Return the reasons why the outputs are out of bounds; empty when they are within."""
    for expected, outputs in pairs:
        for name, theirs in expected.items():
            if outputs[name].shape != theirs.shape:
                shapes = " and ".join(str(list(array.shape)) for array in (outputs[name], theirs))
                return [f"output {name!r} and the original's have different shapes, {shapes}"]
    reasons = []
    if bounds.max_relative_error is not None:
        if not comparison.max_rel_error <= bounds.max_relative_error:
            reasons.append(
                f"an output differs from the original by up to {comparison.max_rel_error:.3g} of its largest value, "
                f"beyond max_relative_error {bounds.max_relative_error:g}"
            )
        return reasons + _disagreement(bounds, comparison)
    for name in pairs[0][0]:
        is_close = all(
            are_close(outputs[name], expected[name], rtol=bounds.rtol, atol=bounds.atol) for expected, outputs in pairs
        )
        if not is_close:
            worst, theirs = max(
                ((largest_error(expected[name], outputs[name]), expected[name]) for expected, outputs in pairs),
                key=itemgetter(0),
            )
            reasons.append(
                f"output {name!r} differs from the original by up to {worst:.3g}, beyond "
                f"{describe_bounds(theirs, bounds.rtol, bounds.atol)}"
            )
    return reasons + _disagreement(bounds, comparison)


def _metric_reasons(task: TaskMetric, metric: float, original: float) -> list[str]:
    """Return a sentence where the bundle's metric lies too far below the original's; none where that is no number."""
    if math.isnan(original) or is_at_least(metric, original - task.drop):
        return []
    return [f"{task.metric} is {metric:.4f}, the original's is {original:.4f}, the allowed drop is {task.drop:g}"]


def _notes(originals: Sequence[NamedArrays]) -> tuple[str, ...]:
    """Return a sentence where each output of the original is the same number in all samples and elements."""
    values = constant_outputs(originals)
    if not values:
        return ()
    return (
        f"the comparison proves little: every output is the same number in all samples ({', '.join(values.values())}); "
        "in a release file, give inputs.samples for which outputs differ",
    )


def _disagreement(bounds: Validate, comparison: Deviation) -> list[str]:
    agreement = comparison.top1_agreement
    if bounds.top1_agreement is not None and agreement is not None and agreement < bounds.top1_agreement:
        return [f"top-1 agreement is {agreement:.4f}, {bounds.top1_agreement:g} is asked for"]
    return []
