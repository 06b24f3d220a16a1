"""Refuses, for GPUs, the operators of this project that have kernels for CPUs alone."""

import tvm
from tvm import relax

from tvmflow.compiler.passes.rewrite import Rewriter, rewriting
from tvmflow.errors import BuildError

_NAMES = {
    "tvmflow.bags": "bags of rows (EmbeddingBag)",
    "tvmflow.recurrence": "LSTM, GRU and RNN",
    "tvmflow.trees": "ensembles of decision trees",
}


def refuse_kernels(target: str) -> tvm.transform.Pass:
    """Return the pass that raises BuildError for recurrent networks, trees and bags; the error names the target."""

    def refuse(_rewriter: Rewriter, call: relax.Call) -> None:
        name = _NAMES[str(call.op.name)]
        raise BuildError(f"{name} are built for CPU targets alone, not for {target!r}; build for a CPU")

    return rewriting("RefuseKernels", dict.fromkeys(_NAMES, (refuse,)))
