"""Lowers ensembles of decision trees to one function."""

import tvm
from tvm import relax

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import trees
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_trees(machine: Machine) -> tvm.transform.Pass:
    """Return the pass that lowers each ensemble of trees to one function for `machine`."""

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr:
        return trees.lower(rewriter.builder_, call, machine)

    return rewriting("LowerTrees", {"tvmflow.trees": (lower,)})
