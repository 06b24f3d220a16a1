"""Computes small ONNX models in float64, to say which of two results in float32 is the nearer one."""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from tvmflow.arrays import Array
from tvmflow.errors import ExportError
from tvmflow.hardware import memory
from tvmflow.onnx_model import external_data
from tvmflow.onnx_model.number_types import replace_type
from tvmflow.onnx_model.session import open_session, run_session


def compute(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array] | None:
    """Return a model's outputs by name, computed in float64 where the model computes in float32.

    ONNX Runtime computes them or, where it has no operator for float64, ONNX's own implementation in NumPy. Returns
    None where neither can, within a quarter of the free memory.
    """
    from onnx.reference import ReferenceEvaluator

    double = onnx.ModelProto()
    double.CopyFrom(model)
    replace_type(double, TensorProto.FLOAT, TensorProto.DOUBLE)
    wide = {name: _wide(array) for name, array in inputs.items()}
    most_memory = memory.safe_bytes()
    with tempfile.TemporaryDirectory() as folder, suppress(ExportError):
        path = Path(folder) / "model.onnx"
        external_data.save(double, path)
        return run_session(open_session(path, prints_errors=False, optimizes=False), wide, most_memory)
    # Each operator has errors of its own kinds for what it does not take.
    with suppress(Exception), memory.limit(most_memory):
        outputs = ReferenceEvaluator(double).run(None, wide)
        return dict(zip((value.name for value in double.graph.output), outputs, strict=True))
    return None


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array
