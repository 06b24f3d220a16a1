"""Blocks of convolutions as one function: a strip of lines goes through all of them and stays in a core's cache.

A block has a convolution in the middle, depthwise (as in an inverted residual) or dense (as in a bottleneck), and a
dense convolution before it, a pointwise convolution after it, or both. Each strip computes the intermediate values that
it needs; lines that two strips share are computed twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import te, tirx

from tvmflow.compiler import cost, tiles, winograd
from tvmflow.compiler.annotations import CHUNK, KERNEL, LANES, STRIP, SUBJECT, TILE, WINOGRAD
from tvmflow.compiler.choices import Decisions
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import strassen
from tvmflow.compiler.operators import winograd as winograd_stages
from tvmflow.compiler.operators.common import surrounded

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

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the result for an input of `height` by `width` pixels."""
        top, left, bottom, right = self.padding
        inputs = (height + top + bottom, width + left + right)
        high, wide = (
            (size - dilation * (kernel - 1) - 1) // stride + 1
            for size, dilation, kernel, stride in zip(inputs, self.dilation, self.kernel, self.strides, strict=True)
        )
        return high, wide


@dataclass(frozen=True)
class Block:
    """The convolutions of a block on images of `height` by `width` pixels; `first` or `last` may be None.

    The input has `depth` channels.
    """

    height: int
    width: int
    depth: int
    first: Convolution | None
    middle: Convolution
    last: Convolution | None

    @property
    def inner(self) -> tuple[int, int, int]:
        """The height, width and depth of the middle convolution's input."""
        if self.first is None:
            return self.height, self.width, self.depth
        return *self.first.size(self.height, self.width), self.first.channels


@dataclass(frozen=True)
class Plan:
    """A way to compute a block strip by strip, with its estimated cost.

    A strip is `lines` lines of the block's result. `first`, `middle` and `last` are the register tiles of the three
    convolutions, pixels by vectors of channels; None for a convolution that the block lacks. With Winograd's algorithm
    the rows of the middle tile are rows of its matrix product, that is, output tiles. `cycles` estimates the time of
    the whole block on all cores.
    """

    lines: int
    first: tiles.Tile | None
    middle: tiles.Tile
    last: tiles.Tile | None
    cycles: float


def block(data: te.Tensor, *tensors: te.Tensor, block: Block, plan: Plan, machine: Machine, subject: str) -> te.Tensor:
    """Define a block of convolutions on NHWC data, computed by `plan`; return the result after the last convolution.

    `tensors` are, for each convolution in order, its packed weights and the tensors that its epilogue reads. `subject`
    names the block in the compiler's decisions (`compiler.choices`).
    """
    remaining = list(tensors)

    def take(convolution: Convolution) -> tuple[te.Tensor, list[te.Tensor]]:
        weight, *others = remaining[: 1 + convolution.reads]
        del remaining[: 1 + convolution.reads]
        return weight, others

    middle_input = _expanded(data, block, plan, *take(block.first)) if block.first else _padded(data, block)
    weight, reads = take(block.middle)
    annotations = {TILE: plan.middle.rows, CHUNK: plan.middle.vectors, STRIP: plan.lines, SUBJECT: subject}
    if block.middle.depthwise:
        product = _depthwise(middle_input, block, weight, {**annotations, LANES: machine.lanes})
    elif block.middle.winograd is None:
        product = _dense(middle_input, block, weight, annotations)
    else:
        product = _winograd(middle_input, block, plan, machine, weight, annotations)
    result = te.compute(
        product.shape, lambda n, h, w, c: _finish(block.middle, product[n, h, w, c], c, reads), name="filtered"
    )
    return _project(result, block.last, plan, *take(block.last)) if block.last else result


def _finish(convolution: Convolution, value: Any, channel: Any, reads: Sequence[te.Tensor]) -> Any:
    return convolution.epilogue(value, channel, reads) if convolution.epilogue else value


def _padded(data: te.Tensor, block: Block) -> te.Tensor:
    """Pad the middle convolution's input with zeros."""
    top, left, bottom, right = block.middle.padding
    high, wide, _ = block.inner
    return surrounded(data, top, left, high + top + bottom, wide + left + right, name="expanded")


def _expanded(data: te.Tensor, block: Block, plan: Plan, weight: te.Tensor, reads: Sequence[te.Tensor]) -> te.Tensor:
    """Compute the first convolution and pad its result with zeros.

    The convolution is computed for the border too, so that its tiles need no bounds checks. That is cheap, because it
    pads its own input, which has the fewest channels.
    """
    first = block.first
    if first is None or plan.first is None:
        raise ValueError("the block has no first convolution")
    batch, *_, depth = data.shape
    top, left, bottom, right = block.middle.padding
    high, wide, _ = block.inner
    _, kernel_h, kernel_w, _, lanes = (int(size) for size in weight.shape)
    (stride_h, stride_w), (dilation_h, dilation_w) = first.strides, first.dilation
    above, before = top * stride_h + first.padding[0], left * stride_w + first.padding[1]
    rows, columns = high + top + bottom, wide + left + right
    needed_h = (rows - 1) * stride_h + (kernel_h - 1) * dilation_h + 1
    needed_w = (columns - 1) * stride_w + (kernel_w - 1) * dilation_w + 1
    source = surrounded(data, above, before, needed_h, needed_w, name="source")
    j, i, k = (te.reduce_axis((0, size), name) for size, name in ((kernel_h, "j"), (kernel_w, "i"), (depth, "k")))
    product = te.compute(
        (batch, rows, columns, first.channels),
        lambda n, y, x, c: te.sum(
            source[n, y * stride_h + j * dilation_h, x * stride_w + i * dilation_w, k]
            * weight[c // lanes, j, i, k, c % lanes],
            axis=[j, i, k],
        ),
        name="expand",
        attrs={KERNEL: "block.first", TILE: plan.first.rows, CHUNK: plan.first.vectors, LANES: lanes},
    )
    return te.compute(
        (batch, rows, columns, first.channels),
        lambda n, y, x, c: tirx.Select(
            tirx.all(y >= top, y < high + top, x >= left, x < wide + left),
            _finish(first, product[n, y, x, c], c, reads),
            tirx.const(0, data.dtype),
        ),
        name="expanded",
    )


def _depthwise(middle_input: te.Tensor, block: Block, weight: te.Tensor, annotations: dict[str, Any]) -> te.Tensor:
    middle = block.middle
    (stride_h, stride_w), (dilation_h, dilation_w) = middle.strides, middle.dilation
    y, x = (te.reduce_axis((0, size), name) for size, name in zip(middle.kernel, "yx", strict=True))
    return te.compute(
        (middle_input.shape[0], *middle.size(*block.inner[:2]), middle.channels),
        lambda n, h, w, c: te.sum(
            middle_input[n, h * stride_h + y * dilation_h, w * stride_w + x * dilation_w, c] * weight[y, x, c],
            axis=[y, x],
        ),
        name="depthwise",
        attrs={KERNEL: "block.depthwise", **annotations},
    )


def _dense(middle_input: te.Tensor, block: Block, weight: te.Tensor, annotations: dict[str, Any]) -> te.Tensor:
    middle = block.middle
    (stride_h, stride_w), (dilation_h, dilation_w) = middle.strides, middle.dilation
    *_, depth, lanes = (int(size) for size in weight.shape)
    y, x, k = (te.reduce_axis((0, size), name) for size, name in zip((*middle.kernel, depth), "yxk", strict=True))
    return te.compute(
        (middle_input.shape[0], *middle.size(*block.inner[:2]), middle.channels),
        lambda n, h, w, c: te.sum(
            middle_input[n, h * stride_h + y * dilation_h, w * stride_w + x * dilation_w, k]
            * weight[c // lanes, y, x, k, c % lanes],
            axis=[y, x, k],
        ),
        name="dense",
        attrs={KERNEL: "block.dense", LANES: lanes, **annotations},
    )


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
    data: te.Tensor, convolution: Convolution, plan: Plan, weight: te.Tensor, reads: Sequence[te.Tensor]
) -> te.Tensor:
    if plan.last is None:
        raise ValueError("the block has no last convolution")
    batch, height, width, depth = data.shape
    vectors, *_, lanes = (int(size) for size in weight.shape)
    k = te.reduce_axis((0, depth), "k")
    product = te.compute(
        (batch, height, width, vectors * lanes),
        lambda n, h, w, c: te.sum(data[n, h, w, k] * weight[c // lanes, 0, 0, k, c % lanes], axis=k),
        name="project",
        attrs={KERNEL: "block.last", TILE: plan.last.rows, CHUNK: plan.last.vectors, LANES: lanes},
    )
    return te.compute(
        (batch, height, width, convolution.channels),
        lambda n, h, w, c: _finish(convolution, product[n, h, w, c], c, reads),
        name="unpack",
    )


# Element-wise operations on a vector of a result: a bias and the two bounds of an activation.
_EPILOGUE = 3
# The most options of a decision.
_CHOICES = 4


def plans(block: Block, batch: int, machine: Machine, strassen: bool = True) -> tuple[list[Plan], float]:
    """Return a block's plans, the fastest first, and the estimated cycles of its convolutions as separate functions.

    The list of plans is empty where strips are impossible or not worth it; the cycles may be 0 then. `batch` is the
    number of images. `strassen` allows Strassen's algorithm for the separate functions.
    """
    lanes, middle = machine.lanes, block.middle
    high, wide, depth = block.inner
    out_h, out_w = middle.size(high, wide)
    step = middle.winograd or 1
    # Channels that do not fill vectors, such as a model's input, are not worth a block.
    whole_vectors = middle.channels % lanes == 0 and (depth % lanes == 0 or (middle.depthwise and block.first is None))
    if not whole_vectors or out_h % step or out_w % step:
        return [], 0.0
    (first_tile, *_), (middle_tile, *_), (last_tile, *_) = _tiles(block, machine)
    # A depthwise convolution has short sums, so it needs fewer of them in flight.
    busy = cost.in_flight(machine)
    if middle_tile.rows * middle_tile.vectors < (busy // 2 if middle.depthwise else busy):
        return [], 0.0
    others = [tile.rows * tile.vectors for tile in (first_tile, last_tile) if tile]
    if min(others, default=0) < busy:
        return [], 0.0

    costs = _Costs(block, batch, machine, (first_tile, middle_tile, last_tile), strassen)
    ranked: list[Plan] = []
    for lines in (lines for lines in range(step, out_h + 1, step) if out_h % lines == 0):
        cycles = costs.whole(lines, first_tile)
        if cycles is not None:
            ranked.append(Plan(lines, first_tile, middle_tile, last_tile, cycles))
    ranked.sort(key=lambda plan: plan.cycles)
    return ranked, costs.apart()


class _Costs:
    """Counts the cycles of a block on all cores."""

    def __init__(
        self,
        block: Block,
        batch: int,
        machine: Machine,
        chosen: tuple[tiles.Tile | None, tiles.Tile, tiles.Tile | None],
        use_strassen: bool,
    ) -> None:
        self._block = block
        self._batch = batch
        self._machine = machine
        first, middle, last, lanes = block.first, block.middle, block.last, machine.lanes
        high, wide, depth = block.inner
        self._out_h, self._out_w = middle.size(high, wide)
        self._wide = wide + middle.padding[1] + middle.padding[3]
        pixels = self._out_h * self._out_w
        first_tile, middle_tile, last_tile = chosen
        numbers = machine.vectors
        epilogue = _EPILOGUE / numbers.multiply_adds
        # `_first`: cycles per pixel of the middle convolution's input. `_middle`, `_last`: per pixel of its result.
        self._copy = -(-depth // lanes) * (1 / numbers.loads + 1 / numbers.stores)
        self._first = self._copy
        if first and first_tile:
            sums = block.depth * first.kernel[0] * first.kernel[1]
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
            self._middle = self._results(middle.channels, taps * depth, middle_tile) + vectors * epilogue
        self._last = 0.0
        if last and last_tile:
            self._last = (
                self._results(last.channels, middle.channels, last_tile) + -(-last.channels // lanes) * epilogue
            )
        self._weights = 0
        if not middle.depthwise:
            self._weights = 4 * taps * depth * middle.channels
            self._weights += 4 * block.depth * depth if first else 0
            self._weights += 4 * middle.channels * last.channels if last else 0
        self._saved = (1.0, 1.0)
        if use_strassen:
            self._saved = (
                self._strassen((batch, high, wide), block.depth, depth) if first and first.kernel == (1, 1) else 1.0,
                self._strassen((batch, self._out_h, self._out_w), middle.channels, last.channels) if last else 1.0,
            )

    def _results(self, channels: int, depth: int, tile: tiles.Tile) -> float:
        """The cycles of a pixel's `channels`, each a sum of `depth` products."""
        return cost.results(-(-channels // self._machine.lanes), depth, tile.rows * tile.vectors, self._machine)

    def _strassen(self, outer: Sequence[int], depth: int, units: int) -> float:
        """The time of a separate product over that of the direct product: below 1 by Strassen's algorithm."""
        estimate = strassen.estimate(outer, depth, units, self._machine)
        return 1.0 if estimate is None else min(1.0, estimate.share)

    def _share(self, tasks: int) -> int:
        """The number of tasks of the busiest core."""
        return -(-tasks // self._machine.cores)

    def whole(self, lines: int, first: tiles.Tile | None) -> float | None:
        """Return the cycles of the block as one function, in strips of `lines`; None where a strip exceeds the cache.

        `first` is the register tile of the first convolution, None where the block has none.
        """
        block, machine = self._block, self._machine
        middle = block.middle
        required_lines = (lines - 1) * middle.strides[0] + middle.dilation[0] * (middle.kernel[0] - 1) + 1
        channels = machine.lanes * first.vectors if first and middle.depthwise else block.inner[2]
        # Winograd's algorithm processes one line of output tiles at a time.
        step = middle.winograd or lines
        bytes_in_cache = 4 * (
            required_lines * self._wide * channels + (step * self._out_w * middle.channels if block.last else 0)
        )
        if middle.winograd:
            taps = winograd.side_of(middle.winograd, middle.strides[0]) ** 2
            bytes_in_cache += 4 * taps * self._out_w // middle.winograd * (channels + middle.channels)
        if not cost.fits(bytes_in_cache, machine) and lines > (middle.winograd or 1):
            return None
        before, after = 4 * required_lines * self._wide * block.inner[2], 4 * lines * self._out_w * middle.channels
        cycles = cost.together(required_lines * self._wide * self._first, before, before, bytes_in_cache, machine)
        result = lines * self._out_w * (self._middle + self._last)
        cycles += cost.together(result, after, after, bytes_in_cache, machine) if block.last else result
        if self._weights + bytes_in_cache > machine.own_cache:
            # Each strip reads all weights again.
            cycles += cost.streaming(max(self._weights, machine.own_cache + 1), machine)
        return self._share(self._batch * self._out_h // lines) * cycles

    def apart(self) -> float:
        """Return the cycles of the block's convolutions as separate functions."""
        block, batch, cores, machine = self._block, self._batch, self._machine.cores, self._machine
        first, middle, last = block.first, block.middle, block.last
        high, wide, depth = block.inner
        saved_first, saved_last = self._saved
        cycles = batch * high * wide * self._first * saved_first
        cycles += batch * self._out_h * self._out_w * (self._middle + self._last * saved_last)
        cycles /= cores
        if first:
            cycles += machine.region + batch * high * self._wide * self._copy / cores
            cycles += cost.passing(4 * self._share(batch * high) * self._wide * depth, machine)
        if last:
            cycles += machine.region
            cycles += cost.passing(4 * self._share(batch * self._out_h) * self._out_w * middle.channels, machine)
        return cycles


def decide(block: Block, ranked: Sequence[Plan], machine: Machine, decisions: Decisions) -> Plan:
    """Return the first of the `ranked` plans, changed where the `decisions` about the block name other options.

    They may name another of the first few plans, by its lines, and other register tiles of the first and of the last
    convolution. The plan's `cycles` are not estimated again.
    """
    plan = decisions.choose("lines", {str(plan.lines): plan for plan in ranked[:_CHOICES]})
    first_tiles, _, last_tiles = _tiles(block, machine)
    first, last = (
        decisions.choose(kind, {f"{tile.rows}x{tile.vectors}" if tile else "": tile for tile in ranked_tiles})
        for kind, ranked_tiles in (("first", first_tiles), ("last", last_tiles))
    )
    return replace(plan, first=first, last=last)


def _tiles(
    block: Block, machine: Machine
) -> tuple[Sequence[tiles.Tile | None], Sequence[tiles.Tile], Sequence[tiles.Tile | None]]:
    """Rank the register tiles of each of the three convolutions, the fastest first; None for a missing convolution."""
    first, middle, last = block.first, block.middle, block.last
    high, wide, depth = block.inner
    _, out_w = middle.size(high, wide)
    wide += middle.padding[1] + middle.padding[3]

    def rank(rows: int, channels: int) -> list[tiles.Tile]:
        best, *others = tiles.rank(rows, -(-channels // machine.lanes), machine, exact=True)
        busy = [tile for tile in others if tile.rows * tile.vectors >= cost.in_flight(machine)]
        return [best, *busy][:_CHOICES]

    if middle.depthwise:
        pixels = max(size for size in range(1, tiles.most_pixels(machine) + 1) if out_w % size == 0)
        between = [tiles.Tile(pixels, 1)]
    else:
        between = rank(out_w // (middle.winograd or 1), middle.channels)
    return (
        rank(wide, depth) if first else [None],
        between,
        rank(out_w, last.channels) if last else [None],
    )
