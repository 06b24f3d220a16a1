"""The inputs of an ONNX graph, and names for those of their dimensions that may have any size."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tvmflow.errors import ExportError

if TYPE_CHECKING:
    import onnx


def graph_inputs(graph: "onnx.GraphProto") -> "list[onnx.ValueInfoProto]":
    """Return the inputs that a caller passes: those of the graph without its weights."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def fix_shapes(graph: "onnx.GraphProto", shapes: Mapping[str, tuple[int | str, ...]]) -> None:
    """Give inputs other shapes, in place: sizes, and names for dimensions that may have any size.

    `shapes` are the new shapes by input name. A dimension with a new name is renamed in all values of the graph. When a
    dimension gets a fixed size, outputs and inner values lose its name and have an unknown size there: exporters may
    use one name for dimensions of several sizes, and shapes are inferred again later. An input without a shape takes
    any. Raises ExportError for a name that is no input, and for a shape that the input cannot have.
    """
    inputs = {value.name: value for value in graph_inputs(graph)}
    new_sizes: dict[str, int | str] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise ExportError(f"the ONNX model has no input {name!r}; its inputs are {', '.join(inputs)}")
        tensor = inputs[name].type.tensor_type
        if not tensor.HasField("shape"):
            for _ in shape:
                tensor.shape.dim.add()
        dims = list(tensor.shape.dim)
        for dim, size in zip(dims, shape, strict=False):
            if len(dims) == len(shape) and dim.dim_value and isinstance(size, str):
                raise ExportError(
                    f"dimension {size!r} of input {name!r} is {dim.dim_value} in the ONNX model; "
                    f"let the model take any size, or say {dim.dim_value} for it"
                )
        if len(dims) != len(shape) or any(
            dim.dim_value and dim.dim_value != size for dim, size in zip(dims, shape, strict=True)
        ):
            own = ", ".join(str(dim.dim_value or dim.dim_param or "?") for dim in dims)
            raise ExportError(
                f"input {name!r} of the ONNX model has shape [{own}] and cannot have [{', '.join(map(str, shape))}]"
            )
        for dim, size in zip(dims, shape, strict=True):
            if dim.dim_param:
                new_sizes[dim.dim_param] = size
            _set_size(dim, size)
    for value in (*graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            new_size = new_sizes.get(dim.dim_param)
            if isinstance(new_size, int):
                dim.Clear()
            elif new_size is not None:
                dim.dim_param = new_size


def _set_size(dim: "onnx.TensorShapeProto.Dimension", size: int | str) -> None:
    if isinstance(size, int):
        dim.dim_value = size
    else:
        dim.dim_param = size


def name_free_dimensions(graph: "onnx.GraphProto", *, zero_is_free: bool = False) -> None:
    """Give every dimension of an input that has no fixed size a name that is an identifier, in place.

    A dimension without a name, or with the size -1 that some exporters write instead, is named after its input and
    axis: `x_0` is the first of input `x`. With `zero_is_free` a dimension of size 0 counts as free, too. In a name from
    the file, underscores replace the characters that no identifier has, in all values of the graph. Dimensions of
    different names keep different names.
    """
    for value in _values(graph):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_value < 0:
                dimension.ClearField("dim_value")
    free = [
        (value.name, axis, dimension)
        for value in graph_inputs(graph)
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim)
        if not dimension.HasField("dim_value") or (zero_is_free and dimension.dim_value == 0)
    ]
    identifiers = {dimension.dim_param for *_, dimension in free if dimension.dim_param.isidentifier()}
    renamed: dict[str, str] = {}
    for name, axis, dimension in free:
        symbol = dimension.dim_param
        if re.search(r"\w", symbol) is None:
            dimension.dim_param = _make_identifier(f"{name}_{axis}", identifiers)
        elif not symbol.isidentifier() and symbol not in renamed:
            renamed[symbol] = _make_identifier(symbol, identifiers)
    for value in _values(graph):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in renamed:
                dimension.dim_param = renamed[dimension.dim_param]


def _values(graph: "onnx.GraphProto") -> "Iterator[onnx.ValueInfoProto]":
    yield from graph.input
    yield from graph.output
    yield from graph.value_info


def _make_identifier(name: str, identifiers: set[str]) -> str:
    """An identifier like `name` that is none of `identifiers`; it becomes one of them."""
    stem = re.sub(r"\W", "_", name)
    stem = stem if stem.isidentifier() else f"_{stem}"
    identifier, number = stem, 2
    while identifier in identifiers:
        identifier, number = f"{stem}_{number}", number + 1
    identifiers.add(identifier)
    return identifier
