"""Maximum and minimum of floats over axes, with infinity as the identity element.

TVM's own identity element is the largest finite number.
"""

import math
from typing import Any

from tvm import relax, te, tirx

from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import reduced_axes


def legalize(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine, sign: int) -> relax.Expr | None:
    """Define a maximum (`sign` 1) or a minimum (`sign` -1) of floats over axes.

    The maximum of no elements is minus infinity, the minimum is infinity. Returns None for other types, for unknown
    shapes, and where there is no axis to reduce.
    """
    data = call.args[0]
    if not isinstance(data.ty.shape, relax.ShapeExpr) or not str(data.ty.dtype).startswith("float"):
        return None
    rank = data.ty.ndim
    axes = reduced_axes(call)
    reducer = te.comm_reducer(
        lambda x, y: tirx.max(x, y) if sign > 0 else tirx.min(x, y),
        lambda dtype: tirx.const(-sign * math.inf, dtype),
    )

    def compute(x: te.Tensor) -> te.Tensor:
        reduce_axes = {axis: te.reduce_axis((0, x.shape[axis]), f"k{axis}") for axis in axes}
        outer_axes = [axis for axis in range(rank) if axis not in reduce_axes]

        def element(*index: Any) -> Any:
            place = dict(zip(range(rank) if call.attrs.keepdims else outer_axes, index, strict=True)) | reduce_axes
            return reducer(x[tuple(place[axis] for axis in range(rank))], axis=list(reduce_axes.values()))

        return te.compute(list(call.ty.shape.values), element)

    if not rank or not axes:
        return None
    return builder.call_te(compute, data, primfunc_name_hint="max" if sign > 0 else "min")
