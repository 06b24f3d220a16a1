"""Writes a PyTorch module as an ONNX model, by PyTorch's exporter."""

import contextlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow.arrays import NamedArrays
from tvmflow.errors import ExportError
from tvmflow.onnx_model import external_data
from tvmflow.onnx_model.inputs import graph_inputs
from tvmflow.onnx_model.reading import fix_input_shapes
from tvmflow.source import Source, load_module
from tvmflow.spec import Dimension, Export, Input
from tvmflow.usercode import describe

if TYPE_CHECKING:
    import onnx
    import torch

_PRIVATE = "tvmflow_output_"
_OF_DECISION = (
    "the model goes another way for other data, which an export cannot follow: write torch.where or torch.cond"
)
# What to do about an error of PyTorch's exporter, by words of its message.
_ADVICE = {
    "No ONNX function found for": "PyTorch's exporter has no form of this operator in ONNX; compute it by other ones",
    "data-dependent": _OF_DECISION,
    "GuardOnDataDependentSymNode": _OF_DECISION,
    "__obj_flatten__": "the model holds weights that PyTorch has quantised; export the model before that, and quantise "
    "the ONNX file",
    "object has no attribute 'name'": "let the model return tensors",
    "only 4D query, key, and value": "give scaled_dot_product_attention tensors of four dimensions, as by unsqueeze(1)",
}


def example_sizes(inputs: tuple[Input, ...], dimensions: Mapping[str, Dimension]) -> dict[str, int]:
    """Return the sizes of the free dimensions for which a module is exported.

    torch.export bakes the sizes 0 and 1 into the graph, so that they are two or more.
    """
    names = {dim for item in inputs for dim in item.shape if isinstance(dim, str)}
    return {name: max(2, dimensions.get(name, Dimension()).typical_size) for name in names}


def export_module(
    source: Source,
    module: "torch.nn.Module",
    inputs: tuple[Input, ...],
    example: NamedArrays,
    dimensions: Mapping[str, Dimension],
    outputs: tuple[str, ...],
    settings: Export,
    path: Path,
) -> "onnx.ModelProto":
    """Export the module of a source to the file `path`, and return the ONNX model with the shapes of `inputs`.

    The exporter follows the module for `example`, whose free dimensions have the sizes of `example_sizes`. `outputs`
    are the names that the release file gives, or none. Raises ExportError when the module cannot be exported, and when
    the exporter fixes a free dimension.
    """
    import torch

    from tvmflow.torch_forms import functions_of_any_size, translations

    arguments = tuple(torch.from_numpy(array) for array in example.values())
    symbols = {name: _symbol(name, dimensions.get(name, Dimension())) for name in example_sizes(inputs, dimensions)}
    shapes = tuple({axis: symbols[dim] for axis, dim in enumerate(item.shape) if dim in symbols} for item in inputs)
    options: dict[str, Any] = {
        "opset_version": settings.opset,
        "optimize": settings.optimize,
        "input_names": [item.name for item in inputs],
        # The exporter gives an output its name even when a value inside the graph has that name already.
        "output_names": [f"{_PRIVATE}{index}" for index in range(len(outputs))] or None,
        "dynamo": True,
        "external_data": _weights_size(module) > external_data.LARGEST_FILE,
        "verbose": False,
        **settings.options,
    }
    if source.kind != "pt2":
        options.setdefault("dynamic_shapes", shapes if symbols else None)
    exported: Any = torch.export.load(str(source.path)) if source.kind == "pt2" else module
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            # The older exporter, which follows one call, has its own forms.
            if options["dynamo"]:
                stack.enter_context(functions_of_any_size())
                options.setdefault("custom_translation_table", translations())
            torch.onnx.export(exported, arguments if source.kind != "pt2" else (), str(path), **options)
        model = external_data.load(path)
        if not model.graph.output:
            raise ExportError(f"model {source.model.label!r} returns no tensors, so that there is nothing to release")
        _name_outputs(model, outputs)
    except ExportError:
        raise
    except Exception as error:
        cause = _root_cause(error)
        signature = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in example.items())
        advice = next((advice for sign, advice in _ADVICE.items() if sign in f"{error} {cause}"), None) or (
            f"it was called with {signature}, as `inputs` say: there must be one for each argument, in their order, "
            "with its shape and dtype"
        )
        raise ExportError(f"model {source.model.label!r} cannot be exported to ONNX ({cause}); {advice}") from error
    _refuse_fixed_dimensions(model, inputs)
    _remove_traces(model)
    fix_input_shapes(model, inputs)
    return model


def _refuse_fixed_dimensions(model: "onnx.ModelProto", inputs: tuple[Input, ...]) -> None:
    """Raise ExportError for a free dimension that PyTorch's exporter made a number."""
    dims = {value.name: value.type.tensor_type.shape.dim for value in graph_inputs(model.graph)}
    for item in inputs:
        for dim, size in zip(dims.get(item.name, ()), item.shape, strict=False):
            if isinstance(size, str) and dim.HasField("dim_value"):
                raise ExportError(
                    f"dimension {size!r} of input {item.name!r} is {dim.dim_value} in the ONNX model: PyTorch's "
                    "exporter fixed it, because the model computes with this size as a number; let the model take any "
                    f"size, or say {dim.dim_value} for it"
                )


def _weights_size(module: "torch.nn.Module") -> int:
    """The bytes of a module's weights."""
    import torch

    tensors = (value for value in module.state_dict().values() if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _name_outputs(model: "onnx.ModelProto", names: tuple[str, ...]) -> None:
    """Give the graph's outputs the names in the release file; rename inner values that have one of these names."""
    if not names:
        return
    current = [output.name for output in model.graph.output]
    if len(current) != len(names):
        raise ExportError(f"the model returns {len(current)} outputs, the release file names {len(names)}")
    inner = {value for node in model.graph.node for value in node.output} - set(current)
    new_names = {name: f"{name}_inside" for name in names if name in inner} | dict(zip(current, names, strict=True))
    for node in model.graph.node:
        for values in (node.input, node.output):
            for index, value in enumerate(values):
                values[index] = new_names.get(value, value)
    for value in (*model.graph.output, *model.graph.value_info):
        value.name = new_names.get(value.name, value.name)


def _symbol(name: str, dimension: Dimension) -> Any:
    import torch

    return torch.export.Dim(name, min=dimension.min, max=dimension.max)


def _remove_traces(model: "onnx.ModelProto") -> None:
    """Remove the stack trace of each node, which holds paths: the same model gives the same bytes in every folder."""
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        properties = [item for item in node.metadata_props if item.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(properties)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return describe(error)


def has_the_same_weights_again(source: Source, module: "torch.nn.Module") -> bool:
    """Whether a second call of the factory gives the weights of `module` again; True where weights come from a file."""
    import torch

    if source.kind != "factory" or source.path is not None:
        return True
    try:
        first, second = module.state_dict(), load_module(source).state_dict()
    except Exception:  # A factory that can be called once cannot give the same weights twice.
        return False
    return first.keys() == second.keys() and all(
        not isinstance(value, torch.Tensor) or _are_equal(value, second[name]) for name, value in first.items()
    )


def _are_equal(one: "torch.Tensor", other: "torch.Tensor") -> bool:
    """Whether two tensors have the same elements; NaN is equal to NaN here."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
