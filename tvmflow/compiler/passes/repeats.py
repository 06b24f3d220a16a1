"""Multiplies by weights that a model repeats for each item of a batch, without repeating them."""

import math

import tvm
from tvm import relax

from tvmflow.compiler.operators.common import are_equal, constant
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting, sizes, static_sizes


def _multiply_by_one_copy(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Divide the batch of a product into the copies of constant weights and what is in a copy.

    The right operand `[copies * count, K, N]`, perhaps transposed, is a constant that is repeated along its first
    dimension. The product becomes one of `[copies, count, M, K]` by the constant `[count, K, N]`.
    """
    left, right = call.args
    transpose = rewriter.call(right, "permute_dims")
    if transpose is not None and [int(axis) for axis in transpose.attrs.axes or ()] != [0, 2, 1]:
        return None
    reshape = rewriter.call(right if transpose is None else transpose.args[0], "reshape")
    repeat = None if reshape is None else rewriter.call(reshape.args[0], "broadcast_to")
    if reshape is None or repeat is None:
        return None
    weight, whole, rows = rewriter.constant(repeat.args[0]), sizes(repeat), sizes(left)
    matrices = sizes(reshape)
    if weight is None or whole is None or rows is None or matrices is None or len(matrices) != 3 or len(rows) != 3:
        return None
    own = static_sizes(repeat.args[0]) or []
    # Only the first dimension grows, and it is the first of the matrices' dimensions, or a part of it.
    if len(own) != len(whole) or own[:1] != [1] or not all(map(are_equal, own[1:], whole[1:])):
        return None
    lines, columns = (int(size) if isinstance(size, tvm.tirx.IntImm) else 0 for size in matrices[1:])
    if not lines * columns or math.prod(own) % (lines * columns):
        return None
    copies, count = whole[0], math.prod(own) // (lines * columns)
    if not are_equal(rows[0], copies * count) or not are_equal(matrices[0], copies * count):
        return None
    value = weight.reshape(count, lines, columns)
    if transpose is not None:
        value = value.transpose(0, 2, 1)
    parts = rewriter.emit(relax.op.reshape(left, relax.ShapeExpr([copies, count, *rows[1:]])))
    product = rewriter.emit(relax.op.matmul(parts, constant(value), call.attrs.out_dtype))
    return relax.op.reshape(product, relax.ShapeExpr([rows[0], rows[1], value.shape[2]]))


def multiply_by_one_copy() -> tvm.transform.Pass:
    """Return the pass that multiplies by repeated constant weights without repeating them."""
    return rewriting("MultiplyByOneCopy", {"matmul": (_multiply_by_one_copy,)})
