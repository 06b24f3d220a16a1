"""Blocks of convolutions as one function: a patch of the image goes through all of them and stays in a core's cache.

A block has a convolution in the middle, depthwise (as in an inverted residual) or dense (as in a bottleneck), and a
dense convolution before it, a pointwise convolution after it, or both. Each patch computes the intermediate values that
it needs; pixels that two patches share are computed twice. A patch is a strip of whole lines where the width is known.
Where it is free, a patch has as many columns as the cost model chooses. All sizes within a patch are constants.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import te, tirx

from tvmflow.compiler import tiles
from tvmflow.compiler.annotations import CHUNK, COLUMNS, DOT, KERNEL, LANES, LINES, SUBJECT, TILE, WINDOW, WINOGRAD
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import dot
from tvmflow.compiler.operators import winograd as winograd_stages
from tvmflow.compiler.operators.common import parts, round_up
from tvmflow.compiler.operators.geometry import Geometry

# The element-wise operations after a convolution: a function of a value, its channel, and the tensors by channel.
Epilogue = Callable[[Any, Any, Sequence[te.Tensor]], Any]


@dataclass(frozen=True)
class Convolution:
    """One convolution of a block, and the element-wise operations that follow it.

    `channels` is the number of the result's channels. `winograd` is the side of the output tiles of Winograd's
    algorithm in pixels, None for a direct convolution. `epilogue` takes an element of the result, its channel and a
    list of `reads` tensors with a value for each channel. It returns the element after the element-wise operations.
    None means that there are none.
    """

    channels: int
    geometry: Geometry
    depthwise: bool = False
    winograd: int | None = None
    epilogue: Epilogue | None = None
    reads: int = 0


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
        return self.first.geometry.result_size(height, width) if self.first else (height, width)


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
    weights have the form of `ConvolutionPacking`. `subject` names the block
    in the compiler's decisions (`compiler.choices`). The result is float32.
    """
    remaining = list(tensors)

    def take(convolution: Convolution) -> tuple[te.Tensor, list[te.Tensor]]:
        weight, *others = remaining[: 1 + convolution.reads]
        del remaining[: 1 + convolution.reads]
        return weight, others

    height, width = data.shape[1:3]
    high, wide = block.middle_size(height, width)
    patches = _Patches.of(data.shape[0], *block.middle.geometry.result_size(high, wide), plan)
    if block.first:
        middle_input = _expanded(data, block, plan, patches, *take(block.first))
    else:
        top, left, *_ = block.middle.geometry.padding
        size = block.middle.geometry.window(plan.lines, plan.columns)
        middle_input = _cut(data, patches, block, block.middle.geometry.strides, (top, left), size, "expanded")
    weight, reads = take(block.middle)
    annotations = {
        TILE: plan.middle.rows,
        CHUNK: plan.middle.vectors,
        LINES: plan.lines,
        COLUMNS: plan.columns,
        WINDOW: _windows(block.middle.geometry),
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
        (data.shape[0], *block.middle.geometry.result_size(high, wide), channels),
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


def _windows(geometry: Geometry) -> list[int]:
    """Along the lines and along the columns, the distance of two pixels' windows and the size of a window."""
    sizes = geometry.window(1, 1)
    return [geometry.strides[0], sizes[0], geometry.strides[1], sizes[1]]


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
    top, left, *_ = middle.geometry.padding
    high, wide = block.middle_size(*data.shape[1:3])
    (stride_h, stride_w), (dilation_h, dilation_w) = first.geometry.strides, first.geometry.dilation
    before = (top * stride_h + first.geometry.padding[0], left * stride_w + first.geometry.padding[1])
    strides = (middle.geometry.strides[0] * stride_h, middle.geometry.strides[1] * stride_w)
    rows, columns = middle.geometry.window(plan.lines, plan.columns)
    size = (rows, -(-columns // plan.first.rows) * plan.first.rows)
    source = _cut(data, patches, block, strides, before, first.geometry.window(*size), "source")
    products = _Products(weight, block)

    def product(*index: Any) -> Any:
        *patch, y, x, c = index
        return products.sum(
            c, lambda j, i, k: source[(*patch, y * stride_h + j * dilation_h, x * stride_w + i * dilation_w, k)]
        )

    shape = (*patches.sizes, *size, first.channels)
    attributes = {
        KERNEL: "block.first",
        TILE: plan.first.rows,
        CHUNK: plan.first.vectors,
        WINDOW: _windows(first.geometry),
        **products.annotations,
    }
    expand = te.compute(shape, product, name="expand", attrs=attributes)

    def element(*index: Any) -> Any:
        _, strip, beside, y, x, c = index
        line = strip * (plan.lines * middle.geometry.strides[0]) + y
        column = beside * (plan.columns * middle.geometry.strides[1]) + x
        inside = tirx.all(line >= top, line < high + top, column >= left, column < wide + left)
        return tirx.Select(inside, _finish(first, expand[index], c, reads), tirx.const(0, "float32"))

    return dot.stage(shape, element, "expanded", block.bf16 and not middle.depthwise)


def _depthwise(
    middle_input: te.Tensor, block: Block, plan: Plan, weight: te.Tensor, annotations: dict[str, Any]
) -> te.Tensor:
    middle = block.middle
    (stride_h, stride_w), (dilation_h, dilation_w) = middle.geometry.strides, middle.geometry.dilation
    y, x = (te.reduce_axis((0, size), name) for size, name in zip(middle.geometry.kernel, "yx", strict=True))

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
    (stride_h, stride_w), (dilation_h, dilation_w) = middle.geometry.strides, middle.geometry.dilation
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
        geometry=replace(block.middle.geometry, padding=(0, 0, 0, 0)),
        annotations=lambda _, lanes, size: {KERNEL: "block.winograd", LANES: lanes, WINOGRAD: size, **annotations},
        machine=machine,
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
