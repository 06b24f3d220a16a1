"""The passes from an imported model to fused, unscheduled functions."""

import tvm
from tvm import relax

from tvmflow.compiler.machine import machine
from tvmflow.compiler.operators import legalizations
from tvmflow.compiler.passes.layout import ChannelsLast
from tvmflow.compiler.passes.simplify import Simplify
from tvmflow.target import Target


def lower_passes(target: Target) -> list[tvm.transform.Pass]:
    """The passes from a Relax module whose weights are constants to `main` with calls of fused functions."""
    if target.arch == "cuda":
        layout: list[tvm.transform.Pass] = []
        legalize = relax.transform.LegalizeOps()
    else:
        layout = [ChannelsLast()]
        legalize = relax.transform.LegalizeOps(legalizations(machine(target)))
    return [
        Simplify(),
        relax.transform.FoldBatchnormToConv2D(),
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.FoldConstant(),
        *layout,
        Simplify(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.EliminateCommonSubexpr(),
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        legalize,
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.DeadCodeElimination(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
