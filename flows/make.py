"""The make flow: one target of a release, made and measured on a worker of the work pool that is its machine."""

import logging
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from prefect import flow

from flows import deployments
from tasks.benchmark import BenchmarkResult, benchmark, gate_failures
from tasks.build import BuildResult
from tasks.choose import Candidate, Choice, Making, to_build
from tasks.export import ExportResult
from tasks.package import PackageResult
from tasks.relax_import import ImportResult
from tasks.step import Context
from tasks.track import TargetOutcomes
from tasks.train import TrainResult
from tasks.tune import TuneResult, tune
from tasks.validate import ReferenceResult, Verdict, unable
from tvmflow import errors
from tvmflow import settings as machine
from tvmflow import spec as release_file
from tvmflow.bundle import public_key
from tvmflow.errors import SettingsError, StepError, StoreError, TargetError, TvmflowError
from tvmflow.progress import Reporter, Status, reporter, reporting_to
from tvmflow.services import Services, open_registry, open_store, open_workspace
from tvmflow.settings import Settings
from tvmflow.spec import Spec, Store
from tvmflow.target import Target, resolve
from tvmflow.workspace import Artifact, Outcome, Progress, Record, StepResult, Workspace, run_step, step_key

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State, WorkPool

_STEP = "make"
_POLL_SECONDS = 1.0
# A run says every few seconds that it lives; one that has not for so long died with its worker.
_BEAT_SECONDS = 3.0
_LOST_SECONDS = 30.0
# Prefect itself finds out after a minute and a half that a worker is gone.
_LOOK_FOR_WORKERS_SECONDS = 15.0
_RAISED = re.compile(r"Flow run encountered an exception: (\w+): (.*)", re.DOTALL)

_log = logging.getLogger(__name__)


class MakeJob(Record):
    """One target of a release, and all that a worker needs to make it.

    `document` is the release file's, with this one target; `files` are those that the release reads of its folder, by
    their paths in it. `signer` is the public key that bundles are signed with. `known` are the shared files of tuning
    records with their sizes, for a release that has no budget for tuning and so depends on them.
    """

    document: dict[str, Any]
    files: dict[str, Artifact]
    target: str
    pool: str
    signer: str | None
    known: dict[str, int]
    exported: ExportResult
    imported: ImportResult
    held_out: ReferenceResult | None
    trained: TrainResult | None

    def artifacts(self) -> Iterator[Artifact]:
        """The artifacts that the worker needs."""
        yield from self.files.values()
        for made in (self.exported, self.imported, self.held_out, self.trained):
            if made is not None:
                yield from made.artifacts()


class Step(Record):
    """Whether a step of a target ran or was found done on its worker, and the seconds that took."""

    status: Literal["ran", "cached"]
    seconds: float


class MakeResult(StepResult):
    """What was made and measured for one target; `measured` is None where the worker could not run it."""

    target: Target
    tuned: TuneResult
    built: BuildResult
    packaged: PackageResult
    verdict: Verdict
    choice: Choice | None
    measured: BenchmarkResult | None
    gates: tuple[str, ...]
    steps: dict[str, Step]


@dataclass(frozen=True)
class Made:
    """What was made for one target: the build that may be shipped, or the tuned and the untuned one, in this order."""

    making: Making
    tuned: Outcome[TuneResult]
    candidates: tuple[Candidate, ...]


def make_here(
    context: Context,
    exported: Outcome[ExportResult],
    imported: Outcome[ImportResult],
    held_out: Outcome[ReferenceResult] | None,
    target: Target,
) -> Made:
    """Tune, build, package and validate for one target on this machine; twice where tuning changes what is built."""
    tuned = tune(context, imported, target)
    making = Making(context, exported, imported, target, held_out)
    return Made(making, tuned, making.candidates(to_build(context.workspace, tuned)))


def chosen_here(made: Made) -> TargetOutcomes:
    """The better of what was made, which is measured on this machine where there are two."""
    shipped, choice = made.making.best(made.candidates)
    return TargetOutcomes(
        target=made.making.target,
        tuned=made.tuned,
        built=shipped.built,
        packaged=shipped.packaged,
        verdict=shipped.verdict,
        choice=choice,
        measured=None,
        gates=(),
    )


def measured_here(
    context: Context, exported: Outcome[ExportResult], trained: Outcome[TrainResult] | None, made: Made
) -> TargetOutcomes:
    """The better of what was made, with its measurements and what the gates say, where it runs here and passed."""
    outcome = chosen_here(made)
    verdict = outcome.verdict.result
    if not (verdict.passed and verdict.verified):
        return outcome
    measured: Outcome[BenchmarkResult] = benchmark(context, exported, outcome.packaged, outcome.target, trained)
    gates = tuple(gate_failures(context, measured.result, outcome.bundle, outcome.target))
    return replace(outcome, measured=measured, gates=gates)


def refuse_unverifiable(spec: Spec, targets: tuple[Target, ...]) -> None:
    """Say before any work is spent that a target could not pass here. Raises TargetError."""
    for target in targets:
        reason = unable(target, spec.build.precision)
        if reason is not None and spec.gates.unverified_targets == "refuse":
            raise TargetError(f"{reason}; release it where it runs, or set gates.unverified_targets to allow")


# -- On the worker -----------------------------------------------------------------------------------------------------


@flow(name="make", flow_run_name="make {name} for {target}", validate_parameters=True)
def make(name: str, target: str, store: dict[str, Any], key: str, job: dict[str, Any]) -> None:
    """Make one target of a release; started by releases, which find what was made in the shared workspace.

    `store` is the section of that name of the release file, `job` the artifact of a MakeJob in the shared workspace,
    and `key` the key of the step.
    """
    settings = machine.load().model_copy(update={"shared_workspace": True})
    artifact, section = Artifact.model_validate(job), Store.model_validate(store)
    with open_store(settings, section) as releases, _telling() as tell, reporting_to(tell):
        releases.check()
        workspace = open_workspace(settings, releases, section)
        _bring(workspace, [artifact], releases.config.uri)
        told = MakeJob.model_validate_json(workspace.path(artifact).read_bytes())
        reads = {"job": told}
        if step_key(_STEP, reads) != key:
            raise SettingsError(
                "this worker has other versions of tvmflow, TVM, NumPy, ONNX or PyTorch than the machine that "
                "releases; install the same on both"
            )
        if told.signer != _signer(settings):
            raise SettingsError(
                f"this worker signs bundles {_key_of(_signer(settings))}, the machine that releases "
                f"{_key_of(told.signer)}; give both the same setting signing_key"
            )
        _bring(workspace, told.artifacts(), releases.config.uri)
        with workspace.scratch() as folder:
            for path, item in told.files.items():
                _lay(workspace.path(item), folder, path)
            spec = release_file.parse(told.document, folder)
            services = Services(releases, open_registry(settings, spec.registry))
            context = Context(spec, settings, workspace, services)
            run_step(workspace, _STEP, reads, MakeResult, lambda: _made(context, told), target=target)


def _made(context: Context, job: MakeJob) -> MakeResult:
    (target,) = context.spec.resolve_targets()
    refuse_unverifiable(context.spec, (target,))
    exported, imported = _given(job.exported), _given(job.imported)
    held_out = None if job.held_out is None else _given(job.held_out)
    trained = None if job.trained is None else _given(job.trained)
    made = measured_here(context, exported, trained, make_here(context, exported, imported, held_out, target))
    steps: dict[str, Outcome[Any] | None] = {
        "tune": made.tuned,
        "build": made.built,
        "package": made.packaged,
        "validate": made.verdict,
        "choose": made.choice,
        "benchmark": made.measured,
    }
    return MakeResult(
        target=target,
        tuned=made.tuned.result,
        built=made.built.result,
        packaged=made.packaged.result,
        verdict=made.verdict.result,
        choice=made.choice.result if made.choice is not None else None,
        measured=made.measured.result if made.measured is not None else None,
        gates=made.gates,
        steps={
            name: Step(status=item.status, seconds=item.seconds) for name, item in steps.items() if item is not None
        },
    )


def _given(result: Any) -> Outcome[Any]:
    return Outcome(result, "cached", 0.0)


def _bring(workspace: Workspace, artifacts: Iterable[Artifact], uri: str) -> None:
    if not workspace.fetch(artifacts):
        raise StoreError(
            f"what the release made is not in {uri}/work as seen from this worker; give it the same s3_endpoint, "
            "s3_bucket and s3_prefix as the machine that releases, and release again"
        )


def _lay(kept: Path, folder: Path, path: str) -> None:
    """Lay a file of the release's folder where it belongs."""
    place = folder / path
    if not place.resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"the release reads {path!r}, which leads out of its folder; put the file beside the release")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kept, place)


class _Telling(Reporter):
    """Keeps the last that the run had to say, and passes everything on."""

    def __init__(self, to: Reporter) -> None:
        self._to = to
        self.said: tuple[float, str] = (0.0, "starting")

    def started(self, step: str, target: str | None) -> None:
        """Note that a step begins."""
        if step != _STEP:
            self.said = (0.0, step)
        self._to.started(step, target)

    def progressed(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Note how far a step is."""
        self.said = (done / total if total else 0.0, f"{step} {message}")
        self._to.progressed(step, target, done, total, message)

    def ended(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Pass the end of a step on."""
        self._to.ended(step, target, status, seconds)


@contextmanager
def _telling() -> Iterator[Reporter]:
    """Say every few seconds, as a progress artifact of this flow run, that it lives and how far it is."""
    from prefect.artifacts import create_progress_artifact
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactUpdate

    telling = _Telling(reporter())
    created: Any = create_progress_artifact(progress=0.0, description=telling.said[1])
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_SECONDS):
            fraction, words = telling.said
            try:
                with get_client(sync_client=True) as client:
                    client.update_artifact(created, ArtifactUpdate(data=100 * fraction, description=words))
            except Exception as error:  # The server may be away for a while; the work goes on.
                _log.warning("progress could not be told: %s", error)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield telling
    finally:
        over.set()
        thread.join()


# -- On the machine that releases --------------------------------------------------------------------------------------


def pools_of(settings: Settings, targets: tuple[Target, ...]) -> dict[str, str]:
    """The work pools that targets of a release are made on, by target; the others are made here.

    Raises SettingsError, before any work is spent, when a pool could not take its target.
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


def _check_pool(target: str, pool: str) -> None:
    from prefect.exceptions import ObjectNotFound

    with deployments.connected(f"look for the work pool {pool}") as client:
        try:
            found = client.read_work_pool(pool)
        except ObjectNotFound as error:
            raise SettingsError(
                f"target_pools names the work pool {pool!r} for {target!r}, which Prefect does not know; create it "
                f"with `prefect work-pool create {pool} --type process`, or correct the setting"
            ) from error
        if not deployments.registered(f"make/{pool}"):
            raise SettingsError(
                f"target_pools names the work pool {pool!r} for {target!r}, which has no deployment make/{pool}; "
                "register it with `tvmflow deploy`"
            )
        if reason := _idle(client, found):
            raise SettingsError(f"target {target!r} is made on the work pool {pool!r}, {reason}")


def _idle(client: "SyncPrefectClient", pool: "WorkPool") -> str | None:
    """Why nobody takes runs of a pool, as the end of a sentence; None if somebody does."""
    if pool.is_paused:
        return f"which is paused; resume it with `prefect work-pool resume {pool.name}`"
    if pool.is_push_pool or pool.is_managed_pool:
        return None
    workers = client.read_workers_for_work_pool(pool.name)
    if any(worker.status.value == "ONLINE" for worker in workers):
        return None
    return f"which has no running worker; start one with `prefect worker start --pool {pool.name}`"


def make_on_pool(
    context: Context,
    pool: str,
    exported: Outcome[ExportResult],
    imported: Outcome[ImportResult],
    held_out: Outcome[ReferenceResult] | None,
    trained: Outcome[TrainResult] | None,
    target: Target,
    interrupted: threading.Event,
) -> TargetOutcomes:
    """Have one target made and measured on a worker of a work pool, or find that it was, in the shared workspace.

    Raises what the worker raised. The run is cancelled when `interrupted` is set.
    """
    workspace, start = context.workspace, time.perf_counter()
    job = _job(context, pool, exported, imported, held_out, trained, target)
    key = step_key(_STEP, {"job": job})

    def progressed(done: float, total: float, message: str) -> None:
        reporter().progressed(_STEP, target.name, done, total, message)

    status: Literal["ran", "cached"] = "cached"
    found = workspace.find(_STEP, key, MakeResult)
    if found is None:
        status = "ran"
        reporter().started(_STEP, target.name)
        try:
            _run(context, job, key, progressed, interrupted)
            found = workspace.find(_STEP, key, MakeResult, progress=progressed)
            if found is None:
                raise StoreError(
                    f"what the worker of pool {pool!r} made for {target.name!r} is not in the shared workspace; give "
                    "the worker the same s3_endpoint, s3_bucket and s3_prefix as this machine"
                )
        except BaseException:
            reporter().ended(_STEP, target.name, "failed", time.perf_counter() - start)
            raise
    reporter().ended(_STEP, target.name, status, time.perf_counter() - start)
    return _outcomes(found, None if status == "ran" else "cached")


def _outcomes(made: MakeResult, status: Literal["cached"] | None) -> TargetOutcomes:
    """As if it had been made here; the steps' times are the worker's, none where all was found done."""

    def outcome(name: str, result: Any) -> Outcome[Any]:
        step = made.steps[name]
        return Outcome(result, status or step.status, 0.0 if status else step.seconds)

    return TargetOutcomes(
        target=made.target,
        tuned=outcome("tune", made.tuned),
        built=outcome("build", made.built),
        packaged=outcome("package", made.packaged),
        verdict=outcome("validate", made.verdict),
        choice=outcome("choose", made.choice) if made.choice is not None else None,
        measured=outcome("benchmark", made.measured) if made.measured is not None else None,
        gates=made.gates,
    )


def _job(
    context: Context,
    pool: str,
    exported: Outcome[ExportResult],
    imported: Outcome[ImportResult],
    held_out: Outcome[ReferenceResult] | None,
    trained: Outcome[TrainResult] | None,
    target: Target,
) -> MakeJob:
    spec = context.spec
    # Without what comes before and after.
    changes: dict[str, object] = {"train": None, "retrain": None, "channels": {}}
    changes["targets"] = [item for item in spec.targets if resolve(item).name == target.name][:1]
    if spec.model.mlflow is not None:
        # An alias may move while the target is made.
        source = context.registry.resolve_source(spec.model.mlflow)
        changes["model.mlflow"] = f"models:/{source.name}/{source.version}"
    known: dict[str, int] = {}
    if not spec.tune.has_budget and context.workspace.shared is not None:
        context.workspace.share_records()
        known = context.workspace.shared.tuning_records()
    return MakeJob(
        document=release_file.to_document(release_file.amend(spec, changes)),
        files=_files(context, [item.result for item in (exported, held_out, trained) if item is not None]),
        target=target.name,
        pool=pool,
        signer=_signer(context.settings),
        known=known,
        exported=exported.result,
        imported=imported.result,
        held_out=held_out.result if held_out is not None else None,
        trained=trained.result if trained is not None else None,
    )


def _files(context: Context, made: list[Any]) -> dict[str, Artifact]:
    """The files in the folder of the release file that the release names, and the modules that its steps imported."""
    spec, model = context.spec, context.spec.model
    named = [model.onnx, model.pt2, model.weights, *(item.samples.file for item in spec.inputs)]
    paths = {str(path) for path in named if path is not None and not path.is_absolute()}
    paths |= {path for result in made for path in result.sources.files if not Path(path).is_absolute()}
    kept = {}
    with context.workspace.scratch() as scratch:
        for path in sorted(paths):
            copied = scratch / "file"
            shutil.copyfile(spec.folder / path, copied)
            kept[path] = context.workspace.keep(copied, Path(path).name)
    return kept


class _LostError(StepError):
    """The worker of a run is gone."""


def _run(context: Context, job: MakeJob, key: str, progressed: Progress, interrupted: threading.Event) -> None:
    """Start the run on the pool and wait for its end."""
    from prefect.states import Cancelling, Crashed

    workspace = context.workspace
    with workspace.scratch() as scratch:
        (scratch / "job.json").write_text(job.model_dump_json())
        artifact = workspace.keep(scratch / "job.json")
    workspace.share([artifact, *job.artifacts()], progressed)
    parameters = {
        "name": context.spec.name,
        "target": job.target,
        "store": context.spec.store.model_dump(mode="json"),
        "key": key,
        "job": artifact.model_dump(mode="json"),
    }
    run_id = UUID(deployments.start(f"make/{job.pool}", parameters, tags=[context.spec.name, job.target]))
    try:
        run = _ended(run_id, job, progressed, interrupted)
    except _LostError as error:
        _end(run_id, job, Crashed(message=str(error)))
        raise StepError(str(error)) from error
    except BaseException:
        _end(run_id, job, Cancelling(message="The release was interrupted or gave up."))
        raise
    _raise_unless_completed(run, job)


def _ended(run_id: UUID, job: MakeJob, progressed: Progress, interrupted: threading.Event) -> "FlowRun":
    """The run when it has ended. Raises StepError when its worker is gone, KeyboardInterrupt on an interrupt."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
    beat, heard = None, time.monotonic()
    looked = heard
    while not interrupted.wait(_POLL_SECONDS):
        with deployments.connected(f"follow the run that makes {job.target}") as client:
            run = client.read_flow_run(run_id)
            if run.state is not None and run.state.is_final():
                return run
            now = time.monotonic()
            if run.state is None or not run.state.is_running():
                heard = now
                if now - looked > _LOOK_FOR_WORKERS_SECONDS:
                    looked = now
                    if reason := _idle(client, client.read_work_pool(job.pool)):
                        raise StepError(f"target {job.target!r} waits for the work pool {job.pool!r}, {reason}")
                progressed(0, 1, f"waiting for a worker of {job.pool}")
                continue
            for artifact in client.read_artifacts(artifact_filter=mine)[:1]:
                if artifact.updated != beat:
                    beat, heard = artifact.updated, now
                progressed(float(str(artifact.data or 0)) / 100, 1, str(artifact.description or ""))
        if now - heard > _LOST_SECONDS:
            raise _LostError(
                f"the worker of pool {job.pool!r} that made target {job.target!r} has said nothing for "
                f"{_LOST_SECONDS:.0f} seconds and is given up; start it again with `prefect worker start --pool "
                f"{job.pool}`, and release again: what was done is found"
            )
    raise KeyboardInterrupt


def _end(run_id: UUID, job: MakeJob, state: "State[Any]") -> None:
    try:
        with deployments.connected(f"end the run that makes {job.target}") as client:
            client.set_flow_run_state(run_id, state, force=state.is_crashed())
    except TvmflowError as error:
        _log.warning("%s", error)


def _raise_unless_completed(run: "FlowRun", job: MakeJob) -> None:
    """Raise what the run raised, as if it had been raised here."""
    state = run.state
    if state is not None and state.is_completed():
        return
    message = (state.message if state is not None else None) or "it said nothing"
    where = f"(on a worker of pool {job.pool!r})"
    raised = _RAISED.search(message)
    kind = getattr(errors, raised[1], None) if raised is not None else None
    if raised is not None and isinstance(kind, type) and issubclass(kind, TvmflowError):
        raise kind(f"{raised[2]} {where}")
    what = "was cancelled" if state is not None and state.is_cancelled() else "failed"
    raise StepError(
        f"the run {run.name!r} that made target {job.target!r} {what} {where}: {' '.join(message.split())[:500]}; "
        "release again: what was done is found"
    )


def _signer(settings: Settings) -> str | None:
    return None if settings.signing_key is None else str(public_key(settings.signing_key))


def _key_of(signer: str | None) -> str:
    return "with no key" if signer is None else f"with the key {signer[:16]}"
