"""Depthwise convolution, and grouped convolution whose groups are narrower than a vector."""

import math
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax, te, tirx

from tvmflow.arrays import Array
from tvmflow.compiler import cost, tiles
from tvmflow.compiler.annotations import DOT, KERNEL, LANES, NARROW, SUBJECT, TILE
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.operators.common import packed, static
from tvmflow.compiler.operators.geometry import Geometry
from tvmflow.compiler.operators.padding import PaddedImage, skipped_padding

# The most lines of the result that one task computes as a strip, by default.
MOST_LINES = 8


def pack(builder: relax.BlockBuilder, weight: relax.Expr, lanes: int) -> relax.Expr:
    """Pack weights `[C][1][KH][KW]` into float32 `[KH][KW][C]`, and return the expression.

    It is a constant if the weights are constant, else the variable of a call that packs them.
    """
    channels, _, kernel_h, kernel_w = (int(dim) for dim in weight.ty.shape.values)

    def element(w: te.Tensor, y: Any, x: Any, c: Any) -> Any:
        return tirx.if_then_else(c < channels, w[c, 0, y, x], 0.0)

    shape = (kernel_h, kernel_w, _padded_channels(channels, lanes))
    return packed(builder, weight, partial(pack_array, lanes=lanes), shape, element)


def pack_array(weight: Array, lanes: int) -> Array:
    """Pack an array `[C][1][KH][KW]` into float32 `[KH][KW][C]`, with zeros after the last channel.

    Zeros fill up the last vector of `lanes` channels, unless exactly half of it is filled.
    """
    channels, _, kernel_h, kernel_w = weight.shape
    value = np.zeros((kernel_h, kernel_w, _padded_channels(channels, lanes)), "float32")
    value[:, :, :channels] = weight[:, 0].transpose(1, 2, 0)
    return value


def is_narrow(out_channels: int, depth: int, groups: int, machine: Machine) -> bool:
    """Whether `depthwise` can compute a grouped convolution, because a vector holds several whole groups.

    `depth` is the number of input channels of a group. It must be at least 2 and a divisor of the machine's lanes, but
    less than these. Each group must have `depth` output channels too.
    """
    return groups > 1 and out_channels == depth * groups and 1 < depth < machine.lanes and machine.lanes % depth == 0


def pack_groups(weight: Array, lanes: int) -> Array:
    """Pack weights `[C][G][KH][KW]` of groups of G channels into `[KH][KW][G][C]`, zeros after the last channel."""
    channels, size, kernel_h, kernel_w = weight.shape
    value = np.zeros((kernel_h, kernel_w, size, -(-channels // lanes) * lanes), "float32")
    value[..., :channels] = weight.transpose(2, 3, 1, 0)
    return value


def pack_pairs(weight: Array, lanes: int) -> Array:
    """Pack weights `[C][G][KH][KW]` of groups of G channels, G even, into bfloat16 `[KH][KW][G/2][C][2]`.

    A bfloat16 is stored as uint16. Zeros stand after the last channel.
    """
    value = pack_groups(weight, lanes).astype(ml_dtypes.bfloat16).view(BF16.weight)
    kernel_h, kernel_w, size, channels = value.shape
    return value.reshape(kernel_h, kernel_w, size // 2, 2, channels).transpose(0, 1, 2, 4, 3)


def _padded_channels(channels: int, lanes: int) -> int:
    # Half a vector at the end is as fast as a whole vector; a shorter rest is not.
    return channels if channels % max(lanes // 2, NARROWEST) == 0 else -(-channels // lanes) * lanes


def depthwise(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    geometry: Geometry,
    machine: Machine,
    subject: str = "",
) -> te.Tensor:
    """Define a depthwise convolution of NHWC data, or a grouped convolution that `is_narrow` accepts.

    `weight` has the layout `[KH][KW][C]` of `pack` for a depthwise convolution, and `[KH][KW][G][C]` of `pack_groups`
    for a convolution with G channels in each group. It is `[KH][KW][G/2][C][2]` of `pack_pairs` where the data are
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
