"""What rounding alone does to a model's outputs. It is asked where a bundle's outputs are out of bounds."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tvmflow import onnx_data, onnx_double
from tvmflow.errors import ExportError
from tvmflow.onnx_rounding import change_last_bits
from tvmflow.samples import NamedArrays
from tvmflow.source import open_session, run_session
from tvmflow.tolerance import Bounds, absolute_tolerance, are_close, largest_error
from tvmflow.verification import ATOL, RTOL

# A bundle's error of at most so many times the one between two ways of ONNX Runtime is the model's.
_AMPLIFIED = 16
# Bytes of weights: a larger model takes long to compute in float64.
_LARGEST = 1 << 30


def find_excuse(
    onnx: Path,
    inputs: Sequence[NamedArrays],
    expected: Sequence[NamedArrays],
    outputs: Sequence[NamedArrays],
    bounds: Bounds,
) -> str | None:
    """Return the sentence that says why outputs out of bounds are as right as ONNX Runtime's; None where they are not.

    They are where a computation in float64 gives them within the bounds, and where they differ from ONNX Runtime's by
    no more than these do without its optimizations; in both cases, a device that checks the bundle's golden sample must
    accept them. `expected` are ONNX Runtime's outputs for `inputs`, `outputs` are the bundle's.
    """
    elements = [
        (place, name, right, outputs[place][name])
        for place, arrays in enumerate(expected)
        for name, right in arrays.items()
    ]
    if not all(
        are_close(mine, right, rtol=RTOL, atol=absolute_tolerance(right, ATOL)) for _, _, right, mine in elements
    ):
        return None
    error = max(_errors(expected, outputs).values(), default=0.0)
    exact = _in_double(onnx, inputs)
    if exact is not None and all(bounds.is_met(exact[place][name], mine) for place, name, _, mine in elements):
        theirs = max(_errors(exact, expected).values(), default=0.0)
        return (
            f"outputs differ from ONNX Runtime's by up to {error:.3g}, but are within the bounds of a computation in "
            f"float64, from which ONNX Runtime's differ by up to {theirs:.3g}"
        )
    with suppress(ExportError):
        spread = _errors(expected, _run_all(onnx, inputs, optimizes=False))
        if all(
            bounds.is_met(right, mine) or (right.dtype.kind == "f" and largest_error(right, mine) <= spread[name])
            for _, name, right, mine in elements
        ):
            return (
                f"outputs differ from ONNX Runtime's by up to {error:.3g}, and ONNX Runtime's with and without its "
                f"optimizations by up to {max(spread.values()):.3g}: the model amplifies rounding errors"
            )
    return None


def explain(onnx: Path, inputs: Sequence[NamedArrays], expected: Sequence[NamedArrays], error: float) -> str:
    """Return what makes the largest error of a bundle likely, where the model amplifies rounding errors; else "".

    `expected` are ONNX Runtime's outputs for `inputs`. It computes them again with another rounding.
    """
    for outputs, change in _with_other_rounding(onnx, inputs):
        spread = _errors(expected, outputs)
        if 0 < error <= _AMPLIFIED * max(spread.values(), default=0.0):
            largest = max(spread[name] / _largest(expected, name) for name in spread)
            return (
                f"; the model amplifies rounding errors: ONNX Runtime {change} differs by up to "
                f"{max(spread.values()):.3g}, {largest:.2g} of an output's largest value; give samples "
                "like the model's real inputs in a release file, or a larger bound, as "
                "`validate.max_relative_error` there or as --max-relative-error"
            )
    return ""


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
    model = onnx_data.load(onnx)
    if sum(math.prod(item.dims) for item in model.graph.initializer) * np.float32().itemsize > _LARGEST:
        return None
    outputs = []
    for sample in inputs:
        exact = onnx_double.compute(model, sample)
        if exact is None:
            return None
        outputs.append(exact)
    return outputs


def _with_other_rounding(onnx: Path, inputs: Sequence[NamedArrays]) -> Iterator[tuple[list[NamedArrays], str]]:
    """Yield outputs of ONNX Runtime that differ by the rounding alone, and how it computed them."""
    # Some operators and types exist in optimized graphs alone.
    with suppress(ExportError):
        yield _run_all(onnx, inputs, optimizes=False), "with and without its optimizations"
    with suppress(ExportError), tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        changed = Path(folder) / "model.onnx"
        if change_last_bits(onnx, changed):
            yield _run_all(changed, inputs), "with its weights changed in their last bit"


def _run_all(onnx: Path, inputs: Sequence[NamedArrays], *, optimizes: bool = True) -> list[NamedArrays]:
    session = open_session(onnx, optimizes=optimizes)
    return [run_session(session, sample) for sample in inputs]
