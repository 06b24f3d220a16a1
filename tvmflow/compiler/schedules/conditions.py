"""Leaves out conditions that always hold, which TVM does not prove where a loop runs over tiles of a free size.

A loop over columns and rows of tiles, `columns * rows` in all, computes the column `loop // rows`. TVM keeps the
condition that it is below `columns`, around each statement of the tile.
"""

from functools import reduce
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize
from tvm.tirx import For, PrimFunc

from tvmflow.compiler.statements import terms


def simplify(func: PrimFunc) -> PrimFunc:
    """Return a scheduled function without such conditions, or unchanged without any."""
    extents: dict[tirx.Var, Any] = {}

    def note(loop: For) -> None:
        extents[loop.loop_var] = loop.extent

    def holds(term: Any) -> bool:
        if not isinstance(term, tirx.LT) or not isinstance(term.a, tirx.FloorDiv) or term.a.a not in extents:
            return False
        return bool(tvm.sym.Analyzer().can_prove_equal(extents[term.a.a], term.a.b * term.b))

    def shorten(realize: SBlockRealize) -> SBlockRealize:
        kept = [term for term in terms(realize.predicate) if not holds(term)]
        if len(kept) == len(terms(realize.predicate)):
            return realize
        predicate = reduce(tirx.all, kept) if kept else tirx.const(True, "bool")
        return SBlockRealize(realize.iter_values, predicate, realize.block)

    tvm_ffi.structural_walk(func.body, (For, note))
    body = tvm_ffi.structural_map(func.body, (SBlockRealize, shorten))
    return func if body.same_as(func.body) else func.with_body(body)
