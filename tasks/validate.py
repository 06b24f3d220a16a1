"""Validate: PyTorch, ONNX Runtime and the bundle side by side, on the samples and the held-out data."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasks.build import Algorithm
from tasks.export import ExportResult, find_source
from tasks.package import PackageResult
from tasks.step import Context, Job, step
from tasks.train import TrainResult
from tvmflow import samples, usercode
from tvmflow.errors import ExportError
from tvmflow.process import Emit
from tvmflow.samples import Array, Named
from tvmflow.source import Source, load_module, open_session, run_module, run_session
from tvmflow.spec import TaskMetric, Validate
from tvmflow.target import Precision, Target, host, missing_features, needed_features
from tvmflow.usercode import describe
from tvmflow.workspace import Artifact, Outcome, Record, StepResult, run_step


class ReferenceJob(Job):
    """The original, the ONNX file, the held-out data, and the folder of the release file."""

    folder: Path
    source: Source
    onnx: Artifact
    task: TaskMetric
    batch: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class ReferenceResult(StepResult):
    """The held-out inputs in chunks with the original's outputs, what ONNX Runtime says, and the labels.

    `count` is the number of held-out samples; chunks have a fixed number of samples where the model's batch is fixed,
    the last one filled up by repeating its last sample.
    """

    original: Artifact
    onnxruntime: Artifact
    labels: Artifact
    count: int
    metric: float


class DeviceJob(Job):
    """A bundle and the inputs to run it on."""

    bundle: Artifact
    samples: Artifact
    held_out: Artifact | None


class DeviceResult(StepResult):
    """The bundle's outputs on the samples and on the held-out data."""

    samples: Artifact
    held_out: Artifact | None


class JudgeJob(Job):
    """All outputs on one bundle's samples and held-out data, and the bounds."""

    exported: ExportResult
    device: DeviceResult
    reference: ReferenceResult | None
    bounds: Validate
    precision: Precision
    algorithms: dict[str, Algorithm]
    target: str


class Comparison(Record):
    """How far outputs are from the original's: worst absolute and relative error, least cosine, top-1 agreement."""

    against: Literal["pytorch", "onnxruntime"]
    max_abs_error: float
    max_rel_error: float
    cosine: float
    top1_agreement: float | None
    samples: int


class Verdict(StepResult):
    """What validation said of one bundle; `reasons` are empty when it passed.

    `algorithms` are those of fewer multiplications, by name; what they cost of accuracy is in the comparisons.
    `precision` is what the bundle's products compute in, `max_relative_error` the bound that was in the place of
    tolerances for each element. `verified` is False for a target that this machine cannot run: nothing was compared
    then.
    """

    passed: bool
    verified: bool
    reasons: tuple[str, ...]
    precision: Precision = "fp32"
    algorithms: dict[str, Algorithm]
    max_relative_error: float | None = None
    comparisons: tuple[Comparison, ...]
    metric_name: str | None
    metric_original: float | None
    metric_bundle: float | None

    @property
    def original(self) -> Comparison | None:
        """The comparison with the model's own framework."""
        return self.comparisons[0] if self.comparisons else None


def reference_work(job: ReferenceJob, emit: Emit) -> ReferenceResult:
    """Run the originals on the held-out data, in a process of its own."""
    workspace = job.workspace
    returned = usercode.call(job.task.dataset, "dataset", ExportError, **job.task.arguments)
    inputs, labels = _dataset(returned, job.task.dataset, job.inputs)
    count = len(labels)
    chunks = split(inputs, count, job.batch or job.task.batch, fixed=job.batch is not None)
    session = open_session(workspace.path(job.onnx))
    module = load_module(job.source) if job.source.framework == "pytorch" else None
    original: list[tuple[Named, Named]] = []
    onnxruntime: list[tuple[Named, Named]] = []
    for index, chunk in enumerate(chunks):
        emit(index, len(chunks), "held-out data")
        try:
            computed = run_session(session, chunk)
            expected = computed if module is None else run_module(module, chunk, job.outputs)
        except ExportError as error:
            raise ExportError(f"dataset {job.task.dataset!r} does not fit the model: {error}") from error
        except Exception as error:
            raise ExportError(f"dataset {job.task.dataset!r} does not fit the model ({describe(error)})") from error
        original.append((chunk, expected))
        onnxruntime.append(({}, computed))
    with workspace.scratch() as folder:
        samples.save(folder / "original.npz", original)
        samples.save(folder / "onnxruntime.npz", onnxruntime)
        np.save(folder / "labels.npy", labels)
        return ReferenceResult(
            original=workspace.keep(folder / "original.npz"),
            onnxruntime=workspace.keep(folder / "onnxruntime.npz"),
            labels=workspace.keep(folder / "labels.npy"),
            count=count,
            metric=score(job.task, join([outputs for _, outputs in original], count), labels),
            sources=usercode.imported_sources(job.folder),
        )


def device_work(job: DeviceJob, emit: Emit) -> DeviceResult:
    """Run the bundle as a device would, in a process of its own."""
    from tvmflow import runtime

    workspace = job.workspace
    with runtime.load(workspace.path(job.bundle)) as model, workspace.scratch() as folder:

        def run(kept: Artifact, name: str) -> Artifact:
            pairs = samples.load(workspace.path(kept))
            outputs: list[tuple[Named, Named]] = []
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
    """Compare the bundle's outputs with the originals' and score the task metric, in a process of its own."""
    workspace, bounds, known = job.workspace, job.bounds, job.reference
    task = bounds.task

    def outputs_of(kept: Artifact) -> list[Named]:
        return [outputs for _, outputs in samples.load(workspace.path(kept))]

    given = samples.load(workspace.path(job.exported.samples))
    computed = outputs_of(job.device.samples)
    session = open_session(workspace.path(job.exported.onnx))
    pairs = [(expected, outputs) for (_, expected), outputs in zip(given, computed, strict=True)]
    peers = [(run_session(session, inputs), outputs) for (inputs, _), outputs in zip(given, computed, strict=True)]
    metric: float | None = None
    if known is not None and job.device.held_out is not None and task is not None:
        ours = join(outputs_of(job.device.held_out), known.count)
        pairs.append((join(outputs_of(known.original), known.count), ours))
        peers.append((join(outputs_of(known.onnxruntime), known.count), ours))
        metric = score(task, ours, np.load(workspace.path(known.labels)))
    comparisons = [_compare("pytorch", pairs)] if job.exported.max_abs_error is not None else []
    comparisons.append(_compare("onnxruntime", peers))
    reasons = _reasons(bounds, comparisons[0], pairs)
    if known is not None and metric is not None and task is not None and metric < known.metric - task.drop:
        reasons.append(
            f"{task.metric} is {metric:.4f}, the original's is {known.metric:.4f}, the allowed drop is {task.drop:g}"
        )
    precision = "" if job.precision == "fp32" else f" in precision {job.precision}"
    return Verdict(
        passed=not reasons,
        verified=True,
        reasons=tuple(f"target {job.target!r}{precision}: {reason}" for reason in reasons),
        precision=job.precision,
        algorithms=job.algorithms,
        max_relative_error=bounds.max_relative_error,
        comparisons=tuple(comparisons),
        metric_name=task.metric if task is not None else None,
        metric_original=known.metric if known is not None else None,
        metric_bundle=metric,
    )


@step
def reference(
    context: Context, exported: Outcome[ExportResult], trained: Outcome[TrainResult] | None = None
) -> Outcome[ReferenceResult]:
    """Run PyTorch and ONNX Runtime on the held-out data once, for all targets.

    Raises ExportError when the dataset fails or does not fit the model.
    """
    task = context.spec.validation.task
    if task is None:
        raise ExportError("the release file names no dataset")
    result = exported.result
    source, identity = find_source(context, trained)
    first = result.inputs[0].shape[0] if result.inputs[0].shape else 1
    high = context.spec.dimension(first).max if isinstance(first, str) else None
    if high is not None:
        task = task.model_copy(update={"batch": min(task.batch, high)})
    job = ReferenceJob(
        home=context.workspace.folder,
        folder=context.spec.folder,
        source=source,
        onnx=result.onnx,
        task=task,
        batch=first if isinstance(first, int) else None,
        inputs=tuple(item.name for item in result.inputs),
        outputs=tuple(item.name for item in result.outputs),
    )
    reads = {**job.model_dump(mode="json", exclude={"home", "folder", "source"}), "source": identity}
    return run_step(
        context.workspace,
        "reference",
        reads,
        ReferenceResult,
        lambda: context.call(
            "tasks.validate:reference_work", job, ReferenceResult, torch=source.framework == "pytorch"
        ),
        folder=context.spec.folder,
    )


@step
def validate(
    context: Context,
    exported: Outcome[ExportResult],
    packaged: Outcome[PackageResult],
    target: Target,
    held_out: Outcome[ReferenceResult] | None = None,
) -> Outcome[Verdict]:
    """Run one bundle as a device would and compare it with the originals.

    Being out of bounds is a verdict, not an error; a bundle that cannot be loaded or crashes raises.
    """
    spec, workspace = context.spec, context.workspace
    known = held_out.result if held_out is not None else None
    job = DeviceJob(
        home=workspace.folder,
        bundle=packaged.result.bundle,
        samples=exported.result.samples,
        held_out=known.original if known is not None else None,
    )

    def work() -> Verdict:
        reason = unable(target, spec.build.precision)
        if reason is not None:
            allowed = spec.gates.unverified_targets == "allow"
            return Verdict(
                passed=allowed,
                verified=False,
                reasons=() if allowed else (reason,),
                precision=spec.build.precision,
                algorithms=packaged.result.algorithms,
                comparisons=(),
                metric_name=None,
                metric_original=None,
                metric_bundle=None,
            )
        made = context.call("tasks.validate:device_work", job, DeviceResult, target=target.name)
        judge = JudgeJob(
            home=workspace.folder,
            exported=exported.result,
            device=made,
            reference=known,
            bounds=spec.bounds,
            precision=spec.build.precision,
            algorithms=packaged.result.algorithms,
            target=target.name,
        )
        return context.call("tasks.validate:judge_work", judge, Verdict, target=target.name)

    reads: dict[str, Any] = {
        **job.model_dump(mode="json", exclude={"home"}),
        "onnx": exported.result.onnx,
        "validate": spec.bounds,
        "precision": spec.build.precision,
        "gates": spec.gates.unverified_targets,
        "reference": known and known.model_dump(mode="json", exclude={"sources"}),
        "runnable": unable(target, spec.build.precision),
    }
    return run_step(workspace, "validate", reads, Verdict, work, target=target.name)


def unable(target: Target, precision: Precision) -> str | None:
    """Why this machine cannot run, and so not verify, the target's bundles of a precision; None when it can."""
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


def _compare(against: Literal["pytorch", "onnxruntime"], pairs: list[tuple[Named, Named]]) -> Comparison:
    absolute, relative, cosine = 0.0, 0.0, 1.0
    agreeing = compared = 0
    for expected, outputs in pairs:
        for name, array in expected.items():
            wanted, got = array.astype(np.float64), outputs[name].astype(np.float64)
            error = _largest_error(wanted, got)
            if wanted.shape != got.shape:
                return Comparison(
                    against=against,
                    max_abs_error=error,
                    max_rel_error=error,
                    cosine=0.0,
                    top1_agreement=0.0,
                    samples=len(pairs),
                )
            absolute = max(absolute, error)
            # Relative to the output's own scale: element by element, values near zero would decide alone.
            scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
            relative = max(relative, error / scale if scale else 0.0)
            cosine = min(cosine, _cosine(wanted, got))
        wanted, got = next(iter(expected.values())), next(iter(outputs.values()))
        if wanted.ndim >= 1 and wanted.shape == got.shape and wanted.shape[-1] > 1:
            same = wanted.argmax(-1) == got.argmax(-1)
            agreeing, compared = agreeing + int(same.sum()), compared + int(same.size)
    return Comparison(
        against=against,
        max_abs_error=absolute,
        max_rel_error=relative,
        cosine=cosine,
        top1_agreement=agreeing / compared if compared else None,
        samples=len(pairs),
    )


def _largest_error(wanted: Array, got: Array) -> float:
    """The largest absolute difference; infinite for another shape, and where only one side is NaN or infinite."""
    if wanted.shape != got.shape:
        return float("inf")
    same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(got - wanted))
    return float(np.where(np.isnan(error), np.inf, error).max(initial=0.0))


def _cosine(wanted: Array, got: Array) -> float:
    norms = float(np.linalg.norm(wanted) * np.linalg.norm(got))
    if norms == 0.0 or not np.isfinite(norms):
        return 1.0 if np.array_equal(wanted, got, equal_nan=True) else 0.0
    return min(1.0, float(np.vdot(wanted, got)) / norms)


def _reasons(bounds: Validate, compared: Comparison, pairs: list[tuple[Named, Named]]) -> list[str]:
    """Why the outputs are out of bounds; none when they are within."""
    reasons = []
    if bounds.max_relative_error is not None:
        if not compared.max_rel_error <= bounds.max_relative_error:
            reasons.append(
                f"an output differs from the original by up to {compared.max_rel_error:.3g} of its largest value, "
                f"beyond max_relative_error {bounds.max_relative_error:g}"
            )
        return reasons + _disagreement(bounds, compared)
    for name in pairs[0][0]:
        close = all(
            expected[name].shape == outputs[name].shape
            and np.allclose(outputs[name], expected[name], rtol=bounds.rtol, atol=bounds.atol, equal_nan=True)
            for expected, outputs in pairs
        )
        if not close:
            worst = max(
                _largest_error(expected[name].astype(np.float64), outputs[name].astype(np.float64))
                for expected, outputs in pairs
            )
            reasons.append(
                f"output {name!r} differs from the original by up to {worst:.3g}, beyond "
                f"rtol {bounds.rtol:g} and atol {bounds.atol:g}"
            )
    return reasons + _disagreement(bounds, compared)


def _disagreement(bounds: Validate, compared: Comparison) -> list[str]:
    agreement = compared.top1_agreement
    if bounds.top1_agreement is not None and agreement is not None and agreement < bounds.top1_agreement:
        return [f"top-1 agreement is {agreement:.4f}, {bounds.top1_agreement:g} is asked for"]
    return []


def _dataset(returned: object, name: str, names: tuple[str, ...]) -> tuple[Named, Array]:
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], dict):
        raise ExportError(f"dataset {name!r} must return (inputs by name, labels), not a {type(returned).__name__}")
    if set(returned[0]) != set(names):
        raise ExportError(
            f"dataset {name!r} gives the inputs {', '.join(returned[0])}; the model takes {', '.join(names)}"
        )
    inputs, labels = {key: np.asarray(returned[0][key]) for key in names}, np.asarray(returned[1])
    for key, array in (*inputs.items(), ("labels", labels)):
        if not array.shape:
            raise ExportError(f"dataset {name!r}: {key!r} is a single number; the first axis must be the sample")
    for key, array in inputs.items():
        if len(array) != len(labels):
            raise ExportError(
                f"dataset {name!r}: input {key!r} has {len(array)} samples, there are {len(labels)} labels"
            )
    if not len(labels):
        raise ExportError(f"dataset {name!r} is empty")
    return inputs, labels


def split(inputs: Named, count: int, size: int, *, fixed: bool) -> list[Named]:
    """Arrays of `count` samples in chunks of `size`; with `fixed` the last chunk repeats its last sample to be full."""
    chunks = []
    for start in range(0, count, size):
        chunk = {name: array[start : start + size] for name, array in inputs.items()}
        short = size - min(size, count - start)
        if fixed and short:
            chunk = {name: np.concatenate([array, array[-1:].repeat(short, 0)]) for name, array in chunk.items()}
        chunks.append(chunk)
    return chunks


def join(outputs: list[Named], count: int) -> Named:
    """The outputs of all chunks by name, without those of what filled the last one up."""
    return {name: np.concatenate([item[name] for item in outputs])[:count] for name in outputs[0]}


def score(task: TaskMetric, outputs: Named, labels: Array) -> float:
    """The task metric of outputs on the held-out data. Raises ExportError when the user's metric fails."""
    if task.metric == "accuracy":
        return float((next(iter(outputs.values())).argmax(-1) == labels).mean())
    return float(usercode.call(task.metric, "metric", ExportError, outputs, labels))
