"""Definitions, as loops, of convolutions and matrix products for a GPU, which its schedules recognise.

Their loops say what is computed. How, the annotation says: it holds a `Product` as JSON, of which `schedules` makes a
call of the kernel `product.cuh`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi

from tvmflow.arrays import Array
from tvmflow.compiler.gpu.tiling import Gpu, Tile, choose_tile
from tvmflow.compiler.operators.attention import Places, element_of, size_of
from tvmflow.compiler.operators.common import call_kernel, constant, numbers_of, reduced_axes, static
from tvmflow.compiler.operators.geometry import Geometry
from tvmflow.compiler.passes.attention import View

# The annotations of the block of a product, of the last block of attention, and of the blocks before that.
PRODUCT, ATTENTION, PART = "tvmflow.product", "tvmflow.attention", "tvmflow.part"
# All bits of a float32 number but its sign.
_NUMBER_BITS = (1 << 31) - 1
# Rows that a product is planned for if their number is unknown.
_UNKNOWN_ROWS = 1024


@dataclass(frozen=True)
class Product:
    """How a block multiplies matrices: `rows` by `depth` numbers by `depth` by `columns` numbers.

    The left rows are the pixels of a window that slides over NHWC images, described by `kernel`, `strides`, `dilation`
    and `padding` (top, left). `groups` products lie side by side in the channels. Without a window (`kernel` is None)
    the rows are those of a matrix. `right` says how the right operand lies in memory (`product.cuh`). `batched` is true
    where both operands are batches of matrices.
    """

    columns: int | None
    depth: int | None
    tile: Tile
    right: str = "PACKED"
    kernel: tuple[int, int] | None = None
    strides: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    groups: int = 1
    batched: bool = False

    def annotate(self) -> dict[str, str]:
        """Return the product as the annotation of its block."""
        return {PRODUCT: json.dumps(asdict(self), sort_keys=True)}

    @classmethod
    def read(cls, text: str) -> "Product":
        """Return the product of an annotation."""
        values = json.loads(text)
        for name in ("kernel", "strides", "dilation", "padding"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**{**values, "tile": Tile(**values["tile"])})


def convolve(
    builder: relax.BlockBuilder, call: relax.Call, data: relax.Expr, gpu: Gpu, dtype: str, name: str
) -> relax.Expr:
    """Return the float32 convolution `call`, with constant weights in OIHW, of NHWC data of a type `dtype`."""
    weight = numbers_of(call.args[1])
    geometry, groups = Geometry.of(call), int(call.attrs.groups)
    units, channels = weight.shape[0] // groups, weight.shape[1]
    rows = math.prod(static(size) or 0 for size in call.ty.shape.values[:3]) or _UNKNOWN_ROWS
    depth = channels * math.prod(geometry.kernel)
    tile = choose_tile(gpu, rows, units, depth, groups, dtype)
    product = Product(
        columns=units,
        depth=depth,
        tile=tile,
        kernel=geometry.kernel,
        strides=geometry.strides,
        dilation=geometry.dilation,
        padding=geometry.padding[:2],
        groups=groups,
    )
    # [group][column][line, column, channel of the window]
    taps = weight.reshape(groups, units, channels, *geometry.kernel).transpose(0, 1, 3, 4, 2)
    packed = constant(pack(taps.reshape(groups, units, depth), tile).astype(dtype))
    (down, across), top, left = geometry.kernel, *geometry.padding[:2]

    def compute(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
        images, height, width, _ = data.shape
        lines, pixels = geometry.result_size(height, width)
        taps = [te.reduce_axis((0, size), name=f"k{place}") for place, size in enumerate((down, across, channels))]

        def element(image: Any, line: Any, pixel: Any, unit: Any) -> Any:
            y = line * geometry.strides[0] + taps[0] * geometry.dilation[0] - top
            x = pixel * geometry.strides[1] + taps[1] * geometry.dilation[1] - left
            group = unit // units if groups > 1 else 0
            value = data[image, y, x, group * channels + taps[2]].astype("float32")
            if any(geometry.padding):
                inside = tirx.all(y >= 0, y < height, x >= 0, x < width)
                value = tirx.if_then_else(inside, value, tirx.const(0, "float32"))
            other = weight[group, unit - group * units, (taps[0] * across + taps[1]) * channels + taps[2]]
            return te.sum(value * other.astype("float32"), axis=taps)

        shape = (images, lines, pixels, units * groups)
        return te.compute(shape, element, name=name, attrs=product.annotate())

    return call_kernel(builder, compute, data, packed, name=name)


def slide(builder: relax.BlockBuilder, call: relax.Call, name: str) -> relax.Expr:
    """Return the convolution `call` of NHWC data with constant weights in OIHW, each result in one thread.

    The weights of neighbouring channels lie side by side, as neighbouring threads read them.
    """
    weight = numbers_of(call.args[1])
    geometry, groups = Geometry.of(call), int(call.attrs.groups)
    units, channels = weight.shape[0] // groups, weight.shape[1]
    top, left = geometry.padding[:2]

    def compute(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
        images, height, width, _ = data.shape
        lines, pixels = geometry.result_size(height, width)
        taps = [te.reduce_axis((0, size), name=f"k{place}") for place, size in enumerate((*geometry.kernel, channels))]

        def element(image: Any, line: Any, pixel: Any, unit: Any) -> Any:
            y = line * geometry.strides[0] + taps[0] * geometry.dilation[0] - top
            x = pixel * geometry.strides[1] + taps[1] * geometry.dilation[1] - left
            value = data[image, y, x, unit // units * channels + taps[2]]
            if any(geometry.padding):
                inside = tirx.all(y >= 0, y < height, x >= 0, x < width)
                value = tirx.if_then_else(inside, value, tirx.const(0, data.dtype))
            return te.sum(value * weight[taps[0], taps[1], taps[2], unit], axis=taps)

        return te.compute((images, lines, pixels, units * groups), element, name=name)

    return call_kernel(builder, compute, call.args[0], constant(weight.transpose(2, 3, 1, 0)), name=name)


def extreme(builder: relax.BlockBuilder, call: relax.Call, *, is_maximum: bool) -> relax.Expr:
    """Return the maximum or the minimum over axes of floats, in `call`: of no numbers it is an infinity.

    It is that of integers in the order of the numbers. TVM's schedules share out to threads what begins with the least
    number of a type, which is finite for floats.
    """
    axes, keeps = reduced_axes(call), bool(call.attrs.keepdims)
    reduce, limit = (topi.max, tirx.max) if is_maximum else (topi.min, tirx.min)
    bits = int(np.float32(-math.inf if is_maximum else math.inf).view(np.int32))
    infinity = tirx.const(bits ^ _NUMBER_BITS if is_maximum else bits, "int32")

    def compute(data: te.Tensor) -> te.Tensor:
        integers = te.compute(data.shape, lambda *place: _to_integer(data[place].astype("float32")), name="integers")
        result = reduce(integers, axis=list(axes), keepdims=keeps)
        return te.compute(
            result.shape,
            lambda *place: _to_number(limit(result[place], infinity)).astype(data.dtype),
            name="extreme",
        )

    return builder.call_te(compute, call.args[0], primfunc_name_hint="max" if is_maximum else "min")


def _to_integer(number: Any) -> Any:
    """The integer of a float32 number whose order among integers is that of the number."""
    return _turn(tirx.reinterpret("int32", number))


def _to_number(integer: Any) -> Any:
    return tirx.reinterpret("float32", _turn(integer))


def _turn(bits: Any) -> Any:
    """Turn the order of negative numbers around, whose bits but the sign grow as they fall."""
    return bits ^ ((bits >> 31) & tirx.const(_NUMBER_BITS, "int32"))


def multiply_weights(
    builder: relax.BlockBuilder, data: relax.Expr, weight: Array, gpu: Gpu, dtype: str, name: str
) -> relax.Expr:
    """Return the float32 product of rows of a type `dtype` and constant weights, `[depth, columns]`."""
    depth, units = weight.shape
    rows = math.prod(static(size) or 0 for size in data.ty.shape.values[:-1]) or _UNKNOWN_ROWS
    tile = choose_tile(gpu, rows, units, depth, 1, dtype)
    product = Product(columns=units, depth=depth, tile=tile)
    packed = constant(pack(weight.T[None], tile).astype(dtype))

    def compute(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
        inner = te.reduce_axis((0, depth), name="k")
        return te.compute(
            (*data.shape[:-1], units),
            lambda *index: te.sum(
                data[(*index[:-1], inner)].astype("float32") * weight[0, index[-1], inner].astype("float32"),
                axis=[inner],
            ),
            name=name,
            attrs=product.annotate(),
        )

    return call_kernel(builder, compute, data, packed, name=name)


def multiply(
    builder: relax.BlockBuilder, left: relax.Expr, right: relax.Expr, gpu: Gpu, dtype: str, name: str
) -> relax.Expr:
    """Return the float32 product of two batches of matrices, `[..., rows, depth]` and `[..., depth, columns]`."""
    (*leading, rows, depth), columns = list(left.ty.shape.values), right.ty.shape.values[-1]
    batch = math.prod(static(size) or 1 for size in leading)
    tile = choose_tile(
        gpu,
        static(rows) or _UNKNOWN_ROWS,
        static(columns) or _UNKNOWN_ROWS,
        static(depth) or _UNKNOWN_ROWS,
        batch,
        dtype,
    )
    product = Product(columns=static(columns), depth=static(depth), tile=tile, right="ROWS", batched=True)

    def compute(left: te.Tensor, right: te.Tensor) -> te.Tensor:
        inner = te.reduce_axis((0, left.shape[-1]), name="k")
        return te.compute(
            (*left.shape[:-1], right.shape[-1]),
            lambda *index: te.sum(
                left[(*index[:-1], inner)].astype("float32") * right[(*index[:-2], inner, index[-1])].astype("float32"),
                axis=[inner],
            ),
            name=name,
            attrs=product.annotate(),
        )

    return call_kernel(builder, compute, left, right, name=name)


@dataclass(frozen=True)
class Attention:
    """How blocks compute attention (`attention.cuh`): a thread block has 16 queries for each of `row_warps`.

    The keys are shared out to `key_warps` warps, `keys` at a time. `places` say where queries, keys and values lie in
    their tensors (`passes.attention.View`).
    """

    scale: float
    zero_for_nan: bool
    row_warps: int
    key_warps: int
    keys: int
    places: tuple[Places, Places, Places]

    @property
    def threads(self) -> int:
        """Return the number of threads of a block."""
        return 32 * self.row_warps * self.key_warps

    def shared_bytes(self, channels: int) -> int:
        """Return the bytes of shared memory for heads of so many channels."""
        width, rows = -(-channels // 16) * 16, 16 * self.row_warps
        tiles = (rows + 4 * self.keys * self.key_warps) * (width * 2 + 16)
        return max(tiles, rows * (width + 8) * 4 + 2 * self.key_warps * rows * 4)

    def annotate(self) -> dict[str, str]:
        """Return the attention as the annotation of its last block."""
        return {ATTENTION: json.dumps(asdict(self), sort_keys=True)}

    @classmethod
    def read(cls, text: str) -> "Attention":
        """Return the attention of an annotation."""
        values = json.loads(text)
        values["places"] = tuple(tuple(map(tuple, places)) for places in values["places"])
        return cls(**values)


def attend(
    builder: relax.BlockBuilder,
    bases: Sequence[relax.Expr],
    numbers: Sequence[int],
    views: Sequence[View],
    shape: Sequence[Any],
    keys: Any,
    mask: relax.Expr | None,
    scale: float,
    zero_for_nan: bool,
    gpu: Gpu,
) -> relax.Expr:
    """Return attention over float16 queries, keys and values, in float32.

    They are the `views`, each of the float16 tensor among `bases` whose place is in `numbers`. `shape` is that of the
    queries and of the result, `[batch, positions, heads, channels]`, and `keys` the number of keys. `mask`, float32, is
    added to the scores, `[batch, heads, queries, keys]`; any of its dimensions may be 1.
    """
    batch, queries, heads, channels = shape
    layers = (static(batch) or 1) * (static(heads) or 1)
    count = static(queries) or _UNKNOWN_ROWS
    row_warps = next((warps for warps in (4, 2) if layers * -(-count // (16 * warps)) >= gpu.processors[1]), 1)
    tile = 64 if int(channels) <= 64 and row_warps == 4 else 32
    places = (views[0].places, views[1].places, views[2].places)
    plan = Attention(float(scale), zero_for_nan, row_warps, 4 // row_warps, tile, places)

    def compute(*tensors: te.Tensor) -> te.Tensor:
        own = [tensors[number] for number in numbers]
        query, key, value = (partial(element_of, *operand) for operand in zip(own, places, strict=True))
        masks = tensors[len(bases) :]
        batch, queries = (size_of(own[0], places[0], dim, shape[dim]) for dim in (0, 1))
        count = size_of(own[1], places[1], 1, keys)
        inner, place = te.reduce_axis((0, channels), name="channel"), te.reduce_axis((0, count), name="key")
        scores = te.compute(
            (batch, heads, queries, count),
            lambda b, h, i, j: te.sum(
                query(b, i, h, inner).astype("float32") * key(b, j, h, inner).astype("float32"), axis=[inner]
            ),
            name="scores",
            attrs={PART: "scores"},
        )

        def masked(*index: Any) -> Any:
            score = scores[index] * tirx.const(float(scale), "float32")
            for item in masks:
                place = (0 if static(size) == 1 else at for size, at in zip(item.shape, index, strict=True))
                score = score + item[tuple(place)]
            return score

        weighted = te.compute(scores.shape, masked, name="masked", attrs={PART: "mask"} if masks else {PART: "scaled"})
        weights = topi.nn.softmax(weighted, axis=-1)
        if zero_for_nan:
            weights = te.compute(
                weights.shape,
                lambda *index: tirx.if_then_else(tirx.isnan(weights[index]), tirx.const(0, "float32"), weights[index]),
                name="zero_for_nan",
            )
        return te.compute(
            (batch, queries, heads, channels),
            lambda b, i, h, d: te.sum(weights[b, h, i, place] * value(b, place, h, d).astype("float32"), axis=[place]),
            name="attended",
            attrs=plan.annotate(),
        )

    return call_kernel(builder, compute, *bases, *([] if mask is None else [mask]), name="attention_fp16")


def pack(weight: Array, tile: Tile) -> Array:
    """Return `[group][column][depth]` weights with zeros for the columns and the depth beyond them in whole tiles."""
    _, columns, depth = weight.shape
    beyond = [(0, 0), (0, -columns % tile.columns), (0, -depth % tile.depth)]
    return np.pad(weight, beyond)
