"""What rounding alone does to a model's outputs. It is asked where a bundle's outputs are out of bounds."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tvmflow.arrays import NamedArrays
from tvmflow.errors import ExportError
from tvmflow.onnx_model import double_precision, external_data
from tvmflow.onnx_model.rounding import change_last_bits
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.tolerance import Bounds, largest_error
from tvmflow.verification import accepts

# A bundle's error of at most so many times the one between two ways of ONNX Runtime is the model's.
_AMPLIFIED = 16
_UNOPTIMIZED = "with and without its optimizations"
# Bytes of weights: a larger model takes long to compute in float64.
_LARGEST = 1 << 30


@dataclass(frozen=True)
class Rounding:
    """The ONNX file of a model, the inputs of its samples, and ONNX Runtime's outputs for them, `expected`."""

    onnx: Path
    inputs: Sequence[NamedArrays]
    expected: Sequence[NamedArrays]

    def justify(self, outputs: Sequence[NamedArrays], bounds: Bounds) -> str | None:
        """Return a sentence on why a bundle's `outputs` out of bounds are right nonetheless; None if they are not.

        They are right if they agree within the bounds with a computation of the model in float64, or if they differ
        from ONNX Runtime's outputs by no more than those differ from ONNX Runtime's without its optimizations. In both
        cases a device's check of the golden sample must accept them as well.
        """
        elements = [
            (place, name, right, outputs[place][name])
            for place, arrays in enumerate(self.expected)
            for name, right in arrays.items()
        ]
        if not all(accepts(right, mine) for _, _, right, mine in elements):
            return None
        error = max(_errors(self.expected, outputs).values(), default=0.0)
        exact = _in_double(self.onnx, self.inputs)
        if exact is not None and all(bounds.is_met(exact[place][name], mine) for place, name, _, mine in elements):
            theirs = max(_errors(exact, self.expected).values(), default=0.0)
            return (
                f"outputs differ from ONNX Runtime's by up to {error:.3g}, but are within the bounds of a computation "
                f"in float64, from which ONNX Runtime's differ by up to {theirs:.3g}"
            )
        if self._outputs_without_optimizations is None:
            return None
        spread = _errors(self.expected, self._outputs_without_optimizations)
        if all(
            bounds.is_met(right, mine) or (right.dtype.kind == "f" and largest_error(right, mine) <= spread[name])
            for _, name, right, mine in elements
        ):
            return (
                f"outputs differ from ONNX Runtime's by up to {error:.3g}, and ONNX Runtime's {_UNOPTIMIZED} by up to "
                f"{max(spread.values()):.3g}: the model amplifies rounding errors"
            )
        return None

    def explain(self, error: float) -> str:
        """Return a clause that explains a bundle's largest error by the model amplifying rounding errors; else "".

        It explains an error of at most 16 times the one between two ways in which ONNX Runtime computes the model.
        """
        for outputs, change in self._with_other_rounding():
            spread = _errors(self.expected, outputs)
            if 0 < error <= _AMPLIFIED * max(spread.values(), default=0.0):
                largest = max(spread[name] / _largest(self.expected, name) for name in spread)
                return (
                    f"; the model amplifies rounding errors: ONNX Runtime {change} differs by up to "
                    f"{max(spread.values()):.3g}, {largest:.2g} of an output's largest value; give samples "
                    "like the model's real inputs in a release file, or a larger bound, as "
                    "`validate.max_relative_error` there or as --max-relative-error"
                )
        return ""

    def _with_other_rounding(self) -> Iterator[tuple[Sequence[NamedArrays], str]]:
        """Yield outputs of ONNX Runtime that differ by the rounding alone, and how it computed them."""
        if self._outputs_without_optimizations is not None:
            yield self._outputs_without_optimizations, _UNOPTIMIZED
        with suppress(ExportError), tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            changed = Path(folder) / "model.onnx"
            if change_last_bits(self.onnx, changed):
                yield _run_all(changed, self.inputs), "with its weights changed in their last bit"

    @cached_property
    def _outputs_without_optimizations(self) -> list[NamedArrays] | None:
        """The outputs of ONNX Runtime without its optimizations; None where it does not run so."""
        # Some operators and types exist in optimized graphs alone.
        with suppress(ExportError):
            return _run_all(self.onnx, self.inputs, optimizes=False)
        return None


def _errors(expected: Sequence[NamedArrays], outputs: Sequence[NamedArrays]) -> dict[str, float]:
    """The largest error of each output over all samples."""
    return {
        name: max(largest_error(right[name], other[name]) for right, other in zip(expected, outputs, strict=True))
        for name in (expected[0].keys() & outputs[0].keys() if expected else ())
    }


def _largest(arrays: Sequence[NamedArrays], name: str) -> float:
    """The largest finite magnitude of an output, 1 where all are 0."""
    values = [array[name].astype(np.float64) for array in arrays]
    return max(float(np.abs(value[np.isfinite(value)]).max(initial=0.0)) for value in values) or 1.0


def _in_double(onnx: Path, inputs: Sequence[NamedArrays]) -> list[NamedArrays] | None:
    """The outputs as computed in float64; None where nothing computes the model so."""
    model = external_data.load(onnx)
    if sum(math.prod(item.dims) for item in model.graph.initializer) * np.float32().itemsize > _LARGEST:
        return None
    outputs = []
    for sample in inputs:
        exact = double_precision.compute(model, sample)
        if exact is None:
            return None
        outputs.append(exact)
    return outputs


def _run_all(onnx: Path, inputs: Sequence[NamedArrays], *, optimizes: bool = True) -> list[NamedArrays]:
    session = open_session(onnx, optimizes=optimizes)
    return [run_session(session, sample) for sample in inputs]
