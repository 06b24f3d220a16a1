"""Lowers bags of the rows of a table to one function."""

import tvm
from tvm import relax

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import bags
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_bags(machine: Machine) -> tvm.transform.Pass:
    """Return the pass that lowers the bags of each table to one function for `machine`."""

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr:
        return bags.lower(rewriter.builder_, call, machine)

    return rewriting("LowerBags", {"tvmflow.bags": (lower,)})
