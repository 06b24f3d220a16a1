"""Helpers that the operators share: shapes, padding, packed weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi

from tvmflow.compiler import winograd
from tvmflow.compiler.annotations import PADDING
from tvmflow.compiler.machine import NARROWEST, Machine

Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

# TVM's fusion kind of operators that take element-wise operators after them. TVM cannot derive it from our stages.
FUSABLE = {"op_pattern": 4}
# Marks operators that TVM shall fuse as element-wise ones. Their fusion kind is 0, and TVM would overwrite a 0.
FOLLOWS = {"tvmflow.follows": 1}


def default(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return TVM's own definition of a call."""
    return call.op.get_attr("FLegalize")(builder, call)


def static(dim: Any) -> int | None:
    """Return a size as an integer; None where it is symbolic."""
    return int(dim) if isinstance(dim, int | tirx.IntImm) else None


def typical_pixels(size: Any) -> int:
    """Return the number of pixels that a height or width counts as where the cost model decides.

    Free sizes in it count as `winograd.INPUT_PIXELS`, as if they were those of the model's input.
    """
    analyzer = tvm.sym.Analyzer()
    for variable in () if static(size) is not None else tirx.analysis.undefined_vars(size):
        analyzer.bind(variable, tirx.IntImm("int64", winograd.INPUT_PIXELS))
    number = static(size) or static(analyzer.simplify(size))
    return winograd.UNKNOWN_PIXELS if number is None else max(number, 1)


def size_parameter(size: Any, name: str) -> Any:
    """Return `size` for the shapes of a TIR function's buffers: a constant, or a new variable `name` if symbolic."""
    number = static(size)
    return tirx.Var(name, "int64") if number is None else tirx.IntImm("int64", number)


def buffer(name: str, shape: Sequence[Any], dtype: str = "float32") -> Any:
    """Create a TIR buffer, without a layout, to be a parameter of a function; the caller adds it to the function."""
    return tirx.decl_buffer(shape, dtype, name, layout=None)


def is_float32(*tensors: relax.Expr) -> bool:
    """Whether all tensors are float32 and of known rank."""
    return all(isinstance(tensor.ty.shape, relax.ShapeExpr) and str(tensor.ty.dtype) == "float32" for tensor in tensors)


def vector(channels: int, machine: Machine) -> int:
    """Return the number of lanes of the vectors for a tensor of `channels` channels.

    It is the machine's, or the smallest power of two from 4 on that holds all channels, if that is less.
    """
    return min(machine.lanes, max(NARROWEST, 1 << (channels - 1).bit_length()))


def constant(value: np.ndarray[Any, Any]) -> relax.Expr:
    """Return an array as a constant of the program."""
    return relax.const(tvm.runtime.tensor(np.asarray(value, order="C")))


def output_size(size: Any, kernel: int, stride: int, before: int, after: int, dilation: int) -> Any:
    """Return the size of a convolution's result along one dimension, an integer or a symbolic size.

    `size` is the size of the input, `before` and `after` are the padding at its two ends.
    """
    return topi.utils.simplify((size + before + after - dilation * (kernel - 1) - 1) // stride + 1)


def round_up(size: Any, multiple: int) -> Any:
    """Round `size`, an integer or a symbolic size, up to a multiple of `multiple`."""
    return topi.utils.simplify((size + multiple - 1) // multiple * multiple)


def parts(extent: Any, size: int) -> Any:
    """Return the number of parts of `size` elements that cover `extent`, an integer or a symbolic size.

    It has the form from which TVM can prove that they do.
    """
    return topi.utils.simplify((extent - 1) // size + 1)


def divides(tile: int, size: Any) -> bool:
    """Whether `size` is known and a multiple of `tile`."""
    number = static(size)
    return number is not None and number % tile == 0


def skipped_padding(padding: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> dict[str, list[int]]:
    """Return the annotation by which a convolution's schedule leaves out padding of zeros; empty without padding.

    `padding` is top, left, bottom, right.
    """
    return {PADDING: [*padding, *strides, *dilation]} if any(padding) else {}


def padded_input(
    data: te.Tensor, padding: Sequence[int], height: Any, width: Any, channels: int | None = None, value: Any = 0
) -> te.Tensor:
    """Pad a convolution's NHWC input with `value` to `height` by `width` pixels and `channels`.

    `padding` is top, left, bottom, right; `channels` None means the channels of the input. An input that needs no
    padding is returned unchanged if its width is constant.
    """
    *_, in_w, in_c = data.shape
    wide = channels is not None and channels != int(in_c)
    if not any(padding) and not wide and static(in_w) is not None and static(width) == static(in_w):
        return data
    return surrounded(data, padding[0], padding[1], height, width, channels, value)


class PaddedImage:
    """A convolution's NHWC data with padding around them, which the lines of its result read by the taps of its kernel.

    `padding` is top, left, bottom, right, of the value `value`. `height` and `width` are the sizes with padding, and
    `channels` None means the channels of the data. The result has `lines` and the kernel `taps` of them, `dilation`
    lines apart. From the dilation `gathered_from` on, the image has, for each line of the result, a copy of the lines
    that it reads (`is_gathered`), because these are few of those that the taps span.
    """

    def __init__(
        self,
        data: te.Tensor,
        padding: Sequence[int],
        height: Any,
        width: Any,
        *,
        lines: Any,
        taps: int,
        stride: int,
        dilation: int,
        gathered_from: float = 2,
        channels: int | None = None,
        value: Any = 0,
    ) -> None:
        self._stride, self._dilation = stride, dilation
        self._image = padded_input(data, padding, height, width, channels, value)
        self.is_gathered = self._image is not data and taps > 1 and dilation >= gathered_from
        if self.is_gathered:
            sizes = (lines, taps, width)
            self._image = _gathered_lines(data, padding, sizes, stride, dilation, channels, value)

    def __call__(self, n: Any, line: Any, tap: Any, column: Any, channel: Any) -> Any:
        """Return the element that `line` of the result reads at a tap: of image `n`, in a `column` with padding."""
        places = (line, tap) if self.is_gathered else (line * self._stride + tap * self._dilation,)
        return self._image[(n, *places, column, channel)]


def _gathered_lines(
    data: te.Tensor,
    padding: Sequence[int],
    sizes: tuple[Any, int, Any],
    stride: int,
    dilation: int,
    channels: int | None,
    value: Any,
) -> te.Tensor:
    """Gather the padded lines that each line of the result reads: `[batch, lines, taps, width, channels]`.

    `sizes` are lines, taps and width; `channels` None means the channels of the data.
    """
    batch, in_h, in_w, in_c = data.shape
    top, left = padding[:2]
    around = tirx.const(value, data.dtype) if isinstance(value, int) else value.astype(data.dtype)

    def element(n: Any, h: Any, tap: Any, x: Any, c: Any) -> Any:
        y = h * stride + tap * dilation
        inside = [tirx.all(y >= top, y < in_h + top, x >= left, x < in_w + left)]
        if channels is not None and channels != int(in_c):
            inside.append(c < in_c)
        return tirx.if_then_else(tirx.all(*inside), data[n, y - top, x - left, c], around)

    return te.compute((batch, *sizes, channels or in_c), element, name="pad")


def surrounded(
    data: te.Tensor,
    top: int,
    left: int,
    height: Any,
    width: Any,
    channels: int | None = None,
    value: Any = 0,
    name: str = "pad",
) -> te.Tensor:
    """Place NHWC data into larger images of `height` by `width`, with `value` elsewhere.

    Each image begins `top` lines and `left` columns before the data. It has `channels` channels where that is more than
    the data has.
    """
    batch, in_h, in_w, in_c = data.shape
    around = tirx.const(value, data.dtype) if isinstance(value, int) else value.astype(data.dtype)

    def element(n: Any, y: Any, x: Any, c: Any) -> Any:
        inside = [tirx.all(y >= top, y < in_h + top, x >= left, x < in_w + left)]
        if channels is not None and channels != int(in_c):
            inside.append(c < in_c)
        return tirx.if_then_else(tirx.all(*inside), data[n, y - top, x - left, c], around)

    return te.compute((batch, height, width, channels or in_c), element, name=name)


@dataclass(frozen=True)
class JoinedRows:
    """Maps the leading dimensions of a dense layer's input to the batch and the rows of a matrix product.

    `outer` are the sizes of the leading dimensions. Those at the positions `joined` in `outer` are flattened into one
    dimension of rows. The others stay as dimensions of the batch.
    """

    outer: Sequence[Any]
    joined: Sequence[int]

    @property
    def lead(self) -> list[int]:
        """The positions in `outer` of the batch dimensions."""
        return [place for place in range(len(self.outer)) if place not in self.joined]

    @property
    def batch(self) -> list[Any]:
        """The sizes of the batch dimensions."""
        return [self.outer[place] for place in self.lead]

    @property
    def rows(self) -> Any:
        """The number of rows, an integer or a symbolic size."""
        first, *others = (self.outer[place] for place in self.joined)
        return topi.utils.simplify(math.prod(others, start=first))

    def position(self, *index: Any) -> tuple[Any, ...]:
        """Convert the index `[*batch, row, k]` of the product's left operand to the input's index of that element."""
        *batch, row, k = index
        position: list[Any] = [None] * len(self.outer)
        for place, value in zip(self.lead, batch, strict=True):
            position[place] = value
        several = [place for place in self.joined if static(self.outer[place]) != 1] or [self.joined[0]]
        for place in self.joined:
            position[place] = 0
        for place in reversed(several[1:]):
            position[place] = row % self.outer[place]
            row = row // self.outer[place]
        position[several[0]] = row
        return (*position, k)

    def row(self, *index: Any) -> tuple[Any, ...]:
        """Convert the result's index `[*outer, unit]` to the product's index `[*batch, row, unit]` of that element."""
        row = index[self.joined[0]]
        for place in self.joined[1:]:
            row = row * self.outer[place] + index[place]
        return (*(index[place] for place in self.lead), row, index[-1])
