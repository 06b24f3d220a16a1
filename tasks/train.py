"""Train: make the weights that the release ships, by the user's own training function."""

from pathlib import Path
from typing import Any

from tasks.step import Context, Job, step
from tvmflow import usercode
from tvmflow.bundle import sha256_file
from tvmflow.errors import TrainError
from tvmflow.process import Emit
from tvmflow.workspace import Artifact, Outcome, StepResult, run_step


class TrainJob(Job):
    """The training function, its arguments, and the folder of the release file."""

    folder: Path
    function: str
    arguments: dict[str, Any]


class TrainResult(StepResult):
    """The trained weights, a state dict."""

    weights: Artifact


def work(job: TrainJob, emit: Emit) -> TrainResult:
    """Train, in a process of its own."""
    workspace = job.workspace
    with workspace.scratch() as folder:
        output = folder / "weights.pt"
        usercode.call(job.function, "training function", TrainError, output, **job.arguments)
        if not output.is_file():
            raise TrainError(f"training function {job.function!r} wrote no file; it must save a state dict to `output`")
        return TrainResult(weights=workspace.keep(output), sources=usercode.imported_sources(job.folder))


@step
def train(context: Context, occasion: str | None = None) -> Outcome[TrainResult]:
    """Train the model as the release file says. Raises TrainError.

    What was trained before is found by the function, its arguments and the files that it is said to read. New data
    behind the same arguments does not show in these: with another `occasion` the model is trained anew.
    """
    section = context.spec.train
    if section is None:
        raise TrainError("the release file says nothing of training")
    files = {str(path): sha256_file(context.spec.path(path)) for path in section.reads}
    job = TrainJob(
        home=context.workspace.folder,
        folder=context.spec.folder,
        function=section.function,
        arguments=section.arguments,
    )
    reads: dict[str, Any] = {"train": section, "files": files}
    if occasion is not None:
        reads["occasion"] = occasion
    return run_step(
        context.workspace,
        "train",
        reads,
        TrainResult,
        lambda: context.call("tasks.train:work", job, TrainResult, torch=True),
        folder=context.spec.folder,
    )
