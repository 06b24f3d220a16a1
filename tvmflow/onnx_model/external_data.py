"""The files beside an ONNX file in which it keeps its weights, and what to do where one is missing or damaged.

Protobuf writes no message above 2 GB. Of a model that is large, weights stay in such files while it is in memory.
"""

import hashlib
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from tvmflow.bundle import sha256_file
from tvmflow.onnx_model.file_formats import explain_format
from tvmflow.onnx_model.graph import nodes_of

if TYPE_CHECKING:
    import onnx

    from tvmflow.arrays import Array

# Bytes of an ONNX file; protobuf's limit.
LARGEST_FILE = (1 << 31) - 1
# Bytes of a model above which weights stay in their files: each of ONNX's functions copies a model that it takes.
_MOST_READ = 1 << 28
# Tensors of fewer elements may be shapes and axes, which ONNX's inference of shapes reads: they are read at once.
_FEWEST_APART = 1024
# Bytes; a weight begins at a whole page of its data file, from where ONNX Runtime maps it.
_PAGE = 4096
# The key under which a tensor in memory names the folder of its file.
_FOLDER = "basepath"
# The key under which a tensor names its file. A file without these bytes need not be read.
_LOCATION = "location"


def load(path: Path) -> "onnx.ModelProto":
    """Read an ONNX file with the weights that it keeps in files beside it.

    Large weights of a large model stay in their files: `array_of` reads them, `without_weights` makes a
    model that ONNX's own functions take, and `save` writes them anew. Raises FileNotFoundError where there is no ONNX
    file, and errors of protobuf and of ONNX, which share no base class, where it is damaged or lacks a data file.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    tensors = [tensor for tensor in _tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    folder = str(path.parent)
    if path.stat().st_size + sum(map(_size_of, tensors)) > _MOST_READ:
        reason = explain_data(path)
        if reason is not None:
            raise ValueError(reason)
        weights = {tensor.name for tensor in model.graph.initializer}
        for tensor in tensors:
            if tensor.name in weights and math.prod(tensor.dims) >= _FEWEST_APART:
                tensor.external_data.add(key=_FOLDER, value=str(path.parent.absolute()))
            else:
                onnx.external_data_helper.load_external_data_for_tensor(tensor, folder)
    else:
        for tensor in tensors:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, folder)
    return model


def array_of(tensor: "onnx.TensorProto") -> "Array":
    """Return the elements of a tensor of a model that `load` read.

    Those of a weight in a file are that file's, which nobody may change: memory has what is read of them.
    """
    import onnx

    entries, dtype = _entries(tensor), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    folder, size = entries.get(_FOLDER), math.prod(tensor.dims) * dtype.itemsize
    if folder is None or entries.get("length") != str(size):  # Numbers of four bits are not in memory as in a file.
        return onnx.numpy_helper.to_array(tensor, folder or "")
    file, offset = Path(folder) / entries[_LOCATION], int(entries.get("offset") or 0)
    return np.memmap(file, dtype, "c", offset, tuple(tensor.dims)).view(np.ndarray)


def array_inside(weights: "Mapping[str, onnx.TensorProto]", name: str) -> "Array | None":
    """Return the elements of one of the weights by name; None for one outside the model's file, and any other value."""
    weight = weights.get(name)
    return None if weight is None or weight.external_data else array_of(weight)


def without_weights(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Return a copy of a model with an input for each weight that stays in a file; a model without such, itself.

    ONNX's checker looks for data files in the current folder.
    """
    import onnx

    apart = _weights_apart(model)
    if not apart:
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    present = {value.name for value in graph.input}
    for tensor in apart:
        if tensor.name not in present:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    others = [tensor for tensor in graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    graph.ClearField("initializer")
    graph.initializer.extend(others)
    return result


def save(model: "onnx.ModelProto", path: Path) -> Path | None:
    """Write a model that `load` read to `path`; equal models give equal bytes.

    A model above protobuf's limit gets one file with its large weights beside it, whose name is its SHA-256. Returns
    the path of this file, None for a model of one file. Raises OSError.
    """
    import onnx

    apart = _weights_apart(model)
    if not apart:
        path.write_bytes(model.SerializeToString(deterministic=True))
        return None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    apart = _weights_apart(result)
    if result.ByteSize() + sum(map(_size_of, apart)) <= LARGEST_FILE:
        for tensor in apart:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, _entries(tensor)[_FOLDER])
        return save(result, path)
    digest, partial = hashlib.sha256(), path.with_name(f"{path.name}.data")
    places, end = [], 0
    with partial.open("wb") as stream:
        for tensor in apart:
            gap = bytes(-end % _PAGE)
            for data in (gap, _data_of(tensor)):
                stream.write(data)
                digest.update(data)
            places.append((end + len(gap), len(data)))
            end += len(gap) + len(data)
    for tensor, (offset, length) in zip(apart, places, strict=True):
        tensor.ClearField("external_data")
        for key, value in (("location", digest.hexdigest()), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
    path.write_bytes(result.SerializeToString(deterministic=True))
    return partial.rename(path.with_name(digest.hexdigest()))


def _weights_apart(model: "onnx.ModelProto") -> "list[onnx.TensorProto]":
    """The weights of a model in memory that are in files."""
    import onnx

    return [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]


def _data_of(tensor: "onnx.TensorProto") -> bytes:
    """The bytes of a weight that is in a file, as the file has them."""
    import onnx

    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    onnx.external_data_helper.load_external_data_for_tensor(copy, _entries(tensor)[_FOLDER])
    return copy.raw_data


def _size_of(tensor: "onnx.TensorProto") -> int:
    """The bytes of a tensor in a file."""
    import onnx

    length = _entries(tensor).get("length")
    if length is not None and length.isdecimal():
        return int(length)
    size: int = math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return size


def data_digests(path: Path) -> dict[str, str | None]:
    """Return the SHA-256 of each data file of an ONNX file, by its location; None for one that is no file beside it.

    The result is empty for a file that keeps all weights within, and for one that is no ONNX file.
    """
    locations = sorted({_entries(tensor).get(_LOCATION, "") for tensor in _tensors_apart(path)})
    files = {location: path.parent / location for location in locations}
    return {
        location: sha256_file(file) if _is_within(location) and file.is_file() else None
        for location, file in files.items()
    }


def explain_unreadable(path: Path) -> str | None:
    """Return a predicate that says why a file cannot be read as ONNX, and what to do; None where it is not known.

    It is a file of another format, or one of its data files cannot be read.
    """
    reason = explain_format(path)
    if reason is not None:
        return f"is not an ONNX file: {reason}"
    reason = explain_data(path)
    return None if reason is None else f"cannot be read: {reason}"


def explain_data(path: Path) -> str | None:
    """Return a clause on the first data file of an ONNX file that cannot be read, and what to do; None without one."""
    for tensor in _tensors_apart(path):
        entries = _entries(tensor)
        location = entries.get(_LOCATION, "")
        file = path.parent / location
        subject = f"the data file {location!r} with its weight {tensor.name!r}"
        if not _is_within(location):
            return f"{subject} is outside the model's folder; put it beside the model and save the model anew"
        if file.is_symlink():
            return f"{subject} is a link, which could lead anywhere; put the file itself beside the model"
        if not file.is_file():
            return f"{subject} is missing beside the model; put it there"
        places = [entries.get(key) or "0" for key in ("offset", "length")]
        if not all(place.isdecimal() for place in places):
            return f"{subject} has the offset {places[0]!r} and the length {places[1]!r}; save the model anew"
        end, size = sum(map(int, places)), file.stat().st_size
        if end > size:
            return f"{subject} has {size} bytes of at least {end}; copy it anew"
    return None


def _tensors_apart(path: Path) -> "list[onnx.TensorProto]":
    """The tensors that an ONNX file keeps in other files; empty for what is no ONNX file."""
    import onnx

    if not _mentions_location(path):
        return []
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception:  # protobuf's errors share no base class; reading the model for its export names the reason.
        return []
    return [tensor for tensor in _tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]


def _entries(tensor: "onnx.TensorProto") -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _is_within(location: str) -> bool:
    """Whether a location is one within the model's folder."""
    path = PurePosixPath(location)
    return not path.is_absolute() and ".." not in path.parts


def _mentions_location(path: Path) -> bool:
    with path.open("rb") as stream:
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return content.find(_LOCATION.encode()) >= 0
        except ValueError:  # an empty file
            return False


def _tensors(model: "onnx.ModelProto") -> "Iterator[onnx.TensorProto]":
    """The weights of a model and the tensors in its nodes' attributes."""
    nodes = [*nodes_of(model.graph), *(node for function in model.functions for node in function.node)]
    yield from model.graph.initializer
    for node in nodes:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            yield from attribute.g.initializer
