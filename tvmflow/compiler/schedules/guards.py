"""Guards of memory reads: replaces each `Select` that may read out of bounds by a branch.

`Select` computes both of its values and then takes one. TVM's simplifier ignores that: it drops a clamp such as
`max(y - 1, 0)` where the condition says `y >= 1`, so the value that is not taken is read from outside the buffer. TVM
itself turns such a `Select` into a branch, but not in a vectorised loop, where the condition is a vector.
"""

from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call, Range, TensorLoad
from tvm.s_tir import SBlock
from tvm.tirx import For, PrimFunc, Select

from tvmflow.compiler.statements import is_choice


def guard_reads(func: PrimFunc) -> PrimFunc:
    """Replace every `Select` that may read out of bounds by a branch (`if_then_else`).

    A value may read out of bounds where the ranges of the loops alone, without the condition, do not prove that each of
    its indices lies within its buffer. What the condition itself reads, as that of `x < 0` does, is read in any case. A
    function without such a `Select` is returned unchanged.
    """
    bounds = _Bounds(func)

    def guard(select: Select) -> Any:
        known = _parts_of(select.condition)
        if bounds.hold_in(select.true_value, known) and bounds.hold_in(select.false_value, known):
            return select
        return tirx.if_then_else(select.condition, select.true_value, select.false_value)

    body = tvm_ffi.structural_map(func.body, (Select, guard))
    return func if body.same_as(func.body) else func.with_body(body)


class _Bounds:
    """The ranges of a function's loops, which prove that an index lies within its buffer."""

    def __init__(self, func: PrimFunc) -> None:
        self._analyzer = sym.Analyzer()
        self._proofs: dict[int, bool] = {}
        tvm_ffi.structural_walk(func.body, [(For, self._bind_loop), (SBlock, self._bind_block)], order="pre")

    def _bind_loop(self, loop: For) -> None:
        self._analyzer.bind(loop.loop_var, Range.from_min_extent(loop.min, loop.extent))

    def _bind_block(self, block: SBlock) -> None:
        for variable in block.iter_vars:
            self._analyzer.bind(variable.var, variable.dom)

    def hold_in(self, value: Any, known: set[int]) -> bool:
        """Whether every read in a value is proven to be within its buffer, but for the parts of the keys `known`."""

        def visit(part: Any) -> Any:
            if not _may_read(part):
                return None
            key = _key(part)
            if key in known:
                return tvm_ffi.WalkResult.SKIP
            if isinstance(part, TensorLoad) and key not in self._proofs:
                self._proofs[key] = all(
                    self._analyzer.can_prove(tirx.all(index >= 0, index < size))
                    for index, size in zip(part.indices, part.source.shape, strict=True)
                )
            return None if self._proofs.get(key, True) else tvm_ffi.VisitInterrupt(part)

        return tvm_ffi.structural_walk(value, ((TensorLoad, Select, Call), visit), order="pre") is None


def _parts_of(condition: Any) -> set[int]:
    """The keys of the parts of a condition that read: reads, and choices, which read what they always read."""
    keys: set[int] = set()

    def visit(part: Any) -> Any:
        if not _may_read(part):
            return None
        keys.add(_key(part))
        return tvm_ffi.WalkResult.SKIP

    tvm_ffi.structural_walk(condition, ((TensorLoad, Select, Call), visit), order="pre")
    return keys


def _may_read(part: Any) -> bool:
    """Whether a part of an expression is a read, or a choice between two values."""
    return isinstance(part, TensorLoad | Select) or is_choice(part)


def _key(part: Any) -> int:
    return int(tvm_ffi.structural_hash(part, map_free_vars=False))
