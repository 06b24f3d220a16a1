"""Pads data by an amount that depends on its size, as windows of data of free size need, in one function."""

from typing import Any

import tvm
from tvm import relax, te

from tvmflow.compiler.operators.common import static
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting, sizes


def _pad_part(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write a slice of padded data, of which a free size says where it begins, as one function of the data.

    TVM does not fuse such a slice with other functions: the padding and the slice would each copy the data.
    """
    padding = rewriter.call(call.args[0], "nn.pad")
    shape, data = sizes(call), None if padding is None else padding.args[0]
    steps = list(call.args[4]) if len(call.args) > 4 else []
    if padding is None or shape is None or sizes(data) is None or not rewriter.used_once(call.args[0]):
        return None
    if not call.attrs.assume_inbound or any(static(step) != 1 for step in steps):
        return None
    begins = {int(axis): begin for axis, begin in zip(call.args[1], call.args[2], strict=True)}
    if all(static(begin) is not None for begin in begins.values()) or padding.attrs.pad_mode != "constant":
        return None
    widths = [int(width) for width in padding.attrs.pad_width]
    if any(width for place, width in enumerate(widths) if place // 2 not in begins):
        return None
    fill = float(padding.attrs.pad_value)

    def pad(data: te.Tensor) -> te.Tensor:
        def element(*place: Any) -> Any:
            inner, conditions = list(place), []
            for axis, begin in begins.items():
                inner[axis] = place[axis] + (begin - widths[2 * axis])
                conditions += [inner[axis] >= 0, inner[axis] < data.shape[axis]]
            return te.if_then_else(te.all(*conditions), data[tuple(inner)], tvm.tirx.const(fill, data.dtype))

        return te.compute(shape, element, name="pad")

    return rewriter.builder_.call_te(pad, data, primfunc_name_hint="pad")


def pad_in_one_function() -> tvm.transform.Pass:
    """Return the pass that writes the slices of padded data as one function each."""
    return rewriting("PadInOneFunction", {"strided_slice": (_pad_part,)})
