"""Blocks of convolutions as one function: a patch of the image goes through all of them and stays in a core's cache.

A block has a convolution in the middle, depthwise (as in an inverted residual) or dense (as in a bottleneck), and a
dense convolution before it, a pointwise convolution after it, or both. Each patch computes the intermediate values that
it needs; pixels that two patches share are computed twice. A patch is a strip of whole lines where the width is known.
Where it is free, a patch has as many columns as the cost model chooses. All sizes within a patch are constants.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tvm import te, tirx

from tvmflow.compiler import cost, tiles, winograd
from tvmflow.compiler.annotations import CHUNK, COLUMNS, DOT, KERNEL, LANES, LINES, SUBJECT, TILE, WINOGRAD
from tvmflow.compiler.choices import Decisions
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import dot, strassen
from tvmflow.compiler.operators import winograd as winograd_stages
from tvmflow.compiler.operators.common import output_size, parts, round_up

# The element-wise operations after a convolution: a function of a value, its channel, and the tensors by channel.
Epilogue = Callable[[Any, Any, Sequence[te.Tensor]], Any]


@dataclass(frozen=True)
class Convolution:
    """One convolution of a block: its kernel, and the element-wise operations that follow it.

    `channels` is the number of the result's channels. `kernel`, `strides` and `dilation` are height, width; `padding`
    is top, left, bottom, right. `winograd` is the side of the output tiles of Winograd's algorithm in pixels, None for
    a direct convolution. `epilogue` takes an element of the result, its channel and a list of `reads` tensors with a
    value for each channel. It returns the element after the element-wise operations. None means that there are none.
    """

    channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int] = (1, 1)
    depthwise: bool = False
    winograd: int | None = None
    epilogue: Epilogue | None = None
    reads: int = 0

    def size(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Return the height and width of the result for an input of `height` by `width` pixels, which may be free."""
        top, left, bottom, right = self.padding
        (high, wide), (down, across), (below, beside) = self.kernel, self.strides, self.dilation
        return (
            output_size(height, high, down, top, bottom, below),
            output_size(width, wide, across, left, right, beside),
        )

    def needs(self, lines: int, columns: int) -> tuple[int, int]:
        """Return the lines and columns of the padded input that `lines` by `columns` pixels of the result read."""
        high, wide = (
            (count - 1) * stride + dilation * (kernel - 1) + 1
            for count, stride, dilation, kernel in zip(
                (lines, columns), self.strides, self.dilation, self.kernel, strict=True
            )
        )
        return high, wide


@dataclass(frozen=True)
class Block:
    """The convolutions of a block on images of `height` by `width` pixels; `first` or `last` may be None.

    The input has `depth` channels. Where `free` is true for the height or the width, that number is what the cost model
    takes it for, and the function is right for every size. With `bf16` the input is bfloat16, stored as uint16, and
    dense convolutions multiply bfloat16 numbers by dot products (`compiler.dotproduct`). A depthwise convolution
    computes in float32, and so do all element-wise operations.
    """

    height: int
    width: int
    depth: int
    first: Convolution | None
    middle: Convolution
    last: Convolution | None
    free: tuple[bool, bool] = (False, False)
    bf16: bool = False

    @property
    def group(self) -> int:
        """The neighbouring channels that a dense convolution multiplies at a time, in each lane."""
        return BF16.group if self.bf16 else 1

    @property
    def inner(self) -> tuple[int, int, int]:
        """The height, width and depth of the middle convolution's input."""
        return (*self.middle_size(self.height, self.width), self.first.channels if self.first else self.depth)

    def middle_size(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Return the height and width of the middle convolution's input for images of `height` by `width` pixels."""
        return self.first.size(height, width) if self.first else (height, width)


@dataclass(frozen=True)
class Plan:
    """A way to compute a block patch by patch, with its estimated cost.

    A patch is `lines` by `columns` pixels of the block's result. `first`, `middle` and `last` are the register tiles of
    the three convolutions, pixels by vectors of channels; None for a convolution that the block lacks. With Winograd's
    algorithm the rows of the middle tile are rows of its matrix product, that is, output tiles. `cycles` estimates the
    time of the whole block on all cores.
    """

    lines: int
    columns: int
    first: tiles.Tile | None
    middle: tiles.Tile
    last: tiles.Tile | None
    cycles: float


def block(data: te.Tensor, *tensors: te.Tensor, block: Block, plan: Plan, machine: Machine, subject: str) -> te.Tensor:
    """Define a block of convolutions on NHWC data, computed by `plan`; return the result after the last convolution.

    `tensors` are, for each convolution in order, its packed weights and the tensors that its epilogue reads. Dense
    weights have the form of `convolution.pack_array`, for bfloat16 that of `dot.pack_conv2d`. `subject` names the block
    in the compiler's decisions (`compiler.choices`). The result is float32.
    """
    remaining = list(tensors)

    def take(convolution: Convolution) -> tuple[te.Tensor, list[te.Tensor]]:
        weight, *others = remaining[: 1 + convolution.reads]
        del remaining[: 1 + convolution.reads]
        return weight, others

    height, width = data.shape[1:3]
    high, wide = block.middle_size(height, width)
    patches = _Patches.of(data.shape[0], *block.middle.size(high, wide), plan)
    if block.first:
        middle_input = _expanded(data, block, plan, patches, *take(block.first))
    else:
        top, left, *_ = block.middle.padding
        size = block.middle.needs(plan.lines, plan.columns)
        middle_input = _cut(data, patches, block, block.middle.strides, (top, left), size, "expanded")
    weight, reads = take(block.middle)
    annotations = {
        TILE: plan.middle.rows,
        CHUNK: plan.middle.vectors,
        LINES: plan.lines,
        COLUMNS: plan.columns,
        SUBJECT: subject,
    }
    if block.middle.depthwise:
        product = _depthwise(middle_input, block, plan, weight, {**annotations, LANES: machine.lanes})
    elif block.middle.winograd is None:
        product = _dense(middle_input, block, plan, weight, annotations)
    else:
        product = _winograd(middle_input, block, plan, machine, weight, annotations)

    result = dot.stage(
        product.shape,
        lambda *index: _finish(block.middle, product[index], index[-1], reads),
        "filtered",
        block.bf16 and block.last is not None,
    )
    channels = block.middle.channels
    if block.last:
        result, channels = _project(result, block, block.last, plan, *take(block.last)), block.last.channels
    return te.compute(
        (data.shape[0], *block.middle.size(high, wide), channels),
        lambda n, h, w, c: result[(*patches.place(n, h, w), c)],
        name="unpack",
    )


@dataclass(frozen=True)
class _Patches:
    """The patches of a batch of images: the sizes of their dimensions, and the pixels of one patch.

    The dimensions are images, strips of patches below each other, and patches beside each other.
    """

    sizes: tuple[Any, Any, Any]
    lines: int
    columns: int

    @staticmethod
    def of(batch: Any, height: Any, width: Any, plan: Plan) -> "_Patches":
        """Divide `batch` results of `height` by `width` pixels into patches."""
        sizes = (batch, parts(height, plan.lines), parts(width, plan.columns))
        return _Patches(sizes, plan.lines, plan.columns)

    def place(self, n: Any, h: Any, w: Any) -> tuple[Any, ...]:
        """The patch that holds the pixel in line `h` and column `w` of image `n`, and the pixel's place in it."""
        return (n, h // self.lines, w // self.columns, h % self.lines, w % self.columns)


def _finish(convolution: Convolution, value: Any, channel: Any, reads: Sequence[te.Tensor]) -> Any:
    return convolution.epilogue(value, channel, reads) if convolution.epilogue else value


def _cut(
    data: te.Tensor,
    patches: _Patches,
    block: Block,
    strides: tuple[int, int],
    before: tuple[int, int],
    size: tuple[int, int],
    name: str,
) -> te.Tensor:
    """Copy from NHWC data the part of `size`, lines by columns, that each patch reads, with zeros around the data.

    The parts of two patches that lie beside or below each other are `strides` times a patch's pixels apart. The first
    one begins `before` lines and columns before the data. Zeros fill the channels up to whole groups of `block.group`.
    A depthwise convolution reads float32 numbers, whatever the type of the data.
    """
    _, height, width, depth = data.shape
    widens = block.bf16 and block.first is None and block.middle.depthwise
    channels = depth if widens else round_up(int(depth), block.group)
    zero = tirx.const(0, "float32" if widens else data.dtype)

    def element(n: Any, strip: Any, beside: Any, y: Any, x: Any, c: Any) -> Any:
        line = strip * (patches.lines * strides[0]) + y
        column = beside * (patches.columns * strides[1]) + x
        top, left = before
        inside = tirx.all(line >= top, line < height + top, column >= left, column < width + left)
        if channels != depth:
            inside = tirx.all(inside, c < depth)
        value = data[n, line - top, column - left, c]
        return tirx.if_then_else(inside, BF16.widen(value) if widens else value, zero)

    return te.compute((*patches.sizes, *size, channels), element, name=name)


class _Products:
    """The sums of products of a dense convolution: the axes of a sum, over taps and channels, and its terms."""

    def __init__(self, weight: te.Tensor, block: Block, pointwise: bool = False) -> None:
        _, high, wide, steps, self.lanes, *group = (int(size) for size in weight.shape)
        self._weight, self._block = weight, block
        self._taps = [] if pointwise else [te.reduce_axis((0, size), name) for size, name in ((high, "y"), (wide, "x"))]
        self._steps = [te.reduce_axis((0, size), name) for size, name in zip((steps, *group), ("k", "g"), strict=False)]

    @property
    def annotations(self) -> dict[str, Any]:
        """What the schedule must know of the sums."""
        return {LANES: self.lanes, **({DOT: BF16.name} if self._block.bf16 else {})}

    def sum(self, channel: Any, element: Callable[[Any, Any, Any], Any]) -> Any:
        """The sum for a channel of the result; `element` returns the number at a tap's line, column and channel."""
        y, x = self._taps or (0, 0)
        step, *within = self._steps
        value = element(y, x, step * self._block.group + within[0] if within else step)
        weight = self._weight[(channel // self.lanes, y, x, step, channel % self.lanes, *within)]
        return te.sum(BF16.product(value, weight) if within else value * weight, axis=[*self._taps, *self._steps])


def _expanded(
    data: te.Tensor, block: Block, plan: Plan, patches: _Patches, weight: te.Tensor, reads: Sequence[te.Tensor]
) -> te.Tensor:
    """Compute the first convolution, with zeros around its result.

    The convolution is computed for the border too, so that its tiles need no bounds checks. That is cheap, because it
    pads its own input, which has the fewest channels.
    """
    first, middle = block.first, block.middle
    if first is None or plan.first is None:
        raise ValueError("the block has no first convolution")
    top, left, *_ = middle.padding
    high, wide = block.middle_size(*data.shape[1:3])
    (stride_h, stride_w), (dilation_h, dilation_w) = first.strides, first.dilation
    before = (top * stride_h + first.padding[0], left * stride_w + first.padding[1])
    strides = (middle.strides[0] * stride_h, middle.strides[1] * stride_w)
    rows, columns = middle.needs(plan.lines, plan.columns)
    size = (rows, -(-columns // plan.first.rows) * plan.first.rows)
    source = _cut(data, patches, block, strides, before, first.needs(*size), "source")
    products = _Products(weight, block)

    def product(*index: Any) -> Any:
        *patch, y, x, c = index
        return products.sum(
            c, lambda j, i, k: source[(*patch, y * stride_h + j * dilation_h, x * stride_w + i * dilation_w, k)]
        )

    shape = (*patches.sizes, *size, first.channels)
    attributes = {KERNEL: "block.first", TILE: plan.first.rows, CHUNK: plan.first.vectors, **products.annotations}
    expand = te.compute(shape, product, name="expand", attrs=attributes)

    def element(*index: Any) -> Any:
        _, strip, beside, y, x, c = index
        line = strip * (plan.lines * middle.strides[0]) + y
        column = beside * (plan.columns * middle.strides[1]) + x
        inside = tirx.all(line >= top, line < high + top, column >= left, column < wide + left)
        return tirx.Select(inside, _finish(first, expand[index], c, reads), tirx.const(0, "float32"))

    return dot.stage(shape, element, "expanded", block.bf16 and not middle.depthwise)


def _depthwise(
    middle_input: te.Tensor, block: Block, plan: Plan, weight: te.Tensor, annotations: dict[str, Any]
) -> te.Tensor:
    middle = block.middle
    (stride_h, stride_w), (dilation_h, dilation_w) = middle.strides, middle.dilation
    y, x = (te.reduce_axis((0, size), name) for size, name in zip(middle.kernel, "yx", strict=True))

    def product(*index: Any) -> Any:
        *patch, h, w, c = index
        value = middle_input[(*patch, h * stride_h + y * dilation_h, w * stride_w + x * dilation_w, c)]
        return te.sum(value * weight[y, x, c], axis=[y, x])

    shape = (*middle_input.shape[:3], plan.lines, plan.columns, middle.channels)
    return te.compute(shape, product, name="depthwise", attrs={KERNEL: "block.depthwise", **annotations})


def _dense(
    middle_input: te.Tensor, block: Block, plan: Plan, weight: te.Tensor, annotations: dict[str, Any]
) -> te.Tensor:
    middle = block.middle
    (stride_h, stride_w), (dilation_h, dilation_w) = middle.strides, middle.dilation
    products = _Products(weight, block)

    def product(*index: Any) -> Any:
        *patch, h, w, c = index
        return products.sum(
            c, lambda y, x, k: middle_input[(*patch, h * stride_h + y * dilation_h, w * stride_w + x * dilation_w, k)]
        )

    shape = (*middle_input.shape[:3], plan.lines, plan.columns, middle.channels)
    attributes = {KERNEL: "block.dense", **products.annotations, **annotations}
    return te.compute(shape, product, name="dense", attrs=attributes)


def _winograd(
    middle_input: te.Tensor, block: Block, plan: Plan, machine: Machine, weight: te.Tensor, annotations: dict[str, Any]
) -> te.Tensor:
    return winograd_stages.conv2d(
        middle_input,
        weight,
        channels=block.middle.channels,
        padding=(0, 0, 0, 0),
        annotations=lambda _, lanes, size: {KERNEL: "block.winograd", LANES: lanes, WINOGRAD: size, **annotations},
        machine=machine,
        stride=block.middle.strides[0],
        rows=plan.middle.rows,
    )


def _project(
    data: te.Tensor, block: Block, convolution: Convolution, plan: Plan, weight: te.Tensor, reads: Sequence[te.Tensor]
) -> te.Tensor:
    if plan.last is None:
        raise ValueError("the block has no last convolution")
    products = _Products(weight, block, pointwise=True)
    product = te.compute(
        (*data.shape[:-1], int(weight.shape[0]) * products.lanes),
        lambda *index: products.sum(index[-1], lambda _y, _x, k: data[(*index[:-1], k)]),
        name="project",
        attrs={KERNEL: "block.last", TILE: plan.last.rows, CHUNK: plan.last.vectors, **products.annotations},
    )
    return te.compute(
        (*data.shape[:-1], convolution.channels),
        lambda *index: _finish(convolution, product[index], index[-1], reads),
        name="projected",
    )


# Element-wise operations on a vector of a result: a bias and the two bounds of an activation.
_EPILOGUE = 3
# The most options of a decision.
_CHOICES = 4
# The most widths of a patch that are tried for an image of free width: beside a patch of 32 columns, the two more that
# a 3x3 kernel needs are 6 %, and an image wastes half a patch of each strip on average.
_WIDTHS = 32
# A line of the first convolution gets at most so many more pixels, so that a tile divides it: fewer than a small tile.
_FILLED = 3


def plans(block: Block, batch: int, machine: Machine, strassen: bool = True) -> tuple[list[Plan], float]:
    """Return a block's plans, the fastest first, and the estimated cycles of its convolutions as separate functions.

    The list of plans is empty where patches are impossible or not worth it; the cycles may be 0 then. `batch` is the
    number of images. `strassen` allows Strassen's algorithm for the separate functions.
    """
    lanes, middle = machine.lanes, block.middle
    high, wide, depth = block.inner
    step = middle.winograd or 1
    # Channels that do not fill vectors, such as a model's input, are not worth a block.
    if middle.channels % lanes or (depth % lanes and not (middle.depthwise and block.first is None)):
        return [], 0.0
    all_lines, all_columns = (
        range(step, size + 1, step) if free else [part for part in range(step, size + 1, step) if size % part == 0]
        for size, free in zip(middle.size(high, wide), block.free, strict=True)
    )
    ranked: list[Plan] = []
    saved = _Saved.of(block, batch, machine) if strassen and not any(block.free) else _Saved()
    apart = 0.0
    for columns in all_columns[:_WIDTHS] if block.free[1] else all_columns[-1:]:
        (first_tile, *_), (middle_tile, *_), (last_tile, *_) = _tiles(block, columns, machine)
        # A depthwise convolution has short sums, so it needs fewer of them in flight.
        busy = cost.in_flight(machine)
        if middle_tile.rows * middle_tile.vectors < (busy // 2 if middle.depthwise else busy):
            continue
        others = [tile.rows * tile.vectors for tile in (first_tile, last_tile) if tile]
        if min(others, default=busy) < busy:
            continue
        costs = _Costs(block, batch, machine, (first_tile, middle_tile, last_tile), saved)
        apart = min(costs.apart(), apart or math.inf)
        for lines in all_lines:
            cycles = costs.whole(lines, columns, first_tile)
            if cycles is not None:
                ranked.append(Plan(lines, columns, first_tile, middle_tile, last_tile, cycles))
    ranked.sort(key=lambda plan: plan.cycles)
    return ranked, apart


@dataclass(frozen=True)
class _Saved:
    """The time of the separate first and last convolution over that of direct ones, below 1 by Strassen's algorithm."""

    first: float = 1.0
    last: float = 1.0

    @staticmethod
    def of(block: Block, batch: int, machine: Machine) -> "_Saved":
        """Estimate what Strassen's algorithm saves in the separate pointwise convolutions of a block."""
        high, wide, depth = block.inner
        first, middle, last = block.first, block.middle, block.last

        def share(size: tuple[int, int], depth: int, units: int) -> float:
            estimate = strassen.estimate((batch, *size), depth, units, machine)
            return 1.0 if estimate is None else min(1.0, estimate.share)

        return _Saved(
            share((high, wide), block.depth, depth) if first and first.kernel == (1, 1) else 1.0,
            share(middle.size(high, wide), middle.channels, last.channels) if last else 1.0,
        )


class _Costs:
    """Counts the cycles of a block on all cores."""

    def __init__(
        self,
        block: Block,
        batch: int,
        machine: Machine,
        chosen: tuple[tiles.Tile | None, tiles.Tile, tiles.Tile | None],
        saved: _Saved,
    ) -> None:
        self._block = block
        self._batch = batch
        self._machine = machine
        first, middle, last, lanes = block.first, block.middle, block.last, machine.lanes
        high, wide, depth = block.inner
        self._out_h, self._out_w = middle.size(high, wide)
        # The bytes of a number that a dense convolution reads, and of one that the middle convolution reads in a block.
        self._number = 4 // block.group
        self._middle_number = 4 if middle.depthwise else self._number
        pixels = self._out_h * self._out_w
        first_tile, middle_tile, last_tile = chosen
        numbers = machine.vectors
        epilogue = _EPILOGUE / numbers.multiply_adds
        # `_first`: cycles per pixel of the middle convolution's input. `_middle`, `_last`: per pixel of its result.
        self._copy = -(-depth // lanes) * (1 / numbers.loads + 1 / numbers.stores)
        self._first = self._copy
        if first and first_tile:
            sums = self._steps(block.depth) * first.kernel[0] * first.kernel[1]
            self._first = self._results(depth, sums, first_tile) + -(-depth // lanes) * epilogue
        taps, vectors = middle.kernel[0] * middle.kernel[1], middle.channels // lanes
        if middle.winograd:
            size, stride = middle.winograd, middle.strides[0]
            whole = winograd.cycles(size, self._out_h, self._out_w, depth, middle.channels, machine, stride)
            self._middle = whole / pixels + vectors * epilogue
            taps = winograd.side_of(size, stride) ** 2
        elif middle.depthwise:
            strip = middle_tile.rows
            self._middle = vectors * (taps * cost.step(strip, 1, machine) / strip + 1 / numbers.stores + epilogue)
        else:
            self._middle = self._results(middle.channels, taps * self._steps(depth), middle_tile) + vectors * epilogue
        self._last = 0.0
        if last and last_tile:
            self._last = (
                self._results(last.channels, self._steps(middle.channels), last_tile)
                + -(-last.channels // lanes) * epilogue
            )
        self._weights = 0
        if not middle.depthwise:
            self._weights = self._number * taps * depth * middle.channels
            self._weights += self._number * block.depth * depth if first else 0
            self._weights += self._number * middle.channels * last.channels if last else 0
        self._saved = saved

    def _steps(self, depth: int) -> int:
        """The products that a lane adds one after another, for a sum over `depth` channels."""
        return -(-depth // self._block.group)

    def _results(self, channels: int, depth: int, tile: tiles.Tile) -> float:
        """The cycles of a pixel's `channels`, each a sum of `depth` products."""
        return cost.results(-(-channels // self._machine.lanes), depth, tile.rows * tile.vectors, self._machine)

    def _share(self, tasks: int) -> int:
        """The number of tasks of the busiest core."""
        return -(-tasks // self._machine.cores)

    def whole(self, lines: int, columns: int, first: tiles.Tile | None) -> float | None:
        """Return the cycles of the block as one function, in patches of `lines` by `columns` pixels.

        None where a patch exceeds the cache. `first` is the register tile of the first convolution, None where the
        block has none.
        """
        block, machine = self._block, self._machine
        middle = block.middle
        lines_in, columns_in = middle.needs(lines, columns)
        channels = machine.lanes * first.vectors if first and middle.depthwise else block.inner[2]
        # Winograd's algorithm processes one line of output tiles at a time.
        step = middle.winograd or lines
        bytes_in_cache = self._middle_number * lines_in * columns_in * channels
        bytes_in_cache += self._number * step * columns * middle.channels if block.last else 0
        if middle.winograd:
            taps = winograd.side_of(middle.winograd, middle.strides[0]) ** 2
            bytes_in_cache += 4 * taps * columns // middle.winograd * (channels + middle.channels)
        if not cost.fits(bytes_in_cache, machine) and lines > (middle.winograd or 1):
            return None
        before = self._middle_number * lines_in * columns_in * block.inner[2]
        after = self._number * lines * columns * middle.channels
        cycles = cost.together(lines_in * columns_in * self._first, before, before, bytes_in_cache, machine)
        result = lines * columns * (self._middle + self._last)
        cycles += cost.together(result, after, after, bytes_in_cache, machine) if block.last else result
        if self._weights + bytes_in_cache > machine.own_cache:
            # Each patch reads all weights again.
            cycles += cost.streaming(max(self._weights, machine.own_cache + 1), machine)
        # Where the size of the image is free, the last patch is half empty on average.
        strips, beside = (
            size / part + 0.5 if free else size // part
            for size, part, free in zip((self._out_h, self._out_w), (lines, columns), block.free, strict=True)
        )
        patches = self._batch * strips * beside
        share: float = patches / machine.cores if any(block.free) else self._share(int(patches))
        return share * cycles

    def apart(self) -> float:
        """Return the cycles of the block's convolutions as separate functions."""
        block, batch, cores, machine = self._block, self._batch, self._machine.cores, self._machine
        first, middle, last = block.first, block.middle, block.last
        high, wide, depth = block.inner
        padded = wide + middle.padding[1] + middle.padding[3]
        cycles: float = batch * high * wide * self._first * self._saved.first
        cycles += batch * self._out_h * self._out_w * (self._middle + self._last * self._saved.last)
        cycles /= cores
        if first:
            cycles += machine.region + batch * high * padded * self._copy / cores
            cycles += cost.passing(self._number * self._share(batch * high) * padded * depth, machine)
        if last:
            cycles += machine.region
            pixels = self._share(batch * self._out_h) * self._out_w
            cycles += cost.passing(self._number * pixels * middle.channels, machine)
        return cycles


def decide(block: Block, ranked: Sequence[Plan], machine: Machine, decisions: Decisions) -> Plan:
    """Return the first of the `ranked` plans, changed where the `decisions` about the block name other options.

    They may name another of the first few plans, by its lines, and other register tiles of the first and of the last
    convolution. The plan's `cycles` are not estimated again.
    """

    def name(plan: Plan) -> str:
        return f"{plan.lines}x{plan.columns}" if block.free[1] else str(plan.lines)

    plan = decisions.choose("lines", {name(plan): plan for plan in ranked[:_CHOICES]})
    first_tiles, _, last_tiles = _tiles(block, plan.columns, machine)
    first, last = (
        decisions.choose(kind, {f"{tile.rows}x{tile.vectors}" if tile else "": tile for tile in ranked_tiles})
        for kind, ranked_tiles in (("first", first_tiles), ("last", last_tiles))
    )
    return replace(plan, first=first, last=last)


def _tiles(
    block: Block, columns: int, machine: Machine
) -> tuple[Sequence[tiles.Tile | None], Sequence[tiles.Tile], Sequence[tiles.Tile | None]]:
    """Rank the register tiles of each of the three convolutions, the fastest first; None for a missing convolution.

    A patch of the block's result has `columns` columns, which the tiles of the middle and the last convolution divide.
    A line of the first convolution is filled up to a multiple of its tile.
    """
    first, middle, last = block.first, block.middle, block.last
    if middle.depthwise:
        pixels = max(size for size in range(1, tiles.most_pixels(machine) + 1) if columns % size == 0)
        between = [tiles.Tile(pixels, 1)]
    else:
        between = _rank(columns // (middle.winograd or 1), middle.channels, machine)
    return (
        _rank_filled(middle.needs(1, columns)[1], block.inner[2], machine) if first else [None],
        between,
        _rank(columns, last.channels, machine) if last else [None],
    )


def _rank_filled(pixels: int, channels: int, machine: Machine) -> list[tiles.Tile]:
    """Rank tiles that divide `pixels`, or the next number of pixels for which a tile keeps a core busy."""
    ranked = [_rank(pixels + more, channels, machine) for more in range(_FILLED + 1)]
    return next((best for best in ranked if best[0].rows * best[0].vectors >= cost.in_flight(machine)), ranked[0])


@cache
def _rank(rows: int, channels: int, machine: Machine) -> list[tiles.Tile]:
    best, *others = tiles.rank(rows, -(-channels // machine.lanes), machine, exact=True)
    busy = [tile for tile in others if tile.rows * tile.vectors >= cost.in_flight(machine)]
    return [best, *busy][:_CHOICES]
