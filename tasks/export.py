"""Export: write the original as an ONNX file, check it, and compare it with the original on samples."""

import contextlib
import io
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np
from pydantic import Field

from tasks.original import Original
from tasks.sizes import SizeTrial
from tasks.step import Job, Step, StepRunner
from tvmflow import memory, onnx_data, samples, usercode
from tvmflow.bundle import TensorSpec, sha256_file
from tvmflow.categories import known_categories
from tvmflow.dimensions import alternatives
from tvmflow.errors import ExportError, naming_model
from tvmflow.index_limits import index_limits, index_ranges
from tvmflow.onnx_domains import explain_unknown, with_own_domain
from tvmflow.onnx_forms import bring_to_usual_form, infer_shapes_anew
from tvmflow.onnx_graph import explain_order, rounds_activations, standard_opset
from tvmflow.onnx_inputs import fix_shapes, graph_inputs, name_free_dimensions
from tvmflow.onnx_labels import replace_labels
from tvmflow.onnx_ties import Ties
from tvmflow.operators import define, load_operators
from tvmflow.process import Emit
from tvmflow.samples import NamedArrays, constant_outputs
from tvmflow.size_limits import SizeLimits
from tvmflow.source import Source, load_module, open_session, run_module, run_session
from tvmflow.spec import ROUNDED_ERROR, Dimension, Dtype, Export, Input, Samples, Spec
from tvmflow.tolerance import Bounds, largest_error
from tvmflow.usercode import describe
from tvmflow.workspace import Artifact, StepResult

if TYPE_CHECKING:
    import onnx
    import onnxruntime
    import torch

_PRIVATE = "tvmflow_output_"
_DTYPES = get_args(Dtype)
# How many values integers have that the model uses as no index: they may be masks.
_MASK = 2
# The sample that a bundle holds takes at most this share of the model's file, or so many bytes, if there is such a one.
_SHARE_OF_SAMPLE, _SMALL_SAMPLE = 10, 1 << 18
# What to do where ONNX Runtime does not run what PyTorch does.
_OF_EXPORT = "PyTorch runs it on them: fix the sizes of its free dimensions, or change what the exporter gets wrong"
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
# The most labels that a note names.
_LABELS_IN_NOTE = 10


class ExportJob(Job):
    """The original, its inputs, and how to export it; `files` are the SHA-256 of sample files by input name.

    `samples` is the number of samples to compare on, and `seed` the seed of their random values. `has_bounds` is
    whether the release file bounds the errors of ONNX Runtime beside PyTorch. `operators` are the user's own operators,
    as `package.module:operator`.
    """

    not_in_key: ClassVar[Mapping[str, Any]] = {"original": {"source"}}

    original: Original
    inputs: tuple[Input, ...]
    dimensions: dict[str, Dimension]
    outputs: tuple[str, ...]
    export: Export
    samples: int
    seed: int
    files: dict[str, str]
    has_bounds: bool
    operators: tuple[str, ...] = ()

    def bounds(self, *, rounds_activations: bool) -> Bounds:
        """Return the errors that ONNX Runtime's outputs may have beside PyTorch's.

        They are wider for a model that rounds what it computes to 8 or 16 bits, where the release file sets none.
        """
        error = ROUNDED_ERROR if rounds_activations and not self.has_bounds else None
        return Bounds(self.export.rtol, self.export.atol, error)

    @property
    def needs_torch(self) -> bool:
        """Whether the original is a PyTorch model."""
        return self.original.source.framework == "pytorch"

    @classmethod
    def of(cls, spec: Spec, original: Original) -> "ExportJob":
        """Return the job that exports a release file's model."""
        files = {
            item.name: sha256_file(spec.path(item.samples.file))
            for item in spec.inputs
            if item.samples.file is not None
        }
        return cls(
            original=original,
            inputs=spec.inputs,
            dimensions=spec.dimensions,
            outputs=spec.outputs,
            export=spec.export,
            samples=spec.validation.samples,
            seed=spec.validation.seed,
            files=files,
            has_bounds=spec.export.has_bounds,
            operators=spec.model.operators,
        )


class ExportResult(StepResult):
    """The ONNX file, its signature, and the samples with the original's outputs.

    `max_abs_error` is the largest absolute difference between ONNX Runtime and PyTorch on the samples; None when the
    original is the ONNX file itself. `dimensions` are the ranges of symbolic dimensions from the release file; where it
    gives none for a dimension of an ONNX file, the range of sizes at which ONNX Runtime runs the file. `registered` is
    the version of the registered model that was exported, as MODEL/3. `is_repeatable` is False when two calls of the
    model's factory gave different weights. `labels` are those of the outputs that `notes` describes, by their names.
    `golden` is the place of the sample that bundles hold, and `undecided` has its masks of the integers and bools that
    rounding decides, by the outputs' names. `rounds_activations` is whether the model computes tensors of few bits:
    8-bit integers, float16 or bfloat16. `indices` are the least and the largest integer of inputs that the model looks
    up in tables. `refusal` says at which sizes of its samples a PyTorch module did not run, if there were such.
    """

    onnx: Artifact
    samples: Artifact
    undecided: Artifact
    golden: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_abs_error: float | None
    opset: int
    dimensions: dict[str, Dimension] = Field(default={})
    registered: str | None = None
    is_repeatable: bool = True
    labels: dict[str, tuple[str, ...]] = Field(default={})
    rounds_activations: bool = False
    indices: dict[str, tuple[int, int]] = Field(default={})
    refusal: str = ""

    def notes(self) -> list[str]:
        """Return a sentence for sizes that the original does not take, and for each input and output of labels.

        These are labels in the original, and numbers in a bundle.
        """
        outputs = {output.name: output for output in self.outputs}
        notes = [self.refusal] if self.refusal else []
        for name, labels in self.labels.items():
            text = ", ".join(labels[:_LABELS_IN_NOTE]) + (", ..." if len(labels) > _LABELS_IN_NOTE else "")
            if name not in outputs:
                form = f"holds strings; a bundle takes their places, from 0 on, in {text}, and -1 for any other"
            elif outputs[name].dtype.startswith("float"):
                form = f"is a dictionary by label (ZipMap); in a bundle it holds the scores, in the order of {text}"
            else:
                form = f"holds strings; in a bundle it holds their places, from 0 on, in {text}"
            notes.append(f"{'output' if name in outputs else 'input'} {name!r} of the model {form}")
        return notes


def work(job: ExportJob, emit: Emit) -> ExportResult:
    """Export the original to ONNX, or take the original's own ONNX file.

    The step calls this in a child process. Raises ExportError when the model cannot be loaded, exported or read, or
    when ONNX Runtime's outputs on the samples differ from PyTorch's beyond the release file's tolerance.
    """
    workspace, source = job.workspace, job.original.source
    label = source.model.label
    with workspace.scratch() as folder, naming_model(label):
        path = folder / "model.onnx"
        is_repeatable = True
        labels: dict[str, tuple[str, ...]] = {}
        if source.framework == "onnx":
            model, labels = read_labelled(source.path or Path(), label)
            rounds = _without_bfloat16(model)
            inputs = _pinned(job.inputs or described_by(model), job.dimensions)
            _fix_shapes(model, inputs)
            module = None
            candidates: Iterable[tuple[Input, ...]] = (inputs,) if job.inputs else sample_candidates(inputs)
        else:
            emit(0, 3, "loading the model")
            module = load_module(source)
            is_repeatable = _is_repeatable(source, module)
            inputs = _pinned(job.inputs, job.dimensions)
            candidates = (inputs,)
            emit(1, 3, "exporting")
            model = _export(module, inputs, job, path)
            rounds = _without_bfloat16(model)
        define(model, load_operators(job.operators))
        _check(model)
        data = onnx_data.save(model, path)
        emit(2, 3, "comparing with ONNX Runtime")
        session = _open(path) if module is None else open_session(path, prints_errors=False)
        limits = SizeLimits(model) if module is None else None
        bounds = job.bounds(rounds_activations=rounds)
        ties = Ties(path)
        dimensions, compared = _compare_where_it_runs(session, module, limits, candidates, ties, job, bounds)
        pairs = compared.pairs
        pinned = _pinned(inputs, dimensions)
        if pinned != inputs:
            # A dimension whose only size was found by trial is as one that the file fixes.
            inputs = pinned
            _fix_shapes(model, inputs)
            data = onnx_data.save(model, path)
        _refuse_nan([outputs for _, outputs in pairs], model if module is None else module)
        samples.save(folder / "samples.npz", pairs)
        golden = _golden(pairs, sum(item.stat().st_size for item in (path, data) if item is not None))
        masks = ties.undecided(*pairs[golden], bounds)
        np.savez(folder / "undecided.npz", **masks)  # type: ignore[arg-type]
        return ExportResult(
            onnx=workspace.keep(path, data=data),
            samples=workspace.keep(folder / "samples.npz"),
            undecided=workspace.keep(folder / "undecided.npz"),
            golden=golden,
            inputs=tuple(TensorSpec(item.name, item.shape, item.dtype) for item in inputs),
            outputs=_signature(model.graph.output, pairs[0][1]),
            max_abs_error=compared.error,
            dimensions=dimensions,
            opset=_opset(model),
            registered=job.original.registered,
            is_repeatable=is_repeatable,
            labels=labels,
            rounds_activations=rounds,
            indices=index_ranges(model),
            refusal=compared.refusal,
            sources=usercode.imported_sources(job.folder),
        )


def _refuse_nan(outputs: Sequence[NamedArrays], model: "onnx.ModelProto | torch.nn.Module") -> None:
    """Raise ExportError for an output that is NaN whatever the sample, because weights are."""
    names = [
        name
        for name, array in outputs[0].items()
        if array.dtype.kind == "f" and all(item[name].size and np.isnan(item[name]).all() for item in outputs)
    ]
    weights = _weights_with_nan(model) if names else []
    if weights:
        raise ExportError(
            f"output {names[0]!r} is NaN in every sample, for weights are NaN: {', '.join(weights[:3])}; train the "
            "model again, or give other weights"
        )


def _weights_with_nan(model: "onnx.ModelProto | torch.nn.Module") -> list[str]:
    """The names of the weights that hold NaN."""
    import onnx

    if isinstance(model, onnx.ModelProto):
        arrays = ((tensor.name, onnx_data.array_of(tensor)) for tensor in model.graph.initializer)
        return [name for name, array in arrays if array.dtype.kind == "f" and np.isnan(array).any()]
    return [name for name, value in model.state_dict().items() if value.is_floating_point() and value.isnan().any()]


def _golden(pairs: Sequence[tuple[NamedArrays, NamedArrays]], model: int) -> int:
    """The place of the sample that a bundle holds, for a model of `model` bytes: the first one that is small beside it.

    Outputs can be large, as those of a language model are for many tokens.
    """
    sizes = [sum(array.nbytes for arrays in pair for array in arrays.values()) for pair in pairs]
    largest = max(_SMALL_SAMPLE, model // _SHARE_OF_SAMPLE)
    return next((place for place, size in enumerate(sizes) if size <= largest), int(np.argmin(sizes)))


def _without_bfloat16(model: "onnx.ModelProto") -> bool:
    """Make float32 of a model's bfloat16, for which ONNX Runtime has no operators on a CPU.

    Returns whether the model, as it was, rounds what it computes to 8 or 16 bits.
    """
    from onnx import TensorProto

    from tvmflow.onnx_types import has_type, reads_bits, replace_type

    rounds = rounds_activations(model)
    if has_type(model, TensorProto.BFLOAT16) and not reads_bits(model):
        replace_type(model, TensorProto.BFLOAT16, TensorProto.FLOAT)
    return rounds


def _export_in_child(job: ExportJob, runner: StepRunner) -> ExportResult:
    # The model is imported and built next.
    runner.start_compiler()
    return runner.call(work, job, ExportResult)


export = Step("export", ExportResult, _export_in_child)


def _opset(model: "onnx.ModelProto") -> int:
    """The version of ONNX's operators that a model uses; of its other domain's where it uses none of them."""
    return standard_opset(model) or max(item.version for item in model.opset_import)


def _is_repeatable(source: Source, module: "torch.nn.Module") -> bool:
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


def _pinned(inputs: tuple[Input, ...], dimensions: Mapping[str, Dimension]) -> tuple[Input, ...]:
    """Return the inputs with a fixed size in the place of each symbolic dimension that has one possible size."""
    fixed = {name: dimension.min for name, dimension in dimensions.items() if dimension.min == dimension.max}
    return tuple(
        item.model_copy(update={"shape": tuple(fixed.get(str(dim), dim) for dim in item.shape)}) for item in inputs
    )


def _export(module: "torch.nn.Module", inputs: tuple[Input, ...], job: ExportJob, path: Path) -> "onnx.ModelProto":
    import torch

    from tvmflow.torch_forms import functions_of_any_size, translations

    # torch.export bakes sizes 0 and 1 into the graph, so symbolic dimensions are traced at two or more.
    sizes = {
        name: max(2, job.dimensions.get(name, Dimension()).typical_size)
        for name in {dim for item in inputs for dim in item.shape if isinstance(dim, str)}
    }
    example = samples.make_at_sizes(inputs, sizes, job.seed, job.folder)
    arguments = tuple(torch.from_numpy(array) for array in example.values())
    symbols = {name: _symbol(name, job.dimensions.get(name, Dimension())) for name in sizes}
    shapes = tuple({axis: symbols[dim] for axis, dim in enumerate(item.shape) if dim in symbols} for item in inputs)
    options: dict[str, Any] = {
        "opset_version": job.export.opset,
        "optimize": job.export.optimize,
        "input_names": [item.name for item in inputs],
        # The exporter gives an output its name even when a value inside the graph has that name already.
        "output_names": [f"{_PRIVATE}{index}" for index in range(len(job.outputs))] or None,
        "dynamo": True,
        "external_data": _weights_size(module) > onnx_data.LARGEST_FILE,
        "verbose": False,
        **job.export.options,
    }
    source = job.original.source
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
        model = onnx_data.load(path)
        if not model.graph.output:
            raise ExportError(f"model {source.model.label!r} returns no tensors, so that there is nothing to release")
        _name_outputs(model, job.outputs)
    except ExportError:
        raise
    except Exception as error:
        cause = _root_cause(error)
        given = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in example.items())
        advice = next((advice for sign, advice in _ADVICE.items() if sign in f"{error} {cause}"), None) or (
            f"it was called with {given}, as `inputs` say: there must be one for each argument, in their order, with "
            "its shape and dtype"
        )
        raise ExportError(f"model {source.model.label!r} cannot be exported to ONNX ({cause}); {advice}") from error
    _refuse_fixed_dimensions(model, inputs)
    _remove_traces(model)
    _fix_shapes(model, inputs)
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
        model = onnx_data.load(path)
        if not model.graph.output:
            raise ValueError("it has no outputs" if model.graph.node else "it holds no graph")
        bring_to_usual_form(model)
        labels = replace_labels(model)
    except FileNotFoundError as error:
        raise ExportError(f"there is no ONNX file {label!r}") from error
    except Exception as error:
        reason = onnx_data.explain_unreadable(path)
        if reason is not None:
            raise ExportError(f"{label!r} {reason}") from error
        raise ExportError(f"{label!r} is not a readable ONNX file ({describe(error)}); export it again") from error
    name_free_dimensions(model.graph, zero_is_free=True)
    return model, labels


def _check(model: "onnx.ModelProto") -> None:
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

    onnx.checker.check_model(onnx_data.without_weights(with_own_domain(model)), full_check=True)


def _open(path: Path) -> "onnxruntime.InferenceSession":
    """Load the user's own ONNX file. Raises ExportError, which names the command that looks at every operator."""
    try:
        return open_session(path, prints_errors=False)
    except ExportError as error:
        raise ExportError(f"{error}; `tvmflow doctor` says for each operator what to do") from error


def described_by(model: "onnx.ModelProto", reshaped: Collection[str] = ()) -> tuple[Input, ...]:
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


def _fix_shapes(model: "onnx.ModelProto", inputs: tuple[Input, ...]) -> None:
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


def _find_dimensions(
    session: "onnxruntime.InferenceSession", limits: SizeLimits, inputs: tuple[Input, ...], job: ExportJob
) -> dict[str, Dimension]:
    """Return the ranges in the release file, and for other dimensions those that `SizeTrial` finds.

    Raises ExportError when it runs the model at none of the sizes that were tried.
    """
    if all(not isinstance(size, str) or size in job.dimensions for item in inputs for size in item.shape):
        return job.dimensions
    trial = SizeTrial(session, limits, inputs, job.dimensions, job.seed, job.folder)
    ranges = trial.find_ranges()
    if ranges is None:
        raise ExportError(
            f"{trial.failure}; it runs at none of the sizes that were tried for its free dimensions: say under "
            "`dimensions` of a release file which sizes it takes, or fix them"
        )
    return {**job.dimensions, **ranges}


def sample_candidates(inputs: tuple[Input, ...]) -> Iterator[tuple[Input, ...]]:
    """Yield the inputs of `described_by` with samples of several kinds, the likeliest first, to be tried in this order.

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


def _compare_where_it_runs(
    session: "onnxruntime.InferenceSession",
    module: "torch.nn.Module | None",
    limits: SizeLimits | None,
    candidates: Iterable[tuple[Input, ...]],
    ties: Ties,
    job: ExportJob,
    bounds: Bounds,
) -> tuple[dict[str, Dimension], "_Comparison"]:
    """Return the dimensions and what `_compare` returns, for the first of `candidates` whose samples the model takes.

    A later candidate is taken where all outputs of the first one are the same number. Raises the ExportError of the
    first candidate where the model takes none.
    """
    failure: ExportError | None = None
    result = None
    for inputs in candidates:
        try:
            dimensions = _find_dimensions(session, limits, inputs, job) if limits else job.dimensions
            compared = _compare(session, module, limits, inputs, dimensions, ties, job, bounds)
        except ExportError as problem:
            failure = failure or problem
            continue
        if not constant_outputs([outputs for _, outputs in compared.pairs]):
            return dimensions, compared
        result = result or (dimensions, compared)
    if result is None:
        raise failure or ExportError("the model has no inputs to run on")
    return result


def _compare(
    session: "onnxruntime.InferenceSession",
    module: "torch.nn.Module | None",
    limits: SizeLimits | None,
    inputs: tuple[Input, ...],
    dimensions: dict[str, Dimension],
    ties: Ties,
    job: ExportJob,
    bounds: Bounds,
) -> "_Comparison":
    """Compare ONNX Runtime with a module on samples, or compute the samples' outputs where there is no module."""
    names = tuple(output.name for output in session.get_outputs())
    if job.outputs and job.outputs != names:
        raise ExportError(f"the ONNX model returns {', '.join(names)}, the release file names {', '.join(job.outputs)}")
    original = _Original(session, module, names)
    pairs, worst = [], 0.0
    # The benchmark runs on samples: there is one for each of the sizes that it measures.
    points = samples.measured_sizes(inputs, dimensions)
    for index in range(max(job.samples, len(points))):
        sizes = samples.choose_sizes(inputs, dimensions, index)
        candidates: Iterable[dict[str, int]] = [sizes]
        most_memory = None
        # Sizes beside those to measure are guesses: a model need not take them, nor be run where it needs much memory.
        if index >= len(points) and sizes:
            candidates = alternatives(sizes, dimensions, points[0])
            if limits is not None:
                candidates = (item for item in candidates if limits.explain(item) is None)
                most_memory = memory.little()
        try:
            sample, expected, outputs = original.first_run(inputs, dimensions, index, job, candidates, most_memory)
        except ExportError:
            if most_memory is None:
                raise
            # At no size does the model need as little.
            sample, expected, outputs = original.first_run(inputs, dimensions, index, job, points[:1], None)
        if module is None:
            pairs.append((sample, outputs))
            continue
        outputs = ties.settle(sample, expected, outputs, bounds)
        try:
            worst = max(worst, _largest_error(expected, outputs, index, bounds))
        except ExportError as error:
            again = run_module(module, sample, names)
            if all(np.array_equal(array, again[name], equal_nan=True) for name, array in expected.items()):
                raise
            raise ExportError(
                "the model gives other outputs when it gets the same inputs again, as with dropout, random numbers or "
                "a state that it changes; leave this out of what the factory returns"
            ) from error
        pairs.append((sample, expected))
    return _Comparison(pairs, None if module is None else worst, original.refusal)


@dataclass(frozen=True)
class _Comparison:
    """The samples with the original's outputs, and ONNX Runtime's largest absolute error on them.

    The error is None where the original is an ONNX file, whose outputs ONNX Runtime computes. `refusal` says which
    sizes a module did not take, and why; it is empty where it took all.
    """

    pairs: list[tuple[NamedArrays, NamedArrays]]
    error: float | None
    refusal: str


@dataclass
class _Original:
    """A model in ONNX Runtime, with the PyTorch module that was exported, if it is no ONNX file.

    `refusal` says at which sizes the module failed first, and why; it is empty until then.
    """

    session: "onnxruntime.InferenceSession"
    module: "torch.nn.Module | None"
    names: tuple[str, ...]
    refusal: str = ""

    def first_run(
        self,
        inputs: tuple[Input, ...],
        dimensions: dict[str, Dimension],
        index: int,
        job: ExportJob,
        candidates: Iterable[dict[str, int]],
        most_memory: int | None,
    ) -> tuple[NamedArrays, NamedArrays, NamedArrays]:
        """Return sample `index` at the first sizes that the model takes, the module's outputs and ONNX Runtime's.

        The module's outputs are empty for an ONNX file. Raises ExportError where the model runs at none of the
        `candidates` within `most_memory` bytes, and where the module runs at sizes at which ONNX Runtime does not.
        """
        failure: ExportError | None = None
        for sizes in candidates:
            sample = samples.make(inputs, dimensions, index, job.seed, job.folder, sizes)
            try:
                if self.module is None:
                    return sample, {}, run_session(self.session, sample, most_memory)
                expected = self._run_module(self.module, sample, index, sizes)
            except ExportError as error:
                failure = failure or error
                continue
            return sample, expected, run_session(self.session, sample, most_memory, _OF_EXPORT)
        raise failure or ExportError("the model has no sizes to run at")

    def _run_module(
        self, module: "torch.nn.Module", sample: NamedArrays, index: int, sizes: Mapping[str, int]
    ) -> NamedArrays:
        try:
            return run_module(module, sample, self.names)
        except ExportError:
            raise
        except Exception as error:
            reason = describe(error)
            text = ", ".join(f"{name} {size}" for name, size in sizes.items())
            self.refusal = self.refusal or f"the model does not run with {text} ({reason}); samples have other sizes"
            raise ExportError(f"the model fails on sample {index} ({reason})") from error


def _largest_error(expected: NamedArrays, outputs: NamedArrays, index: int, bounds: Bounds) -> float:
    worst = 0.0
    for name, array in expected.items():
        other = outputs[name]
        if other.shape != array.shape or other.dtype != array.dtype:
            raise ExportError(
                f"output {name!r} of the ONNX model is {other.dtype}{list(other.shape)} on sample {index}, "
                f"PyTorch's is {array.dtype}{list(array.shape)}"
            )
        error = largest_error(array, other)
        if not bounds.is_met(array, other):
            raise ExportError(
                f"ONNX Runtime differs from PyTorch by {error:.3g} in output {name!r} on sample {index}, beyond "
                f"{bounds.describe(array)}; look at the export, or widen `export.rtol` and "
                "`export.atol`"
            )
        worst = max(worst, error)
    return worst


def _signature(outputs: Any, example: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    signature = []
    for item in outputs:
        dims = item.type.tensor_type.shape.dim
        array = example[item.name]
        shape = tuple(
            (dims[axis].dim_value or dims[axis].dim_param or size) if axis < len(dims) else size
            for axis, size in enumerate(array.shape)
        )
        signature.append(TensorSpec(item.name, shape, array.dtype.name))
    return tuple(signature)
