"""Copies the lines of a padded image without a condition for each number: padding, a line of the image, and padding.

A schedule computes padding by one loop over the pixels of a padded line, with a condition that asks for each pixel
whether it lies in the image. Where the pixels have few channels, that condition costs more than the copy, and keeps
LLVM from copying vectors. `split_lines` makes three loops of such a loop, and none of them has the condition.
"""

from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.tirx import For, ForKind, SeqStmt

from tvmflow.compiler.statements import map_functions, replace_variables, terms, uses, with_own_variables

_IF_THEN_ELSE = tvm.ir.Op.get("prim.if_then_else")


def split_lines(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a lowered module whose loops over the pixels of padded lines have no condition for each pixel.

    Only loops change in which the numbers of a pixel are copied one by one: a condition for a vector of numbers costs
    little.
    """
    return map_functions(mod, lambda func: func.with_body(tvm_ffi.structural_map(func.body, (For, _split))))


def _split(pixels: For) -> Any:
    """Make three loops of a loop over the pixels of a padded line; return another loop unchanged."""
    values: dict[Any, Any] = {}
    store, inner = _only(pixels, values), []
    while isinstance(store, For):
        inner.append(store)
        store = _only(store, values)
    choice = store.value if isinstance(store, tirx.BufferStore) else None
    if not isinstance(choice, tvm.ir.Call) or not choice.op.same_as(_IF_THEN_ELSE):
        return pixels
    place, numbers = pixels.loop_var, [loop.loop_var for loop in inner]
    condition, inside, outside = choice.args
    line: list[Any] = []
    pixel: list[Any] = []
    others: list[Any] = []
    for term in terms(replace_variables(condition, values)):
        (others if uses(term, *numbers) else pixel if uses(term, place) else line).append(term)
    bounds = sym.detect_clip_bound(tirx.all(*pixel), [place]) if pixel else ()
    if not bounds or None in bounds:
        return pixels
    count, zero = pixels.extent, tirx.const(0, pixels.extent.ty.dtype)
    first = tirx.max(tirx.min(bounds[0], count), zero)
    end = tirx.max(tirx.min(bounds[1] + 1, count), first)
    if line:
        first, end = (tirx.Select(tirx.all(*line), bound, count) for bound in (first, end))
    copy = tirx.if_then_else(tirx.all(*others), inside, outside) if others else inside
    parts = []
    for start, stop, value in ((zero, first, outside), (first, end, copy), (end, count, outside)):
        body: Any = tirx.BufferStore(store.buffer, value, store.indices)
        for loop in reversed(inner):
            body = For(loop.loop_var, loop.min, loop.extent, ForKind.SERIAL, body)
        body = replace_variables(replace_variables(body, values), {place: place + start})
        parts.append(with_own_variables(For(place, zero, stop - start, ForKind.SERIAL, body)))
    return SeqStmt(parts)


def _only(loop: Any, values: dict[Any, Any]) -> Any:
    """The one statement in a serial loop, after definitions, whose values are added to `values`; None without it."""
    if not isinstance(loop, For) or loop.kind != ForKind.SERIAL:
        return None
    *definitions, last = loop.body.seq if isinstance(loop.body, SeqStmt) else [loop.body]
    for item in definitions:
        if not isinstance(item, tirx.Bind):
            return None
        values[item.var] = replace_variables(item.value, values)
    return last
