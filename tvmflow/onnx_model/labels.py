"""The labels of an ONNX model's classes: a dictionary by label becomes the tensor of its values, a string a number."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tvmflow.onnx_model.graph import inner_nodes, names_read

if TYPE_CHECKING:
    import onnx

# An opset with Identity, for a model of ai.onnx.ml alone.
_OPSET = 14
# The attributes of operators that hold strings, each with the one that holds integers in their place.
_NUMBERS_OF: dict[str, dict[str, str]] = {
    "Constant": {"value_string": "value_int", "value_strings": "value_ints"},
    "LabelEncoder": {
        "keys_strings": "keys_int64s",
        "values_strings": "values_int64s",
        "default_string": "default_int64",
    },
    "LinearClassifier": {"classlabels_strings": "classlabels_ints"},
    "OneHotEncoder": {"cats_strings": "cats_int64s"},
    "SVMClassifier": {"classlabels_strings": "classlabels_ints"},
    "TreeEnsembleClassifier": {"classlabels_strings": "classlabels_int64s"},
}
# The attributes of these, and those that are tensors, whose strings an operator looks for in its operand.
_OF_OPERAND = {"cats_strings", "keys_strings", "keys_tensor"}
# Those that are the strings of its result, and those that stand for a string that it does not find.
_OF_RESULT = {"classlabels_strings", "value", "value_string", "value_strings", "values_strings", "values_tensor"}
_DEFAULTS = {"default_string", "default_tensor"}
# The operators that move elements, whatever these are.
_MOVES = {
    *("ArrayFeatureExtractor", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity"),
    *("Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where"),
}
# The operators that read strings and make other types.
_READS = {"Equal", "LabelEncoder", "OneHotEncoder", "Shape", "Size"}


def replace_labels(model: "onnx.ModelProto") -> dict[str, tuple[str, ...]]:
    """Turn inputs and outputs that are labels into tensors of numbers, in place; return their labels by their names.

    An output that is a dictionary by label (ZipMap) becomes the scores themselves, float32 [rows, labels] in the order
    of the labels. Inputs and outputs of strings become int64, the place of each string in the labels, as do strings
    within the model; a string that is no label is -1. A model that does something else with strings than to look them
    up, to move and to compare them keeps its strings.
    """
    return {**_drop_zip_maps(model), **_number_strings(model)}


def _drop_zip_maps(model: "onnx.ModelProto") -> dict[str, tuple[str, ...]]:
    """Replace each ZipMap that makes an output of the graph by its operand."""
    import onnx

    graph = model.graph
    outputs = {value.name: value for value in graph.output}
    labels: dict[str, tuple[str, ...]] = {}
    for node in graph.node:
        if node.op_type != "ZipMap" or node.domain != "ai.onnx.ml" or node.output[0] not in outputs:
            continue
        value = outputs[node.output[0]]
        names = tuple(_text(label) for item in node.attribute for label in (*item.ints, *item.strings))
        scores = onnx.TensorProto.FLOAT
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, scores, [_rows(graph), len(names)]))
        identity = onnx.helper.make_node("Identity", node.input, node.output, name=node.name)
        node.CopyFrom(identity)
        labels[value.name] = names
    if labels and not any(opset.domain in ("", "ai.onnx") for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("", _OPSET))
    return labels


def _rows(graph: "onnx.GraphProto") -> str | int | None:
    """The first dimension of the first input: all inputs of a classical model have a row for each item."""
    dims = graph.input[0].type.tensor_type.shape.dim if graph.input else []
    if not dims:
        return None
    size: str | int = dims[0].dim_param or dims[0].dim_value
    return size or None


def _number_strings(model: "onnx.ModelProto") -> dict[str, tuple[str, ...]]:
    """Make numbers of all strings of the graph, where numbers allow all that it does with them."""
    import onnx

    graph, kind = model.graph, onnx.TensorProto.STRING
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == kind}
    groups = _groups_of_strings(graph, set(weights))
    if not groups or not _can_be_numbered(graph, groups):
        return {}
    numbers: dict[str, dict[str, int]] = {group: {} for group in groups.values()}
    # The labels of the outputs come first, which the last nodes make.
    for node in reversed(graph.node):
        for name in node.input:
            if name in weights:
                _number_tensor(weights[name], numbers[groups[name]])
        _number_attributes(
            node, {name: numbers[groups[name]] for name in (*node.input, *node.output) if name in groups}
        )
    for name, tensor in weights.items():
        _number_tensor(tensor, numbers[groups[name]])
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.name in groups:
            value.type.tensor_type.elem_type = onnx.TensorProto.INT64
    return {
        value.name: tuple(numbers[groups[value.name]])
        for value in (*graph.input, *graph.output)
        if value.name in groups
    }


def _groups_of_strings(graph: "onnx.GraphProto", weights: set[str]) -> dict[str, str]:
    """The values that hold strings, each with a name of its group: those among which strings move or are compared."""
    import onnx

    kind = onnx.TensorProto.STRING
    groups = {value.name: value.name for value in graph.input if value.type.tensor_type.elem_type == kind}
    groups |= {name: name for name in weights}
    for node in graph.node:
        if any(item.name in _OF_RESULT and _holds_strings(item) for item in node.attribute):
            groups[node.output[0]] = node.output[0]
        strings = [name for name in node.input if name in groups]
        if strings and node.op_type in _MOVES:
            groups |= {name: name for name in node.output}
            strings += node.output
        elif node.op_type != "Equal":
            continue
        joined = {groups[name] for name in strings}
        groups = {name: groups[strings[0]] if group in joined else group for name, group in groups.items()}
    return groups


def _can_be_numbered(graph: "onnx.GraphProto", groups: "Mapping[str, str]") -> bool:
    """Whether numbers allow all that the nodes do with the strings."""
    known, weights = _OF_OPERAND | _OF_RESULT | _DEFAULTS, {tensor.name for tensor in graph.initializer}
    labelled = set()
    for node in graph.node:
        own = [attribute for attribute in node.attribute if _holds_strings(attribute)]
        if any(attribute.name not in known for attribute in own) or any(map(_casts_to_strings, node.attribute)):
            return False
        strings = names_read(node) & groups.keys()
        if _has_inner_strings(node) or (strings and node.op_type not in _MOVES | _READS):
            return False
        if node.op_type == "Equal" and strings and not strings & weights:
            # Two strings that are no labels need not be equal.
            return False
        if own:
            labelled |= {groups[name] for name in (*node.input, *node.output) if name in groups}
    labelled |= {groups[tensor.name] for tensor in graph.initializer if tensor.name in groups}
    return all(groups[value.name] in labelled for value in graph.input if value.name in groups)


def _has_inner_strings(node: "onnx.NodeProto") -> bool:
    """Whether a graph in a node's attributes, at any depth, holds strings."""
    import onnx

    attributes = [attribute for inner in (node, *inner_nodes(node)) for attribute in inner.attribute]
    graphs = [attribute.g for attribute in attributes if attribute.HasField("g")]
    return any(tensor.data_type == onnx.TensorProto.STRING for graph in graphs for tensor in graph.initializer) or any(
        _holds_strings(attribute) for inner in inner_nodes(node) for attribute in inner.attribute
    )


def _holds_strings(attribute: "onnx.AttributeProto") -> bool:
    """Whether an attribute is a string or several among the data of a model, and no mode of an operator."""
    import onnx

    if attribute.type == onnx.AttributeProto.TENSOR:
        return bool(attribute.t.data_type == onnx.TensorProto.STRING)
    return attribute.name.endswith(("_string", "_strings", "string_vocabulary"))


def _casts_to_strings(attribute: "onnx.AttributeProto") -> bool:
    import onnx

    return bool(attribute.name == "to" and attribute.i == onnx.TensorProto.STRING)


def _number_attributes(node: "onnx.NodeProto", numbers: "Mapping[str, dict[str, int]]") -> None:
    """Write integers in the place of a node's strings; `numbers` are those of the values that it reads and makes."""
    import onnx

    places = _NUMBERS_OF.get(node.op_type, {})
    # The labels of a node's results are numbered before those that stand for none of them.
    for attribute in sorted(node.attribute, key=lambda item: item.name not in _OF_RESULT):
        if not _holds_strings(attribute):
            continue
        own = numbers.get(node.input[0] if attribute.name in _OF_OPERAND else node.output[0])
        if own is None:
            # An encoder that makes other types has a default of these.
            if attribute.name in _DEFAULTS:
                node.attribute.remove(attribute)
            continue
        if attribute.type == onnx.AttributeProto.TENSOR:
            _number_tensor(attribute.t, own)
            continue
        is_list = attribute.type == onnx.AttributeProto.STRINGS
        values = _numbers(attribute.strings if is_list else [attribute.s], own)
        attribute.CopyFrom(onnx.helper.make_attribute(places[attribute.name], values if is_list else values[0]))


def _number_tensor(tensor: "onnx.TensorProto", numbers: dict[str, int]) -> None:
    """Write integers in the place of a tensor's strings, unless this is done."""
    import onnx

    if tensor.data_type == onnx.TensorProto.STRING:
        values = _numbers(tensor.string_data, numbers)
        tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, onnx.TensorProto.INT64, tensor.dims, values))


def _numbers(strings: "Iterable[bytes]", numbers: dict[str, int]) -> list[int]:
    """The number of each string; a new one gets the next number."""
    return [numbers.setdefault(_text(item), len(numbers)) for item in strings]


def _text(label: bytes | str | int) -> str:
    return label.decode(errors="replace") if isinstance(label, bytes) else str(label)
