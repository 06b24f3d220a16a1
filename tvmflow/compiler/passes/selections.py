"""Selects a few of the sorted elements along a dimension by a kernel of this project."""

import tvm
from tvm import relax

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import selection
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_selections(machine: Machine) -> tvm.transform.Pass:
    """Return the pass that lowers TopK of float32, where that takes fewer steps than to sort all elements."""

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        return selection.lower(rewriter.builder_, call, machine)

    return rewriting("LowerSelections", {"topk": (lower,)})
