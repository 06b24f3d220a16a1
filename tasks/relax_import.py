"""Relax import: ONNX to TVM's graph IR with the release file's shapes, weights kept apart."""

from typing import TYPE_CHECKING

from tasks.export import ExportResult
from tasks.step import Context, Job, step
from tvmflow.bundle import TensorSpec
from tvmflow.process import Emit
from tvmflow.workspace import Artifact, Outcome, StepResult, Workspace, run_step

if TYPE_CHECKING:
    from tvmflow.compiler import Imported


class ImportJob(Job):
    """The ONNX file, what messages call the model, and the shapes to import it with."""

    label: str
    onnx: Artifact
    shapes: dict[str, tuple[int | str, ...]]


class ImportResult(StepResult):
    """The model in Relax: `ir` is TVM's JSON, `text` the same to read, `params` the weights in `main`'s order."""

    ir: Artifact
    text: Artifact
    params: Artifact
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def work(job: ImportJob, emit: Emit) -> ImportResult:
    """Import, in a process of its own."""
    from tvmflow import compiler

    workspace = job.workspace
    with workspace.scratch() as folder:
        imported = compiler.import_onnx(workspace.path(job.onnx), job.shapes, job.label)
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


@step
def relax_import(context: Context, exported: Outcome[ExportResult]) -> Outcome[ImportResult]:
    """Import the exported model into Relax.

    Raises UnsupportedOperatorError, naming operator and node, for what TVM cannot take, and ModelImportError.
    """
    shapes = {item.name: item.shape for item in exported.result.inputs}
    label = context.spec.model.label
    job = ImportJob(home=context.workspace.folder, label=label, onnx=exported.result.onnx, shapes=shapes)
    reads = {"onnx": job.onnx.sha256, "shapes": shapes}
    return run_step(
        context.workspace,
        "relax_import",
        reads,
        ImportResult,
        lambda: context.call("tasks.relax_import:work", job, ImportResult),
    )


def load_imported(workspace: Workspace, imported: ImportResult) -> "Imported":
    """The model as the compiler takes it, from its artifacts."""
    from tvmflow import compiler

    return compiler.Imported(
        mod=compiler.load_module(workspace.path(imported.ir)),
        params=compiler.load_params(workspace.path(imported.params)),
        inputs=imported.inputs,
        outputs=imported.outputs,
    )
