"""Runs the original on samples, in ONNX Runtime and in PyTorch, and compares the two."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.sizes import SizeTrial
from tvmflow import samples
from tvmflow.arrays import NamedArrays
from tvmflow.dimensions import alternatives
from tvmflow.errors import ExportError
from tvmflow.hardware import memory
from tvmflow.onnx_model.session import run_session
from tvmflow.onnx_model.size_limits import SizeLimits
from tvmflow.onnx_model.ties import Ties
from tvmflow.samples import constant_outputs
from tvmflow.source import run_module
from tvmflow.spec import Dimension, Input
from tvmflow.tolerance import Bounds, largest_error
from tvmflow.usercode import describe

if TYPE_CHECKING:
    import onnxruntime
    import torch

# What to do where ONNX Runtime does not run what PyTorch does.
_OF_EXPORT = "PyTorch runs it on them: fix the sizes of its free dimensions, or change what the exporter gets wrong"


@dataclass(frozen=True)
class Comparison:
    """The samples with the original's outputs, and ONNX Runtime's largest absolute error on them.

    The error is None where the original is an ONNX file, whose outputs ONNX Runtime computes. `refusal` says which
    sizes a module did not take, and why; it is empty where it took all.
    """

    pairs: list[tuple[NamedArrays, NamedArrays]]
    error: float | None
    refusal: str


@dataclass
class OriginalRuns:
    """A model in ONNX Runtime, with the PyTorch module that was exported, if it is no ONNX file, and its samples.

    `limits` are those of the sizes of an ONNX file, and None for a module. `dimensions` are the ranges in the release
    file, `outputs` the names that it gives, or none, and `count` is the least number of samples. `refusal` says at
    which sizes the module failed first, and why; it is empty until then.
    """

    session: "onnxruntime.InferenceSession"
    module: "torch.nn.Module | None"
    limits: SizeLimits | None
    ties: Ties
    bounds: Bounds
    dimensions: dict[str, Dimension]
    outputs: tuple[str, ...]
    count: int
    seed: int
    folder: Path
    refusal: str = ""

    def compare_where_it_runs(self, variants: Iterable[tuple[Input, ...]]) -> tuple[dict[str, Dimension], Comparison]:
        """Return the ranges of the dimensions and a comparison on samples that the model takes.

        The inputs, with their samples, are the first of `variants` on which it runs. Later ones are taken where
        all outputs of the first one are the same number. Raises the ExportError of the first where the model
        takes none.
        """
        failure: ExportError | None = None
        result = None
        for inputs in variants:
            try:
                dimensions = self._find_dimensions(inputs, self.limits) if self.limits else self.dimensions
                compared = self._compare(inputs, dimensions)
            except ExportError as problem:
                failure = failure or problem
                continue
            if not constant_outputs([outputs for _, outputs in compared.pairs]):
                return dimensions, compared
            result = result or (dimensions, compared)
        if result is None:
            raise failure or ExportError("the model has no inputs to run on")
        return result

    def _find_dimensions(self, inputs: tuple[Input, ...], limits: SizeLimits) -> dict[str, Dimension]:
        """Return the ranges in the release file, and for other dimensions those that `SizeTrial` finds.

        Raises ExportError when it runs the model at none of the sizes that were tried.
        """
        if all(not isinstance(size, str) or size in self.dimensions for item in inputs for size in item.shape):
            return self.dimensions
        trial = SizeTrial(self.session, limits, inputs, self.dimensions, self.seed, self.folder)
        ranges = trial.find_ranges()
        if ranges is None:
            raise ExportError(
                f"{trial.failure}; it runs at none of the sizes that were tried for its free dimensions: say under "
                "`dimensions` of a release file which sizes it takes, or fix them"
            )
        return {**self.dimensions, **ranges}

    def _compare(self, inputs: tuple[Input, ...], dimensions: dict[str, Dimension]) -> Comparison:
        """Compare ONNX Runtime with the module on samples, or compute the samples' outputs where there is no module."""
        self.refusal = ""
        names = self._output_names
        if self.outputs and self.outputs != names:
            raise ExportError(
                f"the ONNX model returns {', '.join(names)}, the release file names {', '.join(self.outputs)}"
            )
        pairs, worst = [], 0.0
        # The benchmark runs on samples: there is one for each of the sizes that it measures.
        points = samples.measured_sizes(inputs, dimensions)
        for index in range(max(self.count, len(points))):
            sizes = samples.choose_sizes(inputs, dimensions, index)
            size_choices: Iterable[dict[str, int]] = [sizes]
            most_memory = None
            # Sizes beside those to measure are guesses: a model need not take them, nor be run where it needs much
            # memory.
            if index >= len(points) and sizes:
                size_choices = alternatives(sizes, dimensions, points[0])
                if (limits := self.limits) is not None:
                    size_choices = (item for item in size_choices if limits.explain(item) is None)
                    most_memory = memory.light_bytes()
            try:
                sample, expected, outputs = self._first_run(inputs, dimensions, index, size_choices, most_memory)
            except ExportError:
                if most_memory is None:
                    raise
                # At no size does the model need as little.
                sample, expected, outputs = self._first_run(inputs, dimensions, index, points[:1], None)
            if self.module is None:
                pairs.append((sample, outputs))
                continue
            outputs = self.ties.settle(sample, expected, outputs, self.bounds)
            try:
                worst = max(worst, _largest_error(expected, outputs, index, self.bounds))
            except ExportError as error:
                again = run_module(self.module, sample, names)
                if all(np.array_equal(array, again[name], equal_nan=True) for name, array in expected.items()):
                    raise
                raise ExportError(
                    "the model gives other outputs when it gets the same inputs again, as with dropout, random numbers "
                    "or a state that it changes; leave this out of what the factory returns"
                ) from error
            pairs.append((sample, expected))
        return Comparison(pairs, None if self.module is None else worst, self.refusal)

    def _first_run(
        self,
        inputs: tuple[Input, ...],
        dimensions: dict[str, Dimension],
        index: int,
        size_choices: Iterable[dict[str, int]],
        most_memory: int | None,
    ) -> tuple[NamedArrays, NamedArrays, NamedArrays]:
        """Return sample `index` at the first sizes that the model takes, the module's outputs and ONNX Runtime's.

        The module's outputs are empty for an ONNX file. Raises ExportError where the model runs at none of the
        `size_choices` within `most_memory` bytes, and where the module runs at sizes at which ONNX Runtime does not.
        """
        failure: ExportError | None = None
        for sizes in size_choices:
            sample = samples.make(inputs, dimensions, index, self.seed, self.folder, sizes)
            try:
                if self.module is None:
                    return sample, {}, run_session(self.session, sample, most_memory)
                expected = self._run_module(self.module, sample, index, sizes)
            except ExportError as error:
                failure = failure or error
                continue
            return sample, expected, run_session(self.session, sample, most_memory, _OF_EXPORT)
        raise failure or ExportError("the model has no sizes to run at")

    def _run_module(
        self, module: "torch.nn.Module", sample: NamedArrays, index: int, sizes: Mapping[str, int]
    ) -> NamedArrays:
        try:
            return run_module(module, sample, self._output_names)
        except ExportError:
            raise
        except Exception as error:
            reason = describe(error)
            text = ", ".join(f"{name} {size}" for name, size in sizes.items())
            self.refusal = self.refusal or f"the model does not run with {text} ({reason}); samples have other sizes"
            raise ExportError(f"the model fails on sample {index} ({reason})") from error

    @property
    def _output_names(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.session.get_outputs())


def _largest_error(expected: NamedArrays, outputs: NamedArrays, index: int, bounds: Bounds) -> float:
    worst = 0.0
    for name, array in expected.items():
        other = outputs[name]
        if other.shape != array.shape or other.dtype != array.dtype:
            raise ExportError(
                f"output {name!r} of the ONNX model is {other.dtype}{list(other.shape)} on sample {index}, "
                f"PyTorch's is {array.dtype}{list(array.shape)}"
            )
        error = largest_error(array, other)
        if not bounds.is_met(array, other):
            raise ExportError(
                f"ONNX Runtime differs from PyTorch by {error:.3g} in output {name!r} on sample {index}, beyond "
                f"{bounds.describe(array)}; look at the export, or widen `export.rtol` and "
                "`export.atol`"
            )
        worst = max(worst, error)
    return worst
