"""Gives the quotients of free sizes in a function one form.

Tiles of a free size are counted by a quotient such as `(width + 15) // 16`. Schedule primitives write it into every
loop and index, and in several forms: `(width - 1) // 16 + 1` is the same number. TVM's passes do not see that. They
keep conditions that always hold, and take seconds for the indices of unrolled loops.
"""

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize
from tvm.tirx import For, PrimFunc

from tvmflow.compiler.statements import map_functions, replace_variables

_LARGEST = 2**31 - 1
"""The end of the range of a size and of a number of tiles, which TVM must be told."""


def unify_quotients(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module in whose scheduled functions quotients of sizes that differ by a whole number have one form.

    In the lengths and conditions of loops, the number of tiles of a size counts as one or more: TVM writes
    `max(1, tiles)` where it cannot tell, and a condition around all that the loop does. Without elements the loop then
    runs not at all, where it ran once and did nothing.
    """
    return map_functions(mod, _unified)


def _unified(func: PrimFunc) -> PrimFunc:
    if not isinstance(func.body, SBlockRealize):
        return func
    dims = [dim for param in func.params for dim in getattr(param, "shape", ())]
    # The shapes of parameters stay as they are, and a buffer has one shape.
    if any(_holds_quotient(dim) for dim in dims):
        return func
    sizes = {size for dim in dims for size in tirx.analysis.undefined_vars(dim)}
    sizes |= {param for param in func.params if not tirx.is_buffer_var(param)}
    table = _Quotients(sizes)
    body = tvm_ffi.structural_map(func.body, [(tirx.FloorDiv, table.replace)], order="pre")
    if not table.values:
        return func
    shorten = [
        ((tirx.Add, tirx.Sub, tirx.Mul), table.simplify),
        (For, table.shorten_loop),
        (SBlockRealize, table.shorten_condition),
    ]
    body = tvm_ffi.structural_map(body, shorten)
    return func.with_body(replace_variables(body, table.values))


def _holds_quotient(expr: Any) -> bool:
    interrupted = tvm_ffi.structural_walk(expr, (tirx.FloorDiv, lambda part: tvm_ffi.VisitInterrupt(part)))
    return interrupted is not None


class _Quotients:
    """Variables in the place of a function's quotients, and their `values`."""

    def __init__(self, sizes: set[tirx.Var]) -> None:
        self.values: dict[tirx.Var, Any] = {}
        self._sizes = sizes
        self._variables: dict[Any, tirx.Var] = {}
        self._analyzer = tvm.sym.Analyzer()
        self._sizes_analyzer = tvm.sym.Analyzer()
        for size in sizes:
            _bind_positive(self._sizes_analyzer, size)

    def replace(self, expr: tirx.FloorDiv) -> Any:
        """Return the variable of a quotient, plus a number; other quotients stay as they are."""
        names = tirx.analysis.undefined_vars(expr.a)
        if not isinstance(expr.b, tirx.IntImm) or int(expr.b) < 1 or not names or not self._sizes.issuperset(names):
            return expr
        divisor = int(expr.b)
        dividend, number = _sum_last_numbers(expr.a)
        more, rest = divmod(number, divisor)
        key = tvm_ffi.StructuralKey(dividend), divisor, rest  # type: ignore[call-arg]
        if key not in self._variables:
            variable = tirx.Var(f"quotient{len(self._variables)}", expr.ty)
            self._variables[key] = variable
            self.values[variable] = self._analyzer.simplify(tirx.floordiv(dividend + rest, expr.b))
            if rest == divisor - 1 and self._sizes_analyzer.can_prove(dividend >= 1):
                _bind_positive(self._analyzer, variable)
        return self._variables[key] + more if more else self._variables[key]

    def shorten_loop(self, loop: For) -> For:
        """Return a loop without `max` and `min` in its length where they change nothing."""
        start, extent = self._shorten(loop.min), self._shorten(loop.extent)
        if start.same_as(loop.min) and extent.same_as(loop.extent):
            return loop
        return For(loop.loop_var, start, extent, loop.kind, loop.body, loop.thread_binding, loop.annotations, loop.step)

    def shorten_condition(self, realize: SBlockRealize) -> SBlockRealize:
        """Return a block with the indices and the condition that its loops give it, without `max` and `min`."""
        values, predicate = [self._shorten(value) for value in realize.iter_values], self._shorten(realize.predicate)
        return SBlockRealize(values, predicate, realize.block)

    def _shorten(self, expr: Any) -> Any:
        shorter = tvm_ffi.structural_map(expr, [((tirx.Max, tirx.Min), self.simplify)])
        return expr if shorter.same_as(expr) else self._analyzer.simplify(shorter)

    def simplify(self, expr: Any) -> Any:
        """Return an expression of quotients and numbers alone in its shortest form; others stay as they are."""
        is_known = all(variable in self.values for variable in tirx.analysis.undefined_vars(expr))
        return self._analyzer.simplify(expr) if is_known else expr


def _bind_positive(analyzer: tvm.sym.Analyzer, variable: tirx.Var) -> None:
    """Tell an analyzer that a variable is at least one."""
    ends = (tirx.const(end, str(variable.ty.dtype)) for end in (1, _LARGEST))
    analyzer.bind(variable, tvm.ir.Range(*ends))


def _sum_last_numbers(expr: Any) -> tuple[Any, int]:
    """A sum as its other terms and the sum of its last numbers."""
    number = 0
    while isinstance(expr, tirx.Add | tirx.Sub) and isinstance(expr.b, tirx.IntImm):
        number += int(expr.b) if isinstance(expr, tirx.Add) else -int(expr.b)
        expr = expr.a
    return expr, number
