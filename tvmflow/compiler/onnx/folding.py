"""Evaluates nodes with constant operands at import, such as those by which models compute shapes and indices."""

import math
from collections.abc import Sequence

import numpy as np
import onnx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.sizes import run_reference

# Operators by which models compute shapes and indices.
_FOLDED = {
    *("Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape", "Cos"),
    *("CumSum", "Div", "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater"),
    *("GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Log", "MatMul", "Max", "MelWeightMatrix", "Min", "Mod"),
    *("Mul", "Neg", "NonZero", "Not", "Or", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin"),
    *("ReduceProd", "ReduceSum", "Reshape", "Round", "ScatterElements", "ScatterND", "Shape", "Sign", "Sin", "Size"),
    *("Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
}
# Operators by which models compute the weights that they use from stored ones, as by standardising them.
_FOLDED_WEIGHTS = {
    *("Abs", "Add", "BatchNormalization", "Concat", "Div", "Exp", "Flatten", "Gather", "Identity", "Max"),
    *("MelWeightMatrix", "Min", "Mul", "Neg", "Pow", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceMean", "ReduceSum"),
    *("ReduceSumSquare", "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Sum", "Transpose", "Unsqueeze"),
}
# Larger results are data rather than sizes: they are computed when the model runs.
_LARGEST = 4096
# No converter computes a filter bank when the model runs: it is a weight.
_LARGEST_FILTER = 1 << 24
_WEIGHTS = {np.dtype("float32"), np.dtype("float64")}


def is_foldable(node: onnx.NodeProto) -> bool:
    """Return whether a node is evaluated at import if all its operands are constant."""
    return node.op_type in _FOLDED and node.domain in ("", "ai.onnx") and bool(node.input)


def evaluate_constants(node: onnx.NodeProto, values: Sequence[Array], opset: int) -> dict[str, Array] | None:
    """Return the results of a foldable node by name, computed from `values`, its operands without absent ones.

    Returns None where a result has more than 4096 elements, and where ONNX's reference implementation fails.
    """
    results = None if _result_size(node, values) > _LARGEST else _run(node, values, opset)
    if results is None or any(item.size > _LARGEST or item.dtype == object for item in results.values()):
        return None
    return results


def computes_weights(node: onnx.NodeProto) -> bool:
    """Return whether a node is evaluated at import if all its operands are weights or constants."""
    return node.op_type in _FOLDED_WEIGHTS and node.domain in ("", "ai.onnx") and bool(node.input)


def evaluate_weights(node: onnx.NodeProto, values: Sequence[Array], opset: int) -> dict[str, Array] | None:
    """Return the results of a node that computes weights by name, from the values of its operands that are present.

    TVM would compile a function for each such node and run it once. None where a result is larger than the operands
    together, or a filter bank larger than 16 million elements; where operands are of other floating point numbers than
    float32 and float64, or all are integers; and where ONNX's reference implementation, which has gaps, fails.
    """
    kinds = {value.dtype for value in values if value.dtype.kind not in "iub"}
    if node.op_type == "MelWeightMatrix":
        largest = _LARGEST_FILTER
    elif kinds and kinds <= _WEIGHTS:
        largest = sum(value.size for value in values)
    else:
        return None
    results = None if _result_size(node, values) > largest else _run(node, values, opset)
    return None if results is None or any(item.size > largest for item in results.values()) else results


def _run(node: onnx.NodeProto, values: Sequence[Array], opset: int) -> dict[str, Array] | None:
    """The results of a node by name; None where ONNX's reference implementation, which has gaps, fails."""
    names = [name for name in node.input if name]
    try:
        with np.errstate(all="ignore"):
            return run_reference(node, dict(zip(names, values, strict=True)), opset)
    except Exception:  # TVM's converter has its turn.
        return None


def _result_size(node: onnx.NodeProto, values: Sequence[Array]) -> float:
    """The number of elements of a foldable node's result, where it may exceed that of the operands; else 0."""
    if node.op_type in ("ConstantOfShape", "Expand", "Tile"):
        sizes = values[-1].astype("float64")
        return float(np.prod(sizes) * (1 if node.op_type == "ConstantOfShape" else values[0].size))
    if node.op_type == "MelWeightMatrix":
        return float(values[0].item()) * (float(values[1].item()) // 2 + 1)
    if node.op_type == "Range":
        start, stop, step = (float(value) for value in values)
        return abs((stop - start) / step) if step else math.inf
    return 0.0
