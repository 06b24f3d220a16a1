"""Arrays in memory that is aligned as TVM aligns its own."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tvmflow.arrays import Array


# Bytes; TVM's kAllocAlignment.
ALIGNMENT = 64


def find_address(array: "Array") -> int:
    """Return the address of an array's first byte."""
    # Half the time of array.ctypes.data, which counts in a call of a few microseconds.
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def copy_aligned(array: "Array") -> "Array":
    """Return a copy whose memory is aligned as TVM aligns its own."""
    copy = make_aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def make_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> "Array":
    """Return an array without content whose memory is aligned as TVM aligns its own."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -find_address(buffer) % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
