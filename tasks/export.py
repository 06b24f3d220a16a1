"""Export: write the original as an ONNX file, check it, and compare it with the original on samples."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from tasks.original import Original
from tasks.original_runs import OriginalRuns
from tasks.step import Job, Step, StepRunner
from tasks.torch_export import example_sizes, export_module, has_the_same_weights_again
from tvmflow import samples, usercode
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import TensorSpec, sha256_file
from tvmflow.errors import ExportError, naming_model
from tvmflow.onnx_model import external_data
from tvmflow.onnx_model.graph import rounds_activations, standard_opset
from tvmflow.onnx_model.index_limits import index_ranges
from tvmflow.onnx_model.reading import check_valid, declared_inputs, fix_input_shapes, read_labelled, sample_candidates
from tvmflow.onnx_model.session import open_session
from tvmflow.onnx_model.size_limits import SizeLimits
from tvmflow.onnx_model.ties import Ties
from tvmflow.operators import define, load_operators
from tvmflow.processes.children import Emit
from tvmflow.source import load_module
from tvmflow.spec import ROUNDED_ERROR, Dimension, Export, Input, Spec
from tvmflow.tolerance import Bounds
from tvmflow.workspace import Artifact, StepResult

if TYPE_CHECKING:
    import onnx
    import onnxruntime
    import torch

# The sample that a bundle holds takes at most this share of the model's file, or so many bytes, if there is such a one.
_SHARE_OF_SAMPLE, _SMALL_SAMPLE = 10, 1 << 18
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
    model's factory gave different weights. `labels` are the labels of inputs and outputs that
    are strings or dictionaries in the original, by their names.
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
            inputs = _pin(job.inputs or declared_inputs(model), job.dimensions)
            fix_input_shapes(model, inputs)
            module = None
            variants: Iterable[tuple[Input, ...]] = (inputs,) if job.inputs else sample_candidates(inputs)
        else:
            emit(0, 3, "loading the model")
            module = load_module(source)
            is_repeatable = has_the_same_weights_again(source, module)
            inputs = _pin(job.inputs, job.dimensions)
            variants = (inputs,)
            emit(1, 3, "exporting")
            example = samples.make_at_sizes(inputs, example_sizes(inputs, job.dimensions), job.seed, job.folder)
            model = export_module(source, module, inputs, example, job.dimensions, job.outputs, job.export, path)
            rounds = _without_bfloat16(model)
        define(model, load_operators(job.operators))
        check_valid(model)
        data = external_data.save(model, path)
        emit(2, 3, "comparing with ONNX Runtime")
        session = _open(path) if module is None else open_session(path, prints_errors=False)
        limits = SizeLimits(model) if module is None else None
        bounds = job.bounds(rounds_activations=rounds)
        ties = Ties(path)
        runs = OriginalRuns(
            session,
            module,
            limits,
            ties,
            bounds,
            dimensions=job.dimensions,
            outputs=job.outputs,
            count=job.samples,
            seed=job.seed,
            folder=job.folder,
        )
        dimensions, compared = runs.compare_where_it_runs(variants)
        pairs = compared.pairs
        pinned = _pin(inputs, dimensions)
        if pinned != inputs:
            # A dimension whose only size was found by trial is as one that the file fixes.
            inputs = pinned
            fix_input_shapes(model, inputs)
            data = external_data.save(model, path)
        _refuse_nan([outputs for _, outputs in pairs], model if module is None else module)
        samples.save(folder / "samples.npz", pairs)
        golden = _golden(pairs, sum(item.stat().st_size for item in (path, data) if item is not None))
        masks = ties.find_undecided(*pairs[golden], bounds)
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
        arrays = ((tensor.name, external_data.array_of(tensor)) for tensor in model.graph.initializer)
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

    from tvmflow.onnx_model.number_types import has_type, reads_bits, replace_type

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


def _pin(inputs: tuple[Input, ...], dimensions: Mapping[str, Dimension]) -> tuple[Input, ...]:
    """Return the inputs with a fixed size in the place of each symbolic dimension that has one possible size."""
    fixed = {name: dimension.min for name, dimension in dimensions.items() if dimension.min == dimension.max}
    return tuple(
        item.model_copy(update={"shape": tuple(fixed.get(str(dim), dim) for dim in item.shape)}) for item in inputs
    )


def _open(path: Path) -> "onnxruntime.InferenceSession":
    """Load the user's own ONNX file. Raises ExportError, which names the command that looks at every operator."""
    try:
        return open_session(path, prints_errors=False)
    except ExportError as error:
        raise ExportError(f"{error}; `tvmflow doctor` says for each operator what to do") from error


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
