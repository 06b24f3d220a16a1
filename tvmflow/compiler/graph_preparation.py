"""Reads an ONNX file and prepares its graph for the import: sizes of inputs, functions, constants."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import numpy_helper

from tvmflow.compiler.messages import shorten
from tvmflow.compiler.onnx import has_converter, is_function
from tvmflow.errors import ModelImportError
from tvmflow.onnx_model.domains import explain_unknown, with_own_domain
from tvmflow.onnx_model.external_data import array_of, explain_unreadable, load, without_weights
from tvmflow.onnx_model.forms import bring_to_usual_form, dense
from tvmflow.onnx_model.graph import explain_order, nodes_of
from tvmflow.onnx_model.inputs import name_free_dimensions
from tvmflow.onnx_model.labels import replace_labels
from tvmflow.onnx_model.number_types import weights_as_inputs

# The element types of four bits, with those of eight bits that have the same numbers.
_FEW_BITS: dict[int, str] = {onnx.TensorProto.INT4: "int8", onnx.TensorProto.UINT4: "uint8"}


def load_model(path: Path, label: str) -> onnx.ModelProto:
    """Read an ONNX file, which messages call `label`, with the weights that it keeps in files beside it.

    Raises ModelImportError if the file or one beside it is missing or damaged, and for a model without outputs.
    """
    try:
        model = with_own_domain(load(path))
        bring_to_usual_form(model)
        reason = explain_order(model.graph) or explain_unknown(model)
        if reason is not None:
            raise ValueError(reason)
        with _shapes_of_inputs(model.graph):
            onnx.checker.check_model(without_weights(model))
    except FileNotFoundError as error:
        raise ModelImportError(f"{label}: {error.strerror or 'file not found'}; expected an ONNX file") from error
    except Exception as error:  # protobuf, checker and external-data errors share no base class
        reason = explain_unreadable(path)
        if reason is not None:
            raise ModelImportError(f"{label} {reason}") from error
        raise ModelImportError(f"{label} is not a valid ONNX model ({shorten(error)}); export it again") from error
    if not model.graph.output:
        raise ModelImportError(f"{label} is not a valid ONNX model (it has no outputs); export it again")
    replace_labels(model)
    _widen_few_bits(model.graph)
    return model


@contextlib.contextmanager
def _shapes_of_inputs(graph: onnx.GraphProto) -> Iterator[None]:
    """Let inputs without a shape have one within, which the checker wants; a caller may give it."""
    shapeless = [value.type.tensor_type for value in graph.input if value.type.HasField("tensor_type")]
    shapeless = [tensor for tensor in shapeless if not tensor.HasField("shape")]
    for tensor in shapeless:
        tensor.shape.SetInParent()
    yield
    for tensor in shapeless:
        tensor.ClearField("shape")


def _widen_few_bits(graph: onnx.GraphProto) -> None:
    """Write weights of four bits that are dequantised, and nothing else, as weights of eight bits, in place.

    GatherBlockQuantized takes weights of uint8 for two numbers of four bits each, and gets int8.
    """
    readers: dict[str, set[str]] = {}
    for node in nodes_of(graph):
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    for tensor in graph.initializer:
        operators = readers.get(tensor.name)
        if tensor.data_type in _FEW_BITS and operators in ({"DequantizeLinear"}, {"GatherBlockQuantized"}):
            dtype = _FEW_BITS[tensor.data_type] if operators == {"DequantizeLinear"} else "int8"
            tensor.CopyFrom(numpy_helper.from_array(array_of(tensor).astype(dtype), tensor.name))


def apply_shapes(
    label: str,
    graph: onnx.GraphProto,
    inputs: Sequence[onnx.ValueInfoProto],
    shapes: Mapping[str, Sequence[int | str]],
) -> dict[str, int | str]:
    """Write `shapes`, which are by the inputs' names, into the graph's inputs, and name dimensions without a name.

    A symbol whose size one input fixes gets that size in all inputs. Returns the new size or the new name of each
    symbol that `shapes` gives one. Raises ModelImportError for an input that is no tensor or has no shape, and for
    shapes that contradict the model or each other. Messages call the file `label`.
    """
    names = [value.name for value in inputs]
    for name in shapes:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"its inputs are {', '.join(map(repr, names))}"
            raise ModelImportError(f"{label} has no input {name!r}; {hint}")
    changes: dict[str, int | str] = {}
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            raise ModelImportError(f"{label}: input {value.name!r} is no tensor; only tensor inputs are supported")
        tensor = value.type.tensor_type
        shape = shapes.get(value.name)
        if not tensor.HasField("shape"):
            if shape is None:
                raise ModelImportError(f"{label}: input {value.name!r} has no shape; give one, as --input-shapes does")
            for _ in shape:
                tensor.shape.dim.add()
    name_free_dimensions(graph)
    for value in inputs:
        dims = value.type.tensor_type.shape.dim
        shape = shapes.get(value.name, ())
        if value.name in shapes and len(shape) != len(dims):
            raise ModelImportError(
                f"{label}: input {value.name!r} has {len(dims)} dimensions, the given shape {tuple(shape)} "
                f"has {len(shape)}"
            )
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=False)):
            if isinstance(size, int) and size < 1:
                raise ModelImportError(
                    f"{label}: dimension {axis} of input {value.name!r} must be positive, not {size}"
                )
            if dim.HasField("dim_value"):
                if size != dim.dim_value:
                    raise ModelImportError(
                        f"{label}: dimension {axis} of input {value.name!r} is fixed to {dim.dim_value} in the model, "
                        f"not {size!r}; export the model with a dynamic dimension"
                    )
            elif changes.setdefault(dim.dim_param, size) != size:
                raise ModelImportError(
                    f"{label}: dimension {dim.dim_param!r} is given both as {changes[dim.dim_param]!r} and {size!r}"
                )
    for value in inputs:
        for dim in value.type.tensor_type.shape.dim:
            change = changes.get(dim.dim_param) if dim.dim_param else None
            if isinstance(change, int):
                dim.dim_value = change
            elif change is not None:
                dim.dim_param = change
    return changes


def expand_functions(label: str, model: onnx.ModelProto, own: Collection[str]) -> onnx.ModelProto:
    """Return the model with its functions inlined, and with ONNX's function bodies for operators without a converter.

    `own` names the functions that are not inlined, as `org.example.Twice`. Raises ModelImportError, in which `label`
    names the file, if ONNX cannot inline the functions.
    """
    try:
        if model.functions:
            defaults = {(item.domain, item.name): list(item.attribute_proto) for item in model.functions}
            inner = [node for item in model.functions for node in item.node]
            for node in (*nodes_of(model.graph), *inner):
                _add_defaults(node, defaults.get((node.domain, node.op_type), []))
            _align_opsets(model)
            names = [(item.domain, item.name) for item in model.functions if f"{item.domain}.{item.name}" in own]
            model = onnx.inliner.inline_selected_functions(model, names, True)
        while nodes := [node for node in nodes_of(model.graph) if not has_converter(node) and is_function(node)]:
            for node in nodes:
                schema = onnx.defs.get_schema(node.op_type)
                _add_defaults(node, [attribute.default_value for attribute in schema.attributes.values()])
            _describe_weights(model.graph)
            names = sorted({("", node.op_type) for node in nodes})
            model = onnx.inliner.inline_selected_functions(model, names, False, True)
    except Exception as error:
        raise ModelImportError(
            f"{label}: the functions of the model cannot be inlined ({shorten(error)}); export it without functions"
        ) from error
    return model


def _align_opsets(model: onnx.ModelProto) -> None:
    """Give functions the opsets of the model, as the inliner wants.

    ONNX's checker has refused a model whose functions have operators that differ in the two.
    """
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for function in model.functions:
        for entry in function.opset_import:
            entry.version = versions.get(entry.domain, entry.version)


def _describe_weights(graph: onnx.GraphProto) -> None:
    """Add types and shapes of weights: the inliner looks for them where an operator's body depends on its inputs."""
    names = {value.name for value in graph.value_info}
    graph.value_info.extend(value for value in weights_as_inputs(graph) if value.name not in names)


def _add_defaults(node: onnx.NodeProto, defaults: Sequence[onnx.AttributeProto]) -> None:
    """Add the default values of absent attributes: the inliner would leave references to them."""
    names = {attribute.name for attribute in node.attribute}
    for default in defaults:
        if default.name not in names and default.type != onnx.AttributeProto.UNDEFINED:
            node.attribute.append(default)


def constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Turn the Constant nodes of a graph and of its inner graphs into initializers, in place.

    A node whose value is in `value_string` or `value_strings` stays.
    """
    others = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                constants_to_initializers(attribute.g)
        tensor = _constant_tensor(node) if node.op_type == "Constant" else None
        if tensor is None:
            others.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(others)


def _constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    if len(node.attribute) != 1:
        return None
    if node.attribute[0].name == "sparse_value":
        return numpy_helper.from_array(dense(node.attribute[0].sparse_tensor))
    attribute = node.attribute[0]
    value: Any = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        tensor: onnx.TensorProto = attribute.t
        return tensor
    dtype = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
    if attribute.name not in dtype:
        return None
    return numpy_helper.from_array(np.array(value, dtype[attribute.name]))
