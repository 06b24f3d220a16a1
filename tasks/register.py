"""Register: a trained PyTorch model in the MLflow registry, from where any release file can take it."""

from importlib.metadata import version
from pathlib import Path

from tasks.evaluate import Evaluation
from tasks.export import ExportResult, find_source
from tasks.step import Context, Job, step
from tasks.train import TrainResult
from tvmflow import samples
from tvmflow.bundle import TensorSpec
from tvmflow.process import Emit
from tvmflow.source import Source, load_module
from tvmflow.spec import Dimension, Input
from tvmflow.workspace import Outcome, StepResult, run_step


class SaveJob(Job):
    """The trained model, its signature, and the folder that MLflow's model is written to."""

    folder: Path
    source: Source
    inputs: tuple[Input, ...]
    dimensions: dict[str, Dimension]
    signature: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
    place: Path


class Saved(StepResult):
    """The model is in the folder."""


class RegisterResult(StepResult):
    """The version of the source model."""

    model: str
    version: str

    @property
    def uri(self) -> str:
        """What a release file's `model.mlflow` says to release it."""
        return f"models:/{self.model}/{self.version}"


def work(job: SaveJob, emit: Emit) -> Saved:
    """Save the model in MLflow's PyTorch flavor, in a process of its own.

    As a traced program: it is loaded without the user's own code, and nothing is executed when it is.
    """
    import mlflow.pytorch

    from tvmflow.registry.signature import model_signature

    # torch.export bakes sizes 0 and 1 into the program, so symbolic dimensions are traced at two or more.
    used = {dim for item in job.inputs for dim in item.shape if isinstance(dim, str)}
    sizes = {name: max(2, job.dimensions.get(name, Dimension()).typical_size) for name in used}
    example = samples.make_at_sizes(job.inputs, sizes, 0, job.folder)
    inputs, outputs = job.signature
    mlflow.pytorch.save_model(
        load_module(job.source),
        str(job.place),
        signature=model_signature(inputs, outputs),
        input_example=tuple(example.values()),
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in ("mlflow", "numpy", "torch")],
        serialization_format="pt2",
    )
    return Saved()


@step
def register(
    context: Context,
    exported: Outcome[ExportResult],
    trained: Outcome[TrainResult],
    evaluation: Evaluation,
    run_id: str,
    model: str,
) -> Outcome[RegisterResult]:
    """Register the trained model as a version of the source model, made by the MLflow run `run_id`.

    The same weights are registered once. Raises ExportError when the model cannot be traced, RegistryError.
    """
    spec, registry = context.spec, context.registry
    source, identity = find_source(context, trained)

    def registered() -> RegisterResult:
        with context.workspace.scratch() as folder:
            job = SaveJob(
                home=context.workspace.folder,
                folder=spec.folder,
                source=source,
                inputs=spec.inputs,
                dimensions=spec.dimensions,
                signature=(exported.result.inputs, exported.result.outputs),
                place=folder / "model",
            )
            context.call("tasks.register:work", job, Saved, torch=True)
            arguments = spec.train.arguments if spec.train is not None else {}
            metrics = {"task_metric": evaluation.challenger}
            logged = registry.log_saved_model(run_id, model, job.place, metrics, arguments)
        tags = {
            **spec.registry.tags,
            "tvmflow.name": spec.name,
            "tvmflow.weights": trained.result.weights.sha256,
            "tvmflow.held_out": evaluation.held_out,
        }
        return RegisterResult(model=model, version=registry.register(model, logged, run_id, tags))

    reads = {
        "registry": registry.config.address,
        "model": model,
        "source": identity,
        "inputs": spec.inputs,
        "dimensions": spec.dimensions,
        "signature": [exported.result.inputs, exported.result.outputs],
    }
    return run_step(
        context.workspace,
        "register",
        reads,
        RegisterResult,
        registered,
        valid=lambda found: registry.version_exists(found.model, found.version),
        folder=spec.folder,
    )
