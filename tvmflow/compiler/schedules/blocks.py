"""The schedule for blocks of convolutions: patches of images in parallel, each of which computes all that it needs."""

from collections.abc import Callable

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler.annotations import CHUNK, COLUMNS, DOT, LANES, LINES, TILE, WINDOW, WINOGRAD
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common, registers, remainder, tails, winograd
from tvmflow.compiler.schedules.dot import inline_exact, use_dot_products
from tvmflow.compiler.schedules.patches import Reach, mark_part, mark_patches

# Along the lines and along the columns of a patch.
_Reaches = tuple[Reach, Reach]

# The loops of Winograd's products: over the taps in two dimensions, images, strips of patches, patches in a strip, the
# lines and columns of output tiles, and channels.
_TAP_LOOPS = 8
# The most taps of a depthwise kernel that are all unrolled.
_TAPS_UNROLLED = 9


def apply(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule a block, a chain of two or three convolutions in one function; return False for other functions.

    A patch, some lines and columns of the result, goes through the whole chain before the next one. A depthwise
    convolution in the middle and the first convolution compute a patch for some channels at a time. A dense convolution
    in the middle and the last convolution read all channels of the convolution before them, which has then computed the
    whole patch.
    """
    middles = {kind: common.find_kernel(sch, f"block.{kind}") for kind in _MIDDLES}
    kind, middle = next(((kind, block) for kind, block in middles.items() if block is not None), ("", None))
    if middle is None:
        return False
    inline_exact(sch)
    lines, columns = _number(sch, middle, LINES), _number(sch, middle, COLUMNS)
    last = common.find_kernel(sch, "block.last")
    # The side of Winograd's output tiles; other convolutions compute their lines one by one.
    size = _number(sch, middle, WINOGRAD) if kind == "winograd" else 1
    # The pixels that the result of a patch needs, here of the result itself.
    reaches = (Reach(), Reach())
    result = common.find_blocks(sch, "output_vertical")[0] if kind == "winograd" else middle
    if last is None:
        filtered = common.inline_epilogue(sch, result)
        n, h, w, c = sch.get_loops(filtered)
        (strip, h), (beside, w) = sch.split(h, [None, lines]), sch.split(w, [None, columns])
        sch.reorder(n, strip, beside, h, w, c)
        task = sch.fuse(n, strip, beside)
        common.parallel(sch, task, machine)
        mark_patches(sch, task, lines, size)
    else:
        (filtered,) = common.find_blocks(sch, "filtered")
        if kind == "winograd":
            (element,) = sch.get_consumers(result)
            sch.compute_inline(element)
        task, part = _last(sch, last, (lines, columns), size, machine, choices)
        sch.compute_at(filtered, part, preserve_unit_loops=True)
        reaches = (reaches[0].before(size), reaches[1].before(_number(sch, last, TILE)))
    at = _MIDDLES[kind](sch, middle, filtered, task, reaches, machine, choices)
    tiles = (size, size * _number(sch, middle, TILE))
    _first(sch, at, task, _before(sch, middle, reaches, tiles), machine, choices)
    use_dot_products(sch, machine)
    return True


def _last(
    sch: Schedule, last: SBlockRV, patch: tuple[int, int], size: int, machine: Machine, choices: Choices
) -> tuple[LoopRV, LoopRV]:
    """Tile the last convolution; return the loop over patches and, in a patch, the loop over its parts.

    `patch` is the lines and columns of a patch, `size` the side of Winograd's output tiles. A part is one line of such
    tiles, which Winograd's algorithm processes at a time, or with a `size` of 1 the whole patch.
    """
    rows, count, width = (_number(sch, last, name) for name in (TILE, CHUNK, LANES))
    lines, columns = patch
    step = size if size > 1 else lines
    n, h, w, c = sch.get_loops(common.inline_epilogue(sch, last))
    strip, part, line = sch.split(h, [None, lines // step, step])
    beside, far, near = sch.split(w, [None, columns // rows, rows])
    outer, pieces, lane = remainder.split(sch, c, count, width)
    sch.reorder(n, strip, beside, part, line, far, outer, near, pieces, lane)
    task = sch.fuse(n, strip, beside)
    common.parallel(sch, task, machine)
    mark_patches(sch, task, lines, size)
    mark_part(sch, part, 0, Reach(), step)
    if size == 1:
        mark_part(sch, line, 0, Reach())
    mark_part(sch, far, 1, Reach(), rows)
    sch.compute_at(last, outer, preserve_unit_loops=True)
    _product(sch, last, rows, count, width, choices, reduced=1)
    registers.keep_in_registers(sch, [near, pieces, lane])
    tails.mark_whole(sch, near)
    return task, part


def _depthwise(
    sch: Schedule,
    depthwise: SBlockRV,
    filtered: SBlockRV,
    _task: LoopRV,
    reaches: _Reaches,
    _machine: Machine,
    _choices: Choices,
) -> LoopRV:
    """Tile a depthwise convolution by chunks of channels, and return the loop over chunks."""
    first = common.find_kernel(sch, "block.first")
    pixels, lanes = (_number(sch, depthwise, name) for name in (TILE, LANES))
    vectors = 1 if first is None else _number(sch, first, CHUNK)
    *_, line, w, c = sch.get_loops(filtered)
    chunk, piece, lane = sch.split(c, [None, vectors, lanes])
    far, near = sch.split(w, [None, pixels])
    sch.reorder(chunk, piece, line, far, near, lane)
    _mark(sch, line, far, reaches, pixels)
    sch.compute_at(depthwise, far, preserve_unit_loops=True)
    _taps(sch, depthwise)
    registers.keep_in_registers(sch, [near, lane])
    return chunk


def _dense(
    sch: Schedule,
    dense: SBlockRV,
    filtered: SBlockRV,
    task: LoopRV,
    reaches: _Reaches,
    _machine: Machine,
    choices: Choices,
) -> LoopRV:
    """Tile a dense convolution that reads all channels of its patch; return the loop at which its input is computed."""
    rows, count, lanes = (_number(sch, dense, name) for name in (TILE, CHUNK, LANES))
    *_, line, w, c = sch.get_loops(filtered)
    outer, piece, lane = sch.split(c, [None, count, lanes])
    far, near = sch.split(w, [None, rows])
    sch.reorder(outer, line, far, near, piece, lane)
    _mark(sch, line, far, reaches, rows)
    sch.compute_at(dense, far, preserve_unit_loops=True)
    _product(sch, dense, rows, count, lanes, choices, reduced=3)
    registers.keep_in_registers(sch, [near, piece, lane])
    return task


def _winograd(
    sch: Schedule,
    product: SBlockRV,
    filtered: SBlockRV,
    task: LoopRV,
    reaches: _Reaches,
    machine: Machine,
    choices: Choices,
) -> LoopRV:
    """Let a patch go through the stages of Winograd's algorithm; return the loop at which its input is computed."""
    rows, count, lanes, size = (_number(sch, product, name) for name in (TILE, CHUNK, LANES, WINOGRAD))
    (vertical,), (transformed,), (back,) = (
        common.find_blocks(sch, name) for name in ("input_vertical", "input", "output_vertical")
    )
    result = sch.cache_write(product, 0, "global")
    *_, h, w, c = sch.get_loops(filtered)
    (high, h), (far, w) = sch.split(h, [None, size]), sch.split(w, [None, size])
    outer, lane = sch.split(c, [None, lanes])
    sch.reorder(high, far, outer, h, w, lane)
    mark_part(sch, high, 0, reaches[0], size)
    mark_part(sch, far, 1, reaches[1], size)
    winograd.transform_back(sch, back, outer, [h, w, lane])

    sch.compute_at(result, high, preserve_unit_loops=True)
    a, b, *place, x, c = list(sch.get_loops(result))[-_TAP_LOOPS:]
    far, near = sch.split(x, [None, rows])
    outer, piece, lane = sch.split(c, [None, count, lanes])
    sch.reorder(a, b, outer, *place, far, near, piece, lane)
    mark_part(sch, far, 1, reaches[1], size * rows)
    sch.compute_at(product, far, preserve_unit_loops=True)
    registers.keep_in_registers(sch, [near, piece, lane])
    _product(sch, product, rows, count, lanes, choices, reduced=1)

    sch.compute_at(transformed, high, preserve_unit_loops=True)
    *_, across = winograd.transform_input(sch, vertical, transformed, machine)
    mark_part(sch, across, 1, reaches[1].before(size * rows), size)
    return task


def _first(sch: Schedule, at: LoopRV, task: LoopRV, reaches: _Reaches, machine: Machine, choices: Choices) -> None:
    """Compute the middle convolution's input, with zeros around it; `reaches` are those of that input."""
    (expanded,) = common.find_blocks(sch, "expanded")
    sch.compute_at(expanded, at, preserve_unit_loops=True)
    first = common.find_kernel(sch, "block.first")
    if first is None:
        _copy(sch, expanded, reaches, machine)
        return
    rows, vectors, width = (_number(sch, first, name) for name in (TILE, CHUNK, LANES))
    *_, line, x, c = sch.get_loops(expanded)
    far, near = sch.split(x, [None, rows])
    chunk, piece, lane = sch.split(c, [None, vectors, width])
    sch.reorder(chunk, line, far, near, piece, lane)
    _mark(sch, line, far, reaches, rows)
    reaches = _before(sch, first, reaches, (1, rows))
    sch.compute_at(first, far, preserve_unit_loops=True)
    _product(sch, first, rows, vectors, width, choices, reduced=3)
    registers.keep_in_registers(sch, [near, piece, lane])
    (source,) = common.find_blocks(sch, "source")
    sch.compute_at(source, task, preserve_unit_loops=True)
    _copy(sch, source, reaches, machine)


def _copy(sch: Schedule, copy: SBlockRV, reaches: _Reaches, machine: Machine) -> None:
    """Vectorise a copy of a part of the image."""
    *_, line, column, _ = sch.get_loops(copy)
    _mark(sch, line, column, reaches)
    common.vectorize_inner(sch, copy, machine)


def _mark(sch: Schedule, line: LoopRV, far: LoopRV, reaches: _Reaches, tile: int = 1) -> None:
    """Mark the loops over the lines of a stage and over the tiles of `tile` pixels in a line."""
    mark_part(sch, line, 0, reaches[0])
    mark_part(sch, far, 1, reaches[1], tile)


def _before(sch: Schedule, convolution: SBlockRV, reaches: _Reaches, tiles: tuple[int, int]) -> _Reaches:
    """The reaches in the input of a convolution that has `reaches`, computed in tiles of lines by columns."""
    stride_h, high, stride_w, wide = (int(number) for number in sch.get(convolution).annotations[WINDOW])
    return reaches[0].before(tiles[0], stride_h, high), reaches[1].before(tiles[1], stride_w, wide)


_Middle = Callable[[Schedule, SBlockRV, SBlockRV, LoopRV, _Reaches, Machine, Choices], LoopRV]

# By kind of the middle convolution: the function that schedules it and returns the loop at which to compute its input.
_MIDDLES: dict[str, _Middle] = {"depthwise": _depthwise, "dense": _dense, "winograd": _winograd}


def _number(sch: Schedule, block: SBlockRV, name: str) -> int:
    return int(sch.get(block).annotations[name])


def _product(
    sch: Schedule, product: SBlockRV, rows: int, vectors: int, lanes: int, choices: Choices, *, reduced: int
) -> None:
    """Keep a product's tile in registers while its reductions accumulate.

    These are the `reduced` innermost loops, around the loop within a dot product, if the product has one.
    """
    loops = list(sch.get_loops(product))
    group = [loops.pop()] if DOT in sch.get(product).annotations else []
    (near, channel), reductions = loops[-reduced - 2 : -reduced], loops[-reduced:]
    tile = registers.split_tile(sch, near, channel, rows, vectors, lanes)
    steps = registers.split_steps(sch, reductions[-1], choices, sch.get(product).name_hint)
    registers.accumulate(sch, product, tile.loops, [*reductions[:-1], *steps], group)


def _taps(sch: Schedule, depthwise: SBlockRV) -> None:
    """Unroll the taps of a depthwise convolution around a strip of pixels by a vector of channels."""
    *_, strip, vector, y, x = sch.get_loops(depthwise)
    taps = (common.extent(sch, y) or 0) * (common.extent(sch, x) or 0)
    unrolled = [y, x] if taps <= _TAPS_UNROLLED else [x]
    registers.accumulate(sch, depthwise, [strip, vector], [y, x], unrolled=unrolled)
