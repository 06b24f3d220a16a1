"""Parallel loops of free length, which run on the caller's thread where they are short.

Whether a loop is worth a parallel region is decided at the build where its length is known. A loop of free length gets
both forms, and a test of its length chooses one when the function runs.
"""

from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import For, PrimFunc

from tvmflow.compiler.statements import map_functions, with_own_variables

PARALLEL_CYCLES = "tvmflow.parallel_cycles"
"""The attribute of a function whose loops may have both forms: the fewest cycles that are worth a parallel region."""

# The operations of a lowered expression that a core runs in one cycle.
_OPERATIONS = 4
# The most nodes of the body of a loop that is in the code twice: a longer one would make the build much longer.
_MOST_NODES = 4000


def run_short_loops_alone(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a lowered module whose parallel loops of free length run on the caller's thread where they are short.

    Only functions with the attribute `PARALLEL_CYCLES` change, and of these only loops whose work follows from sizes
    that are known before the loop.
    """

    def change(func: PrimFunc) -> PrimFunc:
        cycles = (func.attrs or {}).get(PARALLEL_CYCLES)
        if cycles is None:
            return func
        return func.with_body(tvm_ffi.structural_map(func.body, (For, partial(_with_both_forms, cycles=int(cycles)))))

    return map_functions(mod, change)


def _with_both_forms(loop: For, cycles: int) -> Any:
    """Return a loop, or the branch between its serial and its parallel form."""
    if loop.kind != tirx.ForKind.PARALLEL or isinstance(loop.extent, tirx.IntImm) or _count(loop.body) > _MOST_NODES:
        return loop
    work = _Work().of(loop)
    if work is None:
        return loop
    serial = with_own_variables(For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body))
    return tirx.IfThenElse(tvm.sym.Analyzer().simplify(work < _OPERATIONS * cycles), serial, loop)


class _Work:
    """Counts the operations of statements; the numbers of iterations may be symbolic sizes."""

    def __init__(self) -> None:
        self._inner: set[Any] = set()

    def of(self, statement: Any) -> Any:
        """Return the number of operations, an integer or an expression of int64; None where it is not known before."""
        parts: list[Any] = []
        if isinstance(statement, For):
            self._inner.add(statement.loop_var)
            if _runs_once(statement):
                return self.of(statement.body)
            # A length that changes from iteration to iteration is not known before.
            is_known = self._inner.isdisjoint(tirx.analysis.undefined_vars(statement.extent))
            work = self.of(statement.body) if is_known else None
            return None if work is None else work * statement.extent.astype("int64")
        if isinstance(statement, tirx.While):
            return None
        if isinstance(statement, tirx.SeqStmt):
            parts = list(statement.seq)
        elif isinstance(statement, tirx.IfThenElse):
            parts = [part for part in (statement.then_case, statement.else_case) if part is not None]
        elif isinstance(statement, tirx.AttrStmt):
            parts = [statement.body]
        else:
            if isinstance(statement, tirx.Bind):
                self._inner.add(statement.var)
            return tirx.const(_count(statement), "int64")
        total: Any = tirx.const(0, "int64")
        for part in parts:
            work = self.of(part)
            if work is None:
                return None
            total = total + work
        return total


def _runs_once(loop: For) -> bool:
    """Whether a loop stands for a branch: it runs once or never."""
    extent = loop.extent
    while isinstance(extent, tirx.Cast):
        extent = extent.value
    return str(extent.ty.dtype) == "bool"


def _count(statement: Any) -> int:
    """The number of expressions in a statement."""
    nodes: list[Any] = []
    tvm_ffi.structural_walk(statement, (Expr, nodes.append))
    return len(nodes)
