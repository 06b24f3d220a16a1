"""Operators on quantised tensors, written as dequantize, compute, quantize."""

from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvmflow.compiler.onnx.node import Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import dims_of, dtype_of


def convert_qlinear_conv(node: Node) -> relax.Expr:
    """Write QLinearConv in its QDQ form: dequantize the operands, convolve, quantize the result."""
    data, weight = _dequantize(node, 0, 1), _dequantize(node, 3, 0)
    bias = node.input(8)
    if bias is not None:
        scale = node.emit(relax.op.multiply(_as_scalar(node, node.inputs[1]), _as_scalar(node, node.inputs[4])))
        bias = node.emit(relax.op.multiply(node.emit(relax.op.astype(bias, "float32")), scale))
    convert = onnx_frontend.Conv.get_converter(node.opset)
    operands = onnx_frontend.onnx_input([data, weight, bias])
    return _quantize(node, node.emit(convert(node.builder, operands, node.attrs, [{}, {}])), 6)


def convert_qlinear_matmul(node: Node) -> relax.Expr:
    """Write QLinearMatMul in its QDQ form; refuse scales by row or column."""
    for position in (1, 4):
        if dims_of(_as_scalar(node, node.inputs[position])) != []:
            raise UnsupportedFormError("a scale for each row or column")
    product = relax.op.matmul(_dequantize(node, 0, 0), _dequantize(node, 3, 0))
    return _quantize(node, node.emit(product), 6)


def _dequantize(node: Node, position: int, axis: int) -> relax.Expr:
    """Return the operand at `position` as float32; its scale and zero point follow it."""
    value, scale, zero = node.inputs[position : position + 3]
    scale = (
        _as_scalar(node, scale) if dtype_of(scale) == "float32" else _as_scalar(node, relax.op.astype(scale, "float32"))
    )
    return node.emit(relax.op.dequantize(value, scale, _as_scalar(node, zero), axis=axis, out_dtype="float32"))


def _quantize(node: Node, value: relax.Expr, position: int) -> relax.Expr:
    scale, zero = (_as_scalar(node, expr) for expr in node.inputs[position : position + 2])
    if dims_of(scale) != []:
        raise UnsupportedFormError("a scale for each row or channel of the result")
    scale = scale if dtype_of(scale) == "float32" else node.emit(relax.op.astype(scale, "float32"))
    return relax.op.quantize(value, scale, zero, axis=0, out_dtype=dtype_of(zero))


def _as_scalar(node: Node, expr: relax.Expr) -> relax.Expr:
    """Return a vector of one element as a scalar, and anything else as it is."""
    expr = node.builder.normalize(expr)
    return node.emit(relax.op.reshape(expr, ())) if dims_of(expr) == [1] else expr
