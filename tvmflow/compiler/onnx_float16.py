"""Lets a model in float16 compute in float32, as ONNX Runtime does on a CPU.

Files in float16 are half as large. Few processors compute in it, and ONNX Runtime has hardly an operator for it on a
CPU: it converts the operands of each node to float32, and leaves out the conversions between two nodes.
"""

from collections.abc import Collection, Mapping

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tvmflow.compiler.refusals import Refusal, mixed_type_refusals
from tvmflow.onnx_data import array_of
from tvmflow.onnx_graph import node_name, nodes_of

# The attributes that name an element type.
_TYPES = {"to", "dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type"}
# The operators whose results depend on the bits of their operand.
_OF_BITS = {"BitCast"}
# What stands behind the name of an input or an output in the name of the same value in float32.
_SUFFIX = "_as_float32"


def compute_in_float32(model: onnx.ModelProto) -> list[Refusal]:
    """Make float32 of every float16 in a model without functions, in place; its inputs and outputs keep their types.

    A Cast stands behind each input and in front of each output. A model that reads the bits of numbers stays as it is.
    Returns refusals of nodes that mix types, which differ no more afterwards.
    """
    graph = model.graph
    if not _has_float16(graph) or any(node.op_type in _OF_BITS for node in nodes_of(graph)):
        return []
    refusals = mixed_type_refusals(model)
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in weights and _is_float16(value.type)]
    outputs = [value.name for value in graph.output if value.name not in inputs and _is_float16(value.type)]
    _widen(graph, {*inputs, *outputs})
    taken = {name for node in nodes_of(graph) for name in (*node.input, *node.output)} | weights
    names = {name: _unused(f"{name}{_SUFFIX}", taken) for name in (*inputs, *outputs)}
    _rename(graph, names)
    nodes = [
        *(_cast(name, names[name], TensorProto.FLOAT) for name in inputs),
        *graph.node,
        *(_cast(names[name], name, TensorProto.FLOAT16) for name in outputs),
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    return refusals


def _has_float16(graph: onnx.GraphProto) -> bool:
    """Whether a weight, an input, an output or the result of a node is float16 for sure; shapes are not inferred."""
    if any(_is_float16(value.type) for value in (*graph.input, *graph.output, *graph.value_info)):
        return True
    graphs = [graph, *(attribute.g for node in nodes_of(graph) for attribute in node.attribute)]
    if any(tensor.data_type == TensorProto.FLOAT16 for each in graphs for tensor in each.initializer):
        return True
    attributes = [attribute for node in nodes_of(graph) for attribute in node.attribute]
    return any(
        attribute.t.data_type == TensorProto.FLOAT16
        or (attribute.name in _TYPES and attribute.i == TensorProto.FLOAT16)
        for attribute in attributes
    )


def _is_float16(type_: onnx.TypeProto) -> bool:
    return type_.tensor_type.elem_type == TensorProto.FLOAT16


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [source], [result], name=f"{result}_cast", to=to)


def _widen(graph: onnx.GraphProto, ports: Collection[str] = ()) -> None:
    """Widen constants, declared types and attributes of a graph and its inner graphs, but not inputs and outputs called
    `ports`."""
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    ends = [value for value in (*graph.input, *graph.output) if value.name not in ports]
    for value in (*ends, *graph.value_info):
        _widen_type(value.type)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in _TYPES and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
            for tensor in (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors:
                _widen_tensor(tensor)
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _widen(inner)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT16:
        tensor.CopyFrom(numpy_helper.from_array(array_of(tensor).astype(np.float32), tensor.name))


def _widen_type(type_: onnx.TypeProto) -> None:
    kind = type_.WhichOneof("value")
    if kind == "tensor_type" and _is_float16(type_):
        type_.tensor_type.elem_type = TensorProto.FLOAT
    elif kind in ("sequence_type", "optional_type"):
        _widen_type(getattr(type_, kind).elem_type)


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
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                own = {value.name for value in (*inner.input, *inner.initializer)}
                own |= {name for other in inner.node for name in other.output}
                of_outside = {name: new for name, new in names.items() if name not in own}
                _rename(inner, of_outside)
                for value in inner.output:
                    value.name = of_outside.get(value.name, value.name)
