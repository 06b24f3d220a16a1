"""Multiplies a single row by the transpose of a tensor without transposing it, as attention to one query does."""

import tvm
from tvm import relax

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import is_float32, static
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting, sizes


def multiply_single_rows(machine: Machine) -> tvm.transform.Pass:
    """Return the pass that sums the products of a row with each row of a tensor, in the place of the transpose."""

    def multiply(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        left, right = call.args
        transpose, row = rewriter.call(right, "permute_dims"), sizes(left)
        if transpose is None or row is None or not rewriter.used_once(right) or not is_float32(left, right):
            return None
        rank, last = right.ty.ndim, static(row[-1])
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        if rank < 2 or [int(axis) for axis in transpose.attrs.axes or ()] != swapped:
            return None
        # Shorter rows fill no vector.
        if len(row) < 2 or static(row[-2]) != 1 or last is None or last < machine.lanes:
            return None
        products = rewriter.emit(relax.op.multiply(left, transpose.args[0]))
        return relax.op.reshape(rewriter.emit(relax.op.sum(products, axis=-1)), call.ty.shape)

    return rewriting("MultiplySingleRows", {"matmul": (multiply,)})
