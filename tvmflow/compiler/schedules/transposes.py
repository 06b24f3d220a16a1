"""Transposes tiles of 32-bit numbers by shuffles of vectors. Plain loops would load the numbers one by one.

A schedule marks the loops over a tile by an annotation. `expand` replaces them by a call of a function written in LLVM
IR, which LLVM inlines.
"""

import re
from collections.abc import Sequence
from functools import reduce
from operator import mul
from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import For, PrimFunc

from tvmflow.compiler import intrinsics

# The annotation of a loop along the source's last dimension: the places of its variable, and of that of the loop inside
# it, along the result's last dimension, among the variables of the one block in both.
_TRANSPOSE = "tvmflow.transpose"
_TYPES = ("float32", "int32", "uint32")


def fits(sch: Schedule, block: SBlockRV, places: Sequence[int]) -> bool:
    """Whether shuffles can replace a block: it copies one parameter of the function to another, in 32-bit numbers.

    `places` are the positions of two of the block's iteration variables. Both tensors must have each of these variables
    as one index, and only variables and constants as indices.
    """
    store, variables = sch.get(block).body, [item.var for item in sch.get(block).iter_vars]
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, TensorLoad):
        return False
    source, parameters = store.value.source, list(sch.mod["main"].params)
    if str(source.dtype) not in _TYPES:
        return False
    if not all(any(tensor.same_as(item) for item in parameters) for tensor in (source, store.buffer)):
        return False
    return all(
        all(isinstance(index, tirx.Var | tirx.IntImm) for index in indices)
        and all(sum(index.same_as(variables[place]) for index in indices) == 1 for place in places)
        for indices in (store.indices, store.value.indices)
    )


def use(sch: Schedule, places: Sequence[int], near: LoopRV) -> None:
    """Mark a block's two innermost loops, so that `expand` replaces them by shuffles.

    `near` is the outer one of the two and runs along the source's last dimension. The inner one runs along the result's
    last dimension. `places` are the positions of both among the block's iteration variables, in this order (`fits`).
    The loops' extents must be powers of two. Where they do not divide the dimensions, the last tile begins earlier and
    writes some numbers again.
    """
    sch.annotate(near, _TRANSPOSE, list(places))


def expand(func: PrimFunc) -> PrimFunc:
    """Replace the loops that `use` marked by calls of shuffles; a function without such loops is returned unchanged."""
    code: dict[str, str] = {}

    def replace(loop: For) -> Any:
        if _TRANSPOSE not in loop.annotations:
            return loop
        lane, realize = loop.body, loop.body.body
        columns, rows = int(loop.extent), int(lane.extent)
        name = f"tvmflow_transpose_{rows}x{columns}"
        code[name] = _write_code(name, rows, columns)
        store, variables = realize.block.body, [item.var for item in realize.block.iter_vars]
        near, last = (variables[int(place)] for place in loop.annotations[_TRANSPOSE])
        first = {loop.loop_var: loop.min, lane.loop_var: lane.min}
        values = {
            item.var: _bind(value, first)
            for item, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
        }
        # The last tile begins earlier in both tensors, of which the source may be the larger one.
        for variable, length in ((near, columns), (last, rows)):
            extent = realize.block.iter_vars[variables.index(variable)].dom.extent
            values[variable] = _bind(tirx.min(values[variable], extent - length), {})
        operands = []
        for tensor, indices, across in (
            (store.buffer, store.indices, near),
            (store.value.source, store.value.indices, last),
        ):
            start = [_bind(index, values) for index in indices]
            row = _product(tensor.shape[_axis(indices, across) + 1 :])
            operands += [tirx.address_of(tirx.BufferLoad(tensor, start)), row]
        return tirx.Evaluate(tirx.call_extern("void", name, *operands))

    body = tvm_ffi.structural_map(func.body, (For, replace))
    return func if not code else func.with_body(intrinsics.attach(body, "".join(code.values())))


def find_tile(statement: tirx.Evaluate) -> tuple[int, int] | None:
    """Return the rows and columns of the tile that a statement of `expand` transposes; None for other statements."""
    call = statement.value
    name = str(getattr(call.args[0], "value", "")) if isinstance(call, tvm.ir.Call) and len(call.args) else ""
    match = re.fullmatch(r"tvmflow_transpose_(\d+)x(\d+)", name)
    return (int(match[1]), int(match[2])) if match else None


def _axis(indices: Sequence[Any], variable: tirx.Var) -> int:
    return next(axis for axis, index in enumerate(indices) if index.same_as(variable))


def _bind(expr: Any, values: dict[Any, Any]) -> Any:
    analyzer = sym.Analyzer()
    for variable, value in values.items():
        analyzer.bind(variable, value)
    return analyzer.simplify(expr)


def _product(sizes: Any) -> Any:
    return reduce(mul, sizes, tirx.IntImm("int64", 1))


def _write_code(name: str, rows: int, columns: int) -> str:
    """Return LLVM IR for a function that writes a tile of `rows` by `columns` numbers transposed.

    Its parameters are the result, the numbers from one row of it to the next, the source, and the same of the source.
    All numbers of the tile one after the other have an index, row times `columns` plus column. A shuffle of the first
    half of the vectors with the second one takes the index's first bit to its end, so as many shuffles as a row's
    number has bits exchange rows and columns.
    """
    lines: list[str] = []

    def value(text: str) -> str:
        lines.append(f"  %v{len(lines)} = {text}")
        return f"%v{len(lines) - 1}"

    def row(pointer: str, number: int, offset: int = 0) -> str:
        place = value(f"mul i64 %{pointer}_row, {number}")
        return value(f"getelementptr i32, ptr %{pointer}, i64 {value(f'add i64 {place}, {offset}')}")

    def shuffle(one: str, other: str, places: list[int]) -> str:
        mask = ", ".join(f"i32 {place}" for place in places)
        kind = f"<{columns} x i32>"
        return value(f"shufflevector {kind} {one}, {kind} {other}, <{len(places)} x i32> <{mask}>")

    vectors = [value(f"load <{columns} x i32>, ptr {row('from', number)}, align 4") for number in range(rows)]
    pairs = [place + half * columns for place in range(columns) for half in (0, 1)]
    for _ in range(rows.bit_length() - 1):
        halves = zip(vectors[: rows // 2], vectors[rows // 2 :], strict=True)
        vectors = [shuffle(*two, part) for two in halves for part in (pairs[:columns], pairs[columns:])]
    piece = min(rows, columns)
    for number, vector in enumerate(vectors):
        for start in range(0, columns, piece):
            target = row("to", *divmod(number * columns + start, rows))
            part = vector if piece == columns else shuffle(vector, vector, list(range(start, start + piece)))
            lines.append(f"  store <{piece} x i32> {part}, ptr {target}, align 4")
    head = f"define linkonce_odr void @{name}(ptr %to, i64 %to_row, ptr %from, i64 %from_row) alwaysinline {{"
    return "\n".join([head, *lines, "  ret void", "}", ""])
