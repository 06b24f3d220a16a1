"""Weights of 4, 8 or 16 bits that a model computes with in float32.

A quantised file holds its weights as integers, and multiplies them by scales in its graph. A file in float16 holds them
in two bytes. The compiler evaluates both, so its constants are larger than the file's. Where they are still integers
times scales, are of at most 256 values, or are numbers of float16 or bfloat16, a library holds them in the file's size,
and widens them once when it is loaded (`compiler.passes.packing`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
from tvm import te, tirx

from tvmflow.arrays import Array

# The largest integer of a symmetrically quantised weight, and the most values of 8 bits.
_LARGEST, _VALUES = 127, 256
# So many numbers, from all over a tensor, tell that most weights are not those of a quantised file.
_SAMPLE = 4096
# How many numbers of weights have a scale in common in files of a few bits, and the bits of each.
_BLOCKS, _BITS = (256, 128, 64, 32, 16), (4, 8)


@dataclass(frozen=True)
class NarrowWeight(ABC):
    """A float32 tensor in fewer bytes: fields that are arrays hold it."""

    @property
    def parts(self) -> tuple[Array, ...]:
        """Return the arrays that hold the tensor."""
        values = (getattr(self, item.name) for item in fields(self))
        return tuple(value for value in values if isinstance(value, np.ndarray))

    @abstractmethod
    def widen(self, *parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the parts."""


@dataclass(frozen=True)
class ByteWeight(NarrowWeight):
    """A float32 tensor as `numbers` of 8 bits and a float32 `table`.

    The tensor is the numbers times the table, whose dimensions are 1 but for those along which the scales differ; with
    a table of one dimension, it is the table at the numbers.
    """

    numbers: Array
    table: Array

    def widen(self, *parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the numbers and the table."""
        numbers, table = parts

        def element(*place: Any) -> Any:
            if len(table.shape) == 1:
                return table[numbers[place].astype("int32")]
            scale = table[tuple(0 if int(size) == 1 else index for size, index in zip(table.shape, place, strict=True))]
            return numbers[place].astype("float32") * scale

        return te.compute(numbers.shape, element, name="widened")


@dataclass(frozen=True)
class BlockWeight(NarrowWeight):
    """A float32 tensor of blocks along one axis, each of integers of 4 or 8 bits, plus an offset, times a scale.

    `numbers` are uint8. A byte has one number of 8 bits, or two neighbours of 4 bits along the axis, the first one in
    the lower bits. `scales` (float32) have one number for each block, and so have `offsets` (int16) where these differ.
    Else there is one offset.
    """

    numbers: Array
    offsets: Array
    scales: Array
    axis: int
    bits: int

    def floats(self) -> Array:
        """Return the float32 tensor."""
        numbers = np.moveaxis(self.numbers, self.axis, -1)
        if self.bits < 8:
            numbers = np.stack([numbers & 15, numbers >> self.bits], -1).reshape(*numbers.shape[:-1], -1)
        scales = np.moveaxis(self.scales, self.axis, -1)
        block = numbers.shape[-1] // scales.shape[-1]
        offsets = np.broadcast_to(np.moveaxis(self.offsets, self.axis, -1), scales.shape)
        offsets, scales = (np.repeat(part, block, -1) for part in (offsets, scales))
        return np.ascontiguousarray(np.moveaxis((numbers + offsets).astype("float32") * scales, -1, self.axis))

    def widen(self, *parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the numbers, the offsets and the scales."""
        numbers, offsets, scales = parts
        axis, per_byte = self.axis, 8 // self.bits
        size = per_byte * int(numbers.shape[axis])
        block = size // int(scales.shape[axis])

        def element(*place: Any) -> Any:
            def at(index: Any) -> tuple[Any, ...]:
                return (*place[:axis], index, *place[axis + 1 :])

            number = numbers[at(place[axis] // per_byte)]
            if per_byte > 1:
                shift = (place[axis] % per_byte * self.bits).astype("uint8")
                number = (number >> shift) & tirx.const((1 << self.bits) - 1, "uint8")
            of_block = at(place[axis] // block)
            offset = offsets[tuple(0 for _ in place) if self.offsets.size == 1 else of_block]
            return (number.astype("float32") + offset.astype("float32")) * scales[of_block]

        return te.compute([*numbers.shape[:axis], size, *numbers.shape[axis + 1 :]], element, name="widened")


@dataclass(frozen=True)
class _BitsWeight(NarrowWeight):
    """A float32 tensor of numbers that a type of 16 bits has, as their `bits` in uint16."""

    bits: Array


class HalfWeight(_BitsWeight):
    """Finite numbers that float16 has."""

    def widen(self, *parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the bits, by operations that every processor has.

        The exponent of a float32 counts from 127, that of a float16 from 15.
        """
        (bits,) = parts

        def element(*place: Any) -> Any:
            word = bits[place].astype("uint32")
            small = tirx.reinterpret("float32", (word & tirx.const(0x7FFF, "uint32")) << tirx.const(13, "uint32"))
            magnitude = tirx.reinterpret("uint32", small * tirx.const(2.0**112, "float32"))
            sign = (word & tirx.const(0x8000, "uint32")) << tirx.const(16, "uint32")
            return tirx.reinterpret("float32", magnitude | sign)

        return te.compute(bits.shape, element, name="widened")


class BrainWeight(_BitsWeight):
    """Finite numbers that bfloat16 has: the bits are the upper half of each float32."""

    def widen(self, *parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the bits."""
        (bits,) = parts
        return te.compute(bits.shape, lambda *place: float_of_half(bits[place]), name="widened")


@dataclass(frozen=True)
class TiedWeight(NarrowWeight):
    """The transpose `[K, N]` of a `table` `[N, K]` that the library holds anyway, as where a model ties its weights.

    The numbers have any type. With `widens`, the table has 16 bits for each float32, as `float_of_half` reads them.
    """

    table: Array
    widens: bool = False

    def widen(self, *parts: te.Tensor) -> te.Tensor:
        """Define the transpose as a tensor expression of the table."""
        (table,) = parts

        def element(k: Any, n: Any) -> Any:
            return float_of_half(table[n, k]) if self.widens else table[n, k]

        return te.compute((table.shape[1], table.shape[0]), element, name="widened")


def tie(weight: Array, table: Array) -> TiedWeight | None:
    """Return a weight as the transpose of a `table` of two dimensions; None where it is not that."""
    widens = weight.dtype == np.float32 and table.dtype in (np.float16, np.uint16)
    if weight.shape != table.shape[::-1] or not (widens or weight.dtype == table.dtype):
        return None
    # The first line tells most other weights from the table.
    for count in (1, len(table)):
        lines = table[:count]
        if widens:
            lines = lines.astype("float32") if lines.dtype == np.float16 else _floats_of_bits(lines)
        if not np.array_equal(weight.T[:count], lines):
            return None
    return TiedWeight(table, widens)


def _floats_of_bits(bits: Array) -> Array:
    """The float32 numbers whose upper halves these bits are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(weight: Array) -> NarrowWeight | None:
    """Return a float32 tensor in fewer bytes, None where that does not give the same numbers.

    Forms of 4 and 8 bits are for tensors of two dimensions or more.
    """
    if weight.dtype != np.float32:
        return None
    return ((_in_bytes(weight) or _in_blocks(weight)) if weight.ndim > 1 else None) or in_halves(weight)


def _in_bytes(weight: Array) -> ByteWeight | None:
    if _has_few_values(weight):
        table, places = np.unique(weight, return_inverse=True)
        if table.size <= _VALUES and np.isfinite(table).all():
            return ByteWeight(places.reshape(weight.shape).astype(np.uint8), table)
    first, last = 0, weight.ndim - 1
    for axes in ((first,), (last,), (first, last)):
        form = _with_scales(weight, axes)
        if form is not None:
            return form
    return None


def _in_blocks(weight: Array) -> BlockWeight | None:
    return next(filter(None, (in_blocks(weight, axis) for axis in range(weight.ndim))), None)


def in_blocks(weight: Array, axis: int) -> BlockWeight | None:
    """Return a float32 tensor as integers of 4 or 8 bits in blocks along an axis; None where it is not of such numbers.

    The integers have as few bits, and the blocks are as large, as possible.
    """
    lines = np.moveaxis(weight, axis, -1)
    first = lines[(0,) * (weight.ndim - 1)]
    # A few numbers tell of most weights that they are not so, and one line of most sizes of blocks.
    for bits in _BITS:
        if first.size < min(_BLOCKS) or not _are_multiples(first[: min(_BLOCKS)], bits):
            continue
        for block in (block for block in _BLOCKS if first.size % block == 0):
            if _quantise(first.reshape(-1, block), bits) is None:
                continue
            form = _quantise_in_parts(lines.reshape(-1, block), bits)
            if form is not None:
                numbers, offsets, scales = form
                numbers, scales = (array.reshape(*lines.shape[:-1], -1) for array in (numbers, scales))
                offsets = offsets.reshape(scales.shape if offsets.size > 1 else (1,) * weight.ndim)
                if bits < 8:
                    numbers = numbers[..., ::2] | numbers[..., 1::2] << bits
                numbers, offsets, scales = (
                    np.ascontiguousarray(np.moveaxis(part, -1, axis)) for part in (numbers, offsets, scales)
                )
                return BlockWeight(numbers, offsets, scales, axis, bits)
    return None


def _are_multiples(numbers: Array, bits: int) -> bool:
    """Whether a few numbers are integers of few levels times a scale."""
    scales = np.concatenate(_roundings(np.abs(numbers).max() / np.arange(1, 1 << bits, dtype="float32")))
    with np.errstate(divide="ignore", invalid="ignore"):
        multiples = np.rint(numbers / scales[:, None])
        return bool((multiples * scales[:, None] == numbers).all(axis=1).any()) or not numbers.any()


def _quantise_in_parts(blocks: Array, bits: int) -> tuple[Array, Array, Array] | None:
    """The same as `_quantise`, for many blocks, in parts that fit a cache.

    The offsets are one number where that is enough.
    """
    forms = []
    for first in range(0, len(blocks), _SAMPLE):
        form = _quantise(blocks[first : first + _SAMPLE], bits)
        if form is None:
            return None
        forms.append(form)
    numbers, offsets, scales = (np.concatenate(arrays) for arrays in zip(*forms, strict=True))
    least = offsets.min()
    if (offsets + numbers.max(axis=1) - least).max() < 1 << bits:
        numbers += (offsets - least).astype("uint8")[:, None]
        offsets = least.reshape(1)
    return numbers, offsets, scales


def _quantise(blocks: Array, bits: int) -> tuple[Array, Array, Array] | None:
    """The numbers, offsets and scales of blocks [count, size]; None where any of them is not of so few levels."""
    if not np.isfinite(blocks).all():
        return None
    levels, sizes = 1 << bits, np.abs(blocks)
    count, largest = len(blocks), sizes.max(axis=1)
    numbers, offsets, scales = np.zeros(blocks.shape, "uint8"), np.zeros(count, "int16"), np.ones(count, "float32")
    ratio = largest / np.where(sizes > 0.0, sizes, np.float32(np.inf)).min(axis=1)
    is_left = largest > 0.0
    # The largest number is an integer, its level, times the scale: most often a power of two, or one less. Else the
    # smallest one, which is a small integer times the scale, tells the level.
    often = (np.full(count, levels // 2 - below, "float32") for below in range(2))
    for level in chain(often, (np.rint(ratio * np.float32(smallest)) for smallest in range(1, levels))):
        with np.errstate(divide="ignore", invalid="ignore"):
            candidates = _roundings(largest / level)
        for candidate in candidates:
            left = np.flatnonzero(is_left & (level < levels))
            if left.size:
                scale, part = candidate[left], blocks[left]
                multiples = np.rint(part / scale[:, None])
                lowest = multiples.min(axis=1)
                is_exact = (multiples * scale[:, None] == part).all(axis=1) & (multiples.max(axis=1) - lowest < levels)
                places = left[is_exact]
                numbers[places] = (multiples - lowest[:, None])[is_exact].astype("uint8")
                offsets[places] = lowest[is_exact].astype("int16")
                scales[places] = scale[is_exact]
                is_left[places] = False
        if not (is_left & (ratio < levels)).any():
            break
    return None if is_left.any() else (numbers, offsets, scales)


def _roundings(scales: Array) -> tuple[Array, Array, Array]:
    """Scales that follow from the largest numbers, and their neighbours: these numbers were rounded when scaled."""
    return scales, np.nextafter(scales, np.float32(0)), np.nextafter(scales, np.float32(np.inf))


def in_halves(weight: Array) -> HalfWeight | BrainWeight | None:
    """Return a float32 tensor as numbers of float16 or bfloat16; None where it has others."""
    for dtype, kind in ((np.float16, HalfWeight), (ml_dtypes.bfloat16, BrainWeight)):
        # A sample tells of most weights that they are not such numbers.
        for part in (_sample(weight), weight):
            with np.errstate(over="ignore"):
                half = part.astype(dtype)
            if not np.isfinite(part).all() or not np.array_equal(half.astype(np.float32), part):
                break
        else:
            return kind(half.view(np.uint16))
    return None


def halves_of(weight: Array, converts: bool) -> Array | None:
    """Return a float32 tensor as an array of 16 bits that `float_of_half` reads; None where there is none.

    Numbers of bfloat16 are given as their bits (uint16), those of float16 as float16. The latter are there only where
    the processor `converts` them.
    """
    form = in_halves(weight)
    if isinstance(form, HalfWeight):
        return form.bits.view(np.float16) if converts else None
    return None if form is None else form.bits


def float_of_half(value: Any) -> Any:
    """Return the float32 of a number of float16 or float32, or of the bits of a bfloat16 as uint16."""
    if value.dtype != "uint16":
        return value.astype("float32")
    return tirx.reinterpret("float32", value.astype("uint32") << tirx.const(16, "uint32"))


def _sample(weight: Array) -> Array:
    """Numbers from all over a tensor."""
    return weight.flat[:: max(1, weight.size // _SAMPLE)]


def _has_few_values(weight: Array) -> bool:
    """Whether a sample from all over a tensor has no more values than 8 bits tell apart, and all of them finite."""
    sample = _sample(weight)
    return bool(np.isfinite(sample).all()) and np.unique(sample).size <= _VALUES


def _with_scales(weight: Array, axes: Sequence[int]) -> ByteWeight | None:
    """A tensor as integers times scales that differ along `axes`."""
    others = tuple(axis for axis in range(weight.ndim) if axis not in axes)
    # Those of one scale tell first.
    first = weight[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(weight.ndim))]
    if not others or not _has_few_values(first):
        return None
    for part in (first, weight):
        scales = np.abs(part).max(axis=others, keepdims=True) / np.float32(_LARGEST)
        scales[scales == 0.0] = 1.0
        if not np.isfinite(scales).all():
            return None
        numbers, table, exact = np.rint(part / scales), scales, np.zeros_like(scales, dtype=bool)
        for candidate in _roundings(scales):
            is_exact = (numbers * candidate == part).all(axis=others, keepdims=True)
            table = np.where(is_exact & ~exact, candidate, table)
            exact |= is_exact
        if not exact.all():
            return None
    return ByteWeight(numbers.astype(np.int8), table)
