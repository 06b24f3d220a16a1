"""Lowers products with weights of few bits to functions of a CPU, or to products of floats."""

import tvm
from tvm import relax

from tvmflow.compiler.dotproduct import Dot
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import block_products
from tvmflow.compiler.operators.narrow_products import Functions
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_block_products(machine: Machine | None, unit: Dot | None, *, widens: bool = False) -> tvm.transform.Pass:
    """Return the pass that lowers products with weights of few bits; see `operators.block_products.lower`.

    No machine means a GPU, and no `unit` a processor without a dot product of integers.
    """
    functions: Functions = {}

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr:
        return block_products.lower(rewriter.builder_, call, machine, unit, functions, widens=widens)

    return rewriting("LowerBlockProducts", {"tvmflow.block_product": (lower,)})
