"""Lowers divisions of integers, which TVM's own pass does slowly.

Before a division that rounds down becomes one that rounds to zero, TVM tries to prove that both agree. For the index of
a parallel loop over several free sizes, that takes tenths of a second. Sizes and indices of loops are never negative,
and a constant divisor needs no proof.
"""

from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.statements import map_functions, reads_memory

# TVM's intrinsic that reads a field of a structure, and its number for an element of an array of int64, as of a shape.
_STRUCT_GET, _ARRAY_ELEMENT = tvm.ir.Op.get("tirx.tvm_struct_get"), 17
# The operations that are not negative where both operands are not.
_KEEPING = (tirx.Add, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.Min, tirx.Max)
_FORMS = {tirx.FloorDiv: tirx.Div, tirx.FloorMod: tirx.Mod}


def lower_divisions(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a lowered module in which divisions round to zero, where the operands or the divisor allow it.

    Divisions of numbers that may be negative by a size, and of vectors, stay for TVM. So do all of a function that
    converts indices to floats: TVM's analysis of such a float raises where it knows the range of a quotient.
    """

    def change(func: tirx.PrimFunc) -> tirx.PrimFunc:
        if _makes_floats(func.body):
            return func
        lower = partial(_lowered, naturals=_Naturals(func.body))
        return func.with_body(tvm_ffi.structural_map(func.body, [(kind, lower) for kind in _FORMS]))

    return map_functions(mod, change)


def _makes_floats(body: Any) -> bool:
    """Whether a function's body converts integers that it computes, rather than reads, to floats."""

    def visit(cast: tirx.Cast) -> Any:
        is_float = str(cast.ty).startswith(("float", "bfloat"))
        return tvm_ffi.VisitInterrupt(cast) if is_float and not reads_memory(cast.value) else None

    return tvm_ffi.structural_walk(body, (tirx.Cast, visit)) is not None


def _lowered(expr: Any, naturals: "_Naturals") -> Any:
    if expr.a in naturals and expr.b in naturals:
        return _FORMS[type(expr)](expr.a, expr.b)
    is_scalar = expr.ty.is_scalar()
    if not (is_scalar and isinstance(expr.b, tirx.IntImm) and int(expr.b) > 0):
        return expr
    # All bits of a negative remainder's sign.
    remainder = tirx.Mod(expr.a, expr.b)
    sign = remainder >> tirx.const(expr.ty.dtype.bits - 1, str(expr.ty))
    return tirx.Div(expr.a, expr.b) + sign if isinstance(expr, tirx.FloorDiv) else remainder + (expr.b & sign)


class _Naturals:
    """The integers of a function that are not negative: constants, sizes, indices of loops, and what follows."""

    def __init__(self, body: Any) -> None:
        self._variables: set[Any] = set()

        def add(variable: Any, value: Any) -> tvm_ffi.WalkResult:
            if value in self:
                self._variables.add(variable)
            return tvm_ffi.WalkResult.ADVANCE

        tvm_ffi.structural_walk(
            body,
            [
                (tirx.For, lambda loop: add(loop.loop_var, loop.min)),
                (tirx.Bind, lambda binding: add(binding.var, binding.value)),
                (tirx.Let, lambda binding: add(binding.var, binding.value)),
            ],
        )

    def __contains__(self, expr: Any) -> bool:
        """Whether the expression `expr` is known to be an integer that is not negative."""
        if isinstance(expr, tirx.IntImm):
            return int(expr) >= 0
        if isinstance(expr, tirx.Var):
            return expr in self._variables
        if isinstance(expr, tirx.Cast):
            return expr.value in self
        if isinstance(expr, tvm.ir.Call):
            return expr.op.same_as(_STRUCT_GET) and int(expr.args[2]) == _ARRAY_ELEMENT
        return isinstance(expr, _KEEPING) and expr.a in self and expr.b in self
