"""Evaluates nodes with constant operands at import, such as those by which models compute shapes and indices."""

import math
from collections.abc import Sequence

import numpy as np
import onnx

from tvmflow.compiler.onnx.sizes import run_reference
from tvmflow.compiler.onnx.values import Array

# Operators by which models compute shapes and indices.
_FOLDED = {
    *("Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape", "Cos"),
    *("CumSum", "Div", "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater"),
    *("GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Log", "MatMul", "Max", "MelWeightMatrix", "Min", "Mod"),
    *("Mul", "Neg", "NonZero", "Not", "Or", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin"),
    *("ReduceProd", "ReduceSum", "Reshape", "Round", "ScatterElements", "ScatterND", "Shape", "Sign", "Sin", "Size"),
    *("Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
}
# Larger results are data rather than sizes: they are computed when the model runs.
_LARGEST = 4096


def is_foldable(node: onnx.NodeProto) -> bool:
    """Return whether a node is evaluated at import if all its operands are constant."""
    return node.op_type in _FOLDED and node.domain in ("", "ai.onnx") and bool(node.input)


def evaluate_constants(node: onnx.NodeProto, values: Sequence[Array], opset: int) -> dict[str, Array] | None:
    """Return the results of a foldable node by name, computed from `values`, its operands without absent ones.

    Returns None where a result has more than 4096 elements, and where ONNX's reference implementation fails.
    """
    if _result_size(node, values) > _LARGEST:
        return None
    names = [name for name in node.input if name]
    try:
        with np.errstate(all="ignore"):
            results = run_reference(node, dict(zip(names, values, strict=True)), opset)
    except Exception:  # The reference implementation has gaps; TVM's converter has its turn.
        return None
    return None if any(item.size > _LARGEST or item.dtype == object for item in results.values()) else results


def _result_size(node: onnx.NodeProto, values: Sequence[Array]) -> float:
    """The number of elements of a foldable node's result, where it may exceed that of the operands; else 0."""
    if node.op_type in ("ConstantOfShape", "Expand", "Tile"):
        sizes = values[-1].astype("float64")
        return float(np.prod(sizes) * (1 if node.op_type == "ConstantOfShape" else values[0].size))
    if node.op_type == "Range":
        start, stop, step = (float(value) for value in values)
        return abs((stop - start) / step) if step else math.inf
    return 0.0
