"""The make flow: it makes and measures one target of a release on a worker, whose work pool has the target's machines.

Releases start it and wait for it; `flows.remote` is their side.
"""

import logging
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from pydantic import PlainSerializer

from flows.context import RunContext
from flows.local import ModelSteps, build_here, measure_here, refuse_unverifiable
from flows.logs import keeping_logs
from tasks.export import ExportResult
from tasks.reference import ReferenceResult
from tasks.relax_import import ImportResult
from tasks.step import Job, Step, StepRunner
from tasks.track import TargetResult
from tvmflow import errors
from tvmflow import spec as release_file
from tvmflow.bundle import public_key
from tvmflow.errors import SettingsError, StoreError, TvmflowError
from tvmflow.outages import outlast
from tvmflow.processes.children import shared_imports
from tvmflow.progress import Reporter, Status, reporter, reporting_to
from tvmflow.services import Services, open_registry, open_store, open_workspace
from tvmflow.settings import Settings
from tvmflow.spec import Spec, Store
from tvmflow.workspace import Artifact, Workspace

STEP = "make"
ERROR_ARTIFACT = "tvmflow-error"
"""The type of the Prefect artifact that holds the error of a run, as `tvmflow.errors.to_data` writes it."""
_HEARTBEAT_SECONDS = 3.0

_log = logging.getLogger(__name__)


class MakeJob(Job):
    """One target of a release, and all inputs that a worker needs to make it.

    `spec` is the release file with this one target; `files` are the files in its folder that the release reads, by
    their paths in it. `signer` is the public key that belongs to the bundles' signing key, None without signatures.
    `records` are the sizes in bytes of the shared files of tuning records for the target, by file name, for a release
    that has no budget for tuning and so depends on them.
    """

    # The worker validates it again, and knows which keys the file sets.
    spec: Annotated[Spec, PlainSerializer(release_file.to_document)]
    files: dict[str, Artifact]
    target: str
    pool: str
    signer: str | None
    records: dict[str, int]
    exported: ExportResult
    imported: ImportResult
    reference: ReferenceResult | None
    weights: Artifact | None

    @property
    def label(self) -> str:
        """The target's name."""
        return self.target

    def artifacts(self) -> Iterator[Artifact]:
        """Yield the artifacts that the worker fetches: files of the release file, results of steps, and weights."""
        yield from self.files.values()
        for result in (self.exported, self.imported, self.reference):
            if result is not None:
                yield from result.artifacts()
        if self.weights is not None:
            yield self.weights


@flow(name="make", flow_run_name="make {name} for {target}", validate_parameters=True)
def make(name: str, target: str, store: Store, key: str, job: Artifact) -> None:
    """Make one target of a release; the release finds the result in the shared workspace.

    `store` is the section of that name of the release file, `job` the artifact of a MakeJob in the shared workspace,
    and `key` the cache key of the result. An error is also left as an artifact of the flow run. Raises SettingsError
    when this worker has other versions or another signing key than the machine that releases, and what the steps raise.
    """
    with _error_artifact(), _heartbeats() as heartbeats, reporting_to(heartbeats):
        _make(key, job, store)


def _make(key: str, artifact: Artifact, section: Store) -> None:
    settings = Settings.load().model_copy(update={"shared_workspace": True})
    outage = settings.outage_minutes * 60
    with open_store(settings, section) as releases, shared_imports():
        workspace = open_workspace(settings, releases, section)

        def fetch(*artifacts: Artifact) -> None:
            outlast(lambda: _fetch(workspace, artifacts, releases.config.uri), outage)

        outlast(releases.check, outage)
        fetch(artifact)
        job = MakeJob.model_validate_json(workspace.path(artifact).read_bytes())
        if MAKE.key(workspace_runner(workspace, settings, job), job) != key:
            raise SettingsError(
                "this worker has other versions of tvmflow, TVM, NumPy, ONNX or PyTorch than the machine that "
                "releases; install the same on both"
            )
        if job.signer != signer_of(settings):
            raise SettingsError(
                f"this worker signs bundles {_key_phrase(signer_of(settings))}, the machine that releases "
                f"{_key_phrase(job.signer)}; give both the same setting signing_key"
            )
        fetch(*job.artifacts())
        with workspace.scratch() as folder:
            for path, item in job.files.items():
                _place_file(workspace.path(item), folder, path)
            spec = release_file.parse(release_file.to_document(job.spec), folder)
            services = Services(releases, open_registry(settings, spec.registry))
            context = RunContext(spec, settings, workspace, services)
            with keeping_logs(spec.name, workspace, services.registry, spec.registry.tags):
                MAKE(workspace_runner(workspace, settings, job), job, context)


def _work(job: MakeJob, runner: StepRunner, context: RunContext) -> TargetResult:
    (target,) = context.spec.resolve_targets()
    refuse_unverifiable(context.spec, (target,))
    original = context.find_original(job.weights)
    model = ModelSteps(original, job.exported, job.imported, job.reference)
    return measure_here(context, model, build_here(context, model, target))


MAKE = Step(STEP, TargetResult, _work)


def workspace_runner(workspace: Workspace, settings: Settings, job: MakeJob) -> StepRunner:
    """Return the runner of the step `make`, which has no release folder; the steps within it have a runner with one."""
    return StepRunner.with_settings(workspace, job.spec.name, Path(), settings)


def signer_of(settings: Settings) -> str | None:
    """Return the public key, in hexadecimal, of this machine's signing key; None when it has none."""
    return None if settings.signing_key is None else str(public_key(settings.signing_key))


def _key_phrase(signer: str | None) -> str:
    return "with no key" if signer is None else f"with the key {signer[:16]}"


def _fetch(workspace: Workspace, artifacts: Iterable[Artifact], uri: str) -> None:
    if not workspace.fetch(artifacts):
        raise StoreError(
            f"what the release made is not in {uri}/work as seen from this worker; give it the same s3_endpoint, "
            "s3_bucket and s3_prefix as the machine that releases, and release again"
        )


def _place_file(source: Path, folder: Path, path: str) -> None:
    """Copy a file to its path in `folder`. Raises StoreError for a path that leads out of the folder."""
    place = folder / path
    if not place.resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"the release reads {path!r}, which leads out of its folder; put the file beside the release")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, place)


@contextmanager
def _error_artifact() -> Iterator[None]:
    """Leave an error of the body as an artifact of this flow run, for the release that waits for it."""
    from prefect.artifacts import Artifact as RunArtifact

    try:
        yield
    except TvmflowError as error:
        try:
            RunArtifact(type=ERROR_ARTIFACT, data=dict(errors.to_data(error))).create()  # written as JSON
        except Exception as problem:  # The flow run's own state names the error as well.
            _log.warning("the error could not be written to Prefect: %s", problem)
        raise


class _ProgressKeeper(Reporter):
    """A reporter that keeps the latest progress of the run, and passes all events on.

    `target` is None for steps of the release.
    """

    def __init__(self, receiver: Reporter) -> None:
        self._receiver = receiver
        self.latest: tuple[float, str] = (0.0, "starting")

    def begin(self, step: str, target: str | None) -> None:
        """Keep the step's name."""
        if step != STEP:
            self.latest = (0.0, step)
        self._receiver.begin(step, target)

    def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Keep how much of the step is done."""
        self.latest = (done / total if total else 0.0, f"{step} {message}")
        self._receiver.advance(step, target, done, total, message)

    def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Pass the end of a step on to the receiver."""
        self._receiver.end(step, target, status, seconds)


@contextmanager
def _heartbeats() -> Iterator[Reporter]:
    """Update a progress artifact of this flow run every few seconds; it shows that the run lives, and its progress."""
    from prefect.artifacts import create_progress_artifact
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactUpdate

    keeper = _ProgressKeeper(reporter())
    artifact_id: Any = create_progress_artifact(progress=0.0, description=keeper.latest[1])
    is_over = threading.Event()

    def update() -> None:
        while not is_over.wait(_HEARTBEAT_SECONDS):
            fraction, message = keeper.latest
            try:
                with get_client(sync_client=True) as client:
                    client.update_artifact(artifact_id, ArtifactUpdate(data=100 * fraction, description=message))
            except Exception as error:  # The server may be away for a while; the work goes on.
                _log.warning("the heartbeat did not reach Prefect: %s", error)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    try:
        yield keeper
    finally:
        is_over.set()
        thread.join()
