"""Train: make the weights that the release ships with the user's own training function."""

from typing import TYPE_CHECKING, Any

from tasks.step import ChildStep, Job
from tvmflow import usercode
from tvmflow.bundle import sha256_file
from tvmflow.documents.training import Training, finite_json
from tvmflow.errors import TrainError
from tvmflow.processes.children import Emit
from tvmflow.spec import Spec
from tvmflow.workspace import Artifact, Sources, StepResult

if TYPE_CHECKING:
    from tvmflow.documents.release import Release


class TrainJob(Job):
    """The training function, its arguments, and the SHA-256 of each file that `train.reads` names.

    `occasion` is part of the cache key: a new value makes the step train the model again where all else is unchanged.
    """

    function: str
    arguments: dict[str, Any]
    files: dict[str, str]
    occasion: str | None = None

    @property
    def needs_torch(self) -> bool:
        """True: training functions use PyTorch."""
        return True

    @classmethod
    def of(cls, spec: Spec, occasion: str | None = None) -> "TrainJob":
        """Return the job that trains a release file's model; a new `occasion` makes it train again.

        None is the occasion of an ordinary release. Raises TrainError for a file without a section `train`.
        """
        section = spec.train
        if section is None:
            raise TrainError("the release file has no section train; add one, or give model.weights")
        files = {str(path): sha256_file(spec.path(path)) for path in section.reads}
        return cls(function=section.function, arguments=section.arguments, files=files, occasion=occasion)


class TrainResult(StepResult):
    """The file of the trained weights, a PyTorch state dict, and what they were trained with, None if unknown."""

    weights: Artifact
    training: Training | None = None

    @classmethod
    def of_release(cls, weights: Artifact, release: "Release") -> "TrainResult":
        """Return the result for the weights of a release, with the training and the code that the release names."""
        origin = release.provenance
        return cls(weights=weights, training=origin.training, sources=Sources(files=origin.code or {}))


def work(job: TrainJob, emit: Emit) -> TrainResult:
    """Call the training function and return its weights.

    The step calls this in a child process. Nothing is reported by `emit`: a training function prints its own progress.
    Raises TrainError when the function fails or writes no file.
    """
    workspace = job.workspace
    with workspace.scratch() as folder:
        output = folder / "weights.pt"
        usercode.call(job.function, "training function", TrainError, output, **job.arguments)
        if not output.is_file():
            raise TrainError(f"training function {job.function!r} wrote no file; it must save a state dict to `output`")
        training = Training(function=job.function, arguments=finite_json(job.arguments), files=job.files)
        sources = usercode.imported_sources(job.folder)
        return TrainResult(weights=workspace.keep(output), training=training, sources=sources)


train = ChildStep("train", TrainResult, work)
