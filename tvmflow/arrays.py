"""The types of NumPy's arrays, one array and several by name."""

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
NamedArrays = dict[str, Array]
