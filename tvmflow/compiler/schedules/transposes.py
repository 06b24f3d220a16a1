"""Transposes tiles of numbers, or of pairs of 16-bit ones, by shuffles of vectors.

Plain loops would load the numbers one by one.

A schedule marks the loops over a tile by an annotation. `expand` replaces them by a call of a function written in LLVM
IR, which LLVM inlines.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import For, ForKind, PrimFunc, SeqStmt

from tvmflow.compiler import intrinsics
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.operators.common import static
from tvmflow.compiler.schedules import common
from tvmflow.compiler.schedules.common import substitute
from tvmflow.compiler.statements import (
    is_choice,
    is_one_of,
    run_either,
    run_if,
    uses,
    with_loop_body,
    without_annotation,
)

# The annotation of a loop along the source's last dimension: the places of its variable, and of that of the loop inside
# it, along the result's last dimension, among the variables of the one block in both.
_TRANSPOSE = "tvmflow.transpose"
# The same for a block that packs an operand: it has zeros beyond the operand's end along the result's last dimension.
_PACK = "tvmflow.pack_transposed"
_TYPES = ("float32", "int32", "uint32")
_HALVES = ("int16", "uint16")
_BYTES = ("int8", "uint8")
_SERIAL = ForKind.SERIAL


def fits(sch: Schedule, block: SBlockRV, places: Sequence[int]) -> bool:
    """Whether shuffles can replace a block: it copies one parameter of the function to another.

    `places` are the positions of two of the block's iteration variables. Both tensors must have each of these variables
    as one index, and only variables and constants as indices.
    """
    store, variables = sch.get(block).body, [item.var for item in sch.get(block).iter_vars]
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, TensorLoad):
        return False
    source, parameters = store.value.source, list(sch.mod["main"].params)
    if not all(is_one_of(tensor, parameters) for tensor in (source, store.buffer)):
        return False
    return all(
        all(isinstance(index, tirx.Var | tirx.IntImm) for index in indices)
        and all(sum(index.same_as(variables[place]) for index in indices) == 1 for place in places)
        for indices in (store.indices, store.value.indices)
    )


def fits_packing(sch: Schedule, block: SBlockRV, places: Sequence[int]) -> bool:
    """Whether shuffles can replace a block that copies numbers of a tensor, or zeros beyond its end.

    `places` are the positions of two of the block's iteration variables. The first one is, alone or with an offset, the
    source's last index, the second one is the result's, and each is so one other index of the other tensor. The numbers
    have 8, 16 or 32 bits. A variable at a third place, the result's last index, numbers the two 16-bit numbers of a
    pair, which is moved as one of 32.
    """
    store, variables = sch.get(block).body, [item.var for item in sch.get(block).iter_vars]
    load = _source(store.value) if isinstance(store, tirx.BufferStore) else None
    if load is None or str(load.source.dtype) not in (_HALVES if len(places) == 3 else (*_BYTES, *_HALVES, *_TYPES)):
        return False
    near, lane, *pair = (variables[place] for place in places)
    source, result = list(load.indices), list(store.indices)
    if pair:
        if not result.pop().same_as(pair[0]):
            return False
        source[-1] = substitute(source[-1] - near - pair[0], {})
    return (
        _is_offset_of(source[-1], near)
        and result[-1].same_as(lane)
        and all(
            [_is_offset_of(index, item) for index in indices if uses(index, item)] == [True]
            for indices in (result, source)
            for item in (near, lane)
        )
    )


def _is_offset_of(index: Any, variable: tirx.Var) -> bool:
    """Whether an index is a variable, or the sum of it and an offset."""
    return not uses(substitute(index - variable, {}), variable)


def _source(value: Any) -> TensorLoad | None:
    """The element that a block copies, where a condition holds or always."""
    if is_choice(value):
        value = value.args[1]
    return value if isinstance(value, TensorLoad) else None


def is_transpose(func: PrimFunc) -> bool:
    """Return whether a function only copies numbers of 8, 32 or 64 bits, whose last dimension becomes another one.

    Both dimensions must have a vector of numbers, or a symbolic size.
    """
    blocks: list[SBlock] = []
    tvm_ffi.structural_walk(func.body, (SBlock, blocks.append))
    bodies = [block.body for block in blocks if isinstance(block.body, tirx.BufferStore)]
    if len(bodies) != 1 or not isinstance(bodies[0].value, TensorLoad) or len(func.params) != 2:
        return False
    store, load = bodies[0], bodies[0].value
    indices = [*store.indices, *load.indices]
    # Those of 16 bits are parts of functions that read and write bfloat16.
    if common.item_bytes(load.source) == 2 or not all(isinstance(index, tirx.Var | tirx.IntImm) for index in indices):
        return False
    if not load.indices or not store.indices or load.indices[-1].same_as(store.indices[-1]):
        return False
    sizes = [tensor.shape[-1] for tensor in (store.buffer, load.source)]
    return all(not isinstance(size, tirx.IntImm) or int(size) >= NARROWEST for size in sizes)


def mark(sch: Schedule, places: Sequence[int], near: LoopRV) -> None:
    """Mark a block's two innermost loops, so that `expand` replaces them by shuffles.

    `near` is the outer one of the two and runs along the source's last dimension. The inner one runs along the result's
    last dimension. `places` are the positions of both among the block's iteration variables, in this order (`fits`).
    The loops' extents must be powers of two. Where they do not divide the dimensions, the last tile begins earlier and
    writes some numbers again. A dimension of unknown size may be shorter than its loop: then smaller tiles are
    transposed, and below the smallest tile the numbers are copied one by one.
    """
    sch.annotate(near, _TRANSPOSE, list(places))


def mark_packing(sch: Schedule, places: Sequence[int], near: LoopRV) -> None:
    """Mark two loops of a block that packs an operand, the innermost ones, so that `expand` replaces them by shuffles.

    The loops and `places` are as for `mark` (`fits_packing`); the loops' extents divide the dimensions of the result. A
    tile beyond the end of the operand is written number by number. A loop over the numbers of a pair is inside both.
    """
    sch.annotate(near, _PACK, list(places))


def pack_pairs(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Schedule a block that puts the numbers of 2 or 4 neighbouring rows side by side: `[..., lane, rows]`.

    Shuffles do it where they can replace the block (`fits_packing`).
    """
    *outer, vector, step, lane, pair = sch.get_loops(block)
    places = [len(outer) + 2, len(outer) + 3]
    sch.reorder(*outer, step, vector, lane, pair)
    common.parallel(sch, common.fuse(sch, [*outer, step]), machine)
    sch.unroll(pair)
    if fits_packing(sch, block, places):
        mark_packing(sch, places, lane)


def pack_columns(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Schedule a block that packs a part of a matrix's columns: `[..., vector, depth, lane]`.

    Each column lies side by side in the source. Shuffles pack it where they can replace the block (`fits_packing`).
    """
    *_, depth, lane = sch.get_loops(block)
    rank = len(sch.get(block).iter_vars)
    width = math.gcd(common.extent(sch, depth) or machine.lanes, machine.lanes)
    _, near = sch.split(depth, [None, width])
    places = [rank - 2, rank - 1]
    if width >= NARROWEST and fits_packing(sch, block, places):
        mark_packing(sch, places, near)
    sch.vectorize(lane)


def expand(func: PrimFunc) -> PrimFunc:
    """Replace the loops that `mark` and `mark_packing` marked by calls of shuffles.

    A function without such loops is returned unchanged.
    """
    code: dict[str, str] = {}

    def replace(loop: For) -> Any:
        if _PACK in loop.annotations:
            return _Tile(loop, code, _PACK).packing()
        return _Tile(loop, code, _TRANSPOSE).replacement() if _TRANSPOSE in loop.annotations else loop

    body = tvm_ffi.structural_map(func.body, (For, replace))
    return func if not code else func.with_body(intrinsics.attach(body, "".join(code.values())))


class _Tile:
    """A tile to transpose, from the loops that `mark` or `mark_packing` marked by the annotation `mark`.

    `code` gets the functions that it calls, by name.
    """

    def __init__(self, loop: For, code: dict[str, str], mark: str) -> None:
        self._loop, self._lane, self._code = without_annotation(loop, mark), loop.body, code
        # The loops over the numbers of a pair, if there are pairs.
        self._pair = [self._lane.body] if isinstance(self._lane.body, For) else []
        self._realize = (self._pair or [self._lane])[-1].body
        variables = list(self._realize.block.iter_vars)
        across = [variables[int(place)] for place in loop.annotations[mark]][:2]
        self._axes, self._extents = [item.var for item in across], [item.dom.extent for item in across]
        self._lengths = [int(loop.extent), int(self._lane.extent)]
        first = {item.loop_var: item.min for item in (loop, self._lane, *self._pair)}
        self._starts = {
            item.var: substitute(value, first) for item, value in zip(variables, self._realize.iter_values, strict=True)
        }

    def replacement(self) -> Any:
        """The tile's code: by shuffles of the whole tile, else of small tiles, else by plain loops.

        A dimension of unknown size chooses when the function runs.
        """
        unknown = [not isinstance(extent, tirx.IntImm) for extent in self._extents]
        whole = self._shuffle(self._lengths)
        if not any(unknown):
            return whole
        small = [NARROWEST if item else length for item, length in zip(unknown, self._lengths, strict=True)]
        holds_whole, holds_small = self._holds(self._lengths), self._holds(small)
        ways = (
            (holds_whole, whole),
            (tirx.And(holds_small, tirx.Not(holds_whole)), self._shuffle_parts(small)),
            (tirx.Not(holds_small), self._write_plainly()),
        )
        return SeqStmt([run_if(condition, statement) for condition, statement in ways])

    def packing(self) -> Any:
        """The tile's code: by shuffles where the whole tile lies before the operand's end, else number by number."""
        value = self._realize.block.body.value
        whole = self._shuffle(self._lengths)
        if isinstance(value, TensorLoad):
            return whole
        ends = zip(self._axes, (self._loop.extent, self._lane.extent), strict=True)
        last = {**self._starts, **{axis: self._starts[axis] + extent - 1 for axis, extent in ends}}
        return run_either(substitute(value.args[0], last), whole, self._pack_part(value))

    def _pack_part(self, value: Any) -> Any:
        """Set the tile to zero, and copy what lies before the operand's end; `value` is a condition with an element."""
        condition, element, zero = value.args
        is_of_row = uses(condition, self._axes[0])
        iter_vars, store = self._realize.block.iter_vars, self._realize.block.body

        def loops(*order: For) -> tuple[list[For], dict[tirx.Var, Any]]:
            own = {loop.loop_var: tirx.Var(loop.loop_var.name, loop.loop_var.ty) for loop in order}
            values = {
                item.var: substitute(place, own)
                for item, place in zip(iter_vars, self._realize.iter_values, strict=True)
            }
            return [For(own[loop.loop_var], loop.min, loop.extent, _SERIAL, loop.body) for loop in order], values

        def write(values: dict[tirx.Var, Any], number: Any) -> Any:
            return tirx.BufferStore(store.buffer, number, [substitute(index, values) for index in store.indices])

        def nest(order: Sequence[For], statement: Any) -> Any:
            return reduce(lambda inner, loop: with_loop_body(loop, inner), reversed(order), statement)

        (near, lane, *pair), places = loops(self._loop, self._lane, *self._pair)
        vector = For(lane.loop_var, lane.min, lane.extent, ForKind.VECTORIZED, write(places, zero))
        clear = nest([near, *pair], vector)
        (lane, *inner), places = loops(self._lane, self._loop, *self._pair)
        source = tirx.BufferLoad(element.source, [substitute(index, places) for index in element.indices])
        holds = substitute(condition, places)
        if is_of_row:
            copy = nest(inner, run_if(holds, write(places, source)))
        else:
            copy = run_if(holds, nest(inner, write(places, source)))
        return SeqStmt([clear, with_loop_body(lane, copy)])

    def _holds(self, lengths: list[int]) -> Any:
        """Whether both dimensions are at least as long as a tile of these lengths."""
        return tirx.all(*(extent >= length for extent, length in zip(self._extents, lengths, strict=True)))

    def _shuffle_parts(self, lengths: list[int]) -> Any:
        """Transpose the tile by parts of these lengths."""
        variables = [tirx.Var(f"part{place}", "int64") for place in range(2)]
        offsets = [variable * length for variable, length in zip(variables, lengths, strict=True)]
        statement = self._shuffle(lengths, offsets)
        for variable, length, part in zip(variables, self._lengths, lengths, strict=True):
            statement = For(variable, tirx.IntImm("int64", 0), tirx.IntImm("int64", length // part), _SERIAL, statement)
        return statement

    def _shuffle(self, lengths: list[int], offsets: Sequence[Any] = (0, 0)) -> Any:
        """Transpose a tile of these lengths that begins `offsets` after this one, or earlier at a dimension's end."""
        columns, rows = lengths
        values = dict(self._starts)
        # The last tile begins earlier in both tensors, of which the source may be the larger one.
        for axis, extent, length, offset in zip(self._axes, self._extents, lengths, offsets, strict=True):
            values[axis] = substitute(tirx.min(values[axis] + offset, extent - length), {})
        store = self._realize.block.body
        load: Any = _source(store.value)
        bits = 8 * common.item_bytes(load.source)
        operands, apart = [], []
        for tensor, indices, across in (
            (store.buffer, store.indices, self._axes[0]),
            (load.source, load.indices, self._axes[1]),
        ):
            start = [substitute(index, values) for index in indices]
            apart.append(_product(tensor.shape[_axis(indices, across) + 1 :]) * (bits // 8))
            operands += [tirx.address_of(tirx.BufferLoad(tensor, start)), apart[-1]]
        if self._pair:
            bits *= 2
        code = _TileCode(rows, columns, bits, static(apart[0]) == rows * bits // 8)
        self._code[code.name] = code.text
        return tirx.Evaluate(tirx.call_extern("void", code.name, *operands))

    def _write_plainly(self) -> Any:
        """Copy the tile's numbers one by one, up to the ends of both dimensions."""
        statement: Any = SBlockRealize(self._realize.iter_values, True, self._realize.block)
        loops = zip((self._loop, self._lane), self._axes, self._extents, strict=True)
        for loop, axis, extent in reversed(list(loops)):
            count = tirx.min(loop.extent, extent - self._starts[axis])
            statement = For(loop.loop_var, loop.min, substitute(count, {}), _SERIAL, statement)
        return statement


def find_tile(statement: tirx.Evaluate) -> tuple[int, int] | None:
    """Return the rows and columns of the tile that a statement of `expand` transposes; None for other statements."""
    call = statement.value
    name = str(getattr(call.args[0], "value", "")) if isinstance(call, tvm.ir.Call) and len(call.args) else ""
    match = re.fullmatch(r"tvmflow_transpose_(\d+)x(\d+)_\w+", name)
    return (int(match[1]), int(match[2])) if match else None


def _axis(indices: Sequence[Any], variable: tirx.Var) -> int:
    return next(axis for axis, index in enumerate(indices) if uses(index, variable))


def _product(sizes: Any) -> Any:
    return reduce(mul, sizes, tirx.IntImm("int64", 1))


@dataclass(frozen=True)
class _TileCode:
    """LLVM IR for a function that writes a tile of `rows` by `columns` numbers of so many `bits` transposed.

    Its parameters are the result, the bytes from one row of it to the next, the source, and the same of the source. The
    rows of a result that `is_whole` lie side by side.
    """

    rows: int
    columns: int
    bits: int
    is_whole: bool

    @property
    def name(self) -> str:
        return f"tvmflow_transpose_{self.rows}x{self.columns}_{self.bits}" + ("_whole" if self.is_whole else "")

    @property
    def text(self) -> str:
        """The function's definition.

        All numbers of the tile one after the other have an index, row times `columns` plus column. A shuffle of the
        first half of the vectors with the second one takes the index's first bit to its end, so as many shuffles as a
        row's number has bits exchange rows and columns.
        """
        rows, columns, kind, lines = self.rows, self.columns, f"i{self.bits}", list[str]()

        def value(text: str) -> str:
            lines.append(f"  %v{len(lines)} = {text}")
            return f"%v{len(lines) - 1}"

        def row(pointer: str, number: int, offset: int = 0) -> str:
            place = value(f"mul i64 %{pointer}_row, {number}")
            place = value(f"add i64 {place}, {self.bits // 8 * offset}")
            return value(f"getelementptr i8, ptr %{pointer}, i64 {place}")

        def shuffle(one: str, other: str, places: list[int]) -> str:
            mask, vector = ", ".join(f"i32 {place}" for place in places), f"<{columns} x {kind}>"
            return value(f"shufflevector {vector} {one}, {vector} {other}, <{len(places)} x i32> <{mask}>")

        vectors = [value(f"load <{columns} x {kind}>, ptr {row('from', number)}, align 1") for number in range(rows)]
        pairs = [place + half * columns for place in range(columns) for half in (0, 1)]
        for _ in range(rows.bit_length() - 1):
            halves = zip(vectors[: rows // 2], vectors[rows // 2 :], strict=True)
            vectors = [shuffle(*two, part) for two in halves for part in (pairs[:columns], pairs[columns:])]
        piece = columns if self.is_whole else min(rows, columns)
        for number, vector in enumerate(vectors):
            for start in range(0, columns, piece):
                target = row("to", *divmod(number * columns + start, rows))
                part = vector if piece == columns else shuffle(vector, vector, list(range(start, start + piece)))
                lines.append(f"  store <{piece} x {kind}> {part}, ptr {target}, align 1")
        head = f"define linkonce_odr void @{self.name}(ptr %to, i64 %to_row, ptr %from, i64 %from_row) alwaysinline {{"
        return "\n".join([head, *lines, "  ret void", "}", ""])
