"""Software prefetch: a core fetches what it will read and write while it computes.

While tiles are computed with one part of the weights, the next part is fetched, some lines for each chunk of a tile's
reduction; while a tile works through one chunk of a part, the next chunk, if tuning says so. Before a tile is computed,
the lines of the result and of operands such as a residual are fetched. A schedule marks the loop by an annotation, and
`expand` writes the instructions. They stand outside the loops over a chunk: inside these, LLVM would keep the tile in
memory rather than in registers.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tvm import tirx
from tvm.s_tir import SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import For, ForKind, PrimFunc, SeqStmt

from tvmflow.compiler import amx, cost
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import TO_READ, prefetch, same_shape
from tvmflow.compiler.schedules import common
from tvmflow.compiler.statements import is_one_of, uses, with_body

# The annotation of a loop over chunks of a reduction: fetch the part of the last operand that the next chunk reads.
PREFETCH = "tvmflow.prefetch"
# The bytes between what is read and what is fetched ahead: a page.
_DISTANCE = 4096
# The steps of a reduction in one chunk, which is also the distance of the prefetch.
_CHUNKS = (64, 16)
# The annotation of the loops over a tile of the result: fetch what they write before the tile is computed, and if it is
# one, what they read.
FETCH_RESULT = "tvmflow.fetch_result"
# The annotation of a loop: the iterations ahead of which the parts of parameters that its sums read are fetched.
_AHEAD = "tvmflow.prefetch_ahead"
# The annotation of a loop over tasks: the parts of the weights, their bytes, those of a cache's line, and the least
# number of tasks that hide the fetch of a part.
_NEXT = "tvmflow.prefetch_next"
# The annotation of a loop over chunks of a reduction: each fetches a part of the share that the task fetches.
_SPREAD = "tvmflow.prefetch_spread"
# The lines that are fetched at a time: about as many as a core has requests open.
_AT_A_TIME = 16
# The arguments of the prefetch intrinsic: for reading, into the second-level cache, data.
_HOW = (0, 2, 1)
# The same for a line that is written soon, into the first-level cache.
_TO_WRITE = (1, 3, 1)


def split_chunks(sch: Schedule, reduction: LoopRV, choices: Choices) -> list[LoopRV]:
    """Split a reduction over weights into chunks to prefetch, and return its loops.

    `choices` name the steps in a chunk. By default the reduction is not split, and its loop is returned.
    """
    size = common.extent(sch, reduction)
    counts = [count for count in _CHUNKS if size is not None and size > count and size % count == 0]
    count = choices.choose("prefetch", "", {"none": 0} | {str(count): count for count in counts})
    if count == 0:
        return [reduction]
    chunk, steps = sch.split(reduction, [None, count])
    sch.annotate(chunk, PREFETCH, 1)
    return [chunk, steps]


def fetch_result(
    sch: Schedule, block: SBlockRV, rows: LoopRV, machine: Machine, choices: Choices, *, operands: bool = True
) -> bool:
    """Fetch a tile's lines of the result, and of `operands` of its shape, before the tile is computed; return whether.

    `block` writes the tile, and `rows` is the outermost of its loops. By default the lines are fetched where the whole
    result and these operands do not fit a core's own cache, or where their size is unknown; the `choices` may name the
    other option.
    """
    regions = [*sch.get(block).reads, *sch.get(block).writes]
    parameters = list(sch.mod["main"].params)
    buffers = [region.source for region in regions if is_one_of(region.source, parameters)]
    is_large = not common.is_static(sch) or not cost.fits(sum(map(common.bytes_of, buffers)) / machine.cores, machine)
    options = {"result": True, "none": False} if is_large else {"none": False, "result": True}
    is_fetched = choices.choose("fetch", "", options)
    if is_fetched:
        sch.annotate(rows, FETCH_RESULT, int(operands))
    return is_fetched


def fetch_ahead(sch: Schedule, loop: LoopRV, bytes_read: int) -> None:
    """Fetch, some iterations before a loop reads it, what the sums within the loop read of the function's parameters.

    `bytes_read` are those of one iteration. The memory is read once, so that no cache has it.
    """
    sch.annotate(loop, _AHEAD, max(1, _DISTANCE // bytes_read))


def fetch_rows(sch: Schedule, block: SBlockRV, machine: Machine, choices: Choices) -> None:
    """Fetch the lines of a row of the result before it is computed, and what the sums of a following row read.

    An iteration of the outermost loop passes several times over a row, and `block` writes it at last. Without this, the
    first pass waits for what it reads, and the last one for the lines that it writes. Rows of which four do not fit the
    first-level cache are not fetched, nor are those of unknown size.
    """
    task, *within = sch.get_loops(block)
    sizes = [common.extent(sch, loop) for loop in within]
    numbers = math.prod(math.inf if size is None else size for size in sizes)
    size = numbers * common.item_bytes(sch.get(block).writes[0].source)
    if not within or 4 * size > machine.first.size:
        return
    if fetch_result(sch, block, within[0], machine, choices, operands=False):
        fetch_ahead(sch, task, int(size))


def fetch_next_weights(sch: Schedule, task: LoopRV, parts: int, size: int, least: float, machine: Machine) -> None:
    """Fetch weights while tasks compute with those before them.

    The weights have `parts` parts of `size` bytes each. As many iterations in a row of the loop `task` read each part,
    and each of them fetches a share of the next part. Else the first one would wait for all of a part: processors fetch
    only a few lines ahead by themselves. Where the iterations are fewer than `least`, they do without it.
    """
    if math.isfinite(least):
        sch.annotate(task, _NEXT, [parts, size, machine.first.line, int(least)])


def fetches_next(sch: Schedule, task: LoopRV) -> bool:
    """Return whether the iterations of the loop `task` fetch weights of those that follow."""
    return _NEXT in sch.get(task).annotations


def spread_fetches(sch: Schedule, task: LoopRV, outer: Sequence[LoopRV], reduction: LoopRV) -> list[LoopRV]:
    """Split a tile's reduction into chunks that share what the task fetches of the next weights; return its loops.

    A core has few requests open. One that starts a task with all of its fetches waits for most of them before it
    computes. `outer` are the loops around the reduction, those of a convolution's taps. Where the task fetches little,
    or nothing, or an unknown number of lines, the reduction is not split, and its loop is returned.
    """
    extents = [common.extent(sch, loop) for loop in (task, *outer, reduction)]
    following = sch.get(task).annotations.get(_NEXT)
    if following is None or None in extents:
        return [reduction]
    tasks, *taps, depth = (int(extent or 0) for extent in extents)
    parts, size, line, least = (int(item) for item in following)
    readers = tasks // parts
    bursts = size // line // readers // _AT_A_TIME // math.prod(taps)
    count = max((count for count in range(1, bursts + 1) if depth % count == 0), default=0)
    if readers < least or count * math.prod(taps) < 2:
        return [reduction]
    chunk, steps = sch.split(reduction, [count, None])
    sch.annotate(chunk, _SPREAD, 1)
    return [chunk, steps]


def expand(func: PrimFunc) -> PrimFunc:
    """Return a function with the prefetches that its schedule's annotations request, or unchanged without any."""
    body = _add_prefetches(func.body, list(func.params))
    return func if body.same_as(func.body) else func.with_body(body)


def _add_prefetches(stmt: Any, parameters: Sequence[Any]) -> Any:
    """Return a statement with its prefetches; one without prefetches is returned unchanged.

    `parameters` are the function's: tiles of these are fetched, because other functions wrote or will read them.
    """
    if isinstance(stmt, SeqStmt):
        parts = [_add_prefetches(part, parameters) for part in stmt.seq]
        tiles = [part for part in stmt.seq if isinstance(part, For) and FETCH_RESULT in part.annotations]
        parts = [*(fetch for tile in tiles for fetch in _fetch_tile(tile, parameters)), *parts]
        if len(parts) > len(stmt.seq):
            return SeqStmt(parts)
        same = all(new.same_as(old) for new, old in zip(parts, stmt.seq, strict=True))
        return stmt if same else SeqStmt(parts)
    if isinstance(stmt, SBlockRealize):
        body = _add_prefetches(stmt.block.body, parameters)
        if body.same_as(stmt.block.body):
            return stmt
        return SBlockRealize(stmt.iter_values, stmt.predicate, with_body(stmt.block, body))
    if not isinstance(stmt, For):
        return stmt
    body, annotations = _add_prefetches(stmt.body, parameters), dict(stmt.annotations)
    is_tile = annotations.pop(FETCH_RESULT, None) is not None
    ahead = annotations.pop(_AHEAD, None)
    fetches = [] if ahead is None else _fetch_ahead(stmt, int(ahead), parameters)
    fetches += [] if annotations.pop(PREFETCH, None) is None else [_fetch_next(stmt)]
    following = annotations.pop(_NEXT, None)
    if following is not None:
        at_once, body = _fetch_next_weights(stmt, body, parameters, *(int(item) for item in following))
        fetches += at_once
    if fetches:
        body = SeqStmt([*fetches, body])
    elif body.same_as(stmt.body) and not is_tile and ahead is None:
        return stmt
    return For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, annotations)


def _fetch_next(chunks: For) -> Any:
    """Prefetch the part of the last operand of the block in a loop that the next iteration reads."""
    loops, realize = _loops_and_block(chunks.body)
    return _fetch_part(chunks, 1, loops, realize, realize.block.reads[-1])


def _fetch_ahead(loop: For, ahead: int, parameters: Sequence[Any]) -> list[Any]:
    """Prefetch the parts of parameters that the sums in a loop read `ahead` iterations later."""
    fetches: list[Any] = []
    for loops, realize in _sums(loop.body):
        for region in realize.block.reads:
            moves = any(uses(item, loop.loop_var) for item in _start(region, realize))
            if moves and is_one_of(region.source, parameters):
                fetches.append(_fetch_part(loop, ahead, loops, realize, region))
    return fetches


def _fetch_next_weights(
    tasks: For, body: Any, parameters: Sequence[Any], parts: int, size: int, line: int, least: int
) -> tuple[list[Any], Any]:
    """Prefetch, in a loop over tasks, a share of the part of the weights that follows the task's own.

    Returns what to fetch at the start of a task, and the `body` of the loop, in which the chunks of a reduction fetch
    the rest. The weights have `parts` parts of `size` bytes; `line` is a cache line's bytes, and `least` the number of
    tasks that hide the fetch of a part. Weights that are no parameter are not fetched: the function has just written
    them.
    """
    variable, kind = tasks.loop_var, str(tasks.loop_var.ty)
    readers = tirx.truncdiv(tasks.extent, tirx.const(parts, kind))
    share, zero = tirx.truncdiv(readers + (-(-size // line) - 1), readers), tirx.const(0, kind)
    if not isinstance(readers, tirx.IntImm):
        share = tirx.Select(readers >= least, share, zero)
    elif int(readers) < least:
        return [], body
    own = tirx.truncmod(variable, readers) * share
    fetches: list[Any] = []
    for loops, realize in _sums(body):
        weights, index = realize.block.reads[-1].source, _start(realize.block.reads[-1], realize)
        if not is_one_of(weights, parameters):
            continue
        if any(kernel.fetches for kernel in amx.kernels_in(realize)):
            # The kernel's right operand is the task's own part.
            is_last = tirx.truncdiv(variable, readers) + 1 >= parts
            ahead = tirx.Select(is_last, zero, own * line + size).astype("int64")
            body = amx.with_fetch(body, ahead, share.astype("int64"))
            continue
        first = [common.substitute(item, {loop.loop_var: loop.min for loop in loops}) for item in index]
        place = tirx.Var("line", kind)
        around = list(itertools.takewhile(lambda loop: _SPREAD not in loop.annotations, loops))
        if len(around) == len(loops):
            fetches.append(
                For(place, zero, share, ForKind.SERIAL, _fetch_line(weights, first, own + place, size, line))
            )
            continue
        chunks = loops[len(around)]
        number, count = zero, 1
        for loop in (*around, chunks):
            number, count = number * loop.extent + loop.loop_var, count * int(loop.extent)
        each = -(-int(share) // count)
        fetch = _fetch_line(weights, first, own + number * each + place, size, line)
        body = _with_fetch(body, chunks, For(place, zero, tirx.const(each, kind), ForKind.SERIAL, fetch))
    return fetches, body


def _fetch_line(weights: Any, first: Sequence[Any], place: Any, size: int, line: int) -> Any:
    """Prefetch line number `place` of the part that follows the one of `size` bytes which begins at index `first`.

    The parts stand one after another. After the last line of a part, and after the last part, there is nothing to
    fetch: the last number is fetched again.
    """
    number = common.item_bytes(weights)
    (start,) = weights.offset_of(first)
    last = math.prod(map(int, weights.shape)) - 1
    within = tirx.min(place * (line // number), size // number - 1)
    following = [*[0] * (len(first) - 1), tirx.min(start + within + size // number, last)]
    return _fetch(weights, following, [], _HOW)


def _with_fetch(stmt: Any, chunks: For, fetch: Any) -> Any:
    """A statement in which each iteration of the loop `chunks`, a chunk of a reduction, fetches before it computes."""
    if isinstance(stmt, SeqStmt):
        return SeqStmt([_with_fetch(part, chunks, fetch) for part in stmt.seq])
    if not isinstance(stmt, For):
        return stmt
    annotations, inner = dict(stmt.annotations), _with_fetch(stmt.body, chunks, fetch)
    if stmt.loop_var.same_as(chunks.loop_var):
        del annotations[_SPREAD]
        inner = SeqStmt([fetch, inner])
    return For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, inner, stmt.thread_binding, annotations)


def _sums(stmt: Any, loops: tuple[For, ...] = ()) -> Iterator[tuple[tuple[For, ...], SBlockRealize]]:
    """Yield the blocks in a statement that compute sums, each with the loops around it."""
    if isinstance(stmt, For):
        yield from _sums(stmt.body, (*loops, stmt))
    elif isinstance(stmt, SeqStmt):
        for part in stmt.seq:
            yield from _sums(part, loops)
    elif isinstance(stmt, SBlockRealize) and any(
        item.iter_type == tirx.IterVar.CommReduce for item in stmt.block.iter_vars
    ):
        yield loops, stmt


def _fetch_part(around: For, ahead: int, loops: Sequence[For], realize: SBlockRealize, region: Any) -> Any:
    """Prefetch the part of a tensor that a block, in `loops` within the loop `around`, reads some iterations later."""
    index = _start(region, realize)
    # Replace in two steps, because the expression that replaces a loop variable must not contain it.
    after = tirx.Var("after", around.loop_var.ty)
    replacements: dict[Any, Any] = {around.loop_var: after}
    fetch_loops: list[tuple[Any, For]] = []
    for loop in loops:
        replacements[loop.loop_var] = loop.min
        moves = not same_shape(index, [common.substitute(item, {loop.loop_var: loop.min}) for item in index])
        if moves and loop.kind != ForKind.VECTORIZED:
            variable = replacements[loop.loop_var] = tirx.Var(f"{loop.loop_var.name}_next", loop.loop_var.ty)
            fetch_loops.append((variable, loop))
    index = [common.substitute(item, replacements) for item in index]
    following = {after: tirx.min(around.loop_var + ahead, around.extent - 1)}
    return _fetch(region.source, [common.substitute(item, following) for item in index], fetch_loops, _HOW)


def _fetch_tile(rows: For, parameters: Sequence[Any]) -> list[Any]:
    """Prefetch the lines of a tile of the result, and of the operands that have an element for each of its elements."""
    loops, realize = _loops_and_block(rows)
    *outer, lane = loops
    fetches: list[Any] = []
    reads = realize.block.reads if int(rows.annotations[FETCH_RESULT]) else []
    for how, regions in ((TO_READ, reads), (_TO_WRITE, realize.block.writes)):
        for region in regions:
            index = _start(region, realize)
            has_rows = any(uses(item, rows.loop_var) for item in index)
            if not has_rows or not is_one_of(region.source, parameters):
                continue
            fetch_loops = [(tirx.Var(f"{loop.loop_var.name}_fetched", loop.loop_var.ty), loop) for loop in outer]
            replacements = {loop.loop_var: variable for variable, loop in fetch_loops} | {lane.loop_var: lane.min}
            place = [common.substitute(item, replacements) for item in index]
            fetches.append(_fetch(region.source, place, fetch_loops, how))
    return fetches


def _loops_and_block(stmt: Any) -> tuple[list[For], SBlockRealize]:
    """The loops of a nest, the outermost first, and the one block in it. Raises TypeError for a nest without one."""
    loops = []
    while isinstance(stmt, For):
        loops.append(stmt)
        stmt = stmt.body
    if not isinstance(stmt, SBlockRealize):
        raise TypeError("there is more than one block within the loop")
    return loops, stmt


def _start(region: Any, realize: SBlockRealize) -> list[Any]:
    """The index at which a region of a block begins, by the variables of the loops around the block."""
    values = dict(zip((item.var for item in realize.block.iter_vars), realize.iter_values, strict=True))
    return [common.substitute(item.min, values) for item in region.region]


def _fetch(tensor: Any, index: Sequence[Any], loops: Sequence[tuple[Any, For]], how: tuple[int, int, int]) -> Any:
    """Prefetch the lines of `tensor` at an index.

    Each pair in `loops` is a variable of the index and the loop that it runs along. `how` are the arguments of LLVM's
    intrinsic.
    """
    fetch: Any = tirx.Evaluate(prefetch(tensor, index, how))
    for variable, loop in reversed(loops):
        fetch = For(variable, loop.min, loop.extent, ForKind.SERIAL, fetch)
    return fetch
