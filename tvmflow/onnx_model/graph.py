"""The nodes of an ONNX graph and their names, and the opset of a model."""

import ast
import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# The key under which PyTorch's exporter keeps the modules around a node, as a Python list from the whole model inwards.
_SCOPES = "pkg.torch.onnx.name_scopes"


def nodes_of(graph: "onnx.GraphProto") -> "Iterator[onnx.NodeProto]":
    """Yield the nodes of a graph, each followed by the nodes of the graphs in its attributes, at any depth."""
    for node in graph.node:
        yield node
        yield from inner_nodes(node)


def graphs_of(graph: "onnx.GraphProto") -> "Iterator[onnx.GraphProto]":
    """Yield a graph and those in the attributes of its nodes, at any depth."""
    yield graph
    yield from (item.g for node in nodes_of(graph) for item in node.attribute if item.HasField("g"))


def has_graphs(node: "onnx.NodeProto") -> bool:
    """Return whether a node has graphs among its attributes, as If, Loop and Scan have."""
    return any(attribute.HasField("g") for attribute in node.attribute)


def inner_nodes(node: "onnx.NodeProto") -> "Iterator[onnx.NodeProto]":
    """Yield the nodes of the graphs in a node's attributes, at any depth."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from nodes_of(attribute.g)


# ONNX's numbers of the types of two bytes: float16 and bfloat16.
_HALF_TYPES = {10, 16}
# The accuracy level of ONNX Runtime's products of weights of few bits that computes in float32; 0 leaves it open.
_FLOAT32_LEVEL = 1


def rounds_activations(model: "onnx.ModelProto") -> bool:
    """Return whether a model computes tensors of few bits: it quantises them, or they are float16 or bfloat16.

    A last digit then decides between two levels, and two right programs for the model differ by whole levels.
    """
    return _quantises_activations(model) or _computes_in_half(model)


def _computes_in_half(model: "onnx.ModelProto") -> bool:
    """Whether an input, an output or the result of a cast is float16 or bfloat16; casts of weights do not count."""
    values = (*model.graph.input, *model.graph.output)
    weights = {tensor.name for tensor in model.graph.initializer}
    graphs = [nodes_of(model.graph), *(function.node for function in model.functions)]
    return any(value.type.tensor_type.elem_type in _HALF_TYPES for value in values if value.name not in weights) or any(
        attribute.name == "to" and attribute.i in _HALF_TYPES
        for nodes in graphs
        for node in nodes
        if node.op_type == "Cast" and node.input[0] not in weights
        for attribute in node.attribute
    )


def _quantises_activations(model: "onnx.ModelProto") -> bool:
    """Whether a model rounds tensors that it computes to integers of few bits, or lets ONNX Runtime do so."""
    weights = {tensor.name for tensor in model.graph.initializer}
    graphs = [nodes_of(model.graph), *(function.node for function in model.functions)]
    return any(
        "Quantize" in operator or operator.startswith(("QLinear", "QGemm")) or _may_round(node)
        for nodes in graphs
        for node in nodes
        # A damaged name is bytes.
        for operator in (str(node.op_type),)
        if node.input and node.input[0] not in weights
    )


def _may_round(node: "onnx.NodeProto") -> bool:
    """Whether a node has an accuracy level that allows less than float32: float16, bfloat16 or 8-bit integers."""
    levels = [attribute.i for attribute in node.attribute if attribute.name == "accuracy_level"]
    return any(level > _FLOAT32_LEVEL for level in levels)


def standard_opset(model: "onnx.ModelProto") -> int | None:
    """Return the version of the standard's operators that a model uses; None where it uses none of them."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=None)


def operator_name(node: "onnx.NodeProto") -> str:
    """Return the operator's name, with its domain unless it is of the standard."""
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else str(node.op_type)


def node_name(node: "onnx.NodeProto") -> str:
    """Return the node's name; its first output's where it has none."""
    return str(node.name or next(iter(node.output), "unnamed"))


def names_read(node: "onnx.NodeProto") -> set[str]:
    """Return the names of the values that a node reads, also in the graphs of its attributes."""
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            own = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
            own |= {name for inner in graph.node for name in inner.output}
            read = {name for inner in graph.node for name in names_read(inner)}
            names |= (read | {value.name for value in graph.output}) - own
    return names


def readers_of(graph: "onnx.GraphProto") -> defaultdict[str, list["onnx.NodeProto"]]:
    """Return the nodes of a graph that read each value, by the value's name: in their order, and none for others."""
    readers = defaultdict[str, list["onnx.NodeProto"]](list)
    for node in graph.node:
        for name in names_read(node):
            readers[name].append(node)
    return readers


def sort_nodes(graph: "onnx.GraphProto") -> None:
    """Bring the nodes of a graph into an order in which each reads what nodes before it compute.

    Nodes change places in it only where they must; nodes of a cycle stay at its end. ONNX wants such an order, ONNX
    Runtime does not, and some converters append nodes to the end.
    """
    writers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    needs = [
        {writers[name] for name in names_read(node) if name in writers} - {place}
        for place, node in enumerate(graph.node)
    ]
    if all(other < place for place, others in enumerate(needs) for other in others):
        return
    readers: dict[int, list[int]] = {}
    for place, others in enumerate(needs):
        for other in others:
            readers.setdefault(other, []).append(place)
    missing = [len(others) for others in needs]
    ready = [place for place, count in enumerate(missing) if not count]
    order: dict[int, None] = {}
    while ready:
        place = heapq.heappop(ready)
        order[place] = None
        for reader in readers.get(place, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    nodes = [graph.node[place] for place in (*order, *(item for item in range(len(needs)) if item not in order))]
    copies = type(graph)()
    copies.node.extend(nodes)
    del graph.node[:]
    graph.node.extend(copies.node)


def writers_of(graph: "onnx.GraphProto") -> "dict[str, onnx.NodeProto]":
    """Return the nodes of a graph by the names of the values that they compute."""
    return {name: node for node in graph.node for name in node.output}


def source_of(writers: "Mapping[str, onnx.NodeProto]", name: str, kinds: Sequence[str] = ("Identity",)) -> str:
    """Return the name of the value that nodes of some kinds pass on as the value `name`; `name` itself without any.

    `writers` are the nodes of the graph by the names of their results.
    """
    while name in writers and writers[name].op_type in kinds:
        name = writers[name].input[0]
    return name


def explain_order(graph: "onnx.GraphProto") -> str | None:
    """Return a clause on the first node that reads a value before it is computed; None for a graph in a valid order."""
    available = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    available |= {tensor.values.name for tensor in graph.sparse_initializer}
    writers = writers_of(graph)
    for node in graph.node:
        for name in sorted(names_read(node) - available):
            reads = f"operator {operator_name(node)}, node {node_name(node)!r}, reads {name!r}"
            if name not in writers:
                return f"{reads}, which nothing computes"
            if writers[name] is node:
                return f"{reads}, which it computes itself"
            return f"{reads}, which node {node_name(writers[name])!r} after it computes"
        available.update(node.output)
    return None


def scope_of(node: "onnx.NodeProto") -> tuple[str, ...]:
    """Return the names of the modules around a node, the outermost first; the node's name where the file has none.

    PyTorch's exporter writes them into the file; others write node names like paths, as `/layer1/conv/Conv`.
    """
    text = next((item.value for item in node.metadata_props if item.key == _SCOPES), "[]")
    try:
        scopes = [str(scope) for scope in ast.literal_eval(text)]
    except (ValueError, SyntaxError, TypeError):
        scopes = []
    scopes = scopes[1:] or [part for part in node_name(node).split("/") if part]
    return tuple(scopes[:-1] or scopes)
