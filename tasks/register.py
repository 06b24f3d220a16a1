"""Register: add a trained PyTorch model to the MLflow registry, where any release file can name it."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from tasks.evaluate import Evaluation
from tasks.export import ExportResult
from tasks.original import Original
from tasks.step import Job, Step, StepRunner
from tasks.torch_export import example_sizes
from tvmflow import samples
from tvmflow.bundle import TensorSpec
from tvmflow.processes.children import Emit
from tvmflow.registry import Registry
from tvmflow.source import load_module
from tvmflow.spec import Dimension, Input, Spec
from tvmflow.workspace import Artifact, StepResult

# The tag with the key of the step that made a version, written with the version.
_KEY = "tvmflow.key"


class RegisterJob(Job):
    """The trained model with its signature, and the place where it is registered.

    `registry` is the address of the registry, `model` the name there, and `signature` the inputs and the outputs. The
    tags, the training's arguments, the evaluation and the id of its MLflow run are only written to the registry.
    `destination` is the folder into which a child process saves the model.
    """

    not_in_key: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("run_id", "weights", "evaluation", "arguments", "tags", "destination"), True),
        "original": {"source"},
    }

    registry: str
    model: str
    original: Original
    inputs: tuple[Input, ...]
    dimensions: dict[str, Dimension]
    signature: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
    run_id: str
    weights: Artifact
    evaluation: Evaluation
    arguments: dict[str, Any]
    tags: dict[str, str]
    destination: Path = Path()

    @property
    def needs_torch(self) -> bool:
        """True: the model is a PyTorch model."""
        return True

    @classmethod
    def of(
        cls,
        spec: Spec,
        registry: Registry,
        original: Original,
        exported: ExportResult,
        weights: Artifact,
        evaluation: Evaluation,
        run_id: str,
        model: str,
    ) -> "RegisterJob":
        """Return the job that registers a release file's model with these weights, judged in MLflow run `run_id`."""
        return cls(
            registry=registry.config.address,
            model=model,
            original=original,
            inputs=spec.inputs,
            dimensions=spec.dimensions,
            signature=(exported.inputs, exported.outputs),
            run_id=run_id,
            weights=weights,
            evaluation=evaluation,
            arguments=spec.train.arguments if spec.train is not None else {},
            tags={**spec.registry.tags, "tvmflow.name": spec.name},
        )


class Saved(StepResult):
    """An empty result: the child process has saved the model in the folder."""


class RegisterResult(StepResult):
    """The name of the registered source model and its new version."""

    model: str
    version: str

    @property
    def uri(self) -> str:
        """The value of `model.mlflow` in a release file that releases this version, as `models:/MODEL/3`."""
        return f"models:/{self.model}/{self.version}"


def save_work(job: RegisterJob, emit: Emit) -> Saved:
    """Save the model in the folder `job.destination`, in MLflow's PyTorch flavor; a child process runs this.

    The model is saved as a traced program (torch.export), which loads without the user's code. Raises ExportError when
    the model cannot be loaded.
    """
    import mlflow.pytorch

    from tvmflow.registry.signature import model_signature

    example = samples.make_at_sizes(job.inputs, example_sizes(job.inputs, job.dimensions), 0, job.folder)
    inputs, outputs = job.signature
    mlflow.pytorch.save_model(
        load_module(job.original.source),
        str(job.destination),
        signature=model_signature(inputs, outputs),
        input_example=tuple(example.values()),
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in ("mlflow", "numpy", "torch")],
        serialization_format="pt2",
    )
    return Saved()


def work(job: RegisterJob, runner: StepRunner, registry: Registry) -> RegisterResult:
    """Register the trained model as a new version of the source model and return the version.

    If a process that died has already registered a version for the same cache key, that version is returned. Raises
    ExportError when the model cannot be loaded, StepError when saving it fails, RegistryError when the registry fails.
    """
    version = registry.find_tagged_version(job.model, _KEY, runner.key)
    if version is not None:
        return RegisterResult(model=job.model, version=version)
    with runner.workspace.scratch() as folder:
        saving = job.model_copy(update={"destination": folder / "model"})
        runner.call(save_work, saving, Saved)
        metrics = {"task_metric": job.evaluation.challenger}
        logged_model = registry.log_saved_model(job.run_id, job.model, saving.destination, metrics, job.arguments)
    tags = {
        **job.tags,
        "tvmflow.weights": job.weights.sha256,
        "tvmflow.held_out": job.evaluation.held_out,
        _KEY: runner.key,
    }
    return RegisterResult(model=job.model, version=registry.register(job.model, logged_model, job.run_id, tags))


def _is_there(result: RegisterResult, job: RegisterJob, registry: Registry) -> bool:
    return registry.version_exists(result.model, result.version)


register = Step("register", RegisterResult, work, is_current=_is_there)
