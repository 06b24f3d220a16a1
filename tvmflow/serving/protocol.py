"""The Open Inference Protocol, version 2, over REST: requests as arrays, and arrays as responses.

A tensor is in the JSON, or follows it as raw bytes (the protocol's binary tensor data extension).
https://github.com/kserve/open-inference-protocol
"""

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmflow.bundle import Manifest, TensorSpec
from tvmflow.errors import InputError
from tvmflow.runtime import label_places

if TYPE_CHECKING:
    from tvmflow.arrays import Array


HEADER_LENGTH = "inference-header-content-length"
# The protocol's name of each of NumPy's dtypes.
DATATYPES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
# The protocol's name of strings.
STRINGS = "BYTES"
_NUMPY = {datatype: np.dtype(name) for name, datatype in DATATYPES.items()}
# For each kind of dtype, the types of JSON's values that it holds without loss.
_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
# What NumPy's arrays have at most: dimensions, and elements along one.
_MOST_DIMENSIONS = 64
_LARGEST_SIZE = 2**63 - 1


@dataclass(frozen=True)
class OutputRequest:
    """An output that a request asks for, and whether its values follow the JSON of the response as bytes."""

    name: str
    is_binary: bool


@dataclass(frozen=True)
class InferRequest:
    """An inference request: the id that its response repeats, the inputs by name, and the outputs to return."""

    id: str | None
    inputs: "dict[str, Array]"
    outputs: tuple[OutputRequest, ...]


@dataclass(frozen=True)
class InferResponse:
    """The body and the headers of a response."""

    body: bytes
    headers: dict[str, str]


def describe(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    """Return inputs or outputs in the form of the Open Inference Protocol's model metadata.

    Each has `name`, `datatype` (such as FP32) and `shape`, where -1 stands for a symbolic dimension.
    """
    return [
        {
            "name": spec.name,
            "datatype": DATATYPES.get(spec.dtype, spec.dtype.upper()),
            "shape": [size if isinstance(size, int) else -1 for size in spec.shape],
        }
        for spec in specs
    ]


def parse(body: bytes, header_length: str | None, manifest: Manifest) -> InferRequest:
    """Parse the body of a request for the model of a manifest.

    `header_length` is the value of the header HEADER_LENGTH: the number of bytes of JSON, None for a body without
    binary data. Raises InputError for a header or a body that breaks the protocol, for an input or an output that the
    model does not have, and for strings that it does not take. Whether the arrays fit the inputs is not checked.
    """
    length = len(body) if header_length is None else header_size(header_length)
    if length > len(body):
        raise InputError(
            f"{HEADER_LENGTH} is {header_length}, expected the length in bytes of the JSON, at most {len(body)}"
        )
    try:
        document = json.loads(body[:length])
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not JSON ({error})") from error
    document = _mapping(document, "the request")
    identity = document.get("id")
    if not isinstance(identity, str | None):
        raise InputError("'id' is not a string")
    inputs: dict[str, Array] = {}
    rest = memoryview(body)[length:]
    for entry in _list(document.get("inputs"), "'inputs'"):
        name, array, rest = read_tensor(_mapping(entry, "an input"), rest, manifest)
        if name in inputs:
            raise InputError(f"input {name!r} is given twice")
        inputs[name] = array
    if rest:
        raise InputError(f"{len(rest)} bytes follow that no input's 'binary_data_size' describes")
    return InferRequest(identity, inputs, _requested_outputs(document, manifest))


def takes_strings(manifest: Manifest) -> bool:
    """Whether an input of the model may be sent as strings."""
    return any(spec.name in manifest.labels for spec in manifest.inputs)


def header_size(header_length: str) -> int:
    """Parse the value of the header HEADER_LENGTH, a number of bytes. Raises InputError for any other text."""
    # No body's length has more digits, and Python refuses to read numbers with thousands of digits.
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 20):
        raise InputError(f"{HEADER_LENGTH} is {header_length!r}, expected the length in bytes of the JSON")
    return int(header_length)


def render(request: InferRequest, name: str, version: str, results: "Mapping[str, Array]") -> InferResponse:
    """Render the response to a request: `results` are the outputs by name, `name` and `version` the model's.

    Raises InputError for NaN or infinity in an output that the request wants as JSON.
    """
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for output in request.outputs:
        array = results[output.name]
        entry = {"name": output.name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)}
        if output.is_binary:
            binary.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            outputs.append({**entry, "parameters": {"binary_data_size": len(binary[-1])}})
        else:
            outputs.append({**entry, "data": array.ravel().tolist()})
    document = {"model_name": name, "model_version": version, "outputs": outputs}
    if request.id is not None:
        document["id"] = request.id
    try:
        head = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise InputError("an output holds NaN or infinity, which JSON cannot carry: ask for binary_data") from error
    if not binary:
        return InferResponse(head, {"content-type": "application/json"})
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return InferResponse(b"".join([head, *binary]), headers)


def read_tensor(entry: Mapping[str, Any], rest: memoryview, manifest: Manifest) -> "tuple[str, Array, memoryview]":
    """Return the name and the array of one input, and the binary data that remains for the inputs after it.

    `entry` is the input's object in the JSON of a request. `rest` is the binary data of the request that no earlier
    input has read. Strings become their places in the labels of the manifest. Raises InputError when the input breaks
    the protocol, when the model does not have it, and when it is of strings without labels.
    """
    name, datatype, shape = entry.get("name"), entry.get("datatype"), entry.get("shape")
    if not isinstance(name, str):
        raise InputError("an input has no 'name'")
    names = [spec.name for spec in manifest.inputs]
    if name not in names:
        raise InputError(f"the model has no input {brief(name)}; it takes {', '.join(names)}")
    dtype = _NUMPY.get(datatype) if isinstance(datatype, str) else None
    if dtype is None and datatype != STRINGS:
        raise InputError(f"input {name!r} has the datatype {brief(datatype)}, expected one of {', '.join(_NUMPY)}")
    if dtype is None and name not in manifest.labels:
        raise InputError(f"input {name!r} takes no strings; send numbers of its own datatype")
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_DIMENSIONS
        or not all(type(size) is int and 0 <= size <= _LARGEST_SIZE for size in shape)
    ):
        raise InputError(
            f"input {name!r}: 'shape' is not a list of sizes, at most {_MOST_DIMENSIONS} and none above {_LARGEST_SIZE}"
        )
    count = math.prod(shape)
    size = _parameters(entry).get("binary_data_size")
    if dtype is None:
        if size is not None and (type(size) is not int or not 0 <= size <= len(rest) or "data" in entry):
            raise InputError(
                f"input {name!r}: 'binary_data_size' is {brief(size)}, {len(rest)} bytes are there, no 'data'"
            )
        array = _strings(name, entry) if size is None else _strings_of_bytes(name, rest[:size], count)
        rest = rest[size or 0 :]
    elif size is None:
        array = _from_json(name, entry.get("data"), dtype)
    elif size != count * dtype.itemsize or type(size) is not int or "data" in entry:
        raise InputError(
            f"input {name!r}: 'binary_data_size' is {brief(size)}, expected {count * dtype.itemsize}, no 'data'"
        )
    elif size > len(rest):
        raise InputError(f"the request ends before the bytes of input {name!r}")
    else:
        array = np.frombuffer(rest[:size], dtype.newbyteorder("<")).astype(dtype, copy=False)
        rest = rest[size:]
    if array.size != count:
        raise InputError(f"input {name!r} has {array.size} values, its shape {shape} asks for {count}")
    try:
        array = array.reshape(shape)
    except ValueError as error:  # NumPy bounds the product of the sizes, even where one of them is zero.
        raise InputError(f"input {name!r}: no array has the shape {shape}") from error
    return name, array if dtype is not None else label_places(array, manifest.labels[name]), rest


def _strings(name: str, entry: Mapping[str, Any]) -> "Array":
    """Flat or nested strings, of which a model with labels takes their places. Raises InputError for anything else."""
    try:
        values = np.array(_list(entry.get("data"), f"'data' of input {name!r}"), dtype=object)
    except ValueError as error:
        raise InputError(f"input {name!r}: the rows of 'data' are not equally long") from error
    if not all(isinstance(value, str | bytes) for value in values.flat):
        raise InputError(f"input {name!r}: 'data' does not hold strings only")
    return values


def _strings_of_bytes(name: str, data: memoryview, count: int) -> "Array":
    """So many strings as bytes, each after its length in four bytes, the lowest first.

    Raises InputError for anything else.
    """
    values: list[bytes] = []
    place = 0
    while len(values) < count:
        begin = place + 4
        place = begin + int.from_bytes(data[place:begin], "little")
        if place > len(data):
            raise InputError(f"the bytes of input {name!r} end before its {count} strings do")
        values.append(bytes(data[begin:place]))
    if place < len(data):
        raise InputError(
            f"input {name!r}: {len(data) - place} bytes follow its strings, which are {count} by its shape"
        )
    return np.array(values, dtype=object)


def _from_json(name: str, data: Any, dtype: "np.dtype[Any]") -> "Array":
    """Flat or nested numbers as an array of this dtype.

    Raises InputError for values of another type, for rows of different lengths, and for values outside the dtype's
    range: no value is truncated or wrapped.
    """
    # NumPy must not see strings: it would give every element the room of the longest.
    if not _leaf_types(_list(data, f"'data' of input {name!r}")) <= _TYPES[dtype.kind]:
        raise InputError(f"input {name!r}: 'data' does not hold {DATATYPES[dtype.name]} values only")
    try:
        values = np.asarray(data, "float64" if dtype.kind == "f" else dtype)
        with np.errstate(over="ignore"):
            array = values.astype(dtype, copy=False)
        if dtype.kind == "f" and (np.isinf(array) > np.isinf(values)).any():
            raise OverflowError
    except ValueError as error:
        raise InputError(f"input {name!r}: the rows of 'data' are not equally long") from error
    except OverflowError as error:
        raise InputError(f"input {name!r}: 'data' holds values outside the range of {DATATYPES[dtype.name]}") from error
    return array


def brief(value: object) -> str:
    """Return a value of a request as an error shows it: shortened, since it may be of any size."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short.repr(value)


def _leaf_types(values: list[Any]) -> set[type]:
    """The types of the values in lists within lists."""
    types: set[type] = set()
    level = [values]
    while level:
        level_types = set(map(type, chain.from_iterable(level)))
        types |= level_types
        level = [item for item in chain.from_iterable(level) if type(item) is list] if list in level_types else []
    return types - {list}


def _requested_outputs(document: Mapping[str, Any], manifest: Manifest) -> tuple[OutputRequest, ...]:
    """The outputs that a request asks for, by default all. Raises InputError for another name, and for one twice."""
    is_binary = _parameters(document).get("binary_data_output") is True
    entries = (_mapping(entry, "an output") for entry in _list(document.get("outputs") or [], "'outputs'"))
    requests = (
        OutputRequest(entry.get("name", ""), _parameters(entry).get("binary_data", is_binary) is True)
        for entry in entries
    )
    return check_outputs(requests, is_binary, manifest)


def check_outputs(requests: Iterable[OutputRequest], is_binary: bool, manifest: Manifest) -> tuple[OutputRequest, ...]:
    """Return the requests; without any, one for each output of the model, as bytes where `is_binary` is true.

    Raises InputError for an output that the model does not have, and for one twice.
    """
    names = [spec.name for spec in manifest.outputs]
    checked: dict[str, OutputRequest] = {}
    for request in requests:
        if request.name not in names:
            raise InputError(f"the model has no output {brief(request.name)}; it returns {', '.join(names)}")
        if request.name in checked:
            raise InputError(f"output {request.name!r} is asked for twice; ask for it once")
        checked[request.name] = request
    return tuple(checked.values()) or tuple(OutputRequest(name, is_binary) for name in names)


def _parameters(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(entry.get("parameters", {}), "'parameters'")


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{what} is not a JSON object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{what} is not a list")
    return value
