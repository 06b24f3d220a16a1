"""Counts the operations of a model's convolutions and matrix products, by the textbook's algorithms."""

import math
from pathlib import Path

import onnx


def gflop(path: Path) -> float | None:
    """Return the operations of an ONNX model's products, in units of 1e9; a multiply-add counts as two.

    None where a product has an unknown shape.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load(path), data_prop=True)
    shapes = {item.name: tuple(item.dims) for item in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        shapes[value.name] = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
    total = 0
    for node in model.graph.node:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            continue
        left, right, result = (shapes.get(name) for name in (*node.input[:2], node.output[0]))
        if not left or not right or not result or 0 in (*left, *right, *result):
            return None
        if node.op_type == "Conv":
            total += 2 * math.prod(result) * math.prod(right[1:])
        elif node.op_type == "ConvTranspose":
            total += 2 * math.prod(left) * math.prod(right[1:])
        else:
            transposed = any(item.name == "transA" and item.i for item in node.attribute)
            total += 2 * math.prod(result) * left[-2 if transposed else -1]
    return total / 1e9
