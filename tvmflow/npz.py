"""Arrays by name in .npz files: read from anywhere safely, written under any name."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def read(path: Path) -> dict[str, Array]:
    """The arrays of a file. Raises OSError when it cannot be opened, ValueError when it is no .npz of plain arrays."""
    with path.open("rb") as stream:
        try:
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ValueError("it holds one array without a name")
            return {name: np.asarray(loaded[name]) for name in loaded.files}
        except Exception as error:  # zipfile, zlib and NumPy's header reader share no base class
            raise ValueError(str(error) or type(error).__name__) from error


def write(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as `numpy.savez` does, also under the names of its own parameters."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
