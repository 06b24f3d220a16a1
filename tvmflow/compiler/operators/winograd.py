"""The stages of Winograd's convolution: the input transform in two halves, the products, the output transform."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tvm import te, tirx, topi

from tvmflow.compiler import tiles, winograd
from tvmflow.compiler.annotations import GROUPS
from tvmflow.compiler.choices import Decisions
from tvmflow.compiler.dotproduct import BF16, Dot, round_bf16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import parts, static
from tvmflow.compiler.operators.geometry import Geometry
from tvmflow.compiler.operators.padding import surrounded


def conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    channels: int,
    geometry: Geometry,
    annotations: Callable[[int, int, int], dict[str, Any]],
    machine: Machine,
    decisions: Decisions | None = None,
    rows: int | None = None,
    dot: Dot | None = None,
) -> te.Tensor:
    """Define a convolution of NHWC data by Winograd's algorithm.

    The weights come from `transform_kernel` of `compiler.winograd`. For products by the instruction `dot` they come
    from `narrow_kernel`, where the data are float32, or `integer_kernel`, where they are int16: these transform int16,
    and the result is int32. The output tiles are the rows of a matrix product. `annotations(rows, lanes, size)` returns
    the annotations of the product from the rows of its register tile, its lanes and the side of the output tiles in
    pixels. The convolution has as many groups as the channels of a group, which are the weights', go into the data's.

    With `rows` the register tile has that many rows, and the product keeps the dimensions of the images: batch, lines
    and columns of output tiles. `rows` must divide the number of output tiles in a line. Without padding, the batch may
    have several dimensions then. Without `rows` the `decisions` about the convolution choose them; without decisions
    the cost model does. All output tiles are one dimension then, if height and width are known. Else they are four:
    batch, lines, groups of `rows` output tiles of a line, and the tiles of a group.
    """
    *batch, in_h, in_w, depth = data.shape
    forms, vectors, steps, lanes, *_ = (int(dim) for dim in weight.shape)
    group_depth = steps if dot is None else steps * dot.group
    groups = int(depth) // group_depth
    taps = forms // groups
    side, stride = math.isqrt(taps), geometry.strides[0]
    size = (side - 3) // stride + 1
    top, left, *_ = geometry.padding
    height, width = geometry.result_size(in_h, in_w)
    high, wide = (parts(extent, size) for extent in (height, width))
    count = topi.utils.simplify(high * wide)
    step = size * stride
    grid: _Grid
    if rows is not None:
        grid = _ImageGrid(batch, high, wide, size)
    else:
        is_free = static(count) is None
        if is_free:
            ranked = tiles.rank(static(wide), vectors, machine, 4 * steps, unknown=winograd.UNKNOWN_ROWS)
        else:
            ranked = winograd.rank_tiles(int(high), int(wide), taps, steps, vectors, lanes, machine)
        rows = ranked[0].rows
        if decisions is not None:
            rows = tiles.choose_rows(ranked, decisions.choices.about(f"winograd {size} of {decisions.subject}"))
        grid = _GroupedGrid(batch, high, width, size, rows) if is_free else _FlatGrid(batch, high, wide, size)

    inputs, _, outputs = (matrix.tolist() for matrix in winograd.transforms(size, stride))
    required_size = [topi.utils.simplify(step * (number - 1) + side) for number in (high, grid.columns)]
    needs_padding = any(geometry.padding) or not all(
        static(extent) is not None and static(required) is not None and int(extent) >= int(required)
        for extent, required in zip((in_h, in_w), required_size, strict=True)
    )
    source = surrounded(data, top, left, *required_size) if needs_padding else data

    def column(a: Any, j: Any, *index: Any) -> Any:
        *n, y, x = grid.image(*index[:-1])
        return combine(inputs, a, lambda i: source[(*n, y * step + i, x * step + j, index[-1])])

    vertical = te.compute((side, side, *grid.sizes, depth), column, name="input_vertical")
    rounded = round_bf16 if dot is BF16 else lambda value: value
    transformed = te.compute(
        (side, side, *grid.sizes, depth),
        lambda a, b, *index: rounded(combine(inputs, b, lambda j: vertical[(a, j, *index)])),
        name="input",
    )
    k = te.reduce_axis((0, steps), "k")
    within = [] if dot is None else [te.reduce_axis((0, dot.group), "within")]

    def term(a: Any, b: Any, *index: Any) -> Any:
        *place, c = index
        channel, tap, vector = k if dot is None else k * dot.group + within[0], a * side + b, c // lanes
        if groups > 1:
            group, vector = c // (vectors * lanes), vector % vectors
            channel, tap = group * group_depth + channel, group * taps + tap
        value = transformed[(a, b, *place, channel)]
        kernel = weight[(tap, vector, k, c % lanes, *within)]
        return value * kernel if dot is None else dot.product(value, kernel)

    product = te.compute(
        (side, side, *grid.sizes, groups * vectors * lanes),
        lambda *index: te.sum(term(*index), axis=[k, *within]),
        name="product",
        attrs={**annotations(rows, lanes, size), **({GROUPS: groups} if groups > 1 else {})},
    )
    # The dimensions of tiles come first. In the product's order, MetaSchedule would mistake this stage for its copy.
    back = te.compute(
        (*grid.sizes, size, side, groups * vectors * lanes),
        lambda *index: combine(outputs, index[-3], lambda i: product[(i, index[-2], *index[:-3], index[-1])]),
        name="output_vertical",
    )

    def element(*index: Any) -> Any:
        *_, h, w, c = index
        return combine(outputs, w % size, lambda j: back[(*grid.place(*index[:-1]), h % size, j, c)])

    return te.compute((*batch, height, width, channels), element, name="unpack")


class _Grid(Protocol):
    """The output tiles of a batch of images, as dimensions of the stages between the two transforms.

    `sizes` are these dimensions, and `columns` is the number of tiles in a line.
    """

    sizes: list[Any]
    columns: Any

    def image(self, *place: Any) -> tuple[Any, ...]:
        """Return the image, the line and the column of the tile at a place of these dimensions."""

    def place(self, *pixel: Any) -> tuple[Any, ...]:
        """Return the place of the tile that holds a pixel: image, line and column."""


class _ImageGrid:
    """Tiles of `size` by `size` pixels in the dimensions of the images: batch, lines and columns."""

    def __init__(self, batch: Sequence[Any], lines: Any, columns: Any, size: int) -> None:
        self.sizes, self.columns = [*batch, lines, columns], columns
        self._size = size

    def image(self, *place: Any) -> tuple[Any, ...]:
        return place

    def place(self, *pixel: Any) -> tuple[Any, ...]:
        *n, h, w = pixel
        return (*n, h // self._size, w // self._size)


class _FlatGrid:
    """Tiles of `size` by `size` pixels in one dimension; their number in an image is known."""

    def __init__(self, batch: Sequence[Any], lines: Any, columns: Any, size: int) -> None:
        self.columns, self._size = columns, size
        self._count = topi.utils.simplify(lines * columns)
        self.sizes = [topi.utils.simplify(batch[0] * self._count)]

    def image(self, *place: Any) -> tuple[Any, ...]:
        (p,) = place
        return p // self._count, p % self._count // self.columns, p % self.columns

    def place(self, *pixel: Any) -> tuple[Any, ...]:
        n, h, w = pixel
        return (n * self._count + h // self._size * self.columns + w // self._size,)


class _GroupedGrid:
    """Tiles of `size` by `size` pixels in lines of free length, which are filled up to whole groups of `rows` tiles."""

    def __init__(self, batch: Sequence[Any], lines: Any, width: Any, size: int, rows: int) -> None:
        groups = parts(width, size * rows)
        self.columns = topi.utils.simplify(groups * rows)
        self.sizes = [*batch, lines, groups, rows]
        self._size, self._rows = size, rows

    def image(self, *place: Any) -> tuple[Any, ...]:
        *n, y, group, row = place
        return (*n, y, group * self._rows + row)

    def place(self, *pixel: Any) -> tuple[Any, ...]:
        *n, h, w = pixel
        pixels = self._size * self._rows
        return (*n, h // self._size, w // pixels, w % pixels // self._size)


def combine(matrix: Sequence[Sequence[float]], row: Any, element: Callable[[int], Any]) -> Any:
    """Return the sum of `matrix[row][i] * element(i)` over all i, for a constant matrix.

    `row` may be a loop variable. The schedule unrolls that loop, so that `row` becomes a constant.
    """
    sums = [_weighted_sum(weights, element) for weights in matrix]
    value = sums[-1]
    for index in reversed(range(len(sums) - 1)):
        value = tirx.Select(row == index, sums[index], value)
    return value


def _weighted_sum(weights: Sequence[float], element: Callable[[int], Any]) -> Any:
    total = None
    # Start with a positive term, so that the others are added or subtracted without a negation.
    for index in sorted(range(len(weights)), key=lambda index: weights[index] <= 0):
        weight = weights[index]
        if weight == 0:
            continue
        term = element(index) if abs(weight) == 1 else element(index) * abs(weight)
        if total is None:
            total = -term if weight < 0 else term
            continue
        total = total + term if weight > 0 else total - term
    return total
