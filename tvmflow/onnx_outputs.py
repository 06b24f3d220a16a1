"""The outputs of an ONNX graph: a dictionary becomes the tensor of its values."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# An opset with Identity, for a model of ai.onnx.ml alone.
_OPSET = 14


def drop_zip_maps(model: "onnx.ModelProto") -> tuple[str, ...]:
    """Replace each ZipMap that makes an output of the graph by its operand, in place; return these outputs' names.

    ZipMap turns each row of scores into a dictionary by label. The output becomes the scores themselves, float32
    [rows, labels] in the order of the labels.
    """
    import onnx

    graph = model.graph
    outputs = {value.name: value for value in graph.output}
    names = []
    for node in graph.node:
        if node.op_type != "ZipMap" or node.domain != "ai.onnx.ml" or node.output[0] not in outputs:
            continue
        labels = sum(len(attribute.ints) + len(attribute.strings) for attribute in node.attribute)
        value = outputs[node.output[0]]
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, [_rows(graph), labels]))
        identity = onnx.helper.make_node("Identity", node.input, node.output, name=node.name)
        node.CopyFrom(identity)
        names.append(value.name)
    if names and not any(opset.domain in ("", "ai.onnx") for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("", _OPSET))
    return tuple(names)


def _rows(graph: "onnx.GraphProto") -> str | int | None:
    """The first dimension of the first input: all inputs of a classical model have a row for each item."""
    dims = graph.input[0].type.tensor_type.shape.dim if graph.input else []
    if not dims:
        return None
    size: str | int = dims[0].dim_param or dims[0].dim_value
    return size or None
