"""Computes the products of all rows of a tensor before the loop whose iterations each multiply one of these rows.

A recurrent layer that is written as a loop multiplies its input of a step by weights in every step. Together these are
one product of matrices, which reads the weights once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from tvmflow.compiler.onnx.outlining import Importer
from tvmflow.compiler.onnx.values import dims_of
from tvmflow.onnx_model.graph import sort_nodes, source_of, writers_of

# The dimensions of weights that multiply rows of any shape.
_MATRIX = 2


@dataclass(frozen=True)
class Product:
    """A product in a loop's body: the node `product` multiplies the row `row`; `rows` is the tensor of all results."""

    product: onnx.NodeProto
    row: str
    rows: str


def hoist_products(
    importer: Importer, graph: onnx.GraphProto, rows: Mapping[str, str], names: Mapping[str, str]
) -> list[Product]:
    """Import the products of whole tensors by weights, and return those nodes of a loop's body that multiply rows.

    `rows` gives, for a value of the body that is a row of a tensor around the loop, along its first axis, the name of
    that tensor. `names` gives the names around the loop of values that the loop passes on as they are.
    """
    writers, inner = writers_of(graph), {item.name for item in graph.input}
    products = []
    for node in graph.node:
        if node.op_type != "MatMul" or node.domain not in ("", "ai.onnx"):
            continue
        row, weight = source_of(writers, node.input[0]), names.get(node.input[1], node.input[1])
        if row not in rows or weight in writers or weight in inner or not importer.has_value(weight):
            continue
        dims = dims_of(importer.tensor(importer.value(weight)))
        if dims is None or len(dims) != _MATRIX:
            continue
        name = importer.unique_name(node.output[0])
        product = helper.make_node("MatMul", [rows[row], weight], [name], node.name or node.output[0])
        importer.import_graph(helper.make_graph([product], name, [], [helper.make_empty_tensor_value_info(name)]), [])
        importer.bind([name])
        products.append(Product(node, row, name))
    return products


def with_gathered_rows(graph: onnx.GraphProto, products: Sequence[Product]) -> onnx.GraphProto:
    """Return a Loop's body that takes the products out of the tensors of all products, at the places of the rows."""
    if not products:
        return graph
    writers, changed = writers_of(graph), _without_products(graph, products)
    for item in products:
        inputs = [item.rows, writers[item.row].input[1]]
        changed.node.append(helper.make_node("Gather", inputs, item.product.output, item.product.name))
    sort_nodes(changed)
    return changed


def with_rows_as_inputs(graph: onnx.GraphProto, products: Sequence[Product]) -> onnx.GraphProto:
    """Return a Scan's body that takes the products as further inputs."""
    changed = _without_products(graph, products)
    changed.input.extend(helper.make_empty_tensor_value_info(item.product.output[0]) for item in products)
    return changed


def _without_products(graph: onnx.GraphProto, products: Sequence[Product]) -> onnx.GraphProto:
    """A copy of a body without the nodes of products."""
    results = {item.product.output[0] for item in products}
    changed = onnx.GraphProto()
    changed.CopyFrom(graph)
    del changed.node[:]
    changed.node.extend(node for node in graph.node if results.isdisjoint(node.output))
    return changed


def gathered_rows(importer: Importer, graph: onnx.GraphProto) -> dict[str, str]:
    """Return the values of a Loop's body that Gather takes out of a tensor around it, along its first axis, by name."""
    inner = {*writers_of(graph), *(item.name for item in graph.input)}
    rows = {}
    for node in graph.node:
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if node.op_type == "Gather" and axis == 0 and node.input[0] not in inner and importer.has_value(node.input[0]):
            rows[node.output[0]] = node.input[0]
    return rows
