"""Finds by trial at which sizes of its free dimensions ONNX Runtime runs a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow import samples
from tvmflow.dimensions import find_dimensions
from tvmflow.errors import ExportError
from tvmflow.hardware import memory
from tvmflow.onnx_model.session import run_session
from tvmflow.onnx_model.size_limits import SizeLimits
from tvmflow.spec import Dimension, Input

if TYPE_CHECKING:
    import onnxruntime


@dataclass
class SizeTrial:
    """Runs a model at sizes of its free dimensions.

    `limits` are those of the model, `stated` the ranges that a release file gives. Samples are made with `seed`, and
    from files in `folder`. `failure` is the first reason for which the model did not run.
    """

    session: "onnxruntime.InferenceSession"
    limits: SizeLimits
    inputs: tuple[Input, ...]
    stated: Mapping[str, Dimension]
    seed: int
    folder: Path
    failure: ExportError | None = field(default=None, init=False)
    _most_memory: int = field(default_factory=memory.safe_bytes, init=False)
    _has_empty_outputs: bool = field(default=False, init=False)

    def find_ranges(self) -> dict[str, Dimension] | None:
        """Return the ranges of the dimensions that `stated` lacks; None where the model runs at no size that is tried.

        Sizes at which a bundle would not run by the model's limits are left out, and, where there are others, those at
        which an output has no elements.
        """
        ranges = self._search(may_be_empty=False)
        return self._search(may_be_empty=True) if ranges is None and self._has_empty_outputs else ranges

    def _search(self, *, may_be_empty: bool) -> dict[str, Dimension] | None:
        runs = partial(self.runs, may_be_empty=may_be_empty)
        runs_lightly = partial(runs, most_memory=memory.light_bytes())
        return find_dimensions(self.inputs, self.stated, runs, self.limits.weight_sizes, runs_lightly)

    def runs(self, sizes: dict[str, int], most_memory: int | None = None, *, may_be_empty: bool = True) -> bool:
        """Return whether the model runs at these sizes, with outputs that have elements unless they `may_be_empty`.

        A run may take `most_memory` bytes; None means a quarter of the memory that was free at first.
        """
        try:
            sample = samples.make(self.inputs, self.stated, 0, self.seed, self.folder, sizes)
            outputs = run_session(self.session, sample, self._most_memory if most_memory is None else most_memory)
        except ExportError as error:
            self.failure = self.failure or error
            return False
        reason = self.limits.explain(sizes)
        if reason is not None:
            self.failure = self.failure or ExportError(reason)
            return False
        is_empty = not all(array.size for array in outputs.values())
        self._has_empty_outputs |= is_empty
        return may_be_empty or not is_empty
