"""The types of NumPy's arrays, one array and several by name, and their order in memory."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NamedArrays = dict[str, Array]

# The rows and columns of a tile that is copied at once.
_TILE = 256


def in_order(array: Array) -> Array:
    """Return an array whose last dimension is contiguous in memory, as C has it: itself, or a copy.

    A matrix is copied tile by tile. NumPy would copy a large transpose number by number and read memory for each.
    """
    if array.ndim != 2 or array.flags.c_contiguous:
        return np.asarray(array, order="C")
    result = np.empty(array.shape, array.dtype)
    for row in range(0, array.shape[0], _TILE):
        for column in range(0, array.shape[1], _TILE):
            tile = slice(row, row + _TILE), slice(column, column + _TILE)
            result[tile] = array[tile]
    return result
