"""Computes small ONNX models in float64, to say which of two results in float32 is the nearer one."""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from tvmflow import memory, onnx_data
from tvmflow.errors import ExportError
from tvmflow.source import open_session, run_session

Array = npt.NDArray[Any]


def compute(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array] | None:
    """Return a model's outputs by name, computed in float64 where the model computes in float32.

    ONNX Runtime computes them or, where it has no operator for float64, ONNX's own implementation in NumPy. Returns
    None where neither can, within a quarter of the free memory.
    """
    from onnx.reference import ReferenceEvaluator

    double = onnx.ModelProto()
    double.CopyFrom(model)
    _widen(double.graph)
    wide = {name: _wide(array) for name, array in inputs.items()}
    most_memory = memory.share()
    with tempfile.TemporaryDirectory() as folder, suppress(ExportError):
        path = Path(folder) / "model.onnx"
        onnx_data.save(double, path)
        return run_session(open_session(path, prints_errors=False, optimizes=False), wide, most_memory)
    # Each operator has errors of its own kinds for what it does not take.
    with suppress(Exception), memory.limited(most_memory):
        outputs = ReferenceEvaluator(double).run(None, wide)
        return dict(zip((value.name for value in double.graph.output), outputs, strict=True))
    return None


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _widen(graph: onnx.GraphProto) -> None:
    """Make float64 of every float32 in a graph: constants, declared types, conversions, and those of its subgraphs."""
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype", "output_datatype", "stash_type") and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _widen(inner)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(_wide(onnx_data.array_of(tensor)), tensor.name))
