"""Rare forms of an ONNX file, brought to the usual one: sparse weights, outputs without a shape, unsorted nodes."""

import math
from typing import TYPE_CHECKING, Any

from tvmflow.onnx_data import without_weights
from tvmflow.onnx_domains import import_contributed
from tvmflow.onnx_graph import sort_nodes

if TYPE_CHECKING:
    import numpy as np
    import onnx


def bring_to_usual_form(model: "onnx.ModelProto") -> None:
    """Replace the model's sparse weights by dense ones, and give each output without a shape an inferred one, in place.

    Nodes that stand before those that compute what they read are moved after them. A shape without dimensions counts as
    none: exporters write it for outputs of unknown rank. An output whose shape cannot be inferred gets such a shape,
    because ONNX's checker requires the field. A model with operators of com.microsoft gets their version where it has
    none.
    """
    import onnx

    graph = model.graph
    sort_nodes(graph)
    import_contributed(model)
    graph.initializer.extend(
        onnx.numpy_helper.from_array(_dense(item), item.values.name) for item in graph.sparse_initializer
    )
    graph.ClearField("sparse_initializer")
    shapeless = [value for value in graph.output if _lacks_shape(value)]
    if not shapeless:
        return
    for value in shapeless:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    try:
        whole = onnx.shape_inference.infer_shapes(without_weights(model))
        inferred = {value.name: value for value in whole.graph.output}
    except Exception:  # The inference refuses graphs that runtimes take, and files beyond 2 GB.
        inferred = {}
    for value in shapeless:
        value.CopyFrom(inferred.get(value.name, value))
        if _lacks_shape(value) and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()


def _lacks_shape(value: "onnx.ValueInfoProto") -> bool:
    """Whether a value is a tensor, or of unknown type, without a shape or with one of no dimensions."""
    kind = value.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not value.type.tensor_type.shape.dim)


def _dense(sparse: "onnx.SparseTensorProto") -> "np.ndarray[Any, Any]":
    """The elements of a sparse tensor; its indices are places in the flat tensor, or an index along each dimension."""
    import numpy as np
    import onnx

    values, indices = (onnx.numpy_helper.to_array(item) for item in (sparse.values, sparse.indices))
    dense = np.zeros(math.prod(sparse.dims), values.dtype)
    dense[indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))] = values
    return dense.reshape(tuple(sparse.dims))
