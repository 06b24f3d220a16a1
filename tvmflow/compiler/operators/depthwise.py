"""Depthwise convolution, and grouped convolution whose groups are narrower than a vector."""

import math
from typing import Any

from tvm import te

from tvmflow.compiler import cost, tiles
from tvmflow.compiler.annotations import DOT, KERNEL, LANES, NARROW, SUBJECT, TILE
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import static
from tvmflow.compiler.operators.geometry import Geometry
from tvmflow.compiler.operators.padding import PaddedImage, skipped_padding

# The most lines of the result that one task computes as a strip, by default.
MOST_LINES = 8


def is_narrow(out_channels: int, depth: int, groups: int, machine: Machine) -> bool:
    """Whether `depthwise` can compute a grouped convolution, because a vector holds several whole groups.

    `depth` is the number of input channels of a group. It must be at least 2 and a divisor of the machine's lanes, but
    less than these. Each group must have `depth` output channels too.
    """
    return groups > 1 and out_channels == depth * groups and 1 < depth < machine.lanes and machine.lanes % depth == 0


def depthwise(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    geometry: Geometry,
    machine: Machine,
    subject: str = "",
) -> te.Tensor:
    """Define a depthwise convolution of NHWC data, or a grouped convolution that `is_narrow` accepts.

    `weight` has the layout `[KH][KW][C]` of `DepthwisePacking` for a depthwise convolution, and `[KH][KW][G][C]` of
    `GroupsPacking` for a convolution with G channels in each group. It is `[KH][KW][G/2][C][2]` where the data are
    bfloat16, stored as uint16, which such groups alone may be. `subject` names the convolution in the compiler's
    decisions (`compiler.choices`). The result is NHWC and float32.
    """
    batch, in_h, in_w, channels = data.shape
    kernel_h, kernel_w, *rest = (int(dim) for dim in weight.shape)
    # What follows the taps: [C], [G][C], or [G/2][C][2].
    padded_channels, steps = (rest[-2], [rest[0], rest[2]]) if len(rest) == 3 else (rest[-1], rest[:-1])
    out_h, out_w = geometry.result_size(in_h, in_w)
    tile = _depthwise_tile(static(out_w), machine)
    lanes = math.gcd(padded_channels, machine.lanes)
    read = PaddedImage(
        data,
        geometry,
        (out_h, out_w),
        tile,
        # A strip's lines and those that its taps read lie further apart than they are many.
        gathered_from=MOST_LINES,
        channels=padded_channels,
    )
    y = te.reduce_axis((0, kernel_h), "y")
    x = te.reduce_axis((0, kernel_w), "x")
    is_bf16 = data.dtype == BF16.data
    within = [te.reduce_axis((0, count), "k") for count in steps]
    size = math.prod(steps)

    def term(n: Any, h: Any, w: Any, c: Any) -> Any:
        channel = c
        if steps:
            place, *pair = within
            channel = c // size * size + (place * steps[-1] + pair[0] if pair else place)
        value = read(n, h, w, y, x, channel)
        factor = weight[(y, x, *within[:1], c, *within[1:])]
        return te.sum(BF16.product(value, factor) if is_bf16 else value * factor, axis=[y, x, *within])

    product = te.compute(
        (batch, out_h, read.tiled_width, padded_channels),
        term,
        name="depthwise_conv2d",
        attrs={
            KERNEL: "depthwise",
            TILE: tile,
            LANES: lanes,
            SUBJECT: subject,
            **({NARROW: [size, geometry.strides[1], geometry.dilation[1]]} if steps else {}),
            **({DOT: BF16.name} if is_bf16 else {}),
            **({} if read.is_gathered else skipped_padding(geometry)),
        },
    )
    return te.compute((batch, out_h, out_w, channels), lambda n, h, w, c: product[n, h, w, c], name="unpack")


def _depthwise_tile(width: int | None, machine: Machine) -> int:
    """The pixels of a strip with which a line takes the least time; a short strip waits for its own sums."""
    most = tiles.most_pixels(machine)
    if width is None:
        return most // 2
    busy = cost.in_flight(machine)

    def rank(tile: int) -> tuple[int, int, int]:
        strips = -(-width // tile)
        return strips * max(tile, busy), strips * tile, -tile

    return min(range(1, most + 1), key=rank) if width > 0 else 1
