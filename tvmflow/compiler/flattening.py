"""Makes the buffers of functions flat without a fault of TVM in the simplification of their indices.

TVM's `FlattenBuffer` simplifies indices as affine maps. Of `(1 - i) % 2` it makes `-(i % -2)`, of `(i + 5) // 3 % 3`
something that lacks the 5: an element beside the right one is read, or one outside of the tensor. Reversed and shifted
repeats of elements have such indices. On `(i + 1) % 3` where a condition limits that, and i is below 3, it fails.
"""

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx import PrimFunc

from tvmflow.compiler.statements import is_choice, map_functions, reads_memory, replace_variables, summands

_QUOTIENTS = (tirx.FloorDiv, tirx.FloorMod)


@tvm.transform.module_pass(opt_level=0, name="FlattenBuffers")
class FlattenBuffers:
    """Calls TVM's `FlattenBuffer` with variables in the place of the quotients that it would change."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with flat buffers."""
        quotients: dict[tirx.Var, Any] = {}
        flat = tirx.transform.FlattenBuffer()(map_functions(mod, lambda func: _without_quotients(func, quotients)))
        if not quotients:
            return flat
        return map_functions(flat, lambda func: func.with_body(replace_variables(func.body, quotients)))


def _without_quotients(func: PrimFunc, quotients: dict[tirx.Var, Any]) -> PrimFunc:
    """Return the function with variables in the place of quotients at risk; the variables are added to `quotients`."""
    sizes = {
        size
        for param in func.params
        for dim in getattr(param, "shape", ())
        for size in tirx.analysis.undefined_vars(dim)
    }

    # The remainders in conditions.
    limited: list[Any] = []

    def add_limited(call: Any) -> None:
        if is_choice(call):
            tvm_ffi.structural_walk(call.args[0], (tirx.FloorMod, limited.append))

    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, add_limited))

    def is_at_risk(quotient: Any) -> bool:
        return _is_at_risk(quotient, sizes) or (
            isinstance(quotient, tirx.FloorMod)
            and _number(list(summands(quotient.a))) != 0
            and not reads_memory(quotient)
            and any(tvm_ffi.structural_equal(quotient, item) for item in limited)
        )

    def find(quotient: Any) -> Any:
        return tvm_ffi.VisitInterrupt(quotient) if is_at_risk(quotient) else None

    def hide(quotient: Any) -> Any:
        if not is_at_risk(quotient):
            return quotient
        variable = tirx.Var(f"quotient{len(quotients)}", quotient.ty)
        quotients[variable] = quotient
        return variable

    if tvm_ffi.structural_walk(func.body, (_QUOTIENTS, find)) is None:
        return func
    return func.with_body(tvm_ffi.structural_map(func.body, [(_QUOTIENTS, hide)], order="pre"))


def _is_at_risk(quotient: Any, sizes: set[tirx.Var]) -> bool:
    """Whether TVM may change the value of a quotient or a remainder.

    That is one with a falling dividend, or one of another quotient where either dividend has a number or a size added.
    Those that read a buffer stay as they are, since the index within has to become flat.
    """
    inner: list[Any] = []
    tvm_ffi.structural_walk(quotient.a, (_QUOTIENTS, inner.append))
    dividends = [list(summands(item.a)) for item in (quotient, *inner)]
    falls = any(term is not None and factor < 0 for term, factor in dividends[0])
    is_shifted = any(_number(terms) != 0 or any(term in sizes for term, _ in terms) for terms in dividends)
    return (falls or (bool(inner) and is_shifted)) and not reads_memory(quotient)


def _number(terms: list[tuple[Any, int]]) -> int:
    return sum(factor for term, factor in terms if term is None)
