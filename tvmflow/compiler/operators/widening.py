"""Weights of 8 bits that a model computes with in float32.

A quantised file holds its weights as integers, and multiplies them by scales in its graph. The compiler evaluates that,
so its constants are four times as large as the file's. Where they are still integers times scales, or are of at most
256 values, a library holds the integers, and widens them once when it is loaded (`compiler.passes.packing`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import te

Array = np.ndarray[Any, Any]

# The largest integer of a symmetrically quantised weight, and the most values of 8 bits.
_LARGEST, _VALUES = 127, 256
# So many numbers, from all over a tensor, tell that most weights are not those of a quantised file.
_SAMPLE = 4096


@dataclass(frozen=True)
class NarrowWeight:
    """A float32 tensor as `numbers` of 8 bits and a float32 `table`.

    The tensor is the numbers times the table, whose dimensions are 1 but for those along which the scales differ; with
    a table of one dimension, it is the table at the numbers.
    """

    numbers: Array
    table: Array

    @property
    def nbytes(self) -> int:
        """Return the size of both in bytes."""
        return int(self.numbers.nbytes + self.table.nbytes)


def widen(numbers: te.Tensor, table: te.Tensor) -> te.Tensor:
    """Define the float32 tensor of a `NarrowWeight` as a tensor expression."""

    def element(*place: Any) -> Any:
        if len(table.shape) == 1:
            return table[numbers[place].astype("int32")]
        scale = table[tuple(0 if int(size) == 1 else index for size, index in zip(table.shape, place, strict=True))]
        return numbers[place].astype("float32") * scale

    return te.compute(numbers.shape, element, name="widened")


def narrow(weight: Array) -> NarrowWeight | None:
    """Return a float32 tensor of two dimensions or more in 8 bits, None where that does not give the same numbers."""
    if weight.dtype != np.float32 or weight.ndim < 2:
        return None
    if _has_few_values(weight):
        table, places = np.unique(weight, return_inverse=True)
        if table.size <= _VALUES and np.isfinite(table).all():
            return NarrowWeight(places.reshape(weight.shape).astype(np.uint8), table)
    first, last = 0, weight.ndim - 1
    for axes in ((first,), (last,), (first, last)):
        form = _with_scales(weight, axes)
        if form is not None:
            return form
    return None


def _has_few_values(weight: Array) -> bool:
    """Whether a sample from all over a tensor has no more values than 8 bits tell apart, and all of them finite."""
    sample = weight.flat[:: max(1, weight.size // _SAMPLE)]
    return bool(np.isfinite(sample).all()) and np.unique(sample).size <= _VALUES


def _with_scales(weight: Array, axes: Sequence[int]) -> NarrowWeight | None:
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
    return NarrowWeight(numbers.astype(np.int8), table)
