"""The pass by which products and gathers read weights as the model's file stores them, where that is faster.

Other operators get such weights in float32, which the library makes when it is loaded (`passes.packing`). Dense layers
read those of 16 bits themselves (`operators.products`).
"""

import math

import tvm
from tvm import relax, te

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import constant, is_float32, static
from tvmflow.compiler.operators.narrow_products import Functions, NarrowProduct, multiply, pays
from tvmflow.compiler.operators.widening import float_of_half, halves_of, in_blocks
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def read_stored_weights(machine: Machine) -> tvm.transform.Pass:
    """Return the pass for products with constant matrices of 4 or 8 bits, and gathers from tables of 16 bits.

    `passes.block_products` has lowered the products that the file itself has in blocks.
    """
    functions: Functions = {}

    def multiply_blocks(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        data, right = call.args
        if not is_float32(data, right) or data.ty.ndim < 2 or right.ty.ndim != 2:
            return None
        value = rewriter.constant(right)
        if value is None or static(data.ty.shape.values[-1]) is None:
            return None
        rows = math.prod(data.ty.shape.values[:-1])
        if static(rows) == 0 or not pays(value.size, rows, machine):
            return None
        weight = in_blocks(value, 0)
        if weight is None:
            return None
        return multiply(rewriter.builder_, data, NarrowProduct(weight, rows, machine), functions)

    def gather_halves(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        table, *others = call.args
        value = rewriter.constant(table) if is_float32(table) else None
        if value is None or value.nbytes <= machine.own_cache:
            return None
        stored = halves_of(value, machine.converts_halves)
        if stored is None:
            return None
        rows = rewriter.emit(relax.Call(call.op, [constant(stored), *others], call.attrs, call.ty_args))
        return rewriter.builder_.call_te(_widen, rows, primfunc_name_hint="widen")

    return rewriting("ReadStoredWeights", {"matmul": (multiply_blocks,), "take": (gather_halves,)})


def _widen(rows: te.Tensor) -> te.Tensor:
    return te.compute(rows.shape, lambda *place: float_of_half(rows[place]), name="widened")
