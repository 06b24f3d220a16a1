"""Element-wise functions that vectorise. TVM's own definitions call the C library for each lane."""

from collections.abc import Callable
from typing import Any

import tvm
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
    "relax.nn.relu": lambda x: tirx.max(tirx.const(0, "float32"), x),
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


def legalize_extreme(
    builder: relax.BlockBuilder, call: relax.Call, _machine: Machine, largest: bool
) -> relax.Expr | None:
    """Take the larger or the smaller of a float32 tensor and a constant number; NaN stays NaN. None for other operands.

    Code for the first of two operands that do not compare, as with NaN, returns the second one: the number comes first.
    """
    data, number = call.args
    if not is_float32(data, number) or not isinstance(number, tvm.ir.GenericConst) or len(number.ty.shape.values):
        return None
    limit, extreme = tirx.const(float(number.value.numpy()), "float32"), tirx.max if largest else tirx.min

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: extreme(limit, x[index]), name=name)

    name = "maximum" if largest else "minimum"
    return builder.call_te(compute, data, primfunc_name_hint=name)
