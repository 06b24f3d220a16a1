"""Computes running sums by kernels of this project."""

import tvm
from tvm import relax

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import scans
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_scans(machine: Machine) -> tvm.transform.Pass:
    """Return the pass that lowers running sums of integers, float32 and float64."""

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        return scans.lower(rewriter.builder_, call, machine)

    return rewriting("LowerScans", {"cumsum": (lower,)})
