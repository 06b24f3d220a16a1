"""The nodes of an ONNX graph, and the opset of a model."""

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
