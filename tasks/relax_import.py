"""Relax import: turn the ONNX file into a module of Relax, TVM's graph IR, with its weights in a separate file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tasks.export import ExportResult
from tasks.step import ChildStep, Job
from tvmflow import usercode
from tvmflow.bundle import TensorSpec
from tvmflow.operators import load_operators
from tvmflow.processes.children import Emit
from tvmflow.spec import Spec
from tvmflow.workspace import Artifact, Sources, StepResult, Workspace

if TYPE_CHECKING:
    from tvmflow.compiler import Imported


class ImportJob(Job):
    """The ONNX file, the shape of each input by name, the user's operators, and the model's name for messages."""

    not_in_key: ClassVar[Mapping[str, Any]] = {"model_label": True}

    model_label: str
    onnx: Artifact
    shapes: dict[str, tuple[int | str, ...]]
    operators: tuple[str, ...] = ()

    @property
    def needs_compiler(self) -> bool:
        """True: the step uses TVM's importer."""
        return True

    @classmethod
    def of(cls, spec: Spec, exported: ExportResult) -> "ImportJob":
        """Return the job that imports a release file's exported model."""
        shapes = {item.name: item.shape for item in exported.inputs}
        return cls(model_label=spec.model.label, onnx=exported.onnx, shapes=shapes, operators=spec.model.operators)


class ImportResult(StepResult):
    """The model in Relax: `ir` is TVM's JSON, `text` the IR to read, `params` the weights.

    `smallest` maps the names of symbolic dimensions to the smallest sizes that the model accepts, and `transposes` the
    names of weights to those of which they are the transposes.
    """

    ir: Artifact
    text: Artifact
    params: Artifact
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    smallest: dict[str, int] = Field(default={})
    transposes: dict[str, str] = Field(default={})


def work(job: ImportJob, emit: Emit) -> ImportResult:
    """Import the exported model into Relax.

    The step calls this in a child process. Raises UnsupportedOperatorError, which names operator and node, for an
    operator that TVM lacks; ModelImportError for other models that cannot be imported.
    """
    from tvmflow import compiler

    workspace = job.workspace
    with workspace.scratch() as folder:
        own = load_operators(job.operators)
        imported = compiler.import_onnx(workspace.path(job.onnx), job.shapes, job.model_label, own)
        compiler.save_module(imported.mod, folder / "ir.json")
        compiler.save_params(imported.params, folder / "params.npz")
        (folder / "ir.txt").write_text(compiler.ir_text(imported.mod))
        return ImportResult(
            ir=workspace.keep(folder / "ir.json"),
            text=workspace.keep(folder / "ir.txt"),
            params=workspace.keep(folder / "params.npz"),
            inputs=imported.inputs,
            outputs=imported.outputs,
            smallest=dict(imported.smallest),
            transposes=dict(imported.transposes),
            sources=usercode.imported_sources(job.folder) if own else Sources(),
        )


relax_import = ChildStep("relax_import", ImportResult, work)


def load_imported(workspace: Workspace, imported: ImportResult) -> "Imported":
    """Load the imported model from its artifacts, in the form that the compiler takes."""
    from tvmflow import compiler

    return compiler.Imported(
        mod=compiler.load_module(workspace.path(imported.ir)),
        params=compiler.load_params(workspace.path(imported.params)),
        inputs=imported.inputs,
        outputs=imported.outputs,
        transposes=imported.transposes,
    )
