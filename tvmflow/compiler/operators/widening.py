"""Weights of 8 or 16 bits that a model computes with in float32.

A quantised file holds its weights as integers, and multiplies them by scales in its graph. A file in float16 holds them
in two bytes. The compiler evaluates both, so its constants are larger than the file's. Where they are still integers
times scales, are of at most 256 values, or are numbers of float16 or bfloat16, a library holds them in the file's size,
and widens them once when it is loaded (`compiler.passes.packing`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from tvm import te, tirx

Array = np.ndarray[Any, Any]

# The largest integer of a symmetrically quantised weight, and the most values of 8 bits.
_LARGEST, _VALUES = 127, 256
# So many numbers, from all over a tensor, tell that most weights are not those of a quantised file.
_SAMPLE = 4096


class NarrowWeight(Protocol):
    """A float32 tensor in fewer bytes."""

    @property
    def parts(self) -> tuple[Array, ...]:
        """Return the arrays that hold the tensor, the first one of its shape."""

    @staticmethod
    def widen(*parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the parts."""


@dataclass(frozen=True)
class ByteWeight:
    """A float32 tensor as `numbers` of 8 bits and a float32 `table`.

    The tensor is the numbers times the table, whose dimensions are 1 but for those along which the scales differ; with
    a table of one dimension, it is the table at the numbers.
    """

    numbers: Array
    table: Array

    @property
    def parts(self) -> tuple[Array, ...]:
        """Return the numbers and the table."""
        return self.numbers, self.table

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
class HalfWeight:
    """A float32 tensor of finite numbers that float16 has, as their `bits` in uint16."""

    bits: Array

    @property
    def parts(self) -> tuple[Array, ...]:
        """Return the bits."""
        return (self.bits,)

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


@dataclass(frozen=True)
class BrainWeight:
    """A float32 tensor of numbers that bfloat16 has, as their `bits` in uint16: the upper half of each float32."""

    bits: Array

    @property
    def parts(self) -> tuple[Array, ...]:
        """Return the bits."""
        return (self.bits,)

    @staticmethod
    def widen(*parts: te.Tensor) -> te.Tensor:
        """Define the float32 tensor as a tensor expression of the bits."""
        (bits,) = parts

        def element(*place: Any) -> Any:
            return tirx.reinterpret("float32", bits[place].astype("uint32") << tirx.const(16, "uint32"))

        return te.compute(bits.shape, element, name="widened")


def narrow(weight: Array) -> NarrowWeight | None:
    """Return a float32 tensor in fewer bytes, None where that does not give the same numbers.

    8 bits are for tensors of two dimensions or more.
    """
    if weight.dtype != np.float32:
        return None
    return (_in_bytes(weight) if weight.ndim > 1 else None) or _in_halves(weight)


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
        # The largest number was rounded when it was scaled.
        for candidate in (scales, np.nextafter(scales, np.float32(0)), np.nextafter(scales, np.float32(np.inf))):
            is_exact = (numbers * candidate == part).all(axis=others, keepdims=True)
            table = np.where(is_exact & ~exact, candidate, table)
            exact |= is_exact
        if not exact.all():
            return None
    return ByteWeight(numbers.astype(np.int8), table)
