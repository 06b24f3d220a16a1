"""Multiplies by the transpose of a computed matrix without a transpose in memory: the product packs it as it goes."""

import tvm
from tvm import relax

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.products import multiply_transposed
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def multiply_transposes(machine: Machine, choices: Choices) -> tvm.transform.Pass:
    """Return the pass that lowers float32 products by transposes of tensors that are no constants."""

    def multiply(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        right = call.args[1]
        transpose = rewriter.call(right, "permute_dims")
        if transpose is None or transpose.attrs.axes is None or not rewriter.used_once(right):
            return None
        (source,), axes = transpose.args, [int(axis) for axis in transpose.attrs.axes]
        if isinstance(source, tvm.ir.GenericConst) or rewriter.constant(source) is not None:
            return None
        return multiply_transposed(rewriter.builder_, call, source, axes, machine, choices)

    return rewriting("MultiplyTransposes", {"matmul": (multiply,)})
