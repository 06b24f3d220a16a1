"""The schedule for blocks of convolutions: strips of lines in parallel, all that a strip needs computed within it."""

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler.annotations import CHUNK, LANES, STRIP, TILE
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.schedules import common


def apply(sch: Schedule, machine: Machine) -> bool:
    """Blocks around a depthwise convolution.

    For every strip, channels go in chunks through the first two convolutions; the last one reads all of them.
    """
    depthwise = common.kernel(sch, "block.depthwise")
    if depthwise is None:
        return False
    first, last = common.kernel(sch, "block.first"), common.kernel(sch, "block.last")
    lines, pixels, lanes = (_number(sch, depthwise, name) for name in (STRIP, TILE, LANES))
    out = common.inline_epilogue(sch, depthwise if last is None else last)
    n, h, w, c = sch.get_loops(out)
    strip, line = sch.split(h, [None, lines])
    if last is None:
        filtered, at = out, None
    else:
        (filtered,) = common.named(sch, "filtered")
        rows, count, width = (_number(sch, last, name) for name in (TILE, CHUNK, LANES))
        far, near = sch.split(w, [None, rows])
        outer, pieces, lane = common.split_channels(sch, c, count, width)
        sch.reorder(n, strip, line, far, outer, near, pieces, lane)
        at = outer
    task = sch.fuse(n, strip)
    common.parallel(sch, task, machine)
    if last is not None:
        sch.compute_at(last, at, preserve_unit_loops=True)
        _product(sch, last, rows, count, width, reduced=1)
        common.in_registers(sch, [near, pieces, lane])
        sch.compute_at(filtered, task, preserve_unit_loops=True)

    vectors = 1 if first is None else _number(sch, first, CHUNK)
    *_, line, w, c = sch.get_loops(filtered)
    chunk, piece, lane = sch.split(c, [None, vectors, lanes])
    far, near = sch.split(w, [None, pixels])
    sch.reorder(chunk, piece, line, far, near, lane)
    sch.compute_at(depthwise, far, preserve_unit_loops=True)
    _taps(sch, depthwise)
    common.in_registers(sch, [near, lane])

    (expanded,) = common.named(sch, "expanded")
    sch.compute_at(expanded, chunk, preserve_unit_loops=True)
    if first is None:
        common.vectorize_inner(sch, expanded, machine)
        return True
    rows, width = _number(sch, first, TILE), _number(sch, first, LANES)
    *_, x, c = sch.get_loops(expanded)
    far, near = sch.split(x, [None, rows])
    piece, lane = sch.split(c, [vectors, width])
    sch.compute_at(first, far, preserve_unit_loops=True)
    _product(sch, first, rows, vectors, width, reduced=3)
    common.in_registers(sch, [near, piece, lane])
    (source,) = common.named(sch, "source")
    sch.compute_at(source, task, preserve_unit_loops=True)
    common.vectorize_inner(sch, source, machine)
    return True


def _number(sch: Schedule, block: SBlockRV, name: str) -> int:
    return int(sch.get(block).annotations[name])


def _product(sch: Schedule, product: SBlockRV, rows: int, vectors: int, lanes: int, reduced: int) -> None:
    """Keep a product's tile in registers while it accumulates."""
    loops = list(sch.get_loops(product))
    (near, channel), reductions = loops[-reduced - 2 : -reduced], loops[-reduced:]
    if [common.extent(sch, loop) for loop in (near, channel)] != [rows, vectors * lanes]:
        raise ValueError("the tile's extents are not constant")
    piece, lane = sch.split(channel, [vectors, lanes])
    steps = [*reductions[:-1], *common.in_steps(sch, reductions[-1], sch.get(product).name_hint)]
    sch.reorder(*steps, near, piece, lane)
    common.in_registers(sch, [near, piece, lane])
    start = sch.decompose_reduction(product, steps[0])
    common.in_registers(sch, list(sch.get_loops(start))[-3:])


def _taps(sch: Schedule, depthwise: SBlockRV) -> None:
    """Unroll the taps of a depthwise convolution around a strip of pixels by a vector of channels."""
    *_, strip, vector, y, x = sch.get_loops(depthwise)
    sch.reorder(y, x, strip, vector)
    taps: list[LoopRV] = [y, x] if (common.extent(sch, y) or 0) * (common.extent(sch, x) or 0) <= 9 else [x]
    common.in_registers(sch, [*taps, strip, vector])
    start = sch.decompose_reduction(depthwise, y)
    common.in_registers(sch, list(sch.get_loops(start))[-2:])
