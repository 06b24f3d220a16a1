"""Multiplies a single row by a computed matrix, or by the transpose of one, where it lies: without a copy of it."""

import tvm
from tvm import relax

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import free_reductions
from tvmflow.compiler.operators.common import are_equal, is_float32, static
from tvmflow.compiler.operators.products import FEWEST_ROWS
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting, sizes


def multiply_single_rows(machine: Machine, most: int = FEWEST_ROWS) -> tvm.transform.Pass:
    """Return the pass that sums the products of a row with each row of a tensor, in the place of the transpose.

    At most `most` rows of known size are multiplied so. The pass also adds up the rows of a matrix that is no constant,
    each times an element of the row.
    """

    def multiply(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        left, right = call.args
        transpose, row = rewriter.call(right, "permute_dims"), sizes(left)
        if transpose is None or row is None or not rewriter.used_once(right) or not is_float32(left, right):
            return None
        rank, last = right.ty.ndim, static(row[-1])
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        if min(rank, len(row)) < 2 or [int(axis) for axis in transpose.attrs.axes or ()] != swapped:
            return None
        count, matrix = static(row[-2]), transpose.args[0]
        if (
            not count
            or count > (FEWEST_ROWS if last is None else most)
            or (last is not None and last < count * machine.lanes)
        ):
            # Shorter rows fill few vectors.
            return None
        if last is None:
            batch, own = row[:-2], matrix.ty.shape.values
            if len(batch) != rank - 2 or not all(are_equal(*pair) for pair in zip(batch, own[:-2], strict=True)):
                return None
            result = rewriter.emit(free_reductions.multiply_rows(rewriter.builder_, left, matrix, machine))
        else:
            # Each row of the matrix is read once, for all rows.
            factors, rows = (rewriter.emit(relax.op.expand_dims(a, -at)) for a, at in ((left, 3), (matrix, 2)))
            result = rewriter.emit(relax.op.sum(rewriter.emit(relax.op.multiply(factors, rows)), axis=-1))
        if count == 1:
            return relax.op.reshape(result, call.ty.shape)
        last = call.ty.ndim - 1
        return relax.op.permute_dims(result, [*range(last - 1), last, last - 1])

    def add_rows(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        left, right = call.args
        row, matrix = sizes(left), sizes(right)
        if row is None or matrix is None or min(len(row), len(matrix)) < 2 or not is_float32(left, right):
            return None
        if isinstance(right, tvm.ir.GenericConst) or rewriter.constant(right) is not None:
            return None
        # Each matrix has one row to multiply.
        lead = row[: max(0, len(row) - len(matrix))]
        pairs = zip(row[len(lead) : -2], matrix[len(matrix) - len(row) + len(lead) : -2], strict=True)
        if any(static(size) != 1 for size in (row[-2], *lead)) or not all(are_equal(*pair) for pair in pairs):
            return None
        column = rewriter.emit(relax.op.reshape(left, [*row[len(lead) : -2], row[-1], 1]))
        products = rewriter.emit(relax.op.multiply(column, right))
        return relax.op.reshape(rewriter.emit(relax.op.sum(products, axis=-2)), call.ty.shape)

    return rewriting("MultiplySingleRows", {"matmul": (multiply, add_rows)})
