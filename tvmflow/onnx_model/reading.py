"""Reads a user's ONNX file, checks it, and says which inputs it takes and with which samples it may run."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tvmflow.errors import ExportError
from tvmflow.onnx_model import external_data
from tvmflow.onnx_model.categories import known_categories
from tvmflow.onnx_model.domains import explain_unknown, with_own_domain
from tvmflow.onnx_model.forms import bring_to_usual_form, infer_shapes_anew
from tvmflow.onnx_model.graph import explain_order
from tvmflow.onnx_model.index_limits import index_limits
from tvmflow.onnx_model.inputs import fix_shapes, graph_inputs, name_free_dimensions
from tvmflow.onnx_model.labels import replace_labels
from tvmflow.spec import Dtype, Input, Samples
from tvmflow.usercode import describe

if TYPE_CHECKING:
    import onnx

_DTYPES = get_args(Dtype)
# How many values integers have that the model uses as no index: they may be masks.
_MASK = 2


def read_onnx(path: Path, label: str | None = None) -> "onnx.ModelProto":
    """Read an ONNX file; name each free dimension of an input that has no name, as `x_0` for input `x`.

    Strings are numbers in the result. Raises ExportError when the file is missing or not an ONNX file; the message
    calls it `label`, by default its path.
    """
    return read_labelled(path, label)[0]


def read_labelled(path: Path, label: str | None = None) -> "tuple[onnx.ModelProto, dict[str, tuple[str, ...]]]":
    """Read an ONNX file; return it with the labels of its inputs and outputs, by their names.

    Free dimensions have names in the result, and strings are numbers, as `replace_labels` makes them. Raises
    ExportError when the file is missing or not an ONNX file; the message calls it `label`, by default its path.
    """
    label = label or str(path)
    try:
        model = external_data.load(path)
        if not model.graph.output:
            raise ValueError("it has no outputs" if model.graph.node else "it holds no graph")
        bring_to_usual_form(model)
        labels = replace_labels(model)
    except FileNotFoundError as error:
        raise ExportError(f"there is no ONNX file {label!r}") from error
    except Exception as error:
        reason = external_data.explain_unreadable(path)
        if reason is not None:
            raise ExportError(f"{label!r} {reason}") from error
        raise ExportError(f"{label!r} is not a readable ONNX file ({describe(error)}); export it again") from error
    name_free_dimensions(model.graph, zero_is_free=True)
    return model, labels


def check_valid(model: "onnx.ModelProto") -> None:
    """Raise ExportError for a model that is not valid. Shapes in it that its operators do not give are removed."""
    import onnx

    for output in model.graph.output:
        kind = output.type.WhichOneof("value")
        if output.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            raise ExportError(
                f"output {output.name!r} of the ONNX model holds strings that it computes, and only numbers are "
                "supported; export the model to where it has numbers"
            )
        if kind not in (None, "tensor_type"):
            raise ExportError(
                f"output {output.name!r} of the ONNX model is no tensor but a {str(kind).removesuffix('_type')}; "
                "export the model with tensors as outputs"
            )
    reason = explain_order(model.graph) or explain_unknown(with_own_domain(model))
    if reason is not None:
        raise ExportError(f"the ONNX model is not valid ({reason})")
    try:
        try:
            _check_fully(model)
        except onnx.shape_inference.InferenceError:
            # ONNX Runtime takes the shapes that operators give.
            infer_shapes_anew(model)
            _check_fully(model)
    except Exception as error:  # The errors of the checker, of shape inference and of protobuf share no base class.
        raise ExportError(f"the ONNX model is not valid ({describe(error)})") from error


def _check_fully(model: "onnx.ModelProto") -> None:
    import onnx

    onnx.checker.check_model(external_data.without_weights(with_own_domain(model)), full_check=True)


def declared_inputs(model: "onnx.ModelProto", reshaped: Collection[str] = ()) -> tuple[Input, ...]:
    """Return the inputs that an ONNX model declares; free dimensions must have names, as `read_onnx` gives them.

    The samples of integers are all that the model takes as indices, such as the tokens of a vocabulary; others are 0
    and 1. The samples of what an encoder reads are its categories. Inputs named in `reshaped` get another shape from
    the caller, so they need none. Raises ExportError for an input that is not a tensor of numbers, for a dtype that is
    not supported, and for an input without a shape.
    """
    inputs, limits, categories = [], index_limits(model), known_categories(model)
    for item in graph_inputs(model.graph):
        dtype = _input_dtype(item)
        if dtype not in _DTYPES:
            raise ExportError(
                f"input {item.name!r} of the ONNX model is {dtype}; supported are {', '.join(_DTYPES)}: "
                "let the model take one of these and cast it"
            )
        shape = tuple(dim.dim_value or dim.dim_param for dim in item.type.tensor_type.shape.dim)
        if item.name not in reshaped and not item.type.tensor_type.HasField("shape"):
            raise ExportError(
                f"input {item.name!r} of the ONNX model has no shape; give one by --input-shapes, or under `inputs` of "
                "a release file"
            )
        floating = dtype.startswith("float")
        integers = {"kind": "integers", "low": 0, "high": max(limits.get(item.name, _MASK), 1)}
        kind: dict[str, Any] = {"kind": "normal"} if floating else integers
        if item.name in categories:
            kind = {"kind": "categories", "categories": categories[item.name]}
        inputs.append(Input.model_validate({"name": item.name, "shape": shape, "dtype": dtype, "samples": kind}))
    return tuple(inputs)


def _input_dtype(value: "onnx.ValueInfoProto") -> str:
    """The name of the dtype of an input, as `float32`. Raises ExportError when it has none."""
    import onnx

    element = value.type.tensor_type.elem_type
    if element == onnx.TensorProto.STRING:
        raise ExportError(
            f"input {value.name!r} of the ONNX model holds strings, and only numbers are supported; export the model "
            "from where its strings are numbers"
        )
    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(element))
    except KeyError as error:
        raise ExportError(
            f"input {value.name!r} of the ONNX model is not a tensor of numbers; export the model with such inputs"
        ) from error


def fix_input_shapes(model: "onnx.ModelProto", inputs: tuple[Input, ...]) -> None:
    """Write the release file's shapes into the graph. Raises ExportError where names, dtypes or shapes do not fit."""
    declared = {item.name: item for item in graph_inputs(model.graph)}
    if set(declared) != {item.name for item in inputs}:
        raise ExportError(
            f"the ONNX model takes the inputs {', '.join(declared)}, the release file names "
            f"{', '.join(item.name for item in inputs)}; they must be the same"
        )
    for item in inputs:
        dtype = _input_dtype(declared[item.name])
        if dtype != item.dtype:
            raise ExportError(f"input {item.name!r} of the ONNX model is {dtype}, the release file says {item.dtype}")
    fix_shapes(model.graph, {item.name: item.shape for item in inputs})


def sample_candidates(inputs: tuple[Input, ...]) -> Iterator[tuple[Input, ...]]:
    """Yield the inputs of `declared_inputs` with samples of several kinds, in the order to try them: likeliest first.

    A vector of integers that has as many as another input has items is taken for their lengths first: lengths of 0
    and 1 leave nothing of most items. A model of images may need floats from 0 to 1: in others a detector finds
    nothing. Integers that a model divides by, or steps of a range, are not 0.
    """
    lengths, uniform = Samples(kind="lengths"), Samples(kind="uniform", low=0.0, high=1.0)
    batches = {item.shape[0] for item in inputs if len(item.shape) > 1}
    with_lengths = tuple(
        item.model_copy(update={"samples": lengths})
        if len(item.shape) == 1 and item.shape[0] in batches and item.samples.high == _MASK
        else item
        for item in inputs
    )
    if with_lengths != inputs:
        yield with_lengths
    yield inputs
    yield tuple(
        item.model_copy(update={"samples": uniform}) if item.dtype.startswith("float") else item for item in inputs
    )
    positive = Samples(kind="integers", low=1, high=_MASK + 1)
    with_positive = tuple(
        item.model_copy(update={"samples": positive}) if item.samples.high == _MASK else item for item in inputs
    )
    if with_positive != inputs:
        yield with_positive
