"""Arrays by name in .npz files: they can be read from an untrusted source and have any name."""

import io
import math
import mmap
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from tvmflow.arrays import Array

# The bytes of a zip file's header before a member, without its name, and where the lengths of that name and of what
# follows it are.
_HEADER, _LENGTHS = 30, 26
_LARGEST_ARRAY_HEADER = 1 << 16
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


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


def view(stream: IO[bytes]) -> dict[str, Array]:
    """Return the arrays of an open uncompressed file by name, where they lie in it: memory has what is read of them.

    Nothing compares them with the file's check sums. Raises ValueError for another file.
    """
    try:
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
        with zipfile.ZipFile(stream) as archive:
            return {info.filename.removesuffix(".npy"): _view_of(content, info) for info in archive.infolist()}
    except Exception as error:  # zipfile, struct and NumPy's header reader share no base class
        raise ValueError(str(error) or type(error).__name__) from error


def _view_of(content: memoryview, info: zipfile.ZipInfo) -> Array:
    """The array of a member of a file with this content. Raises ValueError for one that is compressed, or no array."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    name, extra = struct.unpack_from("<HH", content, info.header_offset + _LENGTHS)
    start = info.header_offset + _HEADER + name + extra
    member = content[start : start + info.file_size]
    reader = io.BytesIO(member[:_LARGEST_ARRAY_HEADER])
    read_header = _HEADERS[np.lib.format.read_magic(reader)]
    shape, is_fortran, dtype = read_header(reader)
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds Python objects")
    array = np.frombuffer(member, dtype, math.prod(shape), reader.tell())
    return array.reshape(shape, order="F" if is_fortran else "C")


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
