"""Random arrays, and what ONNX Runtime computes from them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tvmflow.arrays import Array
from tvmflow.onnx_model.session import open_session, run_session


def normal(*shape: int, seed: int = 0) -> Array:
    """Draw float32 numbers of the standard normal distribution; the same seed gives the same numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def onnxruntime_outputs(model: Path, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run ONNX Runtime as a release does, exactly (`open_session`), and return all outputs by name.

    It runs on one thread, since idle ones would spin. Raises ExportError where it does not run the model.
    """
    return run_session(open_session(model, threads=1), dict(feed))


class Refused(Exception):
    """ONNX Runtime does not run the model."""


def onnxruntime_results(model: Path, feed: Mapping[str, Array]) -> list[Array]:
    """Run ONNX Runtime with its own defaults on one thread, in silence, and return all outputs in order.

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
