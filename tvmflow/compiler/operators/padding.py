"""Images with padding around them, from which convolutions read."""

from collections.abc import Callable
from typing import Any

from tvm import te, tirx, topi

from tvmflow.compiler.annotations import PADDING
from tvmflow.compiler.operators.common import divides, round_up, static
from tvmflow.compiler.operators.geometry import Geometry


class PaddedImage:
    """A convolution's NHWC data with padding around them, which have the value `value`.

    The result has `height` by `width` pixels, but each of its lines is filled up to whole register tiles of `tile`
    pixels: `tiled_width`. `channels` None means the channels of the data. Data that need neither padding nor more
    channels nor a wider line are read as they are. From the dilation `gathered_from` on, the image has, for each line
    of the result, a copy of the lines that it reads (`is_gathered`), because these are few of those that the taps span.
    """

    def __init__(
        self,
        data: te.Tensor,
        geometry: Geometry,
        size: tuple[Any, Any],
        tile: int,
        *,
        gathered_from: float = 2,
        channels: int | None = None,
        value: Any = 0,
    ) -> None:
        batch, in_h, in_w, in_c = data.shape
        height, width = size
        top, left, bottom, right = geometry.padding
        taps, dilation = geometry.kernel[0], geometry.dilation[0]
        self.tiled_width = round_up(width, tile)
        self._geometry = geometry
        padded_w = in_w + left + right
        if not divides(tile, width):
            padded_w = topi.utils.simplify(geometry.window(1, self.tiled_width)[1])
        has_more_channels = channels is not None and channels != int(in_c)
        is_same_width = static(in_w) is not None and static(padded_w) == static(in_w)
        needs_padding = any(geometry.padding) or has_more_channels or not is_same_width
        self.is_gathered = needs_padding and taps > 1 and dilation >= gathered_from
        if self.is_gathered:
            element = padded_element(data, top, left, channels, value)
            self._image = te.compute(
                (batch, height, taps, padded_w, channels or in_c),
                lambda n, h, tap, x, c: element(n, h * geometry.strides[0] + tap * dilation, x, c),
                name="pad",
            )
        elif needs_padding:
            self._image = surrounded(data, top, left, in_h + top + bottom, padded_w, channels, value)
        else:
            self._image = data

    def __call__(self, n: Any, h: Any, w: Any, y: Any, x: Any, c: Any) -> Any:
        """Return channel `c` of the element that the pixel in line `h` and column `w` of image `n` reads at a tap.

        The tap is in line `y` and column `x` of the kernel.
        """
        (down, across), (dilation_h, dilation_w) = self._geometry.strides, self._geometry.dilation
        lines = (h, y) if self.is_gathered else (h * down + y * dilation_h,)
        return self._image[(n, *lines, w * across + x * dilation_w, c)]


def surrounded(
    data: te.Tensor, top: int, left: int, height: Any, width: Any, channels: int | None = None, value: Any = 0
) -> te.Tensor:
    """Place NHWC data into larger images of `height` by `width`, with `value` elsewhere.

    Each image begins `top` lines and `left` columns before the data. It has `channels` channels where that is more than
    the data has.
    """
    batch, _, _, in_c = data.shape
    element = padded_element(data, top, left, channels, value)
    return te.compute((batch, height, width, channels or in_c), element, name="pad")


def padded_element(
    data: te.Tensor, top: int, left: int, channels: int | None, value: Any
) -> Callable[[Any, Any, Any, Any], Any]:
    """Return the element of an image that `surrounded` describes, as a function of image, line, column and channel.

    `channels` None means the channels of the data.
    """
    _, in_h, in_w, in_c = data.shape
    around = tirx.const(value, data.dtype) if isinstance(value, int) else value.astype(data.dtype)

    def element(n: Any, y: Any, x: Any, c: Any) -> Any:
        inside = [tirx.all(y >= top, y < in_h + top, x >= left, x < in_w + left)]
        if channels is not None and channels != int(in_c):
            inside.append(c < in_c)
        return tirx.if_then_else(tirx.all(*inside), data[n, y - top, x - left, c], around)

    return element


def skipped_padding(geometry: Geometry) -> dict[str, list[int]]:
    """Return the annotation by which a convolution's schedule leaves out padding of zeros; empty without padding."""
    padding = geometry.padding
    return {PADDING: [*padding, *geometry.strides, *geometry.dilation]} if any(padding) else {}
