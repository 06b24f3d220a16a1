"""Computes the last rows of a line of unknown length by code of their own.

The rows of a line fill whole register tiles. Where a function learns the length of its lines only when it runs, the
last tile of a line may be mostly empty. A schedule marks the loop over the rows of a tile of the result by an
annotation, and `expand` writes a second, smaller tile, perhaps a third one of a single row, and branches that take
these where their rows are enough (`mark_tail`). The output tiles of Winograd's algorithm are such rows, too; those that
lie beyond the line are not transformed (`mark_tiles`). Or it writes the rows of a tile a second time, without a
condition for each row, and a branch that takes this form in whole tiles (`mark_whole`).

Of an image of unknown height, the last strip of lines may have fewer of them: each line is computed where there is one
(`mark_lines`).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.tirx import For, ForKind, PrimFunc, SeqStmt

from tvmflow.compiler.schedules import common
from tvmflow.compiler.statements import (
    loop_variables,
    replace_variables,
    run_either,
    run_if,
    terms,
    uses,
    with_body,
    with_loop_body,
    without_annotation,
)

# The annotations of the loop over the rows of a tile of the result. The value of tail and tiles is the size of a row.
_TAIL = "tvmflow.tail"
_SINGLE = "tvmflow.single_row"
_TILES = "tvmflow.tiles"
_WHOLE = "tvmflow.whole"
_LINES = "tvmflow.lines_of_strip"


def mark_tail(sch: Schedule, rows: LoopRV, size: int = 1, *, single: bool = False) -> None:
    """Mark the outermost loop of the block that writes a tile, which runs over the tile's rows, for `expand`.

    A row stands for `size` neighbours in a line of the function's result. With a `size` above 1 the result is an image
    with the channels last, and the block has three dimensions at the end: groups of rows, the rows of a group, and
    channels. With `single` there is a third tile, of one row: of one row, a product reads its weights as fast as memory
    gives them. Does nothing where all sizes are known: these tiles fit. The product must not run by an instruction that
    has buffers of its own, as those of bfloat16 and of 8-bit integers have.
    """
    _annotate(sch, rows, _TAIL, size)
    if single:
        _annotate(sch, rows, _SINGLE, 1)


def mark_tiles(sch: Schedule, rows: LoopRV, size: int) -> None:
    """Mark the loop over the rows of a tile within which each row is transformed, for `expand`.

    A row stands for `size` neighbours in a line of the function's result, an image with the channels last. The last
    block in the loop writes that result, or a tensor of the dimensions that `mark_tail` describes. Does nothing where
    all sizes are known.
    """
    _annotate(sch, rows, _TILES, size)


def mark_whole(sch: Schedule, rows: LoopRV, *, always: bool = False) -> None:
    """Mark the outermost loop of the block that writes a tile, which runs over the tile's rows, for `expand`.

    This serves sums that LLVM unrolls whole, such as those of a depthwise convolution: with a condition for each row,
    LLVM moves the sum of a row into the branch that stores it, and the sums no longer run side by side. Does nothing
    where all sizes are known, unless `always`: then the last tile may have such conditions, too.
    """
    if (always or not common.is_static(sch)) and (common.extent(sch, rows) or 1) > 1:
        sch.annotate(rows, _WHOLE, 1)


def mark_lines(sch: Schedule, lines: LoopRV) -> None:
    """Mark the loop over the lines of a strip, so that `expand` leaves out those beyond the last line of the image.

    One block in the loop writes the function's result. Does nothing where all sizes are known.
    """
    _annotate(sch, lines, _LINES, 1)


def _annotate(sch: Schedule, rows: LoopRV, name: str, value: int) -> None:
    """Annotate a loop over several rows in a function of free sizes."""
    if not common.is_static(sch) and (common.extent(sch, rows) or 1) > 1:
        sch.annotate(rows, name, value)


def expand(func: PrimFunc) -> PrimFunc:
    """Return a scheduled function with the code that its annotations ask for, or unchanged without any."""
    buffers: list[tirx.Var] = []
    result = func.params[-1] if func.params else None
    body = tvm_ffi.structural_map(func.body, (SeqStmt, partial(_add_tails, result=result, buffers=buffers)))
    body = tvm_ffi.structural_map(body, (For, partial(_leave_out_tiles, result=result)))
    body = tvm_ffi.structural_map(body, (For, partial(_leave_out_lines, result=result)))
    body = tvm_ffi.structural_map(body, (For, _add_whole))
    if body.same_as(func.body):
        return func
    block = with_body(body.block, body.block.body, buffers)
    return func.with_body(SBlockRealize(body.iter_values, body.predicate, block))


def _add_tails(stmt: SeqStmt, result: Any, buffers: list[tirx.Var]) -> Any:
    """Return statements of which the last two, a product and the loop over its rows, have smaller forms as well.

    `result` is that of the function. The smaller forms have their own tensors of products, which are added to
    `buffers`: of one that all write, TVM would keep a whole line.
    """
    *before, product, rows = stmt.seq
    if not isinstance(rows, For) or _TAIL not in rows.annotations:
        return stmt
    size, has_single = int(rows.annotations[_TAIL]), _SINGLE in rows.annotations
    rows = without_annotation(without_annotation(rows, _TAIL), _SINGLE)
    (writer,) = _blocks(rows)
    whole = SeqStmt([product, rows])
    limit = limit_of(rows, writer.predicate if size == 1 else _place(writer, rows.extent) * size < result.shape[-2])
    if limit is None:
        return SeqStmt([*before, *whole.seq])
    loops = {rows.loop_var, *_list_row_loops(product, rows, writer)}
    half = (int(rows.extent) + 1) // 2
    forms: Any = _shortened(whole, loops, half, buffers)
    if half > 1 and has_single:
        forms = _choose(limit, rows, 1, forms, _shortened(whole, loops, 1, buffers))
    return SeqStmt([*before, _choose(limit, rows, half, whole, forms)])


def _shortened(whole: Any, loops: set[tirx.Var], rows: int, buffers: list[tirx.Var]) -> Any:
    """Return a statement whose `loops` run over fewer rows, with its own tensors, which are added to `buffers`."""

    def shorten(loop: For) -> Any:
        if loop.loop_var not in loops:
            return loop
        extent = tirx.const(rows, loop.extent.ty.dtype)
        return For(loop.loop_var, loop.min, extent, loop.kind, loop.body, loop.thread_binding, loop.annotations)

    return renewed(tvm_ffi.structural_map(whole, (For, shorten)), buffers)


def _choose(limit: Any, rows: For, count: int, longer: Any, shorter: Any) -> SeqStmt:
    """Run one of two forms: `shorter`, of `count` rows, unless the `limit` of the loop over rows allows for more."""
    is_longer = common.substitute(limit, {rows.loop_var: tirx.const(count, rows.extent.ty.dtype)})
    return run_either(is_longer, longer, shorter)


def _leave_out_tiles(rows: For, result: Any) -> For:
    """Return a loop over rows whose transforms run for those in the line of `result` alone; others unchanged."""
    if _TILES not in rows.annotations:
        return rows
    size, rows = int(rows.annotations[_TILES]), without_annotation(rows, _TILES)
    *_, writer = _blocks(rows)
    if writer.block.writes[0].source.same_as(result):
        first = dict.fromkeys(loop_variables(rows.body), tirx.const(0, "int64"))
        pixel = common.substitute(writer.iter_values[-2], first)
    else:
        pixel = _place(writer, rows.extent) * size
    return with_loop_body(rows, run_if(pixel < result.shape[-2], rows.body))


def _leave_out_lines(lines: For, result: Any) -> Any:
    """Return a loop over lines that does nothing for those beyond the image; others unchanged."""
    if _LINES not in lines.annotations:
        return lines
    lines = without_annotation(lines, _LINES)
    (writer,) = (item for item in _blocks(lines) if item.block.writes[0].source.same_as(result))
    limit = limit_of(lines, writer.predicate)
    return lines if limit is None else with_loop_body(lines, run_if(limit, without_term(lines.body, limit)))


def without_term(stmt: Any, term: Any) -> Any:
    """Return a statement without one of the terms of its blocks' conditions."""

    def drop(realize: SBlockRealize) -> Any:
        kept = [item for item in terms(realize.predicate) if not tvm_ffi.structural_equal(item, term)]
        condition = tirx.all(*kept) if kept else tirx.const(True, "bool")
        return SBlockRealize(realize.iter_values, condition, realize.block)

    return tvm_ffi.structural_map(stmt, (SBlockRealize, drop))


def _add_whole(rows: For) -> Any:
    """Return a loop over rows in two forms, of which the first has no condition for each row; others unchanged."""
    if _WHOLE not in rows.annotations:
        return rows
    rows = without_annotation(rows, _WHOLE)
    (writer,) = _blocks(rows)
    limit = limit_of(rows, writer.predicate)
    if limit is None:
        return rows
    whole = renewed(without_term(rows, limit), [])
    all_inside = common.substitute(limit, {rows.loop_var: rows.extent - 1})
    return run_either(all_inside, whole, rows)


def limit_of(rows: For, condition: Any) -> Any | None:
    """Return the one term of a condition that depends on the row.

    None without one, and where it depends on inner loops, too.
    """
    limits = [term for term in terms(condition) if uses(term, rows.loop_var)]
    return limits[0] if len(limits) == 1 and not uses(limits[0], *loop_variables(rows.body)) else None


def _place(realize: SBlockRealize, rows: Any) -> Any:
    """The place in its line of the row that a block computes, in groups of `rows`."""
    *_, group, row, _ = realize.iter_values[: len(realize.block.writes[0].source.shape)]
    return group * rows + row


def _list_row_loops(product: Any, rows: For, writer: SBlockRealize) -> Iterator[tirx.Var]:
    """List the variables of the unrolled loops over a tile's rows in the statement that computes the product."""
    values = {item.var: value for item, value in zip(writer.block.iter_vars, writer.iter_values, strict=True)}
    # The dimension of the rows in the tensor of products.
    places = {
        region.source: place
        for region in writer.block.reads
        for place, span in enumerate(region.region)
        if uses(common.substitute(span.min, values), rows.loop_var)
    }
    loops: list[For] = []
    tvm_ffi.structural_walk(product, (For, loops.append))
    unrolled = [item for item in loops if item.kind == ForKind.UNROLLED]
    for realize in _blocks(product):
        (region,) = realize.block.writes
        own = {item.var: value for item, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)}
        place = places.get(region.source)
        if place is not None:
            index = common.substitute(region.region[place].min, own)
            yield from (item.loop_var for item in unrolled if uses(index, item.loop_var))


def renewed(stmt: Any, buffers: list[tirx.Var]) -> Any:
    """Return a statement with new variables for its loops, and new tensors, added to `buffers`, for those it reads.

    Only tensors that it writes before it reads them are new.
    """
    values: dict[Any, tirx.Var] = {}
    blocks = [realize.block for realize in _blocks(stmt)]
    read = {region.source for block in blocks for region in block.reads}
    written = dict.fromkeys(region.source for block in blocks for region in block.writes)
    for buffer in (item for item in written if item in read):
        values[buffer] = tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name, scope=buffer.scope())
        buffers.append(values[buffer])

    def visit(block: SBlock) -> None:
        for item in block.iter_vars:
            values[item.var] = tirx.Var(item.var.name, item.var.ty)

    def visit_loop(loop: For) -> None:
        values[loop.loop_var] = tirx.Var(loop.loop_var.name, loop.loop_var.ty)

    tvm_ffi.structural_walk(stmt, [(For, visit_loop), (SBlock, visit)])
    return replace_variables(stmt, values)


def _blocks(stmt: Any) -> list[SBlockRealize]:
    blocks: list[SBlockRealize] = []
    tvm_ffi.structural_walk(stmt, (SBlockRealize, blocks.append))
    return blocks
