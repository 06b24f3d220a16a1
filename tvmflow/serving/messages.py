"""The messages of the Open Inference Protocol over gRPC, as protobuf classes made from the table below, and as arrays.

Names, numbers and types are the protocol's, so that every client's messages fit; parameters, which the server does not
read, are left out. https://github.com/kserve/open-inference-protocol
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from tvmflow.bundle import Manifest
from tvmflow.errors import InputError
from tvmflow.serving import protocol
from tvmflow.serving.protocol import InferRequest, OutputRequest

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

_Field = descriptor_pb2.FieldDescriptorProto
# Each field is "name type", or "name type*" where it is repeated; None stands for a number that is not read.
_Fields = tuple[str | None, ...]
_TENSOR: _Fields = ("name string", "datatype string", "shape int64*")
_MODEL: _Fields = ("name string", "version string")
_MESSAGES: dict[str, _Fields] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("live bool",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("ready bool",),
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": ("ready bool",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("name string", "version string", "extensions string*"),
    "ModelMetadataRequest": _MODEL,
    "TensorMetadata": _TENSOR,
    "ModelMetadataResponse": (
        *("name string", "versions string*", "platform string"),
        *("inputs TensorMetadata*", "outputs TensorMetadata*"),
    ),
    "InferTensorContents": (
        *("bool_contents bool*", "int_contents int32*", "int64_contents int64*", "uint_contents uint32*"),
        *("uint64_contents uint64*", "fp32_contents float*", "fp64_contents double*"),
        "bytes_contents bytes*",
    ),
    "InferTensor": (*_TENSOR, None, "contents InferTensorContents"),
    "InferRequestedOutput": ("name string",),
    "ModelInferRequest": (
        *("model_name string", "model_version string", "id string", None, "inputs InferTensor*"),
        *("outputs InferRequestedOutput*", "raw_input_contents bytes*"),
    ),
    "ModelInferResponse": (
        *("model_name string", "model_version string", "id string", None, "outputs InferTensor*"),
        "raw_output_contents bytes*",
    ),
}


def _make_classes() -> dict[str, Any]:
    """Return the class of each message, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="tvmflow/serving.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field in enumerate(fields, start=1):
            if field is None:
                continue
            label, kind = field.split()
            is_repeated, kind = kind.endswith("*"), kind.removesuffix("*")
            added = message.field.add(
                name=label, number=number, label=_Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL
            )
            if kind in _MESSAGES:
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                added.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    # A pool of its own: a client in the same process may have registered the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


CLASSES = _make_classes()
# The kind of all fields of a request in protobuf's form: a length, and as many bytes. Then, what a field
# `raw_input_contents` begins with, and the most bytes that all other fields of a raw request have.
_WITH_LENGTH = 2
_RAW_TAG = CLASSES["ModelInferRequest"].DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | _WITH_LENGTH
_LARGEST_STRUCTURE = 1 << 13
_TYPED_FIELDS = tuple(CLASSES["InferTensorContents"].DESCRIPTOR.fields_by_name)


def decode(name: str, body: bytes) -> Any:
    """Return the message of a class, by its name; other fields are skipped. Raises InputError for other bytes."""
    try:
        return CLASSES[name].FromString(body)
    except DecodeError as error:
        raise InputError("the request is no message of the protocol; send what a client library makes") from error


def text_size(body: bytes, manifest: Manifest) -> int:
    """Return how many bytes of a ModelInferRequest take time to read.

    That is 0 if all but a few KiB are numbers in `raw_input_contents`, otherwise the size of the whole message.
    """
    if protocol.takes_strings(manifest):
        return len(body)
    size = place = 0
    while place < len(body) and size <= _LARGEST_STRUCTURE:
        tag, length_place = _read_varint(body, place)
        if tag & 7 != _WITH_LENGTH:
            # All fields of the message have a length; what follows another one is not looked for.
            return len(body)
        length, content_place = _read_varint(body, length_place)
        size += content_place - place + (0 if tag == _RAW_TAG else length)
        place = content_place + length
    return 0 if size <= _LARGEST_STRUCTURE else len(body)


def _read_varint(body: bytes, place: int) -> tuple[int, int]:
    """Return the number in protobuf's form at a place, and the place after it."""
    value = shift = 0
    for byte in body[place : place + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, place + shift // 7


def parse(body: bytes, manifest: Manifest) -> InferRequest:
    """Parse a ModelInferRequest for the model of a manifest.

    Raises InputError for bytes that are no such message, and for inputs or outputs that are not the model's.
    """
    request = decode("ModelInferRequest", body)
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InputError(f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs; expected one for each")
    inputs: dict[str, Any] = {}
    for index, item in enumerate(request.inputs):
        entry: dict[str, Any] = {"name": item.name, "datatype": item.datatype, "shape": list(item.shape)}
        if raw:
            entry["parameters"] = {"binary_data_size": len(raw[index])}
        else:
            typed = (getattr(item.contents, name) for name in _TYPED_FIELDS)
            entry["data"] = next((list(values) for values in typed if values), [])
        name, array, _ = protocol.read_tensor(entry, memoryview(raw[index] if raw else b""), manifest)
        if name in inputs:
            raise InputError(f"input {name!r} is given twice")
        inputs[name] = array
    outputs = (OutputRequest(output.name, is_binary=True) for output in request.outputs)
    return InferRequest(request.id or None, inputs, protocol.check_outputs(outputs, True, manifest))
