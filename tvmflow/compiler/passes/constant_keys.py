"""Keys of constants by their content."""

import numpy as np
import tvm

from tvmflow.arrays import Array
from tvmflow.compiler.operators.common import numbers_of

# So many numbers of a constant tell it from most others.
_SAMPLE = 64


class ConstantKeys:
    """Gives constants keys: those of the same type, shape and bits have the same key, in the order of their first use.

    It compares whole constants only where a sample of their numbers is equal, and reads none twice that it has seen.
    """

    def __init__(self) -> None:
        self._alike: dict[tuple[str, tuple[int, ...], bytes], list[tuple[int, Array]]] = {}
        self._count = 0

    def __call__(self, constant: tvm.ir.GenericConst) -> int:
        """Return the key of a constant."""
        value = numbers_of(constant)
        numbers = np.ascontiguousarray(value).reshape(-1)
        sample = numbers[:: max(1, numbers.size // _SAMPLE)].tobytes()
        alike = self._alike.setdefault((value.dtype.name, value.shape, sample), [])
        own = numbers.view(np.uint8)
        for key, other in alike:
            if own.ctypes.data == other.ctypes.data or np.array_equal(own, other):
                return key
        alike.append((self._count, own))
        self._count += 1
        return self._count - 1
