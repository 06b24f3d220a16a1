"""Packs weights into the forms that kernels read: vectors of channels, and the transforms of Winograd.

A library need not hold packed weights. It can take the weights themselves, and pack them once when it is loaded
(`compiler.passes.packing`). Each packing is therefore defined twice: for arrays, and as a tensor expression, of which
the library gets a function.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.arrays import Array
from tvmflow.compiler import winograd
from tvmflow.compiler.annotations import GROUPS, KERNEL, PACKING
from tvmflow.compiler.dotproduct import BF16, PAIRS, Dot, round_bf16
from tvmflow.compiler.machine import NARROWEST
from tvmflow.compiler.operators.winograd import combine

# The numbers of packed weights. Those of bfloat16 are stored as their bits, in uint16.
Number = Literal["float32", "float16", "bfloat16", "int8", "int16"]


class Packing(Protocol):
    """A way to pack weights, called `name`. Its dataclass fields are integers and words, which an attribute stores.

    `expands` says whether packed weights are larger than the weights by more than a few lanes of padding.
    """

    name: ClassVar[str]
    expands: ClassVar[bool]

    def pack(self, weight: Array) -> Array:
        """Return the packed weights."""

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the packed weights as a tensor expression.

        Floating-point numbers may differ from those of `pack` by rounding, because the additions in float64 have
        another order.
        """


@dataclass(frozen=True)
class WinogradPacking:
    """Transforms weights for Winograd's algorithm into float32, as `winograd.transform_kernel` does.

    `size` is the side of the output tiles in pixels; `stride` and `groups` are the convolution's.
    """

    name: ClassVar[str] = "winograd"
    expands: ClassVar[bool] = True

    size: int
    lanes: int
    stride: int
    groups: int = 1

    def pack(self, weight: Array) -> Array:
        """Return the transformed weights."""
        return winograd.transform_kernel(weight, self.size, self.lanes, self.stride, self.groups)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the weights in Winograd's form, computed in float64: the columns of a kernel first, then its rows."""
        shape, element = self._wide(weight)
        return te.compute(shape, element, name="packed", attrs={KERNEL: "packing", GROUPS: self.groups})

    def _wide(self, weight: te.Tensor) -> tuple[tuple[int, int, int, int], Callable[..., Any]]:
        """The shape and the elements, in float32, of `winograd.transform_kernel`."""
        matrix = winograd.transforms(self.size, self.stride)[1].tolist()
        side, columns = len(matrix), _transformed_columns(weight, matrix, self.lanes, "float64")
        vectors, depth, *_ = (int(size) for size in columns.shape)
        per_group, taps = vectors // self.groups, side**2

        def element(t: Any, j: Any, k: Any, v: Any) -> Any:
            vector, line = t // taps * per_group + j, t % taps // side
            return combine(matrix, t % side, lambda x: columns[vector, k, line, x, v]).astype("float32")

        return (self.groups * taps, per_group, depth, self.lanes), element


@dataclass(frozen=True)
class IntegerWinogradPacking(WinogradPacking):
    """Transforms integer weights for Winograd's algorithm into int16, as `winograd.integer_kernel` does."""

    name: ClassVar[str] = "integer_winograd"

    def pack(self, weight: Array) -> Array:
        """Return the transformed weights."""
        return winograd.integer_kernel(weight, self.size, self.lanes, self.stride)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the weights in Winograd's form: the columns of a kernel first, then its rows."""
        factor = winograd.whole_factor(self.size, self.stride) or 1
        matrix = (factor * winograd.transforms(self.size, self.stride)[1]).astype(int).tolist()
        side, columns = len(matrix), _transformed_columns(weight, matrix, self.lanes, "int32")
        (vectors, depth, *_), group = columns.shape, PAIRS.group

        def element(t: Any, j: Any, k: Any, v: Any, g: Any) -> Any:
            value = combine(matrix, t % side, lambda x: columns[j, k * group + g, t // side, x, v])
            return value.astype(PAIRS.weight)

        shape = (side**2, vectors, depth // group, self.lanes, group)
        return te.compute(shape, element, name="packed", attrs={KERNEL: "packing"})


@dataclass(frozen=True)
class NarrowWinogradPacking(WinogradPacking):
    """Transforms weights for Winograd's algorithm with stride one into bfloat16, as `winograd.narrow_kernel` does."""

    name: ClassVar[str] = "narrow_winograd"

    def pack(self, weight: Array) -> Array:
        """Return the transformed weights."""
        return winograd.narrow_kernel(weight, self.size, self.lanes, self.groups)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the weights in Winograd's form, computed in float64: the columns of a kernel first, then its rows."""
        (forms, vectors, depth, lanes), element = self._wide(weight)
        pairs = BF16.group

        def narrow(t: Any, j: Any, k: Any, v: Any, g: Any) -> Any:
            return round_bf16(element(t, j, k * pairs + g, v))

        shape = (forms, vectors, depth // pairs, lanes, pairs)
        return te.compute(shape, narrow, name="packed", attrs={KERNEL: "packing", GROUPS: self.groups})


def _transformed_columns(weight: te.Tensor, matrix: Sequence[Sequence[float]], lanes: int, dtype: str) -> te.Tensor:
    """Define the kernels `[CO][CI][3][3]` with their columns multiplied by a matrix, in numbers of type `dtype`.

    The result is `[CO/v][CI][n][3][v]` for v = `lanes` and a matrix of n rows, with zeros after the last channel.
    """
    channels, depth, taps, _ = (int(size) for size in weight.shape)
    vectors = math.ceil(channels / lanes)

    def tap(j: Any, k: Any, v: Any, y: Any, x: Any) -> Any:
        channel = j * lanes + v
        value = weight[channel, k, y, x].astype(dtype)
        return value if channels % lanes == 0 else tirx.if_then_else(channel < channels, value, tirx.const(0, dtype))

    kernels = te.compute((vectors, depth, lanes, taps, taps), tap, name="kernels")
    return te.compute(
        (vectors, depth, len(matrix), taps, lanes),
        lambda j, k, a, x, v: combine(matrix, a, lambda y: kernels[j, k, v, y, x]),
        name="columns",
    )


@dataclass(frozen=True)
class WideningPacking:
    """Converts packed weights of 8 bits to the 16 bits of which `dotproduct.PAIRS` multiplies pairs."""

    name: ClassVar[str] = "widening_integers"
    expands: ClassVar[bool] = True

    def pack(self, weight: Array) -> Array:
        """Return the weights as int16."""
        return weight.astype(PAIRS.weight)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the weights as int16."""
        return te.compute(weight.shape, lambda *index: weight[index].astype(PAIRS.weight), name="packed")


@dataclass(frozen=True)
class _VectorPacking:
    """Packs weights into vectors of `lanes` output channels of type `number`.

    There are `vectors` vectors. With a `group` above 1, each lane has so many neighbouring input channels, for dot
    products. `steps` is the number of groups of input channels; 0 means as few as these need. There are zeros after the
    last output channel and the last input channel.
    """

    expands: ClassVar[bool] = False

    lanes: int
    vectors: int
    group: int = 1
    number: Number = "float32"
    steps: int = 0

    @classmethod
    def of_dot(cls, channels: int, lanes: int, dot: Dot, steps: int = 0) -> Self:
        """Return the packing of so many output channels for dot products."""
        return cls(lanes, -(-channels // lanes), dot.group, _number_of(dot), steps)

    def _count_steps(self, depth: int) -> int:
        return self.steps or -(-depth // self.group)

    def _guard(self, depth: int, channels: int, place: Any, channel: Any) -> list[Any]:
        """The conditions for a weight at these places of `depth` input and `channels` output channels to be there."""
        is_full = depth == self._count_steps(depth) * self.group and channels == self.vectors * self.lanes
        return [] if is_full else [place < depth, channel < channels]


@dataclass(frozen=True)
class MatrixPacking(_VectorPacking):
    """Packs matrices `[..., K, N]` into `[..., N/v, K, v]`, or `[..., N/v, K/g, v, g]` in groups of g.

    v is `lanes`; a column is an output channel, and a row an input channel.
    """

    name: ClassVar[str] = "matrix"

    def pack(self, weight: Array) -> Array:
        """Return the packed matrices."""
        *lead, depth, units = weight.shape
        steps = self._count_steps(depth)
        value = np.zeros((*lead, steps * self.group, self.vectors * self.lanes), _STORED[self.number])
        value[..., :depth, :units] = _convert(weight, self.number)
        value = value.reshape(*lead, steps, self.group, self.vectors, self.lanes)
        packed = np.moveaxis(value, (-2, -4, -1, -3), (-4, -3, -2, -1))
        return packed[..., 0] if self.group == 1 else packed

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the packed matrices."""
        *lead, depth, units = (int(size) for size in weight.shape)

        def element(*place: Any) -> Any:
            *outer, vector, step, lane = place[: len(lead) + 3]
            row, column = step * self.group + sum(place[len(lead) + 3 :]), vector * self.lanes + lane
            return _element(weight[(*outer, row, column)], self.number, self._guard(depth, units, row, column))

        shape = (*lead, self.vectors, self._count_steps(depth), self.lanes)
        return te.compute((*shape, self.group) if self.group > 1 else shape, element, name="packed")


@dataclass(frozen=True)
class ConvolutionPacking(_VectorPacking):
    """Packs weights `[CO][CI][KH][KW]` into `[CO/v][KH][KW][CI][v]`, or `[CO/v][KH][KW][CI/g][v][g]` in groups of g.

    v is `lanes`.
    """

    name: ClassVar[str] = "convolution"

    def pack(self, weight: Array) -> Array:
        """Return the packed weights."""
        channels, depth, kernel_h, kernel_w = weight.shape
        steps = self._count_steps(depth)
        size = (self.vectors * self.lanes, steps * self.group, kernel_h, kernel_w)
        value = np.zeros(size, _STORED[self.number])
        value[:channels, :depth] = _convert(weight, self.number)
        value = value.reshape(self.vectors, self.lanes, steps, self.group, kernel_h, kernel_w)
        packed = value.transpose(0, 4, 5, 2, 1, 3)
        return packed[..., 0] if self.group == 1 else packed

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the packed weights."""
        channels, depth, kernel_h, kernel_w = (int(size) for size in weight.shape)

        def element(j: Any, y: Any, x: Any, k: Any, v: Any, *g: Any) -> Any:
            channel, place = j * self.lanes + v, k * self.group + sum(g)
            conditions = self._guard(depth, channels, place, channel)
            return _element(weight[channel, place, y, x], self.number, conditions)

        shape = (self.vectors, kernel_h, kernel_w, self._count_steps(depth), self.lanes)
        return te.compute((*shape, self.group) if self.group > 1 else shape, element, name="packed")


@dataclass(frozen=True)
class DepthwisePacking:
    """Packs weights `[C][1][KH][KW]` into float32 `[KH][KW][C]`, with zeros after the last channel.

    Zeros fill up the last vector of `lanes` channels, unless exactly half of it is filled.
    """

    name: ClassVar[str] = "depthwise"
    expands: ClassVar[bool] = False

    lanes: int

    def _padded(self, channels: int) -> int:
        # Half a vector at the end is as fast as a whole vector; a shorter rest is not.
        half = max(self.lanes // 2, NARROWEST)
        return channels if channels % half == 0 else -(-channels // self.lanes) * self.lanes

    def pack(self, weight: Array) -> Array:
        """Return the packed weights."""
        channels, _, kernel_h, kernel_w = weight.shape
        value = np.zeros((kernel_h, kernel_w, self._padded(channels)), "float32")
        value[:, :, :channels] = weight[:, 0].transpose(1, 2, 0)
        return value

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the packed weights."""
        channels, _, kernel_h, kernel_w = (int(size) for size in weight.shape)
        padded = self._padded(channels)
        return te.compute(
            (kernel_h, kernel_w, padded),
            lambda y, x, c: _element(weight[c, 0, y, x], "float32", [c < channels] if padded > channels else []),
            name="packed",
        )


@dataclass(frozen=True)
class GroupsPacking:
    """Packs weights `[C][G][KH][KW]` of groups of G channels into float32 `[KH][KW][G][C]`.

    With `pairs`, G is even, and the result is bfloat16 `[KH][KW][G/2][C][2]`. Zeros after the last channel fill up the
    last vector of `lanes` channels.
    """

    name: ClassVar[str] = "groups"
    expands: ClassVar[bool] = False

    lanes: int
    pairs: bool = False

    def pack(self, weight: Array) -> Array:
        """Return the packed weights."""
        channels, size, kernel_h, kernel_w = weight.shape
        value = np.zeros((kernel_h, kernel_w, size, -(-channels // self.lanes) * self.lanes), "float32")
        value[..., :channels] = weight.transpose(2, 3, 1, 0)
        if not self.pairs:
            return value
        narrow = _convert(value, "bfloat16").reshape(kernel_h, kernel_w, size // 2, 2, -1)
        return narrow.transpose(0, 1, 2, 4, 3)

    def define(self, weight: te.Tensor) -> te.Tensor:
        """Define the packed weights."""
        channels, size, kernel_h, kernel_w = (int(dim) for dim in weight.shape)
        padded = -(-channels // self.lanes) * self.lanes

        def element(y: Any, x: Any, k: Any, c: Any, *g: Any) -> Any:
            place = 2 * k + g[0] if g else k
            conditions = [c < channels] if padded > channels else []
            return _element(weight[c, place, y, x], "bfloat16" if self.pairs else "float32", conditions)

        groups = (size // 2, padded, 2) if self.pairs else (size, padded)
        return te.compute((kernel_h, kernel_w, *groups), element, name="packed")


_STORED: dict[Number, str] = {
    "float32": "float32", "float16": "float16", "bfloat16": BF16.weight, "int8": "int8", "int16": "int16",
}  # fmt: skip


def _number_of(dot: Dot) -> Number:
    """The numbers of the weights of dot products."""
    if dot is BF16:
        return "bfloat16"
    return "int16" if dot.weight == "int16" else "int8"


def _convert(weight: Array, number: Number) -> Array:
    return weight.astype(ml_dtypes.bfloat16).view(BF16.weight) if number == "bfloat16" else weight.astype(number)


def _element(value: Any, number: Number, conditions: Sequence[Any]) -> Any:
    """A weight as an expression of type `number` where all conditions hold, and zero elsewhere."""
    element = round_bf16(value) if number == "bfloat16" else value.astype(number)
    return tirx.if_then_else(tirx.all(*conditions), element, tirx.const(0, _STORED[number])) if conditions else element


_WeightPacking = (
    WinogradPacking | WideningPacking | MatrixPacking | ConvolutionPacking | DepthwisePacking | GroupsPacking
)
_PACKINGS: dict[str, type[_WeightPacking]] = {
    packing.name: packing
    for packing in (
        WinogradPacking,
        IntegerWinogradPacking,
        NarrowWinogradPacking,
        WideningPacking,
        MatrixPacking,
        ConvolutionPacking,
        DepthwisePacking,
        GroupsPacking,
    )
}


def pack_weights(builder: relax.BlockBuilder, weight: relax.Expr, packing: _WeightPacking) -> relax.Var:
    """Emit the call that packs weights, and return the variable of its result.

    Constant weights are packed in advance, or when the library is loaded (`compiler.passes.packing`).
    """
    is_constant = isinstance(weight, tvm.ir.GenericConst)
    call = builder.call_te(
        packing.define,
        weight,
        primfunc_name_hint=f"pack_{packing.name}" if is_constant else "pack",
        primfunc_attrs={PACKING: json.dumps([packing.name, asdict(packing)])} if is_constant else None,
    )
    return builder.emit(call)


def runs_at_load(func: Any) -> bool:
    """Return whether a function packs or widens weights, which a library does once, when it is loaded."""
    return isinstance(func, tirx.PrimFunc) and PACKING in (func.attrs or {})


def packing_of(func: Any) -> Packing | None:
    """Return the packing that a function computes; None for any other function."""
    text = (func.attrs or {}).get(PACKING) if isinstance(func, tirx.PrimFunc) else None
    if text is None:
        return None
    name, fields = json.loads(str(text))
    return _PACKINGS[name](**fields)
