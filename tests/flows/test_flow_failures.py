"""Steps whose servers are away for a while, and targets that end because another one has failed."""

import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow
from prefect.runtime import task_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.release import _make_all
from flows.runs import connect
from support.servers import free_port
from tasks.step import Job, Step, StepRunner
from tvmflow import process
from tvmflow.errors import BuildError, PrefectUnavailableError, StepError, StoreError, StoreUnavailableError
from tvmflow.settings import Settings
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.target import Target, resolve
from tvmflow.workspace import Record, StepResult, Workspace

SLEEPER = """
import signal
from tvmflow.workspace import Record

class Nothing(Record):
    pass

def sleep(job: Nothing, emit) -> Nothing:
    emit(0, 1, "sleeping")
    signal.pause()
"""


class Nothing(Record):
    pass


class AskJob(Job):
    """Ask a server."""


class AskResult(StepResult):
    answer: str


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "state")


def ask(api: str, error: type[StoreError], outage: float, workspace: Workspace) -> list[int]:
    """Run a step within a flow, whose server fails the first request.

    Returns what Prefect said at each request: which attempt of the task this is.
    """
    attempts: list[int] = []

    def work(job: AskJob, runner: StepRunner) -> AskResult:
        attempts.append(task_run.run_count)
        if len(attempts) == 1:
            raise error("S3 does not answer: start it.")
        return AskResult(answer="an answer")

    step, runner = Step("ask", AskResult, work), StepRunner(workspace, "asking", Path(), timeout=60, outage=outage)

    @flow(name="asking")
    def asking() -> None:
        step(runner, AskJob())

    with temporary_settings({PREFECT_API_URL: api}), suppress(error):
        asking()
    return attempts


def test_prefect_retries_a_step_whose_server_is_away(prefect_server: str, workspace: Workspace) -> None:
    assert ask(prefect_server, StoreUnavailableError, 60.0, workspace) == [1, 2]


@pytest.mark.parametrize(("error", "outage"), [(StoreError, 60.0), (StoreUnavailableError, 0.0)])
def test_a_step_that_is_refused_or_may_not_wait_fails_at_once(
    prefect_server: str, workspace: Workspace, error: type[StoreError], outage: float
) -> None:
    assert ask(prefect_server, error, outage, workspace) == [1]


def test_servers_that_refuse_connections_are_known_as_away() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailableError):
        ReleaseStore(StoreConfig(bucket="models", endpoint=address, access_key="a", secret_key="s", attempts=1)).check()
    with (
        temporary_settings({PREFECT_API_URL: f"{address}/api"}),
        pytest.raises(PrefectUnavailableError),
        connect("look for something") as client,
    ):
        client.hello()


def test_the_first_failure_of_a_target_ends_the_others_at_once(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    first, second = resolve("x86-64-v3"), resolve("x86-64-v4")
    context: Any = SimpleNamespace(settings=Settings(parallel_targets=2), stop=threading.Event())
    is_asleep = threading.Event()
    errors: list[Exception] = []

    def make(target: Target) -> Any:
        if target.name == second.name:
            assert is_asleep.wait(120)
            raise BuildError("no linker")
        try:
            process.call("sleeper:sleep", Nothing(), Nothing, log=tmp_path / "log", timeout=120,
                         emit=lambda *_: is_asleep.set(), paths=(tmp_path,))  # fmt: skip
        except StepError as error:
            errors.append(error)
            raise

    with pytest.raises(BuildError):
        _make_all(context, (first, second), make, {})
    assert context.stop.is_set()
    assert "was killed by SIGKILL" in str(errors[0])


def test_no_step_of_a_stopped_release_begins(workspace: Workspace) -> None:
    runner = StepRunner(workspace, "asking", Path(), timeout=60)
    step = Step("ask", AskResult, lambda job, runner: AskResult(answer="an answer"))
    runner.stop.set()
    with pytest.raises(StepError, match="did not begin"):
        step(runner, AskJob())
