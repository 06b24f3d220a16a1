"""Gemm of operands with symbolic dimensions."""

from tvm import relax

from tvmflow.compiler.onnx.broadcasting import agree, agree_in_product
from tvmflow.compiler.onnx.node import Node
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of


def convert_gemm(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Gemm where an operand has a symbolic dimension or an unknown shape.

    When the model runs, it checks that symbolic dimensions which must be equal are equal. Returns None, which leaves
    the node to TVM's converter, where all dimensions are fixed.
    """
    shapes = [dims_of(operand) for operand in node.inputs if operand is not None]
    if all(shape is not None and all(isinstance(size, int) for size in shape) for shape in shapes):
        return None
    operands, bias = [], node.input(2)
    for operand, name in zip(node.inputs, ("transA", "transB"), strict=False):
        operands.append(node.emit(relax.op.permute_dims(operand, [1, 0])) if node.attrs.get(name, 0) else operand)
    alpha, beta = (float(node.attrs.get(name, 1.0)) for name in ("alpha", "beta"))
    if alpha != 1.0:
        operands[0] = node.emit(relax.op.multiply(operands[0], const(alpha, dtype_of(operands[0]))))
    product = node.emit(relax.op.matmul(*agree_in_product(node.builder, operands, node.evaluator)))
    if bias is None:
        return product
    bias = bias if beta == 1.0 else node.emit(relax.op.multiply(bias, const(beta, dtype_of(bias))))
    return relax.op.add(*agree(node.builder, [product, bias], node.evaluator))
