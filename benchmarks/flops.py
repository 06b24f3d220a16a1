"""What a model computes: the operations of its convolutions and products, as the textbook's algorithms have them."""

import math
from pathlib import Path

import onnx


def gflop(path: Path) -> float | None:
    """Thousands of millions of operations of an ONNX model's products, a multiply-add counting as two.

    None where a shape that is needed is not known.
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
