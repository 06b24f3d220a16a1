"""Steps whose servers are away for a while, and targets that end because another one has failed."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.context import FlowRunContext
from prefect.flow_engine import run_flow
from prefect.runtime import deployment, task_run
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from flows.logs import keeping_logs
from flows.make import _make
from flows.release import _make_all
from flows.runs import connect, is_deployed
from mlflow import MlflowClient
from support.databases import Databases
from support.rclone import rclone_s3
from support.servers import free_port, mlflow_server
from support.waits import wait_until
from tasks.step import Job, Step, StepRunner
from tvmflow.errors import (
    BuildError,
    PrefectUnavailableError,
    SettingsError,
    StepError,
    StoreError,
    StoreUnavailableError,
    TvmflowError,
    VerdictError,
)
from tvmflow.hardware.target import Target, resolve
from tvmflow.processes import children
from tvmflow.registry import Registry, embedded_registry
from tvmflow.settings import Settings
from tvmflow.spec import Store
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.workspace import Artifact, Record, StepResult, Workspace

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


@pytest.mark.long
def test_prefect_retries_a_step_whose_server_is_away(prefect_server: str, workspace: Workspace) -> None:
    assert ask(prefect_server, StoreUnavailableError, 60.0, workspace) == [1, 2]


@pytest.mark.parametrize(("error", "outage"), [(StoreError, 60.0), (StoreUnavailableError, 0.0)])
def test_a_step_that_is_refused_or_may_not_wait_fails_at_once(
    prefect_server: str, workspace: Workspace, error: type[StoreError], outage: float
) -> None:
    assert ask(prefect_server, error, outage, workspace) == [1]


def test_runs_of_deployments_are_known_without_asking_the_server(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []

    @flow(name="inner", log_prints=False)
    def inner() -> None:
        answers.append(is_deployed())

    @flow(name="outer", log_prints=False)
    def outer() -> None:
        answers.append(is_deployed())
        # A part of a run is known by its beginning.
        if answers[-1]:
            inner()

    with temporary_settings({PREFECT_API_URL: prefect_server}):
        with get_client(sync_client=True) as client:
            deployment_id = client.create_deployment(client.create_flow(outer), "known")
            run = client.create_flow_run_from_deployment(deployment_id)
        monkeypatch.setattr(deployment, "_get_flow_run", Mock(side_effect=AssertionError("the server is asked")))
        outer()
        run_flow(outer, flow_run=run)
    assert answers == [False, True, True]


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


@contextmanager
def listening(address: str) -> Iterator[Callable[[], bool]]:
    """Break off every connection to an address, as a server that is being started does; yield whether there was one."""
    requests = threading.Event()
    with socket.create_server(("127.0.0.1", urlsplit(address).port or 0)) as server:

        def break_off() -> None:
            with suppress(OSError):  # the end of the body closes the socket
                while True:
                    connection, _ = server.accept()
                    connection.close()
                    requests.set()

        thread = threading.Thread(target=break_off)
        thread.start()
        try:
            yield requests.is_set
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.long
def test_a_release_lives_through_a_restart_of_its_servers(
    machine: Any, databases: Databases, make: Any, tmp_path: Path
) -> None:
    """Both are away when the last target is done; one comes back when it has been asked, then the other."""
    data, folder, models = tmp_path / "s3", tmp_path / "mlflow", tmp_path / "model"
    for path in (data, folder, models):
        path.mkdir()
    databases.mlflow(folder / "mlflow.db")
    port = free_port()
    file = make.waiting(models, "restarted")
    with ExitStack() as stack:
        with rclone_s3(data, bucket="models") as s3, mlflow_server(folder, port=port) as mlflow:
            settings = {
                "TVMFLOW_S3_ENDPOINT": s3.endpoint or "",
                "TVMFLOW_S3_BUCKET": s3.bucket,
                "TVMFLOW_S3_ACCESS_KEY": s3.access_key or "",
                "TVMFLOW_S3_SECRET_KEY": s3.secret_key or "",
                "TVMFLOW_S3_SINGLE_WRITER": "true",
                "TVMFLOW_MLFLOW_TRACKING_URI": mlflow,
                # Its own retries would wait as well.
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            }
            served = replace(machine, home=tmp_path / "state", settings={**machine.settings, **settings})
            process = served.start("release", file, "--json")
            wait_until((models / "reached").exists, message="the bundle is scored", process=process)
        with listening(mlflow) as mlflow_is_asked:
            with listening(s3.endpoint or "") as s3_is_asked:
                (models / "go").touch()
                wait_until(s3_is_asked, message="S3 is asked", process=process)
            stack.enter_context(rclone_s3(data, bucket="models", before=s3))
            wait_until(mlflow_is_asked, message="MLflow is asked", process=process)
        stack.enter_context(mlflow_server(folder, port=port))
        result = served.finish(process)
        assert result.code == 0, result.stderr
        store = ReleaseStore(s3)
        assert store.verify_release("restarted", "1").mlflow_run_id == result.document["mlflow_run_id"]
        assert [version.version for version in served.versions("restarted")] == ["1"]
        runs = served.mlflow.search_runs([served.mlflow.get_experiment_by_name("tvmflow").experiment_id])
        assert {run.info.status for run in runs} == {"FINISHED"}


def test_a_worker_that_begins_while_s3_is_away_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s3").mkdir()
    away = StoreConfig(
        "models", endpoint=f"http://127.0.0.1:{free_port()}", access_key="testing", secret_key="testing-secret"
    )
    settings = {
        "HOME": str(tmp_path / "state"),
        "S3_ENDPOINT": away.endpoint or "",
        "S3_BUCKET": away.bucket,
        "S3_ACCESS_KEY": away.access_key or "",
        "S3_SECRET_KEY": away.secret_key or "",
        "S3_SINGLE_WRITER": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"TVMFLOW_{name}", value)
    job = Artifact(sha256="0" * 64, size=1, name="job.json")
    with ThreadPoolExecutor(1) as pool:
        with listening(away.endpoint or "") as is_asked:
            making = pool.submit(_make, "key", job, Store())
            wait_until(is_asked, 60, message="S3 is asked")
        with (
            rclone_s3(tmp_path / "s3", bucket="models", before=away),
            pytest.raises(StoreError, match="what the release made is not in s3://models/work"),
        ):
            making.result()


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
            children.call("sleeper:sleep", Nothing(), Nothing, log=tmp_path / "log", timeout=120,
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


DYING = """
import sys
from tasks.step import ChildStep, Job
from tvmflow.workspace import StepResult

class DyingJob(Job):
    pass

class DyingResult(StepResult):
    pass

def work(job: DyingJob, emit) -> DyingResult:
    print("these are my last words")
    sys.exit(7)

dying = ChildStep("die", DyingResult, work)
"""


@pytest.mark.long
def test_what_a_step_prints_reaches_prefect(
    prefect_server: str, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying_step.py").write_text(DYING)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = import_module("dying_step")
    runner = StepRunner(workspace, "talking", tmp_path, timeout=60)
    runs: list[UUID] = []

    @flow(name="talking")
    def talking() -> None:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        runs.append(context.flow_run.id)
        module.dying(runner, module.DyingJob())

    with temporary_settings({PREFECT_API_URL: prefect_server, PREFECT_LOGGING_TO_API_ENABLED: True}):
        with pytest.raises(StepError, match="exit code 7"):
            talking()
        own = LogFilter(flow_run_id=LogFilterFlowRunId(any_=runs))
        with get_client(sync_client=True) as client:
            wait_until(
                lambda: "die.log:\nthese are my last words" in "".join(log.message for log in client.read_logs(own))
            )


@pytest.fixture
def context(workspace: Workspace, databases: Databases, tmp_path: Path) -> Any:
    """What a flow's steps share, with a registry of its own."""
    databases.mlflow(tmp_path / "mlflow" / "mlflow.db")
    return SimpleNamespace(
        workspace=workspace, registry=Registry(embedded_registry(tmp_path / "mlflow")), folder=tmp_path
    )


def fail(context: Any, error: TvmflowError, logs: dict[str, str]) -> None:
    """Do what a run does whose steps write these logs and which then fails."""
    with keeping_logs("failing", context.workspace, context.registry, {"team": "vision"}):
        for name, text in logs.items():
            log = context.workspace.folder / "logs" / name
            log.parent.mkdir(exist_ok=True)
            log.write_text(text)
        raise error


def test_logs_of_a_failed_run_are_kept_in_mlflow_and_the_error_says_where(context: Any) -> None:
    log = context.workspace.folder / "logs" / "failing" / "build-native.log"
    log.parent.mkdir()
    old = log.with_name("old.log")
    old.write_text("of an earlier run")
    os.utime(old, (1, 1))
    error = StepError(f"the process of step build ended with exit code 7; its log is {log}")
    logs = {f"failing/{log.name}": "the linker is missing", "failing-too/export.log": "of another release"}
    with pytest.raises(StepError) as caught:
        fail(context, error, logs)
    assert str(log) not in str(caught.value)
    run = str(caught.value).split()[-1]
    kept = context.registry.fetch_artifact(run, f"logs/{log.name}", context.folder)
    assert kept.read_text() == "the linker is missing"
    for name in (old.name, "export.log"):
        assert context.registry.fetch_artifact(run, f"logs/{name}", context.folder) is None
    ended = MlflowClient(context.registry.config.tracking_uri).get_run(run)
    assert ended.info.status == "FAILED"
    assert {
        "team": "vision",
        "tvmflow.kind": "failure",
        "tvmflow.error": "StepError",
    }.items() <= ended.data.tags.items()


@pytest.mark.parametrize(
    ("error", "logs"), [(VerdictError("no"), {"failing/build.log": "built"}), (SettingsError("no"), {})]
)
def test_a_refusal_and_a_failure_without_logs_leave_no_run(
    context: Any, error: TvmflowError, logs: dict[str, str]
) -> None:
    with pytest.raises(type(error), match="no"):
        fail(context, error, logs)
    assert MlflowClient(context.registry.config.tracking_uri).get_experiment_by_name("tvmflow") is None
