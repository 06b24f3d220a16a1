"""Rare forms of an ONNX file, brought to the usual one: sparse weights, outputs without a shape, unsorted nodes."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvmflow.onnx_model.domains import import_contributed
from tvmflow.onnx_model.external_data import without_weights
from tvmflow.onnx_model.graph import graphs_of, nodes_of, sort_nodes, standard_opset

if TYPE_CHECKING:
    import onnx

    from tvmflow.arrays import Array


# The version of ONNX's format since which weights need not be inputs.
_WEIGHTS_APART = 4
# The opset since which GroupNormalization has a scale for each channel.
_SCALE_OF_CHANNEL = 21
# The domain of classical models, and its version since which LabelEncoder finds a key that is NaN.
_CLASSICAL, _FINDS_NAN = "ai.onnx.ml", 4


def bring_to_usual_form(model: "onnx.ModelProto") -> None:
    """Replace the model's sparse weights by dense ones, and give each output without a shape an inferred one, in place.

    Nodes that stand before those that compute what they read are moved after them. A shape without dimensions counts as
    none: exporters write it for outputs of unknown rank. An output whose shape cannot be inferred gets such a shape,
    because ONNX's checker requires the field. A model with operators of com.microsoft gets their version where it has
    none. Weights need not be inputs, and norms of groups with a scale for each group become norms of instances. Keys
    that are NaN, which LabelEncoder does not find before version 4, are removed.
    """
    import onnx

    graph = model.graph
    sort_nodes(graph)
    import_contributed(model)
    _let_weights_be_no_inputs(model)
    if (standard_opset(model) or 1) < _SCALE_OF_CHANNEL:
        for part in list(graphs_of(graph)):
            _replace_group_norms(part)
    _remove_nan_keys(model)
    graph.initializer.extend(
        onnx.numpy_helper.from_array(dense(item), item.values.name) for item in graph.sparse_initializer
    )
    graph.ClearField("sparse_initializer")
    _infer_outputs(model, [value for value in graph.output if _lacks_shape(value)])


def infer_shapes_anew(model: "onnx.ModelProto") -> None:
    """Forget the shapes of values that a model records, and infer those of its outputs, in place."""
    for value in (*model.graph.value_info, *model.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    _infer_outputs(model, model.graph.output)


def _infer_outputs(model: "onnx.ModelProto", values: "Sequence[onnx.ValueInfoProto]") -> None:
    """Give outputs the shapes that the model's operators give, or one without dimensions where these give none."""
    import onnx

    if not values:
        return
    for value in values:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    try:
        whole = onnx.shape_inference.infer_shapes(without_weights(model))
        inferred = {value.name: value for value in whole.graph.output}
    except Exception:  # The inference refuses graphs that runtimes take, and files beyond 2 GB.
        inferred = {}
    for value in values:
        value.CopyFrom(inferred.get(value.name, value))
        if _lacks_shape(value) and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()


def _let_weights_be_no_inputs(model: "onnx.ModelProto") -> None:
    """Give a model whose weights are no inputs a version of the format that allows it, as ONNX Runtime does."""
    inputs = {value.name for value in model.graph.input}
    if model.ir_version < _WEIGHTS_APART and any(item.name not in inputs for item in model.graph.initializer):
        model.ir_version = _WEIGHTS_APART


def _replace_group_norms(graph: "onnx.GraphProto") -> None:
    """Replace each norm of groups that has a scale for each group by a norm of instances, in which a group is one.

    Opset 21 gave GroupNormalization a scale for each channel, and ONNX's checker refuses it before.
    """
    import onnx

    nodes = []
    for node in graph.node:
        if node.op_type != "GroupNormalization" or node.domain not in ("", "ai.onnx"):
            nodes.append(node)
            continue
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        (x, scale, bias), name = node.input, node.output[0]
        parts = {part: f"{name}_{part}" for part in ("groups", "data", "norm", "shape")}
        epsilon = {key: value for key, value in attributes.items() if key == "epsilon"}
        make = onnx.helper.make_node
        nodes += [
            make("Constant", [], [parts["groups"]], value_ints=[0, attributes["num_groups"], -1]),
            make("Reshape", [x, parts["groups"]], [parts["data"]]),
            make("InstanceNormalization", [parts["data"], scale, bias], [parts["norm"]], node.name, **epsilon),
            make("Shape", [x], [parts["shape"]]),
            make("Reshape", [parts["norm"], parts["shape"]], [name]),
        ]
    if len(nodes) > len(graph.node):
        copies = onnx.GraphProto(node=nodes)
        graph.ClearField("node")
        graph.node.extend(copies.node)


def _remove_nan_keys(model: "onnx.ModelProto") -> None:
    """Remove the keys of LabelEncoder that are NaN, with their values, before the version that finds them."""
    import onnx

    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions.get(_CLASSICAL, _FINDS_NAN) >= _FINDS_NAN:
        return
    for node in nodes_of(model.graph):
        lists = {item.name: item for item in node.attribute if item.name.startswith(("keys_", "values_"))}
        if node.op_type != "LabelEncoder" or "keys_floats" not in lists:
            continue
        is_key = [not math.isnan(key) for key in lists["keys_floats"].floats]
        for name, item in lists.items():
            values = onnx.helper.get_attribute_value(item)
            if not all(is_key) and len(values) == len(is_key):
                kept = list(itertools.compress(values, is_key))
                item.CopyFrom(onnx.helper.make_attribute(name, kept, attr_type=item.type))


def _lacks_shape(value: "onnx.ValueInfoProto") -> bool:
    """Whether a value is a tensor, or of unknown type, without a shape or with one of no dimensions."""
    kind = value.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not value.type.tensor_type.shape.dim)


def dense(sparse: "onnx.SparseTensorProto") -> "Array":
    """Return the elements of a sparse tensor.

    Its indices are places in the flat tensor, or an index along each dimension. Raises IndexError or ValueError for an
    index beyond the tensor.
    """
    import numpy as np
    import onnx

    values, indices = (onnx.numpy_helper.to_array(item) for item in (sparse.values, sparse.indices))
    elements = np.zeros(math.prod(sparse.dims), values.dtype)
    elements[indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))] = values
    return elements.reshape(tuple(sparse.dims))
