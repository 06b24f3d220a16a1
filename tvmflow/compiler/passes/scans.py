"""Computes running sums of slices by kernels of this project."""

import tvm
from tvm import relax

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import scans
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting


def lower_scans(machine: Machine) -> tvm.transform.Pass:
    """Return the pass that lowers running sums of float32 along a dimension that is not the last one."""

    def lower(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        return scans.lower(rewriter.builder_, call, machine)

    return rewriting("LowerScans", {"cumsum": (lower,)})
