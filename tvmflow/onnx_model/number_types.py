"""Gives a model's numbers another type, as float32 in the place of float16.

Files in 16 bits are half as large. Few processors compute in them. ONNX Runtime has hardly an operator for float16 on a
CPU: it converts the operands of each node to float32, and leaves out the conversions between two nodes. For bfloat16 it
has none at all.
"""

from collections.abc import Collection, Iterator, Mapping

import onnx
from onnx import TensorProto, numpy_helper

from tvmflow.onnx_model.external_data import array_of
from tvmflow.onnx_model.graph import node_name, nodes_of

# The attributes that name an element type.
_TYPES = {"to", "dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type"}
# The operators whose results depend on the bits of their operand.
_OF_BITS = {"BitCast"}
# What stands behind the name of an input or an output in the name of the same value in float32.
_SUFFIX = "_as_float32"


def has_type(model: onnx.ModelProto, kind: int) -> bool:
    """Return whether a weight, an input, an output or the declared result of a node is of an element type of ONNX."""
    graph = model.graph
    if any(_is_of(value.type, kind) for value in (*graph.input, *graph.output, *graph.value_info)):
        return True
    attributes = [attribute for node in _nodes(model) for attribute in node.attribute]
    graphs = [graph, *(attribute.g for attribute in attributes)]
    return any(tensor.data_type == kind for each in graphs for tensor in each.initializer) or any(
        attribute.t.data_type == kind or (attribute.name in _TYPES and attribute.i == kind) for attribute in attributes
    )


def reads_bits(model: onnx.ModelProto) -> bool:
    """Return whether a node of a model reads the bits of numbers, which another type would change."""
    return any(node.op_type in _OF_BITS for node in _nodes(model))


def replace_type(model: onnx.ModelProto, kind: int, other: int) -> None:
    """Convert all tensors of the type `kind` to the type `other`, in place, also inputs and outputs.

    Both are types of floats, as ONNX numbers them.
    """
    _replace(model.graph, kind, other)
    for function in model.functions:
        _replace_in_nodes(function.node, kind, other)


def weights_as_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the types and shapes of a graph's weights that are no inputs of it."""
    names = {value.name for value in graph.input}
    return [
        onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        for weight in graph.initializer
        if weight.name not in names
    ]


def compute_in_float32(model: onnx.ModelProto) -> None:
    """Make float32 of every float16 in a model without functions, in place; its inputs and outputs keep their types.

    A Cast stands behind each input and in front of each output.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    half = TensorProto.FLOAT16
    inputs = [value.name for value in graph.input if value.name not in weights and _is_of(value.type, half)]
    outputs = [value.name for value in graph.output if value.name not in inputs and _is_of(value.type, half)]
    _replace(graph, half, TensorProto.FLOAT, {*inputs, *outputs})
    used_names = {name for node in nodes_of(graph) for name in (*node.input, *node.output)} | weights
    names = {name: _find_free_name(f"{name}{_SUFFIX}", used_names) for name in (*inputs, *outputs)}
    _rename(graph, names)
    nodes = [
        *(_cast(name, names[name], TensorProto.FLOAT) for name in inputs),
        *graph.node,
        *(_cast(names[name], name, half) for name in outputs),
    ]
    del graph.node[:]
    graph.node.extend(nodes)


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a model and of its functions, at any depth."""
    yield from nodes_of(model.graph)
    for function in model.functions:
        yield from function.node


def _is_of(type_: onnx.TypeProto, kind: int) -> bool:
    return type_.tensor_type.elem_type == kind


def _find_free_name(name: str, used_names: set[str]) -> str:
    while name in used_names:
        name += "_"
    return name


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [source], [result], name=f"{result}_cast", to=to)


def _replace(graph: onnx.GraphProto, kind: int, other: int, ports: Collection[str] = ()) -> None:
    """Change the type of constants, declared values and attributes of a graph and its inner graphs.

    Inputs and outputs called `ports` keep their types.
    """
    for tensor in graph.initializer:
        _replace_in_tensor(tensor, kind, other)
    ends = [value for value in (*graph.input, *graph.output) if value.name not in ports]
    for value in (*ends, *graph.value_info):
        _replace_in_type(value.type, kind, other)
    _replace_in_nodes(graph.node, kind, other)


def _replace_in_nodes(nodes: Collection[onnx.NodeProto], kind: int, other: int) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in _TYPES and attribute.i == kind:
                attribute.i = other
            for tensor in (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors:
                _replace_in_tensor(tensor, kind, other)
            for inner in _graphs(attribute):
                _replace(inner, kind, other)


def _replace_in_tensor(tensor: onnx.TensorProto, kind: int, other: int) -> None:
    if tensor.data_type == kind:
        array = array_of(tensor).astype(onnx.helper.tensor_dtype_to_np_dtype(other))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _replace_in_type(type_: onnx.TypeProto, kind: int, other: int) -> None:
    field = type_.WhichOneof("value")
    if field == "tensor_type" and _is_of(type_, kind):
        type_.tensor_type.elem_type = other
    elif field in ("sequence_type", "optional_type"):
        _replace_in_type(getattr(type_, field).elem_type, kind, other)


def _graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """The graphs that an attribute has."""
    return [attribute.g, *attribute.graphs] if attribute.HasField("g") else list(attribute.graphs)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Give values other names where nodes compute and read them, but not among the inputs and outputs of `graph`."""
    for value in (*graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        # Messages name the node, or what it computes in the user's file.
        node.name = node_name(node)
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
        for attribute in node.attribute:
            for inner in _graphs(attribute):
                own = {value.name for value in (*inner.input, *inner.initializer)}
                own |= {name for other in inner.node for name in other.output}
                of_outside = {name: new for name, new in names.items() if name not in own}
                _rename(inner, of_outside)
                for value in inner.output:
                    value.name = of_outside.get(value.name, value.name)
