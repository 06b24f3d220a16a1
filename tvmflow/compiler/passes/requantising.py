"""Concatenates the integers of a quantised model themselves, not the numbers that they stand for."""

import numpy as np
import tvm
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.passes.rewrite import Rewriter, dtype, rewriting

_INTEGERS = ("uint8", "int8")


def _scalars(rewriter: Rewriter, call: relax.Call) -> list[Array] | None:
    """The scale and the zero point that all numbers share; None where they are computed, or several."""
    values = [rewriter.constant(parameter) for parameter in call.args[1:]]
    one = [value.reshape(-1) for value in values if value is not None and value.size == 1]
    return one if len(one) == len(values) and one[0].dtype == np.float32 else None


def _same_integers(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Take 8-bit integers for what quantises them again, with the same scale and zero point as they have."""
    source = rewriter.call(call.args[0], "dequantize")
    if source is None or dtype(call) not in _INTEGERS or dtype(source.args[0]) != dtype(call):
        return None
    before, after = _scalars(rewriter, source), _scalars(rewriter, call)
    if before is None or after is None or dtype(source) != "float32" or not np.isfinite(after[0] * 512).all():
        return None
    is_same = all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    # Of a subnormal scale, the quotient may be another number.
    return source.args[0] if is_same and after[0] >= np.finfo(np.float32).tiny else None


def _concatenated_integers(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Quantise the parts of a concatenation of dequantised integers, and concatenate these."""
    whole = rewriter.call(call.args[0], "concat")
    if whole is None or dtype(call) not in _INTEGERS or not rewriter.used_once(call.args[0]):
        return None
    parts = rewriter.behind(whole.args[0])
    if not isinstance(parts, relax.Tuple) or _scalars(rewriter, call) is None:
        return None
    sources = [rewriter.call(part, "dequantize") for part in parts.fields]
    if any(source is None or dtype(source.args[0]) not in _INTEGERS for source in sources):
        return None
    attrs = {"axis": 0, "out_dtype": dtype(call)}
    integers = [rewriter.emit(relax.op.quantize(part, *call.args[1:], **attrs)) for part in parts.fields]
    return relax.op.concat(integers, whole.attrs.axis)


def concatenate_integers() -> tvm.transform.Pass:
    """Return the pass that concatenates 8-bit integers in the place of the numbers for which they stand."""
    return rewriting("ConcatenateIntegers", {"quantize": (_same_integers, _concatenated_integers)})
