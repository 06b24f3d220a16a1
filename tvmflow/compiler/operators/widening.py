"""Weights of 4, 8 or 16 bits that a model computes with in float32.

A quantised file holds its weights as integers, and multiplies them by scales in its graph. A file in float16 holds them
in two bytes. The compiler evaluates both, so its constants are larger than the file's. Where they are still integers
times scales, are of at most 256 values, or are numbers of float16 or bfloat16, a library holds them in the file's size,
and widens them once when it is loaded (`compiler.passes.packing`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np
from tvm import te, tirx

Array = np.ndarray[Any, Any]

# The largest integer of a symmetrically quantised weight, and the most values of 8 bits.
_LARGEST, _VALUES = 127, 256
# So many numbers, from all over a tensor, tell that most weights are not those of a quantised file.
_SAMPLE = 4096
# The numbers of weights that have a scale in common in files of 4 bits, and the most values of 4 bits.
_BLOCKS, _LEVELS = (256, 128, 64, 32, 16), 16


@dataclass(frozen=True)
class NarrowWeight(ABC):
    """A float32 tensor in fewer bytes: the fields are the arrays that hold it."""

    @property
    def parts(self) -> tuple[Array, ...]:
        """Return the arrays that hold the tensor."""
        return tuple(getattr(self, item.name) for item in fields(self))

    @staticmethod
    @abstractmethod
    def widen(*parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the parts."""


@dataclass(frozen=True)
class ByteWeight(NarrowWeight):
    """A float32 tensor as `numbers` of 8 bits and a float32 `table`.

    The tensor is the numbers times the table, whose dimensions are 1 but for those along which the scales differ; with
    a table of one dimension, it is the table at the numbers.
    """

    numbers: Array
    table: Array

    @staticmethod
    def widen(*parts: te.Tensor) -> te.Tensor:
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
    """A float32 tensor of blocks along one axis, each of integers of 4 bits, plus an offset, times a scale.

    `numbers` are uint8 with two neighbours along the axis, the first one in the lower bits. `offsets` (int8) and
    `scales` (float32) have one number for each block.
    """

    numbers: Array
    offsets: Array
    scales: Array

    @staticmethod
    def widen(*parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the numbers, the offsets and the scales."""
        numbers, offsets, scales = parts
        bytes_, blocks = (list(map(int, part.shape)) for part in (numbers, scales))
        # A block has several bytes, so that its axis alone differs.
        axis = next(place for place, count in enumerate(bytes_) if count != blocks[place])
        size = 2 * bytes_[axis]
        block = size // blocks[axis]

        def element(*place: Any) -> Any:
            def at(index: Any) -> tuple[Any, ...]:
                return (*place[:axis], index, *place[axis + 1 :])

            shift = (place[axis] % 2 * 4).astype("uint8")
            number = (numbers[at(place[axis] // 2)] >> shift) & tirx.const(_LEVELS - 1, "uint8")
            of_block = at(place[axis] // block)
            return (number.astype("float32") + offsets[of_block].astype("float32")) * scales[of_block]

        return te.compute([*numbers.shape[:axis], size, *numbers.shape[axis + 1 :]], element, name="widened")


@dataclass(frozen=True)
class _BitsWeight(NarrowWeight):
    """A float32 tensor of numbers that a type of 16 bits has, as their `bits` in uint16."""

    bits: Array


class HalfWeight(_BitsWeight):
    """Finite numbers that float16 has."""

    @staticmethod
    def widen(*parts: te.Tensor) -> te.Tensor:
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

    @staticmethod
    def widen(*parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the bits."""
        (bits,) = parts

        def element(*place: Any) -> Any:
            return tirx.reinterpret("float32", bits[place].astype("uint32") << tirx.const(16, "uint32"))

        return te.compute(bits.shape, element, name="widened")


def narrow(weight: Array) -> NarrowWeight | None:
    """Return a float32 tensor in fewer bytes, None where that does not give the same numbers.

    Forms of 4 and 8 bits are for tensors of two dimensions or more.
    """
    if weight.dtype != np.float32:
        return None
    return ((_in_bytes(weight) or _in_blocks(weight)) if weight.ndim > 1 else None) or _in_halves(weight)


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
    """A tensor in 4 bits; the blocks are as large as possible."""
    for axis in range(weight.ndim):
        lines = np.moveaxis(weight, axis, -1)
        first = lines[(0,) * (weight.ndim - 1)]
        # A few numbers tell of most weights that they are not so, and one line of most sizes of blocks.
        sizes = [block for block in _BLOCKS if first.size % block == 0] if _are_multiples(first[: min(_BLOCKS)]) else []
        for block in sizes:
            form = _quantise(lines.reshape(-1, block)) if _quantise(first.reshape(-1, block)) is not None else None
            if form is not None:
                numbers, offsets, scales = form
                pairs = numbers.reshape(*lines.shape[:-1], -1, 2)
                packed = pairs[..., 0] | pairs[..., 1] << 4
                of_blocks = (array.reshape(*lines.shape[:-1], -1) for array in (offsets, scales))
                return BlockWeight(*(np.ascontiguousarray(np.moveaxis(one, -1, axis)) for one in (packed, *of_blocks)))
    return None


def _are_multiples(numbers: Array) -> bool:
    """Whether a few numbers are integers of few levels times a scale."""
    scales = np.concatenate(_roundings(np.abs(numbers).max() / np.arange(1, _LEVELS, dtype="float32")))
    with np.errstate(divide="ignore", invalid="ignore"):
        multiples = np.rint(numbers / scales[:, None])
        return bool((multiples * scales[:, None] == numbers).all(axis=1).any()) or not numbers.any()


def _quantise(blocks: Array) -> tuple[Array, Array, Array] | None:
    """The numbers, offsets and scales of blocks [count, size]; None where any of them is not of so few levels."""
    if not np.isfinite(blocks).all():
        return None
    count, largest = len(blocks), np.abs(blocks).max(axis=1)
    numbers, offsets, scales = np.zeros(blocks.shape, "uint8"), np.zeros(count, "int8"), np.ones(count, "float32")
    left = np.flatnonzero(largest)
    # The largest number is an integer times the scale, most often a power of two.
    for level in sorted(range(1, _LEVELS), key=lambda level: (level != _LEVELS // 2, -level)):
        for scale in _roundings(largest / np.float32(level)):
            if not left.size:
                return numbers, offsets, scales
            candidate, part = scale[left, None], blocks[left]
            with np.errstate(divide="ignore", invalid="ignore"):
                multiples = np.rint(part / candidate)
            lowest = multiples.min(axis=1)
            is_exact = (multiples * candidate == part).all(axis=1) & (multiples.max(axis=1) - lowest < _LEVELS)
            places = left[is_exact]
            numbers[places] = (multiples - lowest[:, None])[is_exact].astype("uint8")
            offsets[places] = lowest[is_exact].astype("int8")
            scales[places] = candidate[is_exact, 0]
            left = left[~is_exact]
    return None if left.size else (numbers, offsets, scales)


def _roundings(scales: Array) -> tuple[Array, Array, Array]:
    """Scales that follow from the largest numbers, and their neighbours: these numbers were rounded when scaled."""
    return scales, np.nextafter(scales, np.float32(0)), np.nextafter(scales, np.float32(np.inf))


def _in_halves(weight: Array) -> HalfWeight | BrainWeight | None:
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
