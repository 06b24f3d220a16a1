"""The schedule for depthwise convolution: a strip of pixels by a vector of channels in registers, taps unrolled.

Convolutions in groups narrower than a vector use the same tile, and shuffle a vector for each channel of a group.
"""

from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmflow.compiler import groups
from tvmflow.compiler.annotations import DOT, LANES, NARROW, PADDING, TILE
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.depthwise import MOST_LINES
from tvmflow.compiler.schedules import common, registers, remainder, tails

# The most taps of a kernel that are all unrolled, and the most of a kernel whose rows are unrolled.
_TAPS_UNROLLED, _ROWS_UNROLLED = 9, 49
# The lines of a strip of an image of unknown height.
_UNKNOWN_LINES = 4


def apply(sch: Schedule, machine: Machine, choices: Choices) -> bool:
    """Schedule the convolutions that `operators.depthwise` defines; return False for other functions.

    These are depthwise convolutions, and grouped convolutions whose groups are narrower than a vector. The padded input
    is computed for one strip of lines at a time, so that it stays in the cache.
    """
    product = common.find_kernel(sch, "depthwise")
    if product is None:
        return False
    annotations = sch.get(product).annotations
    pixels, lanes = int(annotations[TILE]), int(annotations[LANES])
    out = common.inline_epilogue(sch, product)
    n, h, w, c = sch.get_loops(out)
    far, near = sch.split(w, [None, pixels])
    outer, pieces, lane = remainder.split(sch, c, 1, lanes)
    height, kernel_h = (common.extent(sch, loop) for loop in (h, sch.get_loops(product)[4]))
    # TVM finds no instruction for the channels of a group in a strip that may end beyond the image.
    options = {"1": 1} if height is None and NARROW in annotations else _rank_lines(height, machine)
    lines = choices.choose("lines", "", options)
    strip_of, line = sch.split(h, [None, lines])
    part, outer = common.split_for_cores(sch, [n, strip_of], outer, machine)
    sch.reorder(n, strip_of, part, line, far, outer, near, pieces, lane)
    task = sch.fuse(n, strip_of, part)
    common.parallel(sch, task, machine)
    is_stored = NARROW not in annotations and _llvm_moves_sums(sch, product, out)
    sch.compute_at(product, far if is_stored else outer, preserve_unit_loops=True)
    numbers = [int(item) for item in annotations.get(PADDING, [])]
    for pad in common.find_blocks(sch, "pad"):
        if numbers and _pads_twice(height, lines, kernel_h, numbers):
            common.parallel(sch, common.fuse(sch, list(sch.get_loops(pad))[:-2]), machine)
        else:
            sch.compute_at(pad, task, preserve_unit_loops=True)
        common.vectorize_inner(sch, pad, machine)
    narrow = [int(item) for item in annotations[NARROW]] if NARROW in annotations else []
    pair = 2 if DOT in annotations else 1
    around = list(sch.get_loops(product))
    *_, strip, vector, y, x = around[:-pair] if narrow else around
    if is_stored:
        chunk, vector = sch.split(vector, [None, lanes])
        sch.reorder(chunk, strip, vector, y, x)
    if [common.extent(sch, loop) for loop in (strip, vector)] != [pixels, lanes]:
        raise ValueError("the strip's extents are not constant")
    if narrow:
        size, stride, dilation = narrow
        taps = common.extent(sch, x) or 1
        form = groups.Strip(DOT in annotations, size, lanes, pixels, taps, stride, dilation)
        _schedule_groups(sch, machine, product, form, task, around[-4 - pair :])
    else:
        taps = (common.extent(sch, y) or 0) * (common.extent(sch, x) or 0)
        unrolled = [*([y] if taps <= _TAPS_UNROLLED else []), *([x] if taps <= _ROWS_UNROLLED else [])]
        registers.accumulate(sch, product, [strip, vector], [y, x], unrolled=unrolled)
    registers.keep_in_registers(sch, [near, pieces, lane])
    tails.mark_whole(sch, near)
    if height is None:
        tails.mark_lines(sch, line)
    return True


def _schedule_groups(
    sch: Schedule, machine: Machine, product: SBlockRV, form: groups.Strip, task: LoopRV, loops: Sequence[LoopRV]
) -> None:
    """Schedule a product in narrow groups.

    `loops` run over strip, vector, both taps and the channels of a group, in bfloat16 over pairs and within them.
    """
    strip, vector, y, x, channel, *pair = loops
    # The instructions replace no loop of one iteration.
    replaced = [loop for loop in (x, strip, channel, vector, *pair) if common.extent(sch, loop) != 1]
    sch.reorder(y, *(loop for loop in (x, strip, channel) if loop not in replaced), *replaced)
    start = sch.decompose_reduction(product, y)
    registers.keep_in_registers(sch, list(sch.get_loops(start))[-2:])
    groups.tensorize(sch, machine.arch, form, task, replaced[0])


def _llvm_moves_sums(sch: Schedule, product: SBlockRV, out: SBlockRV) -> bool:
    """Whether LLVM would move the sum of each pixel to where `out` reads it, so that sums do not run side by side.

    It does so with sums whose loops it unrolls whole itself, beside a function of many steps such as an exponential.
    The sums of a strip and of all channels are stored first then.
    """
    *_, y, x = (common.extent(sch, loop) or 0 for loop in sch.get_loops(product))
    return y * x > _TAPS_UNROLLED and common.has_function(sch, out)


def _pads_twice(height: int | None, lines: int, taps: int | None, numbers: Sequence[int]) -> bool:
    """Whether the padded input of all strips together is at least twice that of the whole image.

    The result has `height` lines (None: unknown), a strip `lines` of them, and a column of the kernel `taps` (None:
    unknown). `numbers` are those of the annotation `PADDING`.
    """
    if height is None or taps is None:
        return False
    _, _, _, _, stride, _, dilation, _ = numbers
    beyond = (taps - 1) * dilation + 1 - stride
    return -(-height // lines) * (lines * stride + beyond) >= 2 * (height * stride + beyond)


def _rank_lines(height: int | None, machine: Machine) -> dict[str, int]:
    """Rank the lines of output per task. More lines share more padded input, but each core needs several tasks.

    `height` is None where it is unknown: the last strip may have fewer lines.
    """
    if height is None:
        return {str(lines): lines for lines in (_UNKNOWN_LINES, 1)}
    divisors = [lines for lines in range(1, 17) if height % lines == 0]
    tasks = 3 * machine.cores
    best = max(lines for lines in divisors if lines == 1 or (lines <= MOST_LINES and height >= tasks * lines))
    return {str(lines): lines for lines in (best, *(lines for lines in divisors if lines != best))}
