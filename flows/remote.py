"""Targets that are made on other machines: the release's side of the make flow, from finding a worker to the result.

Prefect runs the flow, but its heartbeats are events at least 30 seconds apart that only automations see, and its
`wait_for_flow_run` neither reports progress nor notices the loss of a worker. So a run updates a progress artifact
every few seconds, and this module polls it.
"""

import json
import logging
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID, uuid4

from flows.context import RunContext
from flows.local import ModelSteps
from flows.make import ERROR_ARTIFACT, MAKE, STEP, MakeJob, signer_of, workspace_runner
from flows.pools import why_idle
from flows.runs import connect, is_registered, start
from tasks.track import TargetResult
from tasks.tune import send_records
from tvmflow import errors
from tvmflow import spec as release_file
from tvmflow.errors import SettingsError, StepError, StoreError, TvmflowError
from tvmflow.hardware.target import Target, resolve
from tvmflow.onnx_model.external_data import data_digests
from tvmflow.progress import reporter
from tvmflow.settings import Settings
from tvmflow.workspace import Artifact, Progress, StepResult, StepSummary

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact as RunArtifact
    from prefect.client.schemas.objects import FlowRun, State

_POLL_SECONDS = 1.0
# The most seconds of silence between two answers of Prefect's that count: heartbeats are lost while it is away.
_COUNTED_SECONDS = 5.0
# Prefect notices after a minute and a half that a worker is gone.
_WORKER_POLL_SECONDS = 15.0

_log = logging.getLogger(__name__)


def pools_of(settings: Settings, targets: tuple[Target, ...]) -> dict[str, str]:
    """Return the work pool of each target that is made on one, by the target's name; the others are made here.

    Raises SettingsError, before any work begins, when a pool could not take its target, and PrefectError when the
    server fails.
    """
    pools = {
        target.name: settings.target_pools[target.name] for target in targets if target.name in settings.target_pools
    }
    if not pools:
        return pools
    if not settings.shared_workspace:
        raise SettingsError(
            "setting target_pools makes targets on other machines, which find their work in the shared workspace; "
            "set shared_workspace = true here and there"
        )
    if settings.prefect_api_url is None:
        raise SettingsError(
            "setting target_pools needs a Prefect server that the workers of its pools know; set prefect_api_url"
        )
    for target, pool in pools.items():
        _check_pool(target, pool)
    return pools


def make_on_pool(
    context: RunContext,
    pool: str,
    model: ModelSteps,
    weights: Artifact | None,
    target: Target,
) -> TargetResult:
    """Make and measure one target on a worker of a work pool; a cached result of the shared workspace is returned.

    `weights` are those that were trained for the model, None where none were. When Prefect or the store does not
    answer, the call waits. Raises the error that the run raised; StepError when its worker is lost or the run was
    cancelled; StoreError when its result is missing. The run is cancelled when `context.stop` is set.
    """
    workspace, started_at = context.workspace, time.perf_counter()

    def find(progress: Progress | None = None) -> TargetResult | None:
        return context.outlast(lambda: workspace.find(STEP, key, TargetResult, progress=progress))

    job = context.outlast(lambda: _make_job(context, pool, model, weights, target))
    key = MAKE.key(workspace_runner(workspace, context.settings, job), job)

    def report(done: float, total: float, message: str) -> None:
        reporter().advance(STEP, target.name, done, total, message)

    status: Literal["ran", "cached"] = "cached"
    result = find()
    if result is None:
        status = "ran"
        reporter().begin(STEP, target.name)
        try:
            _run(context, job, key, report)
            result = find(report)
            if result is None:
                raise StoreError(
                    f"what the worker of pool {pool!r} made for {target.name!r} is not in the shared workspace; give "
                    "the worker the same s3_endpoint, s3_bucket and s3_prefix as this machine"
                )
        except BaseException:
            reporter().end(STEP, target.name, "failed", time.perf_counter() - started_at)
            raise
    reporter().end(STEP, target.name, status, time.perf_counter() - started_at)
    return result if status == "ran" else _as_cached(result)


def _as_cached(result: TargetResult) -> TargetResult:
    """Return the result with all steps marked as cached; a new result has the worker's own steps."""
    steps = {name: StepSummary(status="cached", seconds=0.0) for name in result.steps}
    return result.model_copy(update={"steps": steps})


def _make_job(context: RunContext, pool: str, model: ModelSteps, weights: Artifact | None, target: Target) -> MakeJob:
    spec, workspace = context.spec, context.workspace
    # The steps before and after read these sections.
    changes: dict[str, object] = {"train": None, "retrain": None, "channels": {}}
    changes["targets"] = [item for item in spec.targets if resolve(item).name == target.name][:1]
    if model.original.registered is not None:
        # An alias may move while the target is made.
        changes["model.mlflow"] = f"models:/{model.original.registered}"
    records: dict[str, int] = {}
    if not spec.tune.has_budget and context.shared_records is not None:
        records = send_records(workspace, target, context.shared_records)
    return MakeJob(
        spec=release_file.amend(spec, changes),
        files=_files(context, [item for item in (model.exported, model.reference) if item is not None]),
        target=target.name,
        pool=pool,
        signer=signer_of(context.settings),
        records=records,
        exported=model.exported,
        imported=model.imported,
        reference=model.reference,
        weights=weights,
    )


def _files(context: RunContext, results: list[StepResult]) -> dict[str, Artifact]:
    """Return the files in the release file's folder that it names, and the modules that its steps imported, by path."""
    spec, model = context.spec, context.spec.model
    files_in_spec = [model.onnx, model.pt2, model.weights, *(item.samples.file for item in spec.inputs)]
    paths = {str(path) for path in files_in_spec if path is not None and not path.is_absolute()}
    if model.onnx is not None and not model.onnx.is_absolute():
        paths |= {str(model.onnx.parent / location) for location in data_digests(spec.folder / model.onnx)}
    paths |= {path for result in results for path in result.sources.files if not Path(path).is_absolute()}
    files = {}
    with context.workspace.scratch() as scratch:
        for path in sorted(paths):
            copy = scratch / "file"
            shutil.copyfile(spec.folder / path, copy)
            files[path] = context.workspace.keep(copy, Path(path).name)
    return files


# -- Pools -------------------------------------------------------------------------------------------------------------


def _check_pool(target: str, pool: str) -> None:
    """Raise SettingsError when a work pool has no deployment, or no worker that takes its runs."""
    from prefect.exceptions import ObjectNotFound

    with connect(f"look for the work pool {pool}") as client:
        try:
            work_pool = client.read_work_pool(pool)
        except ObjectNotFound as error:
            raise SettingsError(
                f"target_pools names the work pool {pool!r} for {target!r}, which Prefect does not know; create it "
                f"with `prefect work-pool create {pool} --type process`, or correct the setting"
            ) from error
        if not is_registered(f"make/{pool}"):
            raise SettingsError(
                f"target_pools names the work pool {pool!r} for {target!r}, which has no deployment make/{pool}; "
                "register it with `tvmflow deploy`"
            )
        if reason := why_idle(client, work_pool):
            raise SettingsError(f"target {target!r} is made on the work pool {pool!r}, {reason}")


# -- The run -----------------------------------------------------------------------------------------------------------


class _LostWorkerError(StepError):
    """The worker of a run sends no more heartbeats."""


def _run(context: RunContext, job: MakeJob, key: str, report: Progress) -> None:
    """Start a run of the make flow and wait for its end."""
    from prefect.states import Cancelling, Crashed

    workspace = context.workspace
    with workspace.scratch() as scratch:
        (scratch / "job.json").write_text(job.model_dump_json())
        artifact = workspace.keep(scratch / "job.json")
    context.outlast(lambda: workspace.share([artifact, *job.artifacts()], report))
    parameters = {
        "name": context.spec.name,
        "target": job.target,
        "store": context.spec.store.model_dump(mode="json"),
        "key": key,
        "job": artifact.model_dump(mode="json"),
    }
    tags, attempt = [context.spec.name, job.target], uuid4().hex
    # The key makes a second attempt find the run that the first one started, if its answer was lost.
    run_id = UUID(context.outlast(lambda: start(f"make/{job.pool}", parameters, tags=tags, key=attempt)))
    try:
        run = _wait(context, run_id, job, report)
    except _LostWorkerError as error:
        _set_state(run_id, job, Crashed(message=str(error)))
        raise StepError(str(error)) from error
    except BaseException:
        _set_state(run_id, job, Cancelling(message="The release was interrupted or gave up."))
        raise
    context.outlast(lambda: _raise_unless_completed(run, job))


def _wait(context: RunContext, run_id: UUID, job: MakeJob, report: Progress) -> "FlowRun":
    """Wait for the end of a run and return it.

    Raises StepError when its worker is gone or no worker takes it, KeyboardInterrupt on an interrupt.
    """
    watch = _Watch(run_id, job, report)
    while not context.stop.wait(_POLL_SECONDS):
        run = context.outlast(watch.poll)
        if run is not None:
            return run
        if watch.silence > context.settings.worker_timeout_seconds:
            raise _LostWorkerError(
                f"the worker of pool {job.pool!r} that made target {job.target!r} has sent no heartbeat for "
                f"{watch.silence:.0f} seconds and is given up; start it again with `prefect worker start "
                f"--pool {job.pool}`, and release again: finished steps are cached"
            )
    raise KeyboardInterrupt


class _Watch:
    """A run that is polled; `silence` is the seconds since its last heartbeat, without those of Prefect's outages."""

    def __init__(self, run_id: UUID, job: MakeJob, report: Progress) -> None:
        self._run_id = run_id
        self._job = job
        self._report = report
        self._heartbeat: object = None
        self._polled_at = self._workers_seen_at = time.monotonic()
        self.silence = 0.0

    def poll(self) -> "FlowRun | None":
        """Ask Prefect for the run; return it when it has ended, None before.

        Raises StepError when no worker takes it.
        """
        pool = self._job.pool
        with connect(f"follow the run that makes {self._job.target}") as client:
            run = client.read_flow_run(self._run_id)
            if run.state is not None and run.state.is_final():
                return run
            now = time.monotonic()
            self.silence += min(now - self._polled_at, _COUNTED_SECONDS)
            self._polled_at = now
            if run.state is None or not run.state.is_running():
                self.silence = 0.0
                if now - self._workers_seen_at > _WORKER_POLL_SECONDS:
                    self._workers_seen_at = now
                    if reason := why_idle(client, client.read_work_pool(pool)):
                        raise StepError(f"target {self._job.target!r} waits for the work pool {pool!r}, {reason}")
                self._report(0, 1, f"waiting for a worker of {pool}")
                return None
            for artifact in _artifacts(client, self._run_id, "progress"):
                if artifact.updated != self._heartbeat:
                    self._heartbeat, self.silence = artifact.updated, 0.0
                self._report(float(str(artifact.data or 0)) / 100, 1, str(artifact.description or ""))
        return None


def _artifacts(client: "SyncPrefectClient", run_id: UUID, kind: str) -> "list[RunArtifact]":
    """The artifacts of a type that a flow run has left."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType

    return client.read_artifacts(
        artifact_filter=ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]), type=ArtifactFilterType(any_=[kind])
        )
    )


def _set_state(run_id: UUID, job: MakeJob, state: "State[Any]") -> None:
    try:
        with connect(f"end the run that makes {job.target}") as client:
            client.set_flow_run_state(run_id, state, force=state.is_crashed())
    except TvmflowError as error:
        _log.warning("%s", error)


def _raise_unless_completed(run: "FlowRun", job: MakeJob) -> None:
    """Raise the error that the run left as an artifact; a StepError when it left none."""
    state = run.state
    if state is not None and state.is_completed():
        return
    where = f"(on a worker of pool {job.pool!r})"
    with connect(f"read the error of the run that makes {job.target}") as client:
        for artifact in _artifacts(client, run.id, ERROR_ARTIFACT):
            error = _error(artifact.data)
            if error is not None:
                error.args = (f"{error} {where}",)
                raise error
    outcome = "was cancelled" if state is not None and state.is_cancelled() else "failed"
    message = " ".join(((state.message if state is not None else None) or "it left no message").split())[:500]
    raise StepError(
        f"the run {run.name!r} that made target {job.target!r} {outcome} {where}: {message}; release again: finished "
        "steps are cached"
    )


def _error(data: object) -> TvmflowError | None:
    """Return the error in a run's artifact; None when the artifact is damaged."""
    try:
        return errors.from_data(json.loads(str(data)))
    except ValueError:
        return None
