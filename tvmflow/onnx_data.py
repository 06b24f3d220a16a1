"""The files beside an ONNX file in which it keeps its weights, and what to do where one is missing or damaged."""

import mmap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tvmflow.bundle import sha256_file
from tvmflow.onnx_graph import nodes_of

if TYPE_CHECKING:
    import onnx

# The key under which a tensor names its file. A file without these bytes need not be read.
_LOCATION = "location"


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
        end, size = int(entries.get("offset", 0)) + int(entries.get("length", 0)), file.stat().st_size
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
