"""The stages of Winograd's convolution: the input transform in two halves, the products, the output transform."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx, topi

from tvmflow.compiler import tiles, winograd
from tvmflow.compiler.choices import Decisions
from tvmflow.compiler.dotproduct import BF16, round_bf16
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import output_size, parts, static, surrounded


def conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    channels: int,
    padding: Sequence[int],
    annotations: Callable[[int, int, int], dict[str, Any]],
    machine: Machine,
    stride: int = 1,
    decisions: Decisions | None = None,
    rows: int | None = None,
) -> te.Tensor:
    """Define a convolution of NHWC data by Winograd's algorithm.

    The weights come from `transform_kernel` or `narrow_kernel` of `compiler.winograd`. `padding` is top, left, bottom,
    right. The output tiles are the rows of a matrix product. `annotations(rows, lanes, size)` returns the annotations
    of the product from the rows of its register tile, its lanes and the side of the output tiles in pixels.

    With `rows` the register tile has that many rows, and the product keeps the dimensions of the images: batch, lines
    and columns of output tiles. `rows` must divide the number of output tiles in a line. Without padding, the batch may
    have several dimensions then. Without `rows` the `decisions` about the convolution choose them; without decisions
    the cost model does. All output tiles are one dimension then, if height and width are known. Else they are four:
    batch, lines, groups of `rows` output tiles of a line, and the tiles of a group.
    """
    *batch, in_h, in_w, depth = data.shape
    taps, vectors, steps, lanes, *group = (int(dim) for dim in weight.shape)
    side = math.isqrt(taps)
    size = (side - 3) // stride + 1
    top, left, bottom, right = padding
    height, width = (
        output_size(extent, 3, stride, before, after, 1)
        for extent, before, after in ((in_h, top, bottom), (in_w, left, right))
    )
    high, wide = (parts(extent, size) for extent in (height, width))
    count = topi.utils.simplify(high * wide)
    step = size * stride
    keeps_images = rows is not None
    in_groups = rows is None and static(count) is None
    if rows is None:
        if in_groups:
            ranked = tiles.rank(static(wide), vectors, machine, 4 * steps, unknown=winograd.UNKNOWN_ROWS)
        else:
            ranked = winograd.rank_tiles(int(high), int(wide), taps, steps, vectors, machine)
        rows = ranked[0].rows
        if decisions is not None:
            rows = tiles.choose_rows(ranked, decisions.choices.about(f"winograd {size} of {decisions.subject}"))
    if in_groups:
        groups = parts(width, size * rows)
        wide = topi.utils.simplify(groups * rows)
        dimensions = [*batch, high, groups, rows]
    elif keeps_images:
        dimensions = [*batch, high, wide]
    else:
        dimensions = [topi.utils.simplify(batch[0] * count)]

    def image(*place: Any) -> tuple[Any, ...]:
        """The image, line and column of an output tile."""
        if in_groups:
            *n, y, group, row = place
            return *n, y, group * rows + row
        if keeps_images:
            return place
        (p,) = place
        return p // count, p % count // wide, p % wide

    def place_of(*pixel: Any) -> tuple[Any, ...]:
        """The place of the output tile that has a pixel: image, line and column."""
        *n, h, w = pixel
        if in_groups:
            return (*n, h // size, w // (size * rows), w % (size * rows) // size)
        if keeps_images:
            return (*n, h // size, w // size)
        return (n[0] * count + h // size * wide + w // size,)

    inputs, _, outputs = (matrix.tolist() for matrix in winograd.transforms(size, stride))
    required_size = [topi.utils.simplify(step * (number - 1) + side) for number in (high, wide)]
    needs_padding = any(padding) or not all(
        static(extent) is not None and static(required) is not None and int(extent) >= int(required)
        for extent, required in zip((in_h, in_w), required_size, strict=True)
    )
    source = surrounded(data, top, left, *required_size) if needs_padding else data

    def column(a: Any, j: Any, *index: Any) -> Any:
        *n, y, x = image(*index[:-1])
        return combine(inputs, a, lambda i: source[(*n, y * step + i, x * step + j, index[-1])])

    vertical = te.compute((side, side, *dimensions, depth), column, name="input_vertical")
    rounded = round_bf16 if group else lambda value: value
    transformed = te.compute(
        (side, side, *dimensions, depth),
        lambda a, b, *index: rounded(combine(inputs, b, lambda j: vertical[(a, j, *index)])),
        name="input",
    )
    k = te.reduce_axis((0, steps), "k")
    within = [te.reduce_axis((0, size), "within") for size in group]

    def term(a: Any, b: Any, *index: Any) -> Any:
        *place, c = index
        value = transformed[(a, b, *place, k * group[0] + within[0] if group else k)]
        kernel = weight[(a * side + b, c // lanes, k, c % lanes, *within)]
        return BF16.product(value, kernel) if group else value * kernel

    product = te.compute(
        (side, side, *dimensions, vectors * lanes),
        lambda *index: te.sum(term(*index), axis=[k, *within]),
        name="product",
        attrs=annotations(rows, lanes, size),
    )
    # The dimensions of tiles come first. In the product's order, MetaSchedule would mistake this stage for its copy.
    back = te.compute(
        (*dimensions, size, side, vectors * lanes),
        lambda *index: combine(outputs, index[-3], lambda i: product[(i, index[-2], *index[:-3], index[-1])]),
        name="output_vertical",
    )

    def element(*index: Any) -> Any:
        *_, h, w, c = index
        return combine(outputs, w % size, lambda j: back[(*place_of(*index[:-1]), h % size, j, c)])

    return te.compute((*batch, height, width, channels), element, name="unpack")


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
