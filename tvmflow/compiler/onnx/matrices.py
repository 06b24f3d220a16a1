"""Det: determinants of square matrices."""

from typing import Any

from tvm import relax, te, tirx

from tvmflow.compiler.onnx.node import FreeSizeError, Node
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of


def convert_det(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Det: Gaussian elimination with partial pivoting.

    Raises FreeSizeError for matrices of symbolic size.
    """
    data, dims, emit = node.inputs[0], dims_of(node.inputs[0]), node.emit
    if dims is None or not isinstance(dims[-1], int):
        raise FreeSizeError("matrices of unknown size")
    batch, size = dims[:-2], dims[-1]
    data = node.with_sizes(data, [*batch, size, size])
    matrix = emit(relax.op.reshape(data, relax.ShapeExpr([node.evaluator.quotient(batch, []), size, size])))
    result: relax.Expr = const(1, dtype_of(data))
    while size:
        column = emit(relax.op.take(matrix, const(0, "int64"), axis=2))
        row = emit(relax.op.argmax(emit(relax.op.abs(column)), axis=1))
        pivot = node.builder.call_te(_signed_pivot, column, row, primfunc_name_hint="pivot")
        result = emit(relax.op.multiply(result, emit(pivot)))
        size -= 1
        if size:
            matrix = emit(node.builder.call_te(_eliminate, matrix, row, primfunc_name_hint="eliminate"))
    return relax.op.reshape(result, relax.ShapeExpr(batch))


def _signed_pivot(column: te.Tensor, row: te.Tensor) -> te.Tensor:
    """The element of a row; negative where the row must be exchanged with the first."""

    def element(b: Any) -> Any:
        pivot = column[b, row[b]]
        return tirx.Select(row[b] == 0, pivot, -pivot)

    return te.compute((column.shape[0],), element, name="pivot")


def _eliminate(matrix: te.Tensor, row: te.Tensor) -> te.Tensor:
    """The matrix without its first column and a row, a multiple of which is taken from each other row."""
    batch, size, _ = matrix.shape

    def element(b: Any, i: Any, j: Any) -> Any:
        # The first row is in the place of the one that is gone.
        own = tirx.Select(i + 1 == row[b], tirx.const(0, "int64"), (i + 1).astype("int64"))
        pivot = matrix[b, row[b], 0]
        share = tirx.Select(pivot == 0, tirx.const(0, matrix.dtype), matrix[b, own, 0] / pivot)
        return matrix[b, own, j + 1] - share * matrix[b, row[b], j + 1]

    return te.compute((batch, size - 1, size - 1), element, name="eliminate")
