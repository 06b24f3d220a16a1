"""Blocks of convolutions as one function: a strip of lines goes through all of them and stays in a core's cache.

A block is a depthwise convolution with the dense convolution before it, the pointwise one after it, or both. What is
between them is computed per strip, the lines that two strips share twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import te, tirx

from tvmflow.compiler import choices, tiles
from tvmflow.compiler.annotations import CHUNK, KERNEL, LANES, STRIP, SUBJECT, TILE
from tvmflow.compiler.machine import Machine

# Pixels of a strip of the depthwise convolution in registers.
_MOST_PIXELS = 14

# What follows a convolution, from a value and its channel, given the tensors that it reads.
Epilogue = Callable[[Any, Any, Sequence[te.Tensor]], Any]


@dataclass(frozen=True)
class Convolution:
    """One convolution of a block: its kernel, and the element-wise operations that follow it."""

    channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int] = (1, 1)
    epilogue: Epilogue | None = None
    reads: int = 0

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size of the result for an input of `height` by `width`."""
        top, left, bottom, right = self.padding
        inputs = (height + top + bottom, width + left + right)
        high, wide = (
            (size - dilation * (kernel - 1) - 1) // stride + 1
            for size, dilation, kernel, stride in zip(inputs, self.dilation, self.kernel, self.strides, strict=True)
        )
        return high, wide


@dataclass(frozen=True)
class Block:
    """The convolutions of a block on images of `height` by `width` by `depth`, `first` or `last` being None."""

    height: int
    width: int
    depth: int
    first: Convolution | None
    depthwise: Convolution
    last: Convolution | None

    @property
    def middle(self) -> tuple[int, int]:
        """The size of the depthwise convolution's input."""
        return self.first.size(self.height, self.width) if self.first else (self.height, self.width)


@dataclass(frozen=True)
class Plan:
    """How a block is computed: lines of the result per strip, register tiles of pixels by vectors, and its cost.

    `cycles` are those of the whole block on all cores.
    """

    lines: int
    first: tiles.Tile | None
    pixels: int
    last: tiles.Tile | None
    cycles: float


def block(data: te.Tensor, *tensors: te.Tensor, block: Block, plan: Plan, machine: Machine, subject: str) -> te.Tensor:
    """A block on NHWC data; `tensors` are each convolution's packed weights followed by what its epilogue reads."""
    remaining = list(tensors)

    def take(convolution: Convolution) -> tuple[te.Tensor, list[te.Tensor]]:
        weight, *read = remaining[: 1 + convolution.reads]
        del remaining[: 1 + convolution.reads]
        return weight, read

    expanded = _expanded(data, block, plan, *take(block.first)) if block.first else _padded(data, block)
    result = _depthwise(expanded, block, plan, machine, subject, *take(block.depthwise))
    return _project(result, block.last, plan, *take(block.last)) if block.last else result


def _finish(convolution: Convolution, value: Any, channel: Any, reads: Sequence[te.Tensor]) -> Any:
    return convolution.epilogue(value, channel, reads) if convolution.epilogue else value


def _padded(data: te.Tensor, block: Block) -> te.Tensor:
    """The depthwise convolution's input with zeros around it."""
    top, left, bottom, right = block.depthwise.padding
    high, wide = block.middle
    batch, _, _, channels = data.shape
    return te.compute(
        (batch, high + top + bottom, wide + left + right, channels),
        lambda n, y, x, c: tirx.if_then_else(
            tirx.all(y >= top, y < high + top, x >= left, x < wide + left),
            data[n, y - top, x - left, c],
            tirx.const(0, data.dtype),
        ),
        name="expanded",
    )


def _expanded(data: te.Tensor, block: Block, plan: Plan, weight: te.Tensor, reads: Sequence[te.Tensor]) -> te.Tensor:
    """The first convolution with zeros around its result.

    It is computed for the border as well, from zeros, so that its tiles need no bounds: its input is the small one.
    """
    first = block.first
    if first is None or plan.first is None:
        raise ValueError("the block has no first convolution")
    batch, in_h, in_w, depth = data.shape
    top, left, bottom, right = block.depthwise.padding
    high, wide = block.middle
    _, kernel_h, kernel_w, _, lanes = (int(size) for size in weight.shape)
    (stride_h, stride_w), (dilation_h, dilation_w) = first.strides, first.dilation
    above, before = top * stride_h + first.padding[0], left * stride_w + first.padding[1]
    rows, columns = high + top + bottom, wide + left + right
    source = te.compute(
        (
            batch,
            (rows - 1) * stride_h + (kernel_h - 1) * dilation_h + 1,
            (columns - 1) * stride_w + (kernel_w - 1) * dilation_w + 1,
            depth,
        ),
        lambda n, y, x, c: tirx.if_then_else(
            tirx.all(y >= above, y < in_h + above, x >= before, x < in_w + before),
            data[n, y - above, x - before, c],
            tirx.const(0, data.dtype),
        ),
        name="source",
    )
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


def _depthwise(
    expanded: te.Tensor,
    block: Block,
    plan: Plan,
    machine: Machine,
    subject: str,
    weight: te.Tensor,
    reads: Sequence[te.Tensor],
) -> te.Tensor:
    convolution = block.depthwise
    batch, channels = expanded.shape[0], convolution.channels
    out_h, out_w = convolution.size(*block.middle)
    (stride_h, stride_w), (dilation_h, dilation_w) = convolution.strides, convolution.dilation
    y, x = (te.reduce_axis((0, size), name) for size, name in zip(convolution.kernel, "yx", strict=True))
    product = te.compute(
        (batch, out_h, out_w, channels),
        lambda n, h, w, c: te.sum(
            expanded[n, h * stride_h + y * dilation_h, w * stride_w + x * dilation_w, c] * weight[y, x, c],
            axis=[y, x],
        ),
        name="depthwise",
        attrs={KERNEL: "block.depthwise", TILE: plan.pixels, STRIP: plan.lines, LANES: machine.lanes, SUBJECT: subject},
    )
    return te.compute(
        (batch, out_h, out_w, channels),
        lambda n, h, w, c: _finish(convolution, product[n, h, w, c], c, reads),
        name="filtered",
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


# The share of a core's second-level cache that a strip may fill.
_STRIP_SHARE = 0.75
# Cycles of an epilogue and of the stores per vector of a result.
_EPILOGUE = 6
# Bytes per cycle of a core that it writes and reads beyond its own cache: measured, and low because both cores do.
_WRITTEN, _READ = 2, 5
# Cycles to start a parallel region and to copy, per vector, what a depthwise convolution pads.
_REGION, _COPY = 4000, 3
# The most options of a decision.
_CHOICES = 4
# Fewer accumulators than these wait for their own results.
_FEWEST_ACCUMULATORS = 8


def plans(block: Block, batch: int, machine: Machine) -> tuple[list[Plan], bool]:
    """The ways to compute a block strip by strip, the fastest first, and whether its parts one by one are slower.

    There are none where it cannot be computed so.
    """
    lanes, first, depthwise, last = machine.lanes, block.first, block.depthwise, block.last
    if depthwise.channels % lanes:
        return [], False
    high, wide = block.middle
    out_h, out_w = depthwise.size(high, wide)
    wide += depthwise.padding[1] + depthwise.padding[3]
    vectors = depthwise.channels // lanes
    pixels = max(size for size in range(1, _MOST_PIXELS + 1) if out_w % size == 0)
    (first_tile, *_), (last_tile, *_) = _tiles(block, machine)
    chosen = [tile.rows * tile.vectors for tile in (first_tile, last_tile) if tile]
    if min([*chosen, pixels]) < _FEWEST_ACCUMULATORS // 2 or min(chosen, default=0) < _FEWEST_ACCUMULATORS:
        return [], False

    # Cycles per pixel of the middle and of the result.
    middle: float = (
        vectors * (block.depth * first.kernel[0] * first.kernel[1] + _EPILOGUE) if first else vectors * _COPY
    )
    result: float = vectors * (depthwise.kernel[0] * depthwise.kernel[1] + _EPILOGUE)
    if last:
        result += -(-last.channels // lanes) * (depthwise.channels + _EPILOGUE)

    def share(tasks: int) -> int:
        return -(-tasks // machine.cores)

    apart = (batch * high * block.middle[1] * middle + batch * out_h * out_w * result) / machine.cores
    if first:
        apart += _REGION + _COPY * batch * high * wide * vectors / machine.cores
        apart += _moving(4 * share(batch * high) * wide * depthwise.channels, machine)
    if last:
        apart += _REGION + _moving(4 * share(batch * out_h) * out_w * depthwise.channels, machine)
    found: list[Plan] = []
    for lines in (lines for lines in range(1, out_h + 1) if out_h % lines == 0):
        needed = (lines - 1) * depthwise.strides[0] + depthwise.dilation[0] * (depthwise.kernel[0] - 1) + 1
        chunk = lanes * first_tile.vectors if first_tile else depthwise.channels
        held = 4 * (needed * wide * chunk + (lines * out_w * depthwise.channels if last else 0))
        if held > _STRIP_SHARE * machine.second_cache and lines > 1:
            continue
        cycles = share(batch * out_h // lines) * (needed * wide * middle + lines * out_w * result)
        found.append(Plan(lines, first_tile, pixels, last_tile, cycles))
    found.sort(key=lambda plan: plan.cycles)
    return found, bool(found) and found[0].cycles < apart


def decide(block: Block, ranked: Sequence[Plan], machine: Machine, subject: str) -> Plan:
    """The first of the plans, unless decisions about `subject` take another one, or other tiles."""
    plan = choices.choose("lines", subject, {str(plan.lines): plan for plan in ranked[:_CHOICES]})
    first, last = (
        choices.choose(kind, subject, {f"{tile.rows}x{tile.vectors}" if tile else "": tile for tile in found})
        for kind, found in zip(("first", "last"), _tiles(block, machine), strict=True)
    )
    return replace(plan, first=first, last=last)


def _tiles(block: Block, machine: Machine) -> tuple[Sequence[tiles.Tile | None], Sequence[tiles.Tile | None]]:
    """The register tiles for the first convolution and for the last, the fastest first; None where it has none."""
    first, depthwise, last = block.first, block.depthwise, block.last
    high, wide = block.middle
    _, out_w = depthwise.size(high, wide)
    wide += depthwise.padding[1] + depthwise.padding[3]

    def ranked(rows: int, channels: int) -> list[tiles.Tile]:
        best, *others = tiles.ranked(rows, -(-channels // machine.lanes), machine, exact=True)
        busy = [tile for tile in others if tile.rows * tile.vectors >= _FEWEST_ACCUMULATORS]
        return [best, *busy][:_CHOICES]

    return (
        ranked(wide, depthwise.channels) if first else [None],
        ranked(out_w, last.channels) if last else [None],
    )


def _moving(size: int, machine: Machine) -> float:
    """Cycles to write and read again what one core leaves for another function."""
    return 0.0 if size <= _STRIP_SHARE * machine.second_cache else size / _WRITTEN + size / _READ
