"""The messages of the Open Inference Protocol over gRPC, as protobuf classes made from the table below.

Names, numbers and types are the protocol's, so that every client's messages fit; parameters, which the server does not
read, are left out. https://github.com/kserve/open-inference-protocol
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
