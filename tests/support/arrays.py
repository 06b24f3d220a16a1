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


def onnxruntime_outputs(model: Path, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run ONNX Runtime on the CPU and return all outputs by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))
