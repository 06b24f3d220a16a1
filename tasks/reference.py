"""Reference: run the originals, PyTorch and ONNX Runtime, on the held-out data, once for all targets."""

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tasks.export import ExportResult
from tasks.original import Original
from tasks.step import ChildStep, Job
from tvmflow import samples, usercode
from tvmflow.arrays import Array, NamedArrays
from tvmflow.errors import ExportError
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.processes.children import Emit
from tvmflow.source import load_module, run_module
from tvmflow.spec import Spec, TaskMetric
from tvmflow.usercode import describe
from tvmflow.workspace import Artifact, StepResult


class ReferenceJob(Job):
    """The original, the ONNX file, and the held-out data.

    `batch` is the model's fixed batch size, or None; `ranks` is the number of axes of each of `inputs`.
    """

    not_in_key: ClassVar[Mapping[str, Any]] = {"original": {"source"}}

    original: Original
    onnx: Artifact
    task: TaskMetric
    batch: int | None
    inputs: tuple[str, ...]
    ranks: tuple[int, ...]
    outputs: tuple[str, ...]

    @property
    def needs_torch(self) -> bool:
        """Whether the original is a PyTorch model."""
        return self.original.source.framework == "pytorch"

    @classmethod
    def of(cls, spec: Spec, original: Original, exported: ExportResult) -> "ReferenceJob":
        """Return the job that runs the originals of a release file's model.

        Raises ExportError for a release file without held-out data.
        """
        task = spec.validation.task
        if task is None:
            raise ExportError("the release file names no held-out data; add validate.task")
        first = exported.inputs[0].shape[0] if exported.inputs[0].shape else 1
        largest = spec.dimension(first).max if isinstance(first, str) else None
        if largest is not None:
            task = task.model_copy(update={"batch": min(task.batch, largest)})
        return cls(
            original=original,
            onnx=exported.onnx,
            task=task,
            batch=first if isinstance(first, int) else None,
            inputs=tuple(item.name for item in exported.inputs),
            ranks=tuple(len(item.shape) for item in exported.inputs),
            outputs=tuple(item.name for item in exported.outputs),
        )


class ReferenceResult(StepResult):
    """The held-out inputs with the original's outputs, both in chunks; ONNX Runtime's outputs; and the labels.

    `data` is the SHA-256 of the held-out inputs and labels, `count` the number of samples, `metric` the original's task
    metric on them. Where the model's batch size is fixed, the last chunk is filled up by repeating its last sample.
    If `one_by_one` is true, each chunk is a single sample, and its arrays have no axis of samples.
    """

    original: Artifact
    onnxruntime: Artifact
    labels: Artifact
    count: int
    one_by_one: bool
    metric: float
    data: str


def reference_work(job: ReferenceJob, emit: Emit) -> ReferenceResult:
    """Run the originals on the held-out data and score the task metric.

    The step calls this in a child process. Raises ExportError when the dataset or the metric fails, or the dataset does
    not fit the model.
    """
    workspace = job.workspace
    value = usercode.call(job.task.dataset, "dataset", ExportError, **job.task.arguments)
    inputs, labels = _dataset(value, job.task.dataset, job.inputs)
    count = len(labels)
    one_by_one = all(inputs[name].ndim == rank + 1 for name, rank in zip(job.inputs, job.ranks, strict=True))
    size = None if one_by_one else job.batch or job.task.batch
    chunks = split(inputs, count, size, fixed=job.batch is not None)
    session = open_session(workspace.path(job.onnx))
    module = load_module(job.original.source) if job.needs_torch else None
    original: list[tuple[NamedArrays, NamedArrays]] = []
    onnxruntime: list[tuple[NamedArrays, NamedArrays]] = []
    for index, chunk in enumerate(chunks):
        emit(index, len(chunks), "held-out data")
        try:
            outputs = run_session(session, chunk)
            expected = outputs if module is None else run_module(module, chunk, job.outputs)
        except ExportError as error:
            raise ExportError(f"dataset {job.task.dataset!r} does not fit the model: {error}") from error
        except Exception as error:
            raise ExportError(f"dataset {job.task.dataset!r} does not fit the model ({describe(error)})") from error
        original.append((chunk, expected))
        onnxruntime.append(({}, outputs))
    with workspace.scratch() as folder:
        samples.save(folder / "original.npz", original)
        samples.save(folder / "onnxruntime.npz", onnxruntime)
        np.save(folder / "labels.npy", labels)
        return ReferenceResult(
            original=workspace.keep(folder / "original.npz"),
            onnxruntime=workspace.keep(folder / "onnxruntime.npz"),
            labels=workspace.keep(folder / "labels.npy"),
            count=count,
            one_by_one=one_by_one,
            data=_hash_data(inputs, labels),
            metric=score(job.task, join([outputs for _, outputs in original], count, one_by_one=one_by_one), labels),
            sources=usercode.imported_sources(job.folder),
        )


reference = ChildStep("reference", ReferenceResult, reference_work)


def _dataset(value: object, name: str, names: tuple[str, ...]) -> tuple[NamedArrays, Array]:
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], dict):
        raise ExportError(f"dataset {name!r} must return (inputs by name, labels), not a {type(value).__name__}")
    if set(value[0]) != set(names):
        raise ExportError(
            f"dataset {name!r} gives the inputs {', '.join(value[0])}; the model takes {', '.join(names)}"
        )
    inputs, labels = {key: np.asarray(value[0][key]) for key in names}, np.asarray(value[1])
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


def split(inputs: NamedArrays, count: int, size: int | None, *, fixed: bool) -> list[NamedArrays]:
    """Return arrays of `count` samples in chunks of `size` along the first axis.

    With `fixed` the last chunk repeats its last sample until it has `size` samples; otherwise it may be shorter. A
    `size` of None gives each sample by itself, without the first axis.
    """
    if size is None:
        return [{name: array[index, ...] for name, array in inputs.items()} for index in range(count)]
    chunks = []
    for start in range(0, count, size):
        chunk = {name: array[start : start + size] for name, array in inputs.items()}
        short = size - min(size, count - start)
        if fixed and short:
            chunk = {name: np.concatenate([array, array[-1:].repeat(short, 0)]) for name, array in chunk.items()}
        chunks.append(chunk)
    return chunks


def join(chunks: list[NamedArrays], count: int, *, one_by_one: bool) -> NamedArrays:
    """Return the first `count` samples of all chunks by name, joined along the first axis, without filled-up ones.

    With `one_by_one`, each chunk is one sample without the first axis.
    """
    combine = np.stack if one_by_one else np.concatenate
    return {name: combine([chunk[name] for chunk in chunks])[:count] for name in chunks[0]}


def _hash_data(inputs: NamedArrays, labels: Array) -> str:
    digest = hashlib.sha256()
    for name, array in (*sorted(inputs.items()), ("", labels)):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def is_right(outputs: NamedArrays, labels: Array) -> npt.NDArray[np.bool_]:
    """Return for each label whether the argmax along the last axis of the first output matches it."""
    matches: npt.NDArray[np.bool_] = np.asarray(next(iter(outputs.values())).argmax(-1) == labels)
    return matches


def score(task: TaskMetric, outputs: NamedArrays, labels: Array) -> float:
    """Return the task metric of outputs on the held-out data. Raises ExportError when the user's own metric fails.

    `accuracy` is the share, 0 to 1, of labels that the argmax along the last axis of the first output matches.
    """
    if task.metric == "accuracy":
        return float(is_right(outputs, labels).mean())
    return float(usercode.call(task.metric, "metric", ExportError, outputs, labels))
