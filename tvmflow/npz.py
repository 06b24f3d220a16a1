"""Arrays by name in .npz files: they can be read from an untrusted source and have any name."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from tvmflow.arrays import Array


def read(path: Path) -> dict[str, Array]:
    """Return the arrays by name. Raises OSError for a file that cannot be opened, ValueError for a file without arrays.

    Nothing is unpickled: an array of Python objects raises ValueError.
    """
    with path.open("rb") as stream:
        return parse(stream)


def parse(stream: IO[bytes]) -> dict[str, Array]:
    """Return the arrays of an open file by name. Raises ValueError for a file without arrays or with Python objects."""
    try:
        archive = np.load(stream, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array without a name")
        return {name: np.asarray(archive[name]) for name in archive.files}
    except Exception as error:  # zipfile, zlib and NumPy's header reader share no base class
        raise ValueError(str(error) or type(error).__name__) from error


def part(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return the arrays whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def typical_inputs(sample: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs of the usual sizes by name, from all arrays of the file of a bundle's golden sample.

    They stand beside the golden inputs only where these have other sizes.
    """
    return part(sample, "typical:") or part(sample, "input:")


def write(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name to an uncompressed .npz file; every name is allowed, also `file`. Raises OSError."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
