"""The nodes of an ONNX graph and their names, and the opset of a model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def nodes_of(graph: "onnx.GraphProto") -> "Iterator[onnx.NodeProto]":
    """Return the nodes of a graph and of the graphs within them."""
    for node in graph.node:
        yield node
        yield from inner_nodes(node)


def inner_nodes(node: "onnx.NodeProto") -> "Iterator[onnx.NodeProto]":
    """Return the nodes of the graphs in a node's attributes, and of the graphs within those."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from nodes_of(attribute.g)


def standard_opset(model: "onnx.ModelProto") -> int | None:
    """Return the version of the standard's operators that a model uses; None where it uses none of them."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=None)


def operator_name(node: "onnx.NodeProto") -> str:
    """Return the operator's name, with its domain unless it is of the standard."""
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else str(node.op_type)


def node_name(node: "onnx.NodeProto") -> str:
    """Return the node's name; its first output's where it has none."""
    return str(node.name or next(iter(node.output), "unnamed"))
