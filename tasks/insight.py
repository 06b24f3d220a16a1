"""Insight: where a bundle spends its time, and the samples on which it differs most from the original."""

import base64
import io
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from tasks.export import ExportResult
from tasks.layers import find_layers, measure_peaks
from tasks.reference import ReferenceResult
from tasks.step import ChildStep, TargetJob
from tvmflow import samples
from tvmflow.arrays import Array, NamedArrays
from tvmflow.bundle import read_manifest
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.external_data import load
from tvmflow.processes.children import Emit
from tvmflow.report import insight as report
from tvmflow.report.insight import Drawing, FunctionTime, SampleInsight
from tvmflow.tolerance import largest_error
from tvmflow.workspace import Artifact, StepResult

# How often functions are timed; how many of the slowest and of the worst samples are kept; how long samples are run.
_REPEATS, _FUNCTIONS, _SAMPLES = 10, 40, 10
_SECONDS = 60.0
# The largest side of a picture, the fewest values of a waveform and the points that it is drawn with.
_LARGEST_SIDE, _LEAST_WAVE, _WAVE_POINTS = 128, 64, 160
_SHOWN_VALUES = 24


class InsightJob(TargetJob):
    """A bundle that runs here, the samples, and the held-out data with the original's outputs, if there are any.

    `held_out` and `labels` are None, and `count`, the number of held-out samples, is 0 without such data. The held-out
    data is a file of chunks. If `one_by_one` is true, each chunk is a single sample, and its arrays have no axis of
    samples. The bundle runs on `threads` threads, those of its measurement, and on its own number where that is lower;
    None stands for its own number.
    """

    bundle: Artifact
    onnx: Artifact
    samples: Artifact
    held_out: Artifact | None
    labels: Artifact | None
    count: int
    one_by_one: bool
    threads: int | None

    @property
    def needs_compiler(self) -> bool:
        """True: the step reads the names of the functions from the bundle's IR, which only the compiler can load."""
        return True

    @property
    def data(self) -> Artifact:
        """The data that is looked at: the held-out data, or the samples without such data."""
        return self.samples if self.held_out is None else self.held_out

    @property
    def is_chunked(self) -> bool:
        """Whether the data is in chunks that have samples along the first axis."""
        return self.held_out is not None and not self.one_by_one

    def cache_key(self) -> Mapping[str, Any]:
        """Return the digests of the bundle, of the model and of the data, and the number of threads."""
        return self.model_dump(mode="json", include={"bundle", "onnx", "samples", "held_out", "labels", "threads"})

    @classmethod
    def of(
        cls,
        exported: ExportResult,
        reference: ReferenceResult | None,
        bundle: Artifact,
        target: Target,
        threads: int | None,
    ) -> "InsightJob":
        """Return the job that looks into one bundle; `reference` is None without held-out data.

        `threads` is the number of threads with which the bundle was measured, None where it was not.
        """
        return cls(
            bundle=bundle,
            onnx=exported.onnx,
            samples=exported.samples,
            held_out=None if reference is None else reference.original,
            labels=None if reference is None else reference.labels,
            count=0 if reference is None else reference.count,
            one_by_one=reference is not None and reference.one_by_one,
            target=target,
            threads=threads,
        )


class Insight(report.Insight, StepResult):
    """Where a bundle spends its time, and the samples on which it differs most."""


def work(job: InsightJob, emit: Emit) -> Insight:
    """Profile a bundle and run it on the held-out data, else on the samples.

    The step calls this in a child process. Samples are run for a minute at most. Raises BundleError when the bundle
    does not run here.
    """
    from tvmflow import runtime
    from tvmflow.runtime.profile import compiled_functions, group_calls, measure_calls

    bundle = job.workspace.path(job.bundle)
    labels = None if job.labels is None else np.load(job.workspace.path(job.labels))
    limit = read_manifest(bundle).max_threads
    threads = job.threads if job.threads is None or limit is None else min(job.threads, limit)
    with runtime.load(bundle, threads=threads) as model:
        sample = model.typical_inputs
        functions = compiled_functions(bundle, model.manifest)
        run = partial(model, **sample)
        calls = measure_calls(model.machine, run, _REPEATS, model.device.sync)
        times = group_calls(calls, functions)
        layers = find_layers(model.machine, run, functions, calls, load(job.workspace.path(job.onnx)), sample)
        peaks = measure_peaks(job.target, model.threads)
        comparisons = list(_compare(job, model, emit))
    worst = sorted(comparisons, key=lambda item: -item[1])[:_SAMPLES]
    flipped = [item for item in comparisons if item[2] != item[3]]
    return Insight(
        functions=tuple(
            FunctionTime(name=item.name, calls=item.calls, ms=item.seconds * 1e3, bytes=item.bytes)
            for item in times[:_FUNCTIONS]
        ),
        layers=layers,
        peaks=peaks,
        worst=tuple(_describe(item, labels) for item in worst),
        flipped=tuple(_describe(item, labels) for item in flipped[:_SAMPLES]),
        flips=len(flipped),
        samples=len(comparisons),
    )


insight = ChildStep("insight", Insight, work)

# A sample's index, error, answer, the original's answer, and inputs.
_Compared = tuple[int, float, int | None, int | None, NamedArrays]


def _compare(job: InsightJob, model: Any, emit: Emit) -> Iterator[_Compared]:
    """Run the model on the data and yield every sample."""
    data = samples.load(job.workspace.path(job.data))
    index, start = 0, time.monotonic()
    for number, (inputs, expected) in enumerate(data):
        emit(number, len(data), "samples")
        outputs = model(**inputs)
        length = min(len(next(iter(expected.values()))), job.count - index) if job.is_chunked else 1
        for position in range(length):
            place: Any = slice(position, position + 1) if job.is_chunked else ...
            ours, theirs = (
                {name: np.asarray(values[name])[place] for name in expected} for values in (outputs, expected)
            )
            error = max(largest_error(theirs[name], ours[name]) for name in expected)
            first = next(iter(expected))
            part = {name: array[position] if job.is_chunked else array for name, array in inputs.items()}
            yield index, error, _answer(ours[first]), _answer(theirs[first]), part
            index += 1
        if time.monotonic() - start > _SECONDS:
            break


def _answer(output: Array) -> int | None:
    """The argmax of an output that has one row of several scores, else None."""
    if not output.shape or output.shape[-1] < 2 or output.size != output.shape[-1]:
        return None
    return int(output.argmax())


def _describe(item: _Compared, labels: Array | None) -> SampleInsight:
    index, error, answer, original_answer, inputs = item
    label = None if labels is None or np.ndim(labels[index]) else str(labels[index])
    drawings = tuple(draw(name, np.asarray(array)) for name, array in inputs.items())
    return SampleInsight(
        index=index,
        error=error,
        answer=answer,
        original_answer=original_answer,
        label=label,
        inputs=drawings,
    )


def draw(name: str, array: Array) -> Drawing:
    """Return an input as an image, a waveform, or its first values.

    An image has two axes of at least four pixels, and may have one or three channels before or after them. A waveform
    has one axis of 64 floating-point values or more. Both may have an axis of one item in front.
    """
    squeezed = array[0] if array.ndim > 1 and array.shape[0] == 1 else array
    plain = Drawing(name=name, shape=array.shape, values=_first_values(array))
    if not np.issubdtype(array.dtype, np.number):
        return plain
    pixels = _pixels(squeezed)
    if pixels is not None:
        return plain.model_copy(update={"image": _png(pixels)})
    if squeezed.ndim == 1 and squeezed.size >= _LEAST_WAVE and np.issubdtype(squeezed.dtype, np.floating):
        parts = np.array_split(np.nan_to_num(squeezed.astype(np.float64)), min(_WAVE_POINTS, squeezed.size))
        return plain.model_copy(update={"wave": tuple((float(part.min()), float(part.max())) for part in parts)})
    return plain


def _pixels(array: Array) -> Array | None:
    """The array as height, width and channels, None where it is no image."""
    if array.ndim == 2 and min(array.shape) >= 4:
        array = array[:, :, None]
    elif array.ndim == 3 and array.shape[0] in (1, 3) and min(array.shape[1:]) >= 4:
        array = array.transpose(1, 2, 0)
    return array if array.ndim == 3 and array.shape[2] in (1, 3) and min(array.shape[:2]) >= 4 else None


def _png(pixels: Array) -> str:
    from PIL import Image

    values = np.nan_to_num(pixels.astype(np.float64))
    low, high = float(values.min()), float(values.max())
    scaled = ((values - low) * (255 / ((high - low) or 1.0))).astype(np.uint8)
    image = Image.fromarray(scaled[:, :, 0] if scaled.shape[2] == 1 else scaled)
    image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def _first_values(array: Array) -> str:
    text = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in _flat(array))
    return f"{text}, ..." if array.size > _SHOWN_VALUES else text


def _flat(array: Array) -> list[Any]:
    values: list[Any] = array.reshape(-1)[:_SHOWN_VALUES].tolist()
    return values
