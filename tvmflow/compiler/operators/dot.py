"""Convolutions and matrix products of bfloat16 or 8-bit integers, by dot-product instructions (`compiler.dotproduct`).

Activations are NHWC. They are bfloat16, stored as uint16, or uint8; 8-bit weights are int8. Weights are packed into
`[CO/v][KH][KW][CI/g][v][g]` for vectors of v lanes and dot products of g numbers, those of a dense layer into
`[N/v][K/g][v][g]`. They are padded with zeros to whole vectors and whole groups of g. As with `products`, every product
is computed into a buffer of whole tiles.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from tvmflow.compiler import amx, cost, tiles
from tvmflow.compiler.annotations import AMX, DOT, GROUPS, KERNEL, LANES, LEAD, SHARED, TILE
from tvmflow.compiler.choices import Decisions
from tvmflow.compiler.dotproduct import BF16, Dot, round_bf16
from tvmflow.compiler.machine import NARROWEST, Machine
from tvmflow.compiler.operators.common import (
    JoinedRows,
    Product,
    are_equal,
    divides,
    parts,
    round_up,
    static,
    vector,
)
from tvmflow.compiler.operators.geometry import Geometry
from tvmflow.compiler.operators.padding import PaddedImage, padded_element, skipped_padding
from tvmflow.compiler.operators.products import place_of_operand, rows_of_pixels


def lanes_of(channels: int, groups: int, machine: Machine) -> int:
    """Return the lanes of the vectors for `channels` output channels of a convolution with `groups` groups.

    With several groups, the lanes divide the number of a group's output channels. Returns 0 where no vector has such a
    number of lanes.
    """
    if groups == 1:
        return vector(channels, machine)
    # A vector of output channels must read one group's input channels only.
    lanes = math.gcd(channels // groups, machine.lanes)
    return lanes if lanes >= NARROWEST else 0


def steps_of_conv2d(
    data: Sequence[Any], weight: Sequence[int], groups: int, geometry: Geometry, lanes: int, dot: Dot, machine: Machine
) -> int:
    """Return how many groups of `dot.group` input channels the packed weights of a convolution have.

    `data` is the shape of the NHWC data, and `weight` that of the OIHW weights. There are as many as the input
    channels need, or a few more of zeros where AMX takes less time then.
    """
    _, in_h, in_w, _ = data
    out_h, out_w = geometry.result_size(in_h, in_w)
    pixels = static(out_h * out_w) if geometry.is_pointwise else static(out_w)
    steps = -(-weight[1] // dot.group)
    if groups > 1 or geometry.kernel[1] > 1:
        return steps
    return _filled(pixels, steps, weight[0], lanes, dot, machine, pieces=geometry.kernel[0])


def steps_of_dense(data: Sequence[Any], weight: Sequence[int], rows: Sequence[int], dot: Dot, machine: Machine) -> int:
    """Return how many groups of `dot.group` numbers of the depth the packed weights of a dense layer have.

    `data` is the shape of the data, `weight` is K and N, and `rows` are the positions of the dimensions that are
    flattened into rows. There are as many as K needs, or a few more of zeros where AMX takes less time then.
    """
    depth, units = weight
    joined = static(math.prod(data[place] for place in rows))
    return _filled(joined, -(-depth // dot.group), units, vector(units, machine), dot, machine)


def _filled(
    rows: int | None, steps: int, channels: int, lanes: int, dot: Dot, machine: Machine, pieces: int = 1
) -> int:
    if dot.name not in machine.amx or lanes != amx.LANES:
        return steps
    return amx.fill_depth(rows, steps, -(-channels // lanes), machine, pieces=pieces)


def conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    dot: Dot,
    channels: int,
    groups: int,
    geometry: Geometry,
    machine: Machine,
    decisions: Decisions,
    zero: Any = 0,
) -> te.Tensor:
    """Define a convolution of NHWC data of type `dot.data` with weights of `ConvolutionPacking`.

    The padding has the value `zero`, a number or an expression. The result is NHWC with `channels` channels of type
    `dot.accumulator`. The `decisions` about the convolution choose whether AMX multiplies its lines or its patches.
    """
    batch, in_h, in_w, in_c = data.shape
    vectors, kernel_h, kernel_w, steps, lanes, group = (int(dim) for dim in weight.shape)
    out_h, out_w = geometry.result_size(in_h, in_w)
    (_, stride_w), (dilation_h, dilation_w) = geometry.strides, geometry.dilation
    per_group, rows = vectors // groups, 0
    # Neighbouring pixels of which all channels are read are contiguous in memory: one reduction covers them.
    spread = dilation_w if groups > 1 or (kernel_w > 1 and dilation_w > 1) else 0
    of_patches = 0
    if dot.name in machine.amx and lanes == amx.LANES:
        depth_at_once, pieces = (steps, kernel_h * kernel_w) if spread else (kernel_w * steps, kernel_h)
        rows = amx.choose_rows(static(out_w), depth_at_once, per_group, machine, pieces=pieces)
        if groups == 1 and not geometry.is_pointwise:
            of_line = _cycles_of_line(static(out_w), rows, depth_at_once, per_group, machine, pieces)
            of_patches = _rows_of_patches(out_h, out_w, of_line, weight, machine, decisions)
    if groups == 1 and geometry.is_pointwise and not (rows and _is_by_line(out_h, out_w, rows, weight, machine)):
        return _pointwise(data, weight, dot=dot, channels=channels, machine=machine)
    if of_patches:
        return _patches_product(data, weight, dot=dot, channels=channels, geometry=geometry, tile=of_patches, zero=zero)
    row_bytes = 4 // group * stride_w * int(in_c)
    reserving = tiles.reserve_register(dot, machine)
    tile = rows or tiles.choose(static(out_w), per_group, reserving, row_bytes, uses=kernel_h * kernel_w).rows
    read = PaddedImage(
        data,
        geometry,
        (out_h, out_w),
        tile,
        # AMX's kernel steps over the lines between those that it reads.
        gathered_from=math.inf if rows else 2,
        channels=steps * group if groups == 1 else int(in_c),
        value=zero,
    )
    y, ki = te.reduce_axis((0, kernel_h), "y"), te.reduce_axis((0, group), "ki")
    line, taps = (y, [y]) if kernel_h > 1 or not rows else (0, [])
    if rows and not spread:
        k = te.reduce_axis((0, kernel_w * steps), "k")
        pixel, step, within = (k // steps, k % steps, [k]) if kernel_w > 1 else (0, k, [k])
    elif rows and kernel_w == 1:
        step = te.reduce_axis((0, steps), "ko")
        pixel, within = 0, [step]
    else:
        x, ko = te.reduce_axis((0, kernel_w), "x"), te.reduce_axis((0, steps), "ko")
        pixel, step, within = x, ko, [x, ko]

    def depth(c: Any) -> Any:
        place = step * group + ki
        return place if groups == 1 else c // (per_group * lanes) * (steps * group) + place

    product = te.compute(
        (batch, out_h, read.tiled_width, vectors * lanes),
        lambda n, h, w, c: te.sum(
            dot.product(read(n, h, w, line, pixel, depth(c)), weight[c // lanes, line, pixel, step, c % lanes, ki]),
            axis=[*taps, *within, ki],
        ),
        name="conv2d",
        attrs={
            KERNEL: "dot_conv2d",
            DOT: dot.name,
            TILE: tile,
            LANES: lanes,
            LEAD: 1,
            SHARED: 1,
            # AMX's kernel runs over all taps. Other values than zero, those of integers, are no padding to leave out.
            **({AMX: [steps, kernel_h, kernel_w, stride_w, dilation_h, spread], GROUPS: groups} if rows else {}),
            **(skipped_padding(geometry) if dot is BF16 and not rows else {}),
        },
    )
    return te.compute((batch, out_h, out_w, channels), lambda n, h, w, c: product[n, h, w, c], name="unpack")


def _is_by_line(height: Any, width: Any, rows: int, weight: te.Tensor, machine: Machine) -> bool:
    """Whether AMX's kernels compute a 1x1 convolution line by line, `rows` pixels at a time, or all pixels as one line.

    All pixels together fill tiles better, but are copied first. The result has `height` lines of `width` pixels, and
    `weight` is packed. Lines of a free width are one line, as others of free sizes are (`passes.rows`).
    """
    if static(height) is None or static(width) is None:
        return static(width) is not None
    vectors, steps = int(weight.shape[0]), int(weight.shape[3])
    pixels = int(height) * int(width)
    joined = amx.choose_rows(pixels, steps, vectors, machine, is_copied=True)
    if not joined:
        return True
    of_line = amx.cycles(int(width), rows, steps, vectors, machine)
    return int(height) * of_line <= amx.cycles(pixels, joined, steps, vectors, machine, is_copied=True)


def _cycles_of_line(width: int | None, rows: int, depth: int, vectors: int, machine: Machine, pieces: int) -> float:
    """The cycles for a vector of results of a line of pixels: by AMX's kernels of `rows`, by dot products if it is 0.

    `depth` is `amx.Kernel.depth`, and `pieces` is `amx.Kernel.pieces`.
    """
    if not rows:
        return tiles.cycles(width, pieces * depth, vectors, machine)
    return amx.cycles(width, rows, depth, vectors, machine, pieces=pieces)


def _rows_of_patches(
    height: Any, width: Any, of_line: float, weight: te.Tensor, machine: Machine, decisions: Decisions
) -> int:
    """The rows of AMX's kernels for a product of the patches of an image; 0 where its lines are multiplied one by one.

    Lines of a few pixels leave most of a tile empty. The result has `height` lines of `width` pixels. A vector of
    results of one line takes `of_line` cycles, and `weight` is packed.
    """
    if static(height) is None or static(width) is None:
        return 0
    vectors, kernel_h, kernel_w, steps = (int(size) for size in weight.shape[:4])
    pixels, depth = int(height) * int(width), kernel_w * steps
    tile = amx.choose_rows(pixels, depth, vectors, machine, pieces=kernel_h, is_copied=True)
    if not tile:
        return 0
    size = 4 * pixels * depth * kernel_h
    copying = cost.move_cycles(size, size, size, machine)
    of_patches = copying + vectors * amx.cycles(pixels, tile, depth, vectors, machine, pieces=kernel_h)
    cycles = {"lines": vectors * int(height) * of_line, "patches": of_patches}
    rows = {"lines": 0, "patches": tile}
    return decisions.choose(
        "algorithm", {name: rows[name] for name in sorted(cycles, key=cycles.__getitem__)}, cycles=cycles
    )


def _patches_product(
    data: te.Tensor, weight: te.Tensor, *, dot: Dot, channels: int, geometry: Geometry, tile: int, zero: Any
) -> te.Tensor:
    """Define a convolution as a product of its patches, which are copied: all pixels are the rows of AMX's kernels.

    The copy is an image whose lines are the taps of a column. In a line, the taps of each pixel stand side by side, so
    that the kernel steps from pixel to pixel as a convolution with strides does. A kernel has `tile` rows.
    """
    batch, in_h, in_w, _ = data.shape
    vectors, kernel_h, kernel_w, steps, lanes, group = (int(size) for size in weight.shape)
    out_h, out_w = geometry.result_size(in_h, in_w)
    (down, across), (dilation_h, dilation_w) = geometry.strides, geometry.dilation
    element = padded_element(data, *geometry.padding[:2], steps * group, zero)
    pixels = int(out_h * out_w)

    def tap(n: Any, y: Any, place: Any, c: Any) -> Any:
        pixel, x = tirx.min(place // kernel_w, pixels - 1), place % kernel_w
        line, column = pixel // out_w, pixel % out_w
        return element(n, line * down + y * dilation_h, column * across + x * dilation_w, c)

    tiled = int(round_up(pixels, tile))
    panel = te.compute((batch, kernel_h, tiled * kernel_w, steps * group), tap, name="panel")
    k, ki = te.reduce_axis((0, kernel_w * steps), "k"), te.reduce_axis((0, group), "ki")
    y = te.reduce_axis((0, kernel_h), "y")
    line, taps = (y, [y]) if kernel_h > 1 else (0, [])
    x, step = (k // steps, k % steps) if kernel_w > 1 else (0, k)
    product = te.compute(
        (batch, tiled, vectors * lanes),
        lambda n, m, c: te.sum(
            dot.product(
                panel[n, line, m * kernel_w + x, step * group + ki],
                weight[c // lanes, line, x, step, c % lanes, ki],
            ),
            axis=[*taps, k, ki],
        ),
        name="product",
        attrs={
            KERNEL: "dot_rows",
            DOT: dot.name,
            TILE: tile,
            LANES: lanes,
            LEAD: 1,
            SHARED: 1,
            AMX: [steps, kernel_h, kernel_w, kernel_w, 1, 0],
        },
    )
    shape = (batch, out_h, out_w, channels)
    return te.compute(shape, lambda n, h, w, c: product[n, h * out_w + w, c], name="unpack")


def _pointwise(data: te.Tensor, weight: te.Tensor, *, dot: Dot, channels: int, machine: Machine) -> te.Tensor:
    """Define a 1x1 convolution: the pixels of an image, or of a line, are the rows of a matrix product."""
    *outer, _ = data.shape
    vectors, _, _, steps, lanes, _ = (int(dim) for dim in weight.shape)
    joined = rows_of_pixels(outer)

    def right(*index: Any) -> Any:
        return weight[index[-2] // lanes, 0, 0, index[-3], index[-2] % lanes, index[-1]]

    product = joined.product(data, right, vectors * lanes, lanes)
    return joined.unpack(_rows_product(product, machine, dot, steps, pointwise=True), channels)


def dense(
    data: te.Tensor, weight: te.Tensor, *, dot: Dot, units: int, rows: Sequence[int], machine: Machine
) -> te.Tensor:
    """Multiply `data` of shape `[..., K]` and type `dot.data` by weights of `MatrixPacking` with `units` columns.

    `rows` are the positions of the leading dimensions that are flattened into the rows of the product. The others stay
    dimensions of a batch. The result has the shape `[..., units]` and the type `dot.accumulator`.
    """
    *outer, _ = data.shape
    vectors, steps, lanes, _ = (int(dim) for dim in weight.shape)
    joined = JoinedRows(outer, rows)

    def right(*index: Any) -> Any:
        return weight[index[-2] // lanes, index[-3], index[-2] % lanes, index[-1]]

    product = joined.product(data, right, vectors * lanes, lanes, rows)
    # The description of AMX's kernel has no dimension between the rows and the depth.
    in_line = len(outer) - 1 in rows and all(static(outer[place]) == 1 for place in rows[:-1])
    return joined.unpack(_rows_product(product, machine, dot, steps, in_line=in_line), units)


def batch_matmul(
    left: te.Tensor, right: te.Tensor, *, batch: Sequence[Any], machine: Machine, dot: Dot = BF16
) -> te.Tensor:
    """Multiply `left` `[..., rows, K]` by `right` `[..., K, units]` over the leading dimensions `batch`.

    The operands have the types `dot.data` and `dot.weight`. Operands that lack some of the leading dimensions are
    broadcast. Without AMX, K may be symbolic. The result has the type
    `dot.accumulator`.
    """
    rows, depth = left.shape[-2:]
    units = right.shape[-1]
    columns = static(units)
    lanes = machine.lanes if columns is None else vector(columns, machine)
    steps = parts(depth, dot.group)
    if static(depth) is not None:
        steps = _filled(static(rows), int(steps), columns or lanes, lanes, dot, machine)

    def interleaved(*index: Any) -> Any:
        *lead, far, ko, near, ki = index
        k, c = ko * dot.group + ki, far * lanes + near
        ends = [
            *([] if are_equal(steps * dot.group, depth) else [k < depth]),
            *([] if divides(lanes, units) else [c < units]),
        ]
        value = right[(*lead, k, c)]
        return tirx.if_then_else(tirx.all(*ends), value, tirx.const(0, dot.weight)) if ends else value

    vectors, lead = parts(units, lanes), right.shape[:-2]
    packed_columns = te.compute((*lead, vectors, steps, lanes, dot.group), interleaved, name="pack_pairs")

    def weight(*index: Any) -> Any:
        ko, c, ki = index[-3:]
        place = place_of_operand((*index[:-3], 0, c), lead)
        return packed_columns[(*place, c // lanes, ko, c % lanes, ki)]

    product = Product(
        batch=batch,
        rows=rows,
        depth=depth,
        channels=round_up(units, lanes),
        lanes=lanes,
        left=lambda *index: left[(*place_of_operand(index, left.shape[:-2]), *index[-2:])],
        right=weight,
        shared=False,
    )
    result = _rows_product(product, machine, dot, steps, in_line=True)
    return te.compute((*batch, rows, units), lambda *index: result[index], name="unpack")


def stage(shape: Sequence[Any], element: Callable[..., Any], name: str, bf16: bool) -> te.Tensor:
    """Define the stage `name` of a function, whose float32 elements are rounded to bfloat16 if `bf16` is true.

    A rounding reads its number twice. So the number is a stage of its own, `exact`, which the schedule inlines
    (`schedules.dot.inline_exact`).
    """
    if not bf16:
        return te.compute(shape, element, name=name)
    exact = te.compute(shape, element, name="exact")
    return te.compute(shape, lambda *index: round_bf16(exact[index]), name=name)


def _rows_product(
    product: Product, machine: Machine, dot: Dot, steps: Any, *, in_line: bool = False, pointwise: bool = False
) -> te.Tensor:
    """Define a product by dot products of g numbers, computed in whole register tiles.

    The element of the right operand is `right(*batch_index, k / g, channel, k % g)`, and its depth is `steps` groups of
    g. `in_line` is true where the rows are the last dimension of the left operand before its depth. `pointwise` is true
    where the right operand is packed as the weights of a 1x1 convolution. The product has whole tiles of rows. Where
    its rows are no such multiple, the last row is repeated. Where its depth is less than the groups, the left operand
    is copied, with zeros after its depth; AMX's tiles need a copy in both cases.
    """
    batch, rows, depth, lanes = product.batch, product.rows, product.depth, product.lanes
    group, size = dot.group, static(depth)
    is_filled = not are_equal(steps * group, depth)
    by_amx = dot.name in machine.amx and lanes == amx.LANES
    tile = 0
    if by_amx:
        tile = amx.choose_rows(static(rows), steps, product.vectors or 1, machine, is_copied=is_filled or not in_line)
    # Packed weights of a convolution have dimensions for taps, which the description of AMX's kernel must have too.
    by_tiles: dict[str, Any] = {AMX: [steps, *([1, 1, 1, 1] if pointwise else [])]} if tile else {}
    reserving = tiles.reserve_register(dot, machine)
    tile = tile or tiles.choose(static(rows), product.vectors or 2, reserving, size and 4 // group * size).rows
    source = product.left
    tiled_rows = rows if divides(tile, rows) else round_up(rows, tile)
    if not divides(tile, rows) and not is_filled and not by_tiles:
        source = product.last_row_repeated
    elif not divides(tile, rows) or is_filled or (by_tiles and not in_line):

        def value(*index: Any) -> Any:
            *lead, m, k = index
            element = product.last_row_repeated(*lead, m, tirx.min(k, depth - 1))
            return tirx.if_then_else(k < depth, element, tirx.const(0, dot.data)) if is_filled else element

        panel = te.compute((*batch, tiled_rows, steps * group), value, name="panel")

        def source(*index: Any) -> Any:
            return panel[index]

    ko, ki = te.reduce_axis((0, steps), "ko"), te.reduce_axis((0, group), "ki")
    return te.compute(
        (*batch, tiled_rows, product.channels),
        lambda *index: te.sum(
            dot.product(source(*index[:-1], ko * group + ki), product.right(*index[:-2], ko, index[-1], ki)),
            axis=[ko, ki],
        ),
        name="product",
        attrs={KERNEL: "dot_rows", DOT: dot.name, TILE: tile, **product.annotations, **by_tiles},
    )
