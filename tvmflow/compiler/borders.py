"""Splits loops where a condition for each number asks where in its line the number lies.

A schedule computes padding by one loop over the pixels of a padded line, with a condition that asks for each pixel
whether it lies in the image; a concatenation asks of which operand a number is. Where the numbers are copied one by
one, that condition costs more than the copy, and keeps LLVM from copying vectors. `split_lines` makes several loops of
such a loop, and none of them has the condition.

In this module, a *line* is such a loop: it copies *numbers* one by one, or *pixels*, each by loops over its numbers. A
*choice* is an `if_then_else` in the value that is stored.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.tirx import For, ForKind, SeqStmt

from tvmflow.compiler.statements import (
    is_choice,
    map_functions,
    reads_memory,
    replace_variables,
    terms,
    uses,
    with_own_variables,
)

# A loop has no more such conditions, as the concatenation of so many tensors and one: each of them is one more loop.
MOST_CHOICES = 7


def split_lines(mod: tvm.IRModule, kind: ForKind = ForKind.SERIAL) -> tvm.IRModule:
    """Return a lowered module whose loops over the numbers of a line have no condition for the place of each.

    Only loops of one `kind` change: those of one core, or with `PARALLEL` those over numbers that cores share. In them
    numbers are computed one by one; a condition for a vector of numbers costs little. A loop of known length changes
    only if it copies the pixels of a padded line.
    """
    split = partial(_split, kind=kind)
    return map_functions(mod, lambda func: func.with_body(tvm_ffi.structural_map(func.body, (For, split))))


def _split(line: For, kind: ForKind) -> Any:
    """Make several loops of a loop over the numbers, or pixels, of a line; return another loop unchanged."""
    values: dict[Any, Any] = {}
    if line.kind != kind:
        return line
    store, inner = _only(line, values), []
    while isinstance(store, For):
        inner.append(store)
        store = _only(store, values) if store.kind == ForKind.SERIAL else None
    if not isinstance(store, tirx.BufferStore):
        return line
    place, value = line.loop_var, replace_variables(store.value, values)
    is_known = isinstance(line.extent, tirx.IntImm)
    if kind == ForKind.PARALLEL and (is_known or inner):
        return line
    choices = [item for item in (value,) if is_choice(item)] if is_known else _choices(value)
    if len(choices) > MOST_CHOICES:
        return line
    zero = tirx.const(0, line.extent.ty.dtype)
    parts = [(zero, line.extent, value)]
    for choice in choices:
        parts = [part for whole in parts for part in _parts(choice, place, [loop.loop_var for loop in inner], *whole)]
    if len(parts) == 1:
        return line
    statements = []
    for start, stop, copy in parts:
        body: Any = tirx.BufferStore(store.buffer, copy, store.indices)
        for loop in reversed(inner):
            body = For(loop.loop_var, loop.min, loop.extent, ForKind.SERIAL, body)
        body = replace_variables(replace_variables(body, values), {place: place + start})
        statements.append(with_own_variables(For(place, zero, stop - start, kind, body)))
    return SeqStmt(statements)


def _only(loop: For, values: dict[Any, Any]) -> Any:
    """The one statement in a loop, after definitions, whose values are added to `values`; None without it."""
    *definitions, last = loop.body.seq if isinstance(loop.body, SeqStmt) else [loop.body]
    for item in definitions:
        if not isinstance(item, tirx.Bind):
            return None
        values[item.var] = replace_variables(item.value, values)
    return last


def _choices(value: Any) -> list[Any]:
    """The choices in a value whose conditions are of numbers alone, each before those in its branches."""
    choices: list[Any] = []

    def visit(call: tvm.ir.Call) -> tvm_ffi.WalkResult:
        if is_choice(call) and not reads_memory(call.args[0]):
            choices.append(call)
        return tvm_ffi.WalkResult.ADVANCE

    tvm_ffi.structural_walk(value, (tvm.ir.Call, visit), order="pre")
    return choices


def _parts(
    choice: Any, place: tirx.Var, numbers: Sequence[tirx.Var], start: Any, stop: Any, value: Any
) -> list[tuple[Any, Any, Any]]:
    """Cut the part of a line from `start` to `stop` where a choice in the `value` that it stores changes.

    `place` is the variable of the line's loop, `numbers` are those of the loops inside it. Returns the start, the end
    and the value of each new part.
    """
    condition, true, false = choice.args
    line: list[Any] = []
    pixel: list[Any] = []
    others: list[Any] = []
    for term in terms(condition):
        (others if uses(term, *numbers) else pixel if uses(term, place) else line).append(term)
    lowest, highest = (sym.detect_clip_bound(tirx.all(*pixel), [place]) if pixel else ()) or (None, None)
    if lowest is None and highest is None:
        return [(start, stop, value)]
    inside = _replaced(value, choice, tirx.if_then_else(tirx.all(*others), true, false) if others else true)
    outside = _replaced(value, choice, false)
    first = start if lowest is None else tirx.max(tirx.min(lowest, stop), start)
    end = stop if highest is None else tirx.max(tirx.min(highest + 1, stop), first)
    if line:
        first, end = (tirx.Select(tirx.all(*line), bound, stop) for bound in (first, end))
    before = [] if lowest is None and not line else [(start, first, outside)]
    return [*before, (first, end, inside), *([] if highest is None else [(end, stop, outside)])]


def _replaced(value: Any, choice: Any, replacement: Any) -> Any:
    """A value with a replacement of one of its choices."""
    is_same = tvm_ffi.structural_equal
    return tvm_ffi.structural_map(value, (tvm.ir.Call, lambda call: replacement if is_same(call, choice) else call))
