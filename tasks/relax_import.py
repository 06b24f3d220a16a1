"""Relax import: the ONNX file as a module of Relax, TVM's graph IR, with its weights in a file of their own."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.export import ExportResult
from tasks.step import ChildStep, Job
from tvmflow.bundle import TensorSpec
from tvmflow.process import Emit
from tvmflow.spec import Spec
from tvmflow.workspace import Artifact, StepResult, Workspace

if TYPE_CHECKING:
    from tvmflow.compiler import Imported


class ImportJob(Job):
    """The ONNX file, the shapes to import it with, and the name of the model in messages."""

    not_in_key: ClassVar[Mapping[str, Any]] = {"model_label": True}

    model_label: str
    onnx: Artifact
    shapes: dict[str, tuple[int | str, ...]]

    @property
    def needs_compiler(self) -> bool:
        """Always."""
        return True

    @classmethod
    def of(cls, spec: Spec, exported: ExportResult) -> "ImportJob":
        """The job of a release file's exported model."""
        shapes = {item.name: item.shape for item in exported.inputs}
        return cls(model_label=spec.model.label, onnx=exported.onnx, shapes=shapes)


class ImportResult(StepResult):
    """The model in Relax: `ir` is TVM's JSON, `text` the same to read, `params` the weights in `main`'s order."""

    ir: Artifact
    text: Artifact
    params: Artifact
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def work(job: ImportJob, emit: Emit) -> ImportResult:
    """Import the exported model into Relax.

    Raises UnsupportedOperatorError, which names operator and node, for an operator that TVM lacks; ModelImportError for
    other models that cannot be imported.
    """
    from tvmflow import compiler

    workspace = job.workspace
    with workspace.scratch() as folder:
        imported = compiler.import_onnx(workspace.path(job.onnx), job.shapes, job.model_label)
        compiler.save_module(imported.mod, folder / "ir.json")
        compiler.save_params(imported.params, folder / "params.npz")
        (folder / "ir.txt").write_text(compiler.ir_text(imported.mod))
        return ImportResult(
            ir=workspace.keep(folder / "ir.json"),
            text=workspace.keep(folder / "ir.txt"),
            params=workspace.keep(folder / "params.npz"),
            inputs=imported.inputs,
            outputs=imported.outputs,
        )


relax_import = ChildStep("relax_import", ImportResult, work)


def load_imported(workspace: Workspace, imported: ImportResult) -> "Imported":
    """Read the imported model, in the form that the compiler takes, from its artifacts."""
    from tvmflow import compiler

    return compiler.Imported(
        mod=compiler.load_module(workspace.path(imported.ir)),
        params=compiler.load_params(workspace.path(imported.params)),
        inputs=imported.inputs,
        outputs=imported.outputs,
    )
