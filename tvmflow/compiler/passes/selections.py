"""Selects a few of the sorted elements along a dimension, or the first one's place, by a kernel of this project."""

from functools import partial

import tvm
from tvm import relax

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import selection
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_selections(machine: Machine) -> tvm.transform.Pass:
    """Return the pass that lowers TopK of numbers of 32 or 64 bits to a kernel, where TVM would sort all elements.

    It also lowers ArgMax and ArgMin along an axis.
    """

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        return selection.lower(rewriter.builder_, call, machine)

    def lower_place(rewriter: Rewriter, call: relax.Call, *, largest: bool) -> relax.Expr | None:
        return selection.lower_place(rewriter.builder_, call, machine, largest=largest)

    return rewriting(
        "LowerSelections",
        {
            "topk": (lower,),
            "argmax": (partial(lower_place, largest=True),),
            "argmin": (partial(lower_place, largest=False),),
        },
    )
