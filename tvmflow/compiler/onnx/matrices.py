"""Det and com.microsoft's Inverse: determinants and inverses of square matrices."""

from typing import Any

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

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


def convert_inverse(node: Node) -> relax.Expr:
    """Return the Relax expression of com.microsoft's Inverse: Gauss-Jordan elimination with partial pivoting.

    A matrix of float16 is inverted in float32. Raises FreeSizeError for data of unknown shape.
    """
    data, dims, emit = node.inputs[0], dims_of(node.inputs[0]), node.emit
    if dims is None:
        raise FreeSizeError("data of unknown shape")
    *batch, size, columns = dims
    node.check_size(columns, size)
    dtype = dtype_of(data)
    data = emit(relax.op.astype(data, "float32")) if dtype == "float16" else data
    matrices = emit(relax.op.reshape(data, relax.ShapeExpr([node.evaluator.quotient(batch, []), size, columns])))
    inverse = emit(node.builder.call_te(_inverse, matrices, primfunc_name_hint="inverse"))
    inverse = emit(relax.op.reshape(inverse, relax.ShapeExpr(dims)))
    return relax.op.astype(inverse, dtype) if dtype == "float16" else inverse


def _inverse(matrices: te.Tensor) -> te.Tensor:
    """The inverse of each matrix `[matrices, size, size]`."""
    count, size, _ = matrices.shape
    dtype = matrices.dtype

    def eliminate(inputs: Any, outputs: Any) -> Any:
        with IRBuilder() as builder:
            source, inverse, rest, number, place = map(T.buffer_proxy, (inputs[0], *outputs))
            with T.parallel(0, count) as b:
                with T.serial(0, size) as i, T.serial(0, size) as j:
                    rest[b, i, j] = source[b, i, j]
                    inverse[b, i, j] = tirx.Select(i == j, tirx.const(1, dtype), tirx.const(0, dtype))
                with T.serial(0, size) as k:
                    place[b] = k.astype("int64")
                    with T.serial(k + 1, size) as i:
                        is_larger = tirx.abs(rest[b, i, k]) > tirx.abs(rest[b, place[b], k])
                        with T.If(is_larger), T.Then():
                            place[b] = i.astype("int64")
                    with T.serial(0, size) as j:
                        for part in (rest, inverse):
                            number[b] = part[b, k, j]
                            part[b, k, j] = part[b, place[b], j]
                            part[b, place[b], j] = number[b]
                    number[b] = rest[b, k, k]
                    with T.serial(0, size) as j:
                        for part in (rest, inverse):
                            part[b, k, j] = part[b, k, j] / number[b]
                    with T.serial(0, size) as i, T.If(i != k), T.Then():
                        number[b] = rest[b, i, k]
                        with T.serial(0, size) as j:
                            for part in (rest, inverse):
                                part[b, i, j] = part[b, i, j] - number[b] * part[b, k, j]
            return builder.get()

    shapes = [(count, size, size), (count, size, size), (count,), (count,)]
    dtypes = [dtype, dtype, dtype, "int64"]
    buffers = [tirx.decl_buffer(shape, kind, "part") for shape, kind in zip(shapes, dtypes, strict=True)]
    results = te.extern(shapes, [matrices], eliminate, out_buffers=buffers, dtype=dtypes, name="inverse")
    return results[0]
