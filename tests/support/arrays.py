"""Random arrays, and what ONNX Runtime computes from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def normal(*shape: int, seed: int = 0) -> Array:
    """Draw float32 numbers of the standard normal distribution; the same seed gives the same numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def open_session(model: Path) -> Any:
    """Load a model into ONNX Runtime on one thread of the CPU: the idle ones of a pool would spin."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def onnxruntime_outputs(model: Path, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run ONNX Runtime on the CPU and return all outputs by name."""
    session = open_session(model)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


class Refused(Exception):
    """ONNX Runtime does not run the model."""


def onnxruntime_results(model: Path, feed: Mapping[str, Array]) -> list[Array]:
    """Run ONNX Runtime on one thread of the CPU, in silence, and return all outputs in order.

    Raises Refused where it does not run the model.
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return [np.asarray(value) for value in session.run(None, dict(feed))]
    except (errors.NotImplemented, errors.Fail, errors.InvalidGraph, errors.InvalidArgument, errors.RuntimeException):
        raise Refused(model) from None
