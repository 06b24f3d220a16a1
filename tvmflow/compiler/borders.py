"""Copies the lines of a padded image without a condition for each number: padding, a line of the image, and padding.

A schedule computes padding by one loop over the pixels of a padded line, with a condition that asks for each pixel
whether it lies in the image. Where the pixels have few channels, that condition costs more than the copy, and keeps
LLVM from copying vectors. `split_lines` makes three loops of such a loop, and none of them has the condition.
"""

from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.tirx import For, ForKind, PrimFunc, SeqStmt

from tvmflow.compiler.schedules.common import terms

_IF_THEN_ELSE = tvm.ir.Op.get("prim.if_then_else")
_renew = tvm_ffi.get_global_func("s_tir.RenewDefs")


def split_lines(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a lowered module whose loops over the pixels of padded lines have no condition for each pixel.

    Only loops that hold one loop over the numbers of a pixel change, and only where these are copied one by one: a
    condition for a vector of numbers costs little.
    """
    functions = dict(mod.functions_items())
    for variable, function in functions.items():
        if isinstance(function, PrimFunc):
            functions[variable] = function.with_body(tvm_ffi.structural_map(function.body, (For, _split)))
    return tvm.IRModule(functions, attrs=mod.attrs)


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
    for term in terms(_substitute(condition, values)):
        (others if _has(term, *numbers) else pixel if _has(term, place) else line).append(term)
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
        body = _substitute(_substitute(body, values), {place: place + start})
        parts.append(_renew(PrimFunc([], For(place, zero, stop - start, ForKind.SERIAL, body))).body)
    return SeqStmt(parts)


def _only(loop: Any, values: dict[Any, Any]) -> Any:
    """The one statement in a serial loop, after definitions, whose values are added to `values`; None without it."""
    if not isinstance(loop, For) or loop.kind != ForKind.SERIAL:
        return None
    *definitions, last = loop.body.seq if isinstance(loop.body, SeqStmt) else [loop.body]
    for item in definitions:
        if not isinstance(item, tirx.Bind):
            return None
        values[item.var] = _substitute(item.value, values)
    return last


def _substitute(node: Any, values: Mapping[Any, Any]) -> Any:
    """Return an expression or a statement with values in the place of variables."""
    return tvm_ffi.structural_map(node, (tirx.Var, lambda name: values.get(name, name))) if values else node


def _has(expr: Any, *variables: tirx.Var) -> bool:
    return any(item.same_as(variable) for item in tirx.analysis.undefined_vars(expr) for variable in variables)
