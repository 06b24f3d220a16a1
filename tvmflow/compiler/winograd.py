"""Winograd's convolution: its transforms, its cost and its error bound.

The algorithm computes convolutions with 3x3 kernels and stride one or two by fewer multiplications. Source: Lavin and
Gray, "Fast Algorithms for Convolutional Neural Networks" (2015). Tiles of the input and of the kernel are transformed,
multiplied element by element (one matrix product per element of the tile), and transformed back. With stride two, the
input's even elements meet two taps of the kernel, which is a convolution with stride one, and its odd elements meet the
third tap, which is a multiplication.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tvmflow.arrays import Array
from tvmflow.compiler import cost, tiles
from tvmflow.compiler.dotproduct import BF16, PAIRS, Dot
from tvmflow.compiler.machine import Machine

_Matrix = npt.NDArray[np.float64]

# By stride and size of the output tile: the points of the interpolation; infinity is always one more. For size 4 the
# usual points 0, 1, -1, 2, -2 would double the error, and the coefficients of the points below are exact in float32
# too.
_POINTS: dict[int, dict[int, tuple[float, ...]]] = {
    1: {2: (0.0, 1.0, -1.0), 4: (0.0, 0.75, -0.75, 1.5, -1.5)},
    2: {2: (0.0, -1.0), 3: (0.0, 1.0, -1.0), 4: (0.0, 0.75, -0.75, 1.5)},
}

# The share of time that a tile must gain for each pixel of its side: the price of its larger rounding error.
_CAUTION = 0.01
# An output of unknown height or width counts as so many pixels: a multiple of the sides of all output tiles. Larger
# images cost as much for each pixel.
UNKNOWN_PIXELS = 48
# A free height or width of a model's input counts as so many pixels. The sizes of all images within the network follow
# from it. Networks take inputs of about 200 to 1000 pixels.
INPUT_PIXELS = 256
# The rows of a register tile where the number of output tiles in a line is unknown. The last tile of a line is
# half empty on average, and a line of output tiles is a half to a quarter as long as a line of pixels: hence fewer than
# `tiles.UNKNOWN_ROWS`.
UNKNOWN_ROWS = 4
# A line of at least so many output tiles divides into as good register tiles as all tiles of an image: networks have
# lines of 7, 14 and 28. It is a property of such sizes.
_LONG_LINE = 7


@dataclass(frozen=True)
class Shape:
    """A 3x3 convolution as the cost model sees it, whose result has `height` by `width` pixels.

    `dot` is the dot-product instruction that a direct convolution uses, None in float32. Lines of output tiles are
    filled up to a multiple of `rows`. The channels are those of all `groups`, which are computed one after another.
    """

    height: int
    width: int
    channels: int
    out_channels: int
    stride: int = 1
    dot: Dot | None = None
    rows: int = 1
    groups: int = 1

    @property
    def depth(self) -> int:
        """Return the input channels of a group."""
        return self.channels // self.groups

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of output tiles that the convolution can have: with integers those that are exact."""
        return [size for size in _POINTS.get(self.stride, ()) if self.dot is not PAIRS or self.group(size) > 1]

    def group(self, size: int | None) -> int:
        """Return the multiply-adds that an instruction of the products does in a lane: several in a dot product.

        `size` is that of the output tiles; None is the direct convolution.
        """
        if self.dot is None or (size is not None and not takes_narrow(self.dot, size, self.stride, self.depth)):
            return 1
        return self.dot.group

    def lanes(self, machine: Machine) -> int:
        """Return the lanes of the result's vectors, of which each belongs to one group."""
        return lanes_of(self.out_channels, self.groups, machine)


def lanes_of(channels: int, groups: int, machine: Machine) -> int:
    """Return the lanes of the vectors for the `channels` of a tensor, of which each belongs to one of `groups` groups.

    Without groups (`groups` is 1), zeros may fill the last vector.
    """
    return machine.lanes if groups == 1 else math.gcd(channels // groups, machine.lanes)


def rank_sizes(shape: Shape, machine: Machine) -> list[int | None]:
    """Rank the sizes of output tiles for a convolution, the fastest first.

    None in the list is the direct convolution. It is the only entry for outputs of fewer than 2 pixels in a line or
    column, for channels that fill less than half of a vector, for groups whose output channels do not fill whole
    vectors or halves, for strides other than 1 and 2, and for an odd number of integers. The rank counts a core's
    cycles per image: for the products, for the transforms, and for reading weights that the core's own cache does not
    hold.
    """
    # Transforms of vectors that are mostly empty cost more than the products save.
    has_few_channels = min(shape.channels, shape.out_channels, shape.lanes(machine)) < machine.fewest_lanes
    if has_few_channels or min(shape.height, shape.width) < 2:
        return [None]
    costs = {size: cycles(size, shape, machine) for size in (None, *shape.sizes)}
    return sorted(costs, key=lambda size: costs[size] * (1 + _CAUTION * (size or 0)))


def cycles(size: int | None, shape: Shape, machine: Machine) -> float:
    """Return a core's cycles for one image with output tiles of `size`, or by direct convolution if `size` is None.

    Winograd's products use the dot-product instruction only where `takes_narrow`.
    """
    height, width, groups, stride = shape.height, shape.width, shape.groups, shape.stride
    # All numbers but the sums at the end are those of one group.
    lanes = shape.lanes(machine)
    vectors = -(-(shape.out_channels // groups) // lanes)
    if size is None:
        depth = 9 * shape.depth / shape.group(size)
        tile = tiles.choose(width, vectors, machine, uses=9)
        results = math.ceil(width / tile.rows) * tile.rows * height * vectors
        weights = 4 * depth * vectors * lanes
        products = cost.results(results, depth, tile.rows * tile.vectors, machine)
        reading = _weight_read_cycles(weights, groups, height, products / height, machine)
        return groups * products + reading
    high, wide = -(-height // size), -(-width // (size * shape.rows)) * shape.rows
    taps = side_of(size, stride) ** 2
    steps = shape.depth // shape.group(size)
    tile = choose_tile(high, wide, taps, steps, vectors, lanes, machine)
    weights = 4 * taps * steps * vectors * lanes
    products = cost.results(taps * high * wide * vectors, steps, tile.rows * tile.vectors, machine)
    inputs, _, outputs = (np.count_nonzero(matrix) for matrix in transforms(size, stride))
    side, vectors_in = side_of(size, stride), -(-shape.depth // lanes_of(shape.channels, groups, machine))
    # Of both dimensions, the first is transformed for each column, the second for each line that remains.
    operations = high * wide * (vectors_in * 2 * side * inputs + vectors * (side + size) * outputs)
    tile_bytes = 4 * taps * (steps + vectors * lanes)
    # Each of a tile's elements is written once and read once on both sides. The tiles of a task stay in the core's
    # caches between the stages where the weights do; otherwise all tiles pass from core to core.
    size_of_all = groups * high * wide * tile_bytes
    reading = cost.weight_read_cycles(groups * weights, machine)
    if weights <= machine.own_cache:
        count = tiles_of_task(wide, tile.rows, tile_bytes, machine)
        moving = cost.move_cycles(size_of_all, size_of_all, count * tile_bytes, machine)
        computing = taps * count * vectors * steps / machine.vectors.multiply_adds
        reading = _weight_read_cycles(weights, groups, high * wide // count, computing, machine)
    else:
        moving = cost.exchange_cycles(size_of_all, machine)
    transforming = max(groups * operations / machine.vectors.multiply_adds, moving)
    return groups * products + reading + transforming


def _weight_read_cycles(size: float, groups: int, tasks: int, computing: float, machine: Machine) -> float:
    """The cycles of a core to read the weights of all groups, `size` bytes each.

    Those of the next group are fetched while a group's tasks compute, for `computing` cycles each, if these hide it.
    """
    is_hidden = tasks >= cost.tasks_to_fetch(size, computing, machine)
    return cost.weight_read_cycles(groups * size, machine) / (groups if is_hidden else 1)


def tiles_of_task(columns: int, rows: int, tile_bytes: int, machine: Machine) -> int:
    """Return the output tiles of a line that a core takes through all stages at once, as many as its cache holds.

    They are a divisor of the `columns`, the tiles of a line, and a multiple of the `rows` of a register tile; a whole
    line where there is none, or none fits. `tile_bytes` is the size of a tile's elements before and after the products.
    """
    fitting = (
        columns // parts
        for parts in range(1, columns // rows + 1)
        if columns % parts == 0 and columns // parts % rows == 0
    )
    return next((count for count in fitting if cost.fits(count * tile_bytes, machine)), columns)


def takes_narrow(dot: Dot, size: int, stride: int, channels: int) -> bool:
    """Whether a dot product multiplies the transformed numbers: of an even number of `channels`, and these sizes.

    bfloat16 has `size` 2 with stride 1: the error is 1.5 times that of a direct convolution in bfloat16 then, and four
    times with tiles of four. Integers have those sizes of which all transforms are whole numbers.
    """
    if channels % dot.group:
        return False
    return (size, stride) == (2, 1) if dot is BF16 else dot is PAIRS and whole_factor(size, stride) is not None


@cache
def whole_factor(size: int, stride: int) -> int | None:
    """Return the least power of two that makes the transform of kernels one of whole numbers.

    None where that of the input or of the products has fractions too, or where the power exceeds 2.
    """
    inputs, kernel, outputs = transforms(size, stride)
    if np.any(inputs % 1) or np.any(outputs % 1):
        return None
    return next((factor for factor in (1, 2) if not np.any(factor * kernel % 1)), None)


def whole_sizes(stride: int) -> list[int]:
    """Return the sizes of output tiles whose transforms are whole numbers, for a convolution's stride."""
    return [size for size in _POINTS.get(stride, ()) if whole_factor(size, stride) is not None]


def is_exact(weight: Array, size: int, stride: int, largest: int) -> bool:
    """Return whether a convolution with integer weights `[CO][CI][3][3]` is exact in the integers of `PAIRS`.

    `largest` is the largest magnitude in its input, all of which are integers. The transforms must be whole numbers, no
    transformed number may need more than 16 bits, and no sum of products more than 32.
    """
    factor = whole_factor(size, stride)
    if factor is None:
        return False
    # Numbers of so few bits are exact in float32.
    transformed = np.abs(factor**2 * transform_kernel(weight, size, 1, stride))
    inputs, _, outputs = (float(np.abs(matrix).sum(axis=1).max()) ** 2 for matrix in transforms(size, stride))
    operand, accumulator = (np.iinfo(dtype).max for dtype in (PAIRS.weight, PAIRS.accumulator))
    sums = float(transformed.sum(axis=2, dtype="float64").max()) * largest * inputs * outputs
    return max(float(transformed.max()), largest * inputs) <= operand and sums <= accumulator


def side_of(size: int, stride: int) -> int:
    """Return the side of an input tile, in elements, for output tiles of `size`."""
    return stride * (size - 1) + 3


def choose_tile(
    high: int, wide: int, taps: int, channels: int, vectors: int, lanes: int, machine: Machine
) -> tiles.Tile:
    """Choose the register tile of the products for images of `high` by `wide` output tiles.

    `taps` are the elements of an input tile, `channels` is the depth of a product, and `vectors` the vectors, of
    `lanes` lanes, of a group's output channels. The tile's rows divide one line of output tiles if the line is long, or
    if a group's weights stay in the cache, so that a line can go through all stages at once. Otherwise they divide the
    number of output tiles of an image.
    """
    return rank_tiles(high, wide, taps, channels, vectors, lanes, machine)[0]


def rank_tiles(
    high: int, wide: int, taps: int, channels: int, vectors: int, lanes: int, machine: Machine
) -> list[tiles.Tile]:
    """Rank the register tiles of the products: first the one that `choose_tile` returns, then others worth measuring.

    Images have `high` by `wide` output tiles. `taps` are the elements of an input tile, `channels` is the depth of a
    product, and `vectors` the vectors, of `lanes` lanes, of a group's output channels.
    """
    line, lines = (tiles.rank(rows, vectors, machine, 4 * channels, exact=True) for rows in (wide, high * wide))
    in_cache = 4 * taps * channels * vectors * lanes <= machine.own_cache
    enough = cost.in_flight(machine)
    in_lines = wide >= _LONG_LINE or (in_cache and line[0].rows * line[0].vectors >= enough)
    first, second = (line, lines) if in_lines else (lines, line)
    busy = [tile for tile in (*second[:1], *first, *second) if tile.rows * tile.vectors >= enough]
    return [first[0], *busy]


@cache
def transforms(size: int, stride: int = 1) -> tuple[_Matrix, _Matrix, _Matrix]:
    """Return the three matrices that transform tiles of the input, kernels, and tiles of products.

    Their shapes are n by n, n by 3 and size by n, where n = side_of(size, stride).
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
    """Return a bound on the rounding error of a float32 convolution by Winograd's algorithm.

    It is relative to the largest output that the weights can produce: the largest magnitude in the input times the sum
    of the weights' magnitudes for an output channel. Higham's analysis ("Accuracy and Stability of Numerical
    Algorithms", 2002) of the three transforms gives the factor by which intermediate values outgrow the result, squared
    for two dimensions; each value is rounded once per term of the sums that make it.
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


def transform_kernel(weight: Array, size: int, lanes: int, stride: int = 1, groups: int = 1) -> Array:
    """Transform weights `[CO][CI][3][3]` and pack them into float32 `[groups*taps][CO/groups/v][CI][v]`.

    `taps` are the elements of an input tile, `size` is the size of the output tiles, and `lanes` is v. CI are the input
    channels of a group. Zeros fill the last vector of output channels, if there is one group; the channels of several
    fill whole vectors. The weights of a group stand side by side.
    """
    out_channels, channels = weight.shape[:2]
    kernel = transforms(size, stride)[1]
    transformed = np.einsum("ay,oiyx,bx->abio", kernel, weight.astype("float64"), kernel)
    vectors = -(-out_channels // lanes)
    value = np.zeros((kernel.shape[0] ** 2, channels, vectors * lanes), "float32")
    value[:, :, :out_channels] = transformed.reshape(-1, channels, out_channels)
    packed = value.reshape(-1, channels, groups, vectors // groups, lanes).transpose(2, 0, 3, 1, 4)
    return packed.reshape(-1, vectors // groups, channels, lanes)


def integer_kernel(weight: Array, size: int, lanes: int, stride: int = 1) -> Array:
    """Transform integer weights `[CO][CI][3][3]`, and pack them into int16 `[taps][CO/v][CI/2][v][2]`, v = `lanes`.

    They are multiplied by the square of `whole_factor`, and so is the convolution's result. CI must be even. Raises
    ValueError for tiles whose transforms are no whole numbers.
    """
    factor = whole_factor(size, stride)
    if factor is None:
        raise ValueError(f"the transforms of tiles of {size} pixels with stride {stride} have fractions")
    return _group_channels((factor**2 * transform_kernel(weight, size, lanes, stride)).astype(PAIRS.weight), PAIRS)


def narrow_kernel(weight: Array, size: int, lanes: int, groups: int = 1) -> Array:
    """Return the weights of `transform_kernel` with stride one as bits of bfloat16.

    Their form is `[groups*taps][CO/groups/v][CI/2][v][2]`, and the bits are uint16. CI must be even.
    """
    transformed = transform_kernel(weight, size, lanes, groups=groups)
    return _group_channels(transformed.astype(ml_dtypes.bfloat16).view("uint16"), BF16)


def _group_channels(wide: Array, dot: Dot) -> Array:
    """Weights `[taps][CO/v][CI][v]` as `[taps][CO/v][CI/g][v][g]` for dot products of g numbers."""
    taps, vectors, channels, lanes = wide.shape
    return wide.reshape(taps, vectors, channels // dot.group, dot.group, lanes).swapaxes(3, 4)
