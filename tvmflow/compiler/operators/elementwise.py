"""Element-wise functions that vectorise. TVM's own definitions call the C library for each lane."""

from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from tvmflow.compiler import vectormath
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import is_float32

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relax.exp": vectormath.exp,
    "relax.erf": vectormath.erf,
    "relax.tanh": vectormath.tanh,
    # Rounds ties to even, as TVM's own definition does, but vectorises.
    "relax.round": tirx.round,
    "relax.sigmoid": vectormath.sigmoid,
    "relax.nn.silu": vectormath.silu,
    "relax.nn.gelu": vectormath.gelu,
    "relax.nn.gelu_tanh": vectormath.gelu_tanh,
}


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, _machine: Machine, function: Callable[[Any], Any]
) -> relax.Expr | None:
    """Apply `function` to every element of a float32 tensor; None for other types."""
    if not is_float32(call.args[0]):
        return None
    name = call.op.name.rpartition(".")[2]

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: function(x[index]), name=name)

    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)
