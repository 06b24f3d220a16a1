"""Lowers products of rounded rows to functions of a CPU, or to products of floats."""

import tvm
from tvm import relax

from tvmflow.compiler.dotproduct import Dot
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import rounded_products
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_rounded_products(machine: Machine | None, unit: Dot | None) -> tvm.transform.Pass:
    """Return the pass that lowers products of rounded rows for a machine with the dot product `unit` of integers.

    Without a machine, as for a GPU, and without a dot product, they become products of floats.
    """

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr:
        return rounded_products.lower(rewriter.builder_, call, machine, unit)

    return rewriting("LowerRoundedProducts", {"tvmflow.rounded_product": (lower,)})
