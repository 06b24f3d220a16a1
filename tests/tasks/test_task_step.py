"""A step as its author declares it: a job, a result and a function; everything else is written once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tasks.step import ChildStep, Job, Step, StepRunner, slug
from tvmflow.errors import InputError
from tvmflow.processes.children import Emit
from tvmflow.progress import Status, reporting_to
from tvmflow.workspace import StepResult, Workspace


class SumJob(Job):
    not_in_key: ClassVar[Mapping[str, Any]] = {"place": True}

    numbers: tuple[int, ...]
    place: Path = Path()
    target: str = "native"

    @property
    def label(self) -> str:
        return self.target


class SumResult(StepResult):
    total: int
    folder: Path


def add(job: SumJob, emit: Emit) -> SumResult:
    if not job.numbers:
        raise InputError("there are no numbers")
    emit(1, 1, "added")
    return SumResult(total=sum(job.numbers), folder=job.folder)


def add_here(job: SumJob, runner: StepRunner, calls: list[int]) -> SumResult:
    calls.append(sum(job.numbers))
    runner.emit(1, 1, "added")
    return SumResult(total=sum(job.numbers), folder=job.folder)


@pytest.fixture
def runner(workspace: Workspace, tmp_path: Path) -> StepRunner:
    return StepRunner(workspace, "sums", tmp_path, timeout=60)


def test_a_child_step_runs_in_a_process_with_a_log_of_its_own_and_is_cached(runner: StepRunner) -> None:
    # The child imports the function by the name of its module, which must be one that it can find.
    step = ChildStep("add", SumResult, add)
    add.__module__ = "test_task_step"
    own_runner = StepRunner(runner.workspace, "sums", Path(__file__).parent, timeout=60)
    first = step(own_runner, SumJob(numbers=(1, 2)))
    assert (first.status, first.result) == ("ran", SumResult(total=3, folder=Path(__file__).parent))
    assert step(own_runner, SumJob(numbers=(1, 2))).status == "cached"
    assert (runner.workspace.folder / "logs" / "sums" / "add-native.log").is_file()
    with pytest.raises(InputError, match="there are no numbers"):
        step(own_runner, SumJob(numbers=()))


def test_only_what_is_in_the_key_runs_a_step_again(runner: StepRunner) -> None:
    calls: list[int] = []
    step = Step("add", SumResult, add_here)
    jobs = (SumJob(numbers=(1,)), SumJob(numbers=(1,), place=Path("/elsewhere")), SumJob(numbers=(2,)))
    assert [step(runner, job, calls).status for job in jobs] == ["ran", "cached", "ran"]
    assert calls == [1, 2]


def test_a_result_that_is_gone_outside_is_made_again(runner: StepRunner) -> None:
    calls: list[int] = []
    step = Step("add", SumResult, add_here, is_current=lambda result, job, calls: len(calls) > 1)
    assert [step(runner, SumJob(numbers=(1,)), calls).status for _ in range(3)] == ["ran", "ran", "cached"]


def test_a_step_that_is_not_cached_always_runs(runner: StepRunner) -> None:
    calls: list[int] = []
    step = Step("add", SumResult, add_here, cached=False)
    assert [step(runner, SumJob(numbers=(1,)), calls).status for _ in range(2)] == ["ran", "ran"]


def test_events_of_a_step_have_its_name_and_its_job_s_label(runner: StepRunner) -> None:
    events: list[tuple[str, str, str | None]] = []

    class Listener:
        def begin(self, step: str, target: str | None) -> None:
            events.append(("started", step, target))

        def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
            events.append((message, step, target))

        def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
            events.append((status, step, target))

    with reporting_to(Listener()):
        Step("add", SumResult, add_here)(runner, SumJob(numbers=(1,), target="x86-64-v3"), [])
    assert events == [(event, "add", "x86-64-v3") for event in ("started", "added", "ran")]


def test_targets_that_differ_after_60_letters_have_different_slugs() -> None:
    one = json.dumps({"kind": "llvm", "mattr": ["+neon", "+crc", "+crypto", "+fullfp16"], "mcpu": "cortex-a75"})
    other = one.replace("a75", "a76")
    assert slug(one)[:-8] == slug(other)[:-8]
    assert slug(one) != slug(other)
    assert len(slug(one)) == 60
    assert slug("llvm -mcpu=a") != slug("llvm +mcpu=a")
    assert slug("x86-64-v4-vnni") == "x86-64-v4-vnni"
