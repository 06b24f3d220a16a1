"""Show: the samples of a report as text, by a function of the user's, whose failure stops no release."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from tasks.insight import Insight, InsightJob
from tasks.step import Job, Step, StepRunner
from tvmflow import samples, usercode
from tvmflow.arrays import NamedArrays
from tvmflow.errors import ExportError, StepError
from tvmflow.processes.children import Emit
from tvmflow.report.insight import SampleInsight
from tvmflow.workspace import Artifact, Record, StepResult

logger = logging.getLogger(__name__)

# The role of the user's function in messages; the seconds to find it, and for all samples of a target; the letters of
# one.
_SHOW = "function that shows a sample"
_FIND_SECONDS, _SECONDS = 60.0, 300.0
_LONGEST_TEXT = 2000


class ShowJob(Job):
    """The user's function that returns a sample as text."""

    function: str

    @property
    def needs_torch(self) -> bool:
        """True: the function's module may import PyTorch."""
        return True


class ShowResult(StepResult):
    """The function was found; or its import failed in a way that may pass: `problem` is a sentence on it, else None."""

    problem: str | None = None


def work_show(job: ShowJob, emit: Emit) -> ShowResult:
    """Look for the function that a release needs at its end; the step calls this in a child process.

    Raises ExportError where the module, one that it imports or the function is missing, which no later try will change.
    An import that raises another exception, as without a network, is the `problem` of the result.
    """
    problem = None
    try:
        usercode.find(job.function, _SHOW, ExportError)
    except ExportError as error:
        if error.__cause__ is None or isinstance(error.__cause__, ModuleNotFoundError):
            raise
        problem = str(error)
    return ShowResult(problem=problem, sources=usercode.imported_sources(job.folder))


def find(job: ShowJob, runner: StepRunner) -> ShowResult:
    """Look for the function in a child process, in a minute at most.

    Raises ExportError where there is no such function. A process that crashes or hangs while it imports the module
    stops no release: the result has a `problem`, and the step `texts` tries again at the release's end.
    """
    try:
        result = replace(runner, timeout=min(runner.timeout, _FIND_SECONDS)).call(work_show, job, ShowResult)
    except StepError as error:
        if not error.end:
            raise
        module = job.function.partition(":")[0]
        result = ShowResult(problem=f"{_SHOW} {job.function!r}: the process that imports {module!r} {error.end}")
    if result.problem is not None:
        logger.warning("%s; the release goes on, and its report may lack texts", result.problem)
    return result


def _is_there(result: ShowResult, job: ShowJob) -> bool:
    return result.problem is None


find_show = Step("show", ShowResult, find, is_current=_is_there)


class TextsJob(Job):
    """The user's function, and the samples of an insight by their indices in `data`, of the target `target`.

    With `is_chunked`, `data` is in chunks that have samples along the first axis.
    """

    not_in_key: ClassVar[Mapping[str, Any]] = {"target": True}

    function: str
    data: Artifact
    is_chunked: bool
    indices: tuple[int, ...]
    target: str

    @property
    def label(self) -> str:
        """The target's name."""
        return self.target

    @property
    def needs_torch(self) -> bool:
        """True: the function's module may import PyTorch."""
        return True

    @classmethod
    def of(cls, function: str, job: InsightJob, profile: Insight) -> "TextsJob":
        """Return the job that shows the samples of an insight, which is the result of `job`."""
        indices = sorted({sample.index for sample in (*profile.worst, *profile.flipped)})
        return cls(
            function=function,
            data=job.data,
            is_chunked=job.is_chunked,
            indices=tuple(indices),
            target=job.target.name,
        )


class Text(Record):
    """A sample as text; where the function has `failed` on it, a sentence on that."""

    text: str
    failed: bool = False


class Texts(StepResult):
    """The texts of samples by their indices; `problem` says in one sentence why there are none, else it is None."""

    texts: dict[int, Text]
    problem: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a text is missing."""
        return self.problem is not None or any(text.failed for text in self.texts.values())

    def add_to(self, profile: Insight) -> Insight:
        """Return an insight with these texts."""

        def show(items: Sequence[SampleInsight]) -> Iterator[SampleInsight]:
            for item in items:
                text = self.texts.get(item.index)
                yield item.model_copy(update={"text": None if text is None else text.text})

        changes = {
            "worst": tuple(show(profile.worst)),
            "flipped": tuple(show(profile.flipped)),
            "problem": self.problem,
        }
        return profile.model_copy(update=changes)


def work_texts(job: TextsJob, emit: Emit) -> Texts:
    """Call the user's function on the samples; the step calls this in a child process."""
    data = samples.load(job.workspace.path(job.data))
    # All chunks but the last have as many samples as the first, and samples that fill up the last have no index.
    length = len(next(iter(data[0][0].values()))) if job.is_chunked else 1
    texts = {}
    for number, index in enumerate(job.indices):
        emit(number, len(job.indices), "samples")
        chunk, position = divmod(index, length)
        inputs = data[chunk][0]
        sample = {name: array[position] for name, array in inputs.items()} if job.is_chunked else inputs
        texts[index] = write_text(job.function, sample)
    return Texts(texts=texts, sources=usercode.imported_sources(job.folder))


def work(job: TextsJob, runner: StepRunner) -> Texts:
    """Show the samples in a child process, in five minutes at most.

    The release is built and checked by then: where the process crashes or hangs, the result says so.
    """
    try:
        return replace(runner, timeout=min(runner.timeout, _SECONDS)).call(work_texts, job, Texts)
    except StepError as error:
        if not error.end:
            raise
        logger.warning("%s", error)
        return Texts(texts={}, problem=f"The samples are not shown as text: {_SHOW} {job.function!r} {error.end}.")


def _is_whole(result: Texts, job: TextsJob) -> bool:
    return not result.has_failed


# A result with a failure is recorded like any other and never used: the next run calls the function again.
texts = Step("texts", Texts, work, is_current=_is_whole)


def write_text(show: str, inputs: NamedArrays) -> Text:
    """Return a sample as the user's function `show` writes it, at most 2000 characters of it.

    Of a function that raises, the text is a sentence without the exception's message, which may name files of this
    machine.
    """
    what = f"{_SHOW} {show!r}"
    try:
        text = usercode.call(show, _SHOW, ExportError, {name: np.array(array) for name, array in inputs.items()})
    except (ExportError, SystemExit) as error:
        logger.warning("%s", error)
        if isinstance(error, ExportError) and error.__cause__ is None:
            return Text(text=str(error), failed=True)
        return Text(text=f"{what} raised {type(error.__cause__ or error).__name__}", failed=True)
    if not isinstance(text, str):
        return Text(text=f"{what} returned a {type(text).__name__}, not a text", failed=True)
    # Halves of surrogate pairs, which no file of UTF-8 can hold, become question marks.
    text = text.encode("utf-8", "replace").decode()
    return Text(text=text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…")
