"""Winograd's convolution: 3x3 kernels with stride one or two by fewer multiplications, and when that pays.

The algorithm is that of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015): tiles of the input
and the kernel are transformed, multiplied element by element as one matrix product per element of the tile, and
transformed back. With stride two, the input's even elements meet two taps of the kernel, which is a convolution with
stride one, and its odd elements meet the third tap, which is a multiplication.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tvmflow.compiler import tiles
from tvmflow.compiler.dotproduct import BF16
from tvmflow.compiler.machine import Machine

_Matrix = npt.NDArray[np.float64]

# By stride and size of the output tile: the points of the interpolation, besides infinity. For size 4 the usual points
# 0, 1, -1, 2, -2 double the error. The coefficients of these points are exact in float32, too.
_POINTS: dict[int, dict[int, tuple[float, ...]]] = {
    1: {2: (0.0, 1.0, -1.0), 4: (0.0, 0.75, -0.75, 1.5, -1.5)},
    2: {2: (0.0, -1.0), 3: (0.0, 1.0, -1.0), 4: (0.0, 0.75, -0.75, 1.5)},
}

# Fewest channels, in and out, whose products outweigh the transforms.
_FEWEST_CHANNELS = 8
# Cycles to start and store a vector of a product, and to transform one.
_START, _TRANSFORM = 4, 4
# Output tiles side by side that are worth a register tile of their own.
_LONG_LINE = 7
# Vectors of results in flight at once that keep a core from waiting for them.
_ENOUGH = 8
# Bytes of weights that a core reads from beyond its own cache, in the time of a multiply-add of vectors.
_BYTES_PER_CYCLE = 5


def ranked(
    height: int,
    width: int,
    channels: int,
    out_channels: int,
    machine: Machine,
    stride: int = 1,
    group: int = 1,
) -> list[int | None]:
    """The sizes of output tiles for an output of `height` by `width`, the fastest first; None for the direct way.

    Counts a core's cycles per image: of the products, of the transforms, and of reading weights that stay in no cache.
    `group` is how many multiply-adds of narrow numbers an instruction does in a lane, where they are accurate enough.
    """
    if min(channels, out_channels) < _FEWEST_CHANNELS or min(height, width) < 2 or stride not in _POINTS:
        return [None]
    sizes = (None, *_POINTS[stride])
    costs = {size: cost(size, height, width, channels, out_channels, machine, stride, group) for size in sizes}
    return sorted(costs, key=lambda size: costs[size])


def cost(
    size: int | None,
    height: int,
    width: int,
    channels: int,
    out_channels: int,
    machine: Machine,
    stride: int = 1,
    group: int = 1,
) -> float:
    """A core's cycles for one image, as `ranked` counts them: with output tiles of `size`, the direct way for None."""
    vectors = -(-out_channels // machine.lanes)
    if size is None:
        return _cost(height * width, 1, 9 * channels / group, vectors, machine)
    high, wide = -(-height // size), -(-width // size)
    taps = side_of(size, stride) ** 2
    depth = -(-channels // (group if takes_narrow(size, stride, channels) else 1))
    tile = tile_of(high, wide, taps, depth, vectors, machine)
    # A tile of few rows and vectors waits for loads, and for its own results.
    stall = max(1.0, _ENOUGH / (tile.rows * tile.vectors))
    transforms = _TRANSFORM * taps * high * wide * (-(-channels // machine.lanes) + vectors)
    return _cost(taps * high * wide * stall, taps, depth, vectors, machine) + transforms


def takes_narrow(size: int, stride: int, channels: int) -> bool:
    """Whether the transformed numbers may be rounded to bfloat16.

    With tiles of two the error is 1.5 times that of rounding for the direct way, with tiles of four it is four times.
    """
    return (size, stride, channels % BF16.group) == (2, 1, 0)


def side_of(size: int, stride: int) -> int:
    """The elements along an input tile, which are the products along an output tile of `size`."""
    return stride * (size - 1) + 3


def _cost(results: float, taps: int, depth: float, vectors: int, machine: Machine) -> float:
    """Cycles for `results` vectors of sums of `depth` products, for each of `vectors` of output channels."""
    weight_bytes = 4 * taps * depth * vectors * machine.lanes
    reading = weight_bytes / _BYTES_PER_CYCLE if weight_bytes > machine.cache else 0.0
    return results * (depth + _START) * vectors + reading


def tile_of(high: int, wide: int, taps: int, channels: int, vectors: int, machine: Machine) -> tiles.Tile:
    """The register tile for images of `high` by `wide` output tiles.

    Its rows are of one line of output tiles if that is long, or if the weights stay in the cache, where a line can go
    through all stages at once; else of all lines.
    """
    return ranked_tiles(high, wide, taps, channels, vectors, machine)[0]


def ranked_tiles(high: int, wide: int, taps: int, channels: int, vectors: int, machine: Machine) -> list[tiles.Tile]:
    """The register tile of `tile_of`, then others that are worth measuring."""
    line, lines = (tiles.ranked(rows, vectors, machine, 4 * channels, exact=True) for rows in (wide, high * wide))
    in_cache = 4 * taps * channels * vectors * machine.lanes <= machine.cache
    in_lines = wide >= _LONG_LINE or (in_cache and line[0].rows * line[0].vectors >= _ENOUGH)
    first, second = (line, lines) if in_lines else (lines, line)
    busy = [tile for tile in (*second[:1], *first, *second) if tile.rows * tile.vectors >= _ENOUGH]
    return [first[0], *busy]


@cache
def transforms(size: int, stride: int = 1) -> tuple[_Matrix, _Matrix, _Matrix]:
    """The matrices that transform tiles of the input, kernels and tiles of products.

    With n = side_of(size, stride) they are n by n, n by 3 and size by n.
    """
    points = _POINTS[stride][size]
    if stride == 1:
        return _interpolate(points, size, 3)
    side = side_of(size, stride)
    inputs, kernel, output = np.zeros((side, side)), np.zeros((side, 3)), np.zeros((size, side))
    even = size + 1
    inputs[:even, ::2], kernel[:even, ::2], output[:, :even] = _interpolate(points, size, 2)
    inputs[even:, 1::2] = output[:, even:] = np.eye(size)
    kernel[even:, 1] = 1
    return inputs, kernel, output


def error_bound(size: int, stride: int, channels: int) -> float:
    """A bound of a convolution's rounding error in float32, before anything is computed.

    It is relative to the largest output that the weights could make of inputs as large as the largest one: the largest
    magnitude in the input times the sum of the weights' magnitudes for an output channel. Higham's analysis ("Accuracy
    and Stability of Numerical Algorithms", 2002) of the three transforms gives the factor by which intermediate values
    outgrow the result, squared for two dimensions; each value is rounded once per term of the sums that make it.
    """
    inputs, kernel, output = (np.abs(matrix) for matrix in transforms(size, stride))
    growth = float(((output * inputs.sum(axis=1)) @ kernel).max()) ** 2
    roundings = channels + 4 * side_of(size, stride) + 1
    return growth * roundings * float(np.finfo("float32").eps) / 2


def _interpolate(points: Sequence[float], size: int, taps: int) -> tuple[_Matrix, _Matrix, _Matrix]:
    """The transforms for stride one, by the method of Toom and Cook: n by n, n by taps and size by n."""
    n = size + taps - 1
    inputs, kernel, output = np.zeros((n, n)), np.zeros((n, taps)), np.zeros((size, n))
    for row, point in enumerate(points):
        others = [other for other in points if other != point]
        inputs[row, : n - 1] = np.poly(others)[::-1]
        kernel[row] = point ** np.arange(taps) / np.prod([point - other for other in others])
        output[:, row] = point ** np.arange(size)
    inputs[-1] = np.poly(points)[::-1]
    kernel[-1, -1] = output[-1, -1] = 1
    return inputs, kernel, output


def transform_kernel(weight: np.ndarray[Any, Any], size: int, lanes: int, stride: int = 1) -> np.ndarray[Any, Any]:
    """The weights `[CO][CI][3][3]` transformed and packed into `[taps][CO/v][CI][v]`, zeros after the last channel."""
    out_channels, channels = weight.shape[:2]
    kernel = transforms(size, stride)[1]
    transformed = np.einsum("ay,oiyx,bx->abio", kernel, weight.astype("float64"), kernel)
    vectors = -(-out_channels // lanes)
    value = np.zeros((kernel.shape[0] ** 2, channels, vectors * lanes), "float32")
    value[:, :, :out_channels] = transformed.reshape(-1, channels, out_channels)
    return value.reshape(-1, channels, vectors, lanes).transpose(0, 2, 1, 3)


def narrow_kernel(weight: np.ndarray[Any, Any], size: int, lanes: int) -> np.ndarray[Any, Any]:
    """The transformed weights as the bits of bfloat16, packed into `[taps][CO/v][CI/2][v][2]`; CI must be even."""
    wide = transform_kernel(weight, size, lanes).astype(ml_dtypes.bfloat16).view("uint16")
    taps, vectors, channels, _ = wide.shape
    return wide.reshape(taps, vectors, channels // BF16.group, BF16.group, lanes).swapaxes(3, 4)
