"""Deployments: how flow runs are started by name, which are active, and how the deployments are registered."""

import datetime
import importlib.resources
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from tvmflow.errors import PrefectError, SettingsError
from tvmflow.triggers import ManagedModel

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

PoolType = Literal["process", "docker", "kubernetes"]
POOL_TYPES: tuple[PoolType, ...] = get_args(PoolType)
# What flows/prefect.yaml says of its example, in whose place the release files come.
_EXAMPLE_FILE = "{{ $PWD }}/examples/digits/release.yaml"
_EXAMPLE_NAME = "digits"
_TAG = "tvmflow"
# Prefect's own command takes some seconds per deployment on a busy machine.
_DEPLOY_SECONDS = 600.0
# What a pod of a Kubernetes work pool reads its environment from, where there are such.
_KUBERNETES_ENVIRONMENT = "tvmflow"
_ACTIVE = ("RUNNING", "PENDING", "PAUSED", "CANCELLING", "SCHEDULED")
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Run:
    """A flow run of a deployment; `state` is Prefect's name of it, e.g. `Running`, `Suspended`, `Late`."""

    id: str
    name: str
    deployment: str
    state: str
    tags: tuple[str, ...]
    parameters: dict[str, Any]


def start(deployment: str, parameters: Mapping[str, Any], *, key: str | None = None, tags: Sequence[str] = ()) -> str:
    """Start a flow run of the deployment `FLOW/NAME`, without waiting for it; return its id.

    `parameters` come over those of the deployment. The same `key` again gives the run that it started before.
    Raises PrefectError when the server does not answer, refuses, or has no such deployment.
    """
    with connected(f"start {deployment}") as client:
        found = _deployment(client, deployment)
        if found is None:
            raise PrefectError(f"There is no deployment {deployment!r}; register it with `tvmflow deploy`.")
        run = client.create_flow_run_from_deployment(
            found.id, parameters=dict(parameters), tags=list(tags), idempotency_key=key
        )
        return str(run.id)


def registered(deployment: str) -> bool:
    """Whether the server has the deployment `FLOW/NAME`. Raises PrefectError."""
    with connected(f"look for {deployment}") as client:
        return _deployment(client, deployment) is not None


def active(deployment: str, tags: Sequence[str] = ()) -> list[Run]:
    """The runs of a deployment that are running, suspended or due, with all of these tags; the oldest first.

    Those that a schedule foresees for later are not among them. Raises PrefectError.
    """
    with connected(f"look for runs of {deployment}") as client:
        runs = _runs(client, deployment, tags, _ACTIVE)
    return [_run(run, deployment) for run in runs if not _foreseen(run)]


def ended(deployment: str, tags: Sequence[str] = ()) -> list[Run]:
    """The runs of a deployment that came to an end, well or not, with all of these tags; the oldest first."""
    with connected(f"look for runs of {deployment}") as client:
        runs = _runs(client, deployment, tags, _ENDED)
    return [_run(run, deployment) for run in runs]


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Wait until no other flow run releases, retrains or retunes this model, and keep others waiting.

    So it is on a server where `register` was called for the model; elsewhere nobody waits. Prefect takes the place of a
    run that died back within five minutes.
    """
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import ObjectNotFound

    limit = _limit(name)
    with connected("look for the limit of its runs") as client:
        try:
            client.read_global_concurrency_limit_by_name(limit)
        except ObjectNotFound:
            limit = ""
    with concurrency(limit) if limit else nullcontext():
        yield


def _limit(name: str) -> str:
    return f"{_TAG}-{name}"


@dataclass(frozen=True)
class Deployed:
    """A deployment that is registered: its schedules in words, and the events that start it."""

    name: str
    pool: str
    schedules: tuple[str, ...]
    events: tuple[str, ...]
    parameters: dict[str, Any]


def project(entries: Sequence[ManagedModel], pool: str, targets: Sequence[str] = ()) -> dict[str, Any]:
    """The Prefect project of these release files: flows/prefect.yaml with each of them in the place of its example."""
    text = importlib.resources.files("flows").joinpath("prefect.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    template = document["deployments"]
    document["deployments"] = [
        {**_filled(deployment, entry), "work_pool": {"name": pool}}
        for entry in entries
        for deployment in template
        if deployment["name"] == _EXAMPLE_NAME and not (_flow(deployment) == "retrain" and entry.spec.retrain is None)
    ] + [{**item, "work_pool": {"name": pool}} for item in template if item["name"] != _EXAMPLE_NAME]
    document["deployments"] += [
        {"name": name, "entrypoint": "flows.make.make", "tags": [_TAG], "work_pool": {"name": name}} for name in targets
    ]
    return document


def register(entries: Sequence[ManagedModel], pool: str, targets: Sequence[str] = ()) -> list[Deployed]:
    """Register the deployments of these release files, as often as wanted; return what is registered now.

    `targets` are the work pools that make targets of releases: each gets its deployment make/POOL. A schedule that was
    paused stays paused. What a release file no longer asks for is taken away. The work pools must exist. Raises
    PrefectError.
    """
    from prefect.flows import load_flow_from_entrypoint

    document = project(entries, pool, targets)
    for deployment in document["deployments"]:
        # Prefect would register a flow that cannot be imported without a word.
        load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        file = Path(folder, "prefect.yaml")
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False, timeout=_DEPLOY_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise PrefectError(f"`prefect deploy` did not end within {_DEPLOY_SECONDS:.0f} s; run it again.") from error
    if done.returncode != 0:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])
        raise PrefectError(f"`prefect deploy` failed ({said[:300]}); correct what it names and run again.")
    wanted = {f"{_flow(deployment)}/{deployment['name']}": deployment for deployment in document["deployments"]}
    with connected("read the deployments") as client:
        for entry in entries:
            client.upsert_global_concurrency_limit_by_name(_limit(entry.name), 1)
        _remove_others(client, {entry.name for entry in entries}, set(wanted))
        found = {name: _deployment(client, name) for name in wanted}
    return [
        Deployed(
            name=name,
            pool=deployment.work_pool_name or "",
            schedules=tuple(_in_words(item) for item in deployment.schedules),
            events=tuple(event for item in wanted[name].get("triggers", ()) for event in item["expect"]),
            parameters=dict(deployment.parameters),
        )
        for name, deployment in found.items()
        if deployment is not None
    ]


def ensure_pool(name: str, kind: PoolType | None = None, image: str | None = None) -> bool:
    """Create the work pool where there is none, by default of type process; return whether that was needed.

    Runs of a process pool start in the folder that this is called in, where the settings file and the state folder
    are. Those of the other two run in containers of `image`; a Docker worker or the secret and the config map `tvmflow`
    of the cluster give them their settings. Raises SettingsError when the pool is of another type.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound

    with connected(f"create the work pool {name!r}") as client:
        try:
            found = client.read_work_pool(name)
        except ObjectNotFound:
            template = _job_template(client, kind or "process", image)
            client.create_work_pool(WorkPoolCreate(name=name, type=kind or "process", base_job_template=template))
            return True
        if kind is not None and found.type != kind:
            raise SettingsError(
                f"the work pool {name!r} is of type {found.type}, not {kind}; name another with --pool, or delete it "
                f"with `prefect work-pool delete {name}`"
            )
        return False


def _job_template(client: "SyncPrefectClient", kind: PoolType, image: str | None) -> dict[str, Any]:
    if kind == "process":
        from prefect.workers.process import ProcessWorker

        template = deepcopy(ProcessWorker.get_default_base_job_template())
        template["variables"]["properties"]["working_dir"]["default"] = str(Path.cwd())
        return template
    if image is None:
        raise SettingsError(f"a work pool of type {kind} needs the image that its containers run; name it with --image")
    metadata = client.read_worker_metadata()
    template = deepcopy(metadata[f"prefect-{kind}"][kind]["default_base_job_configuration"])
    properties = template["variables"]["properties"]
    properties["image"]["default"] = image
    properties["image_pull_policy"]["default"] = "IfNotPresent"
    if kind == "docker":
        properties["auto_remove"]["default"] = True
        return template
    (container,) = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"]
    source = {"name": _KUBERNETES_ENVIRONMENT, "optional": True}
    container["envFrom"] = [{"configMapRef": source}, {"secretRef": source}]
    return template


def _filled(deployment: dict[str, Any], entry: ManagedModel) -> dict[str, Any]:
    """A deployment of the example with a release file's path and name in the place of the example's."""

    def fill(value: Any) -> Any:
        match value:
            case dict():
                return {key: fill(item) for key, item in value.items()}
            case list():
                return [fill(item) for item in value]
            case str() if value == _EXAMPLE_FILE:
                return str(entry.file)
            case str():
                return value.replace(_EXAMPLE_NAME, entry.name)
            case _:
                return value

    return dict(fill(deployment))


def _flow(deployment: Mapping[str, Any]) -> str:
    return str(deployment["entrypoint"]).rpartition(".")[2]


def _remove_others(client: "SyncPrefectClient", names: set[str], wanted: set[str]) -> None:
    """Delete those deployments of these names that are not wanted any more."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    for name in names:
        tags = DeploymentFilterTags(all_=[_TAG, f"model:{name}"])
        for found in client.read_deployments(deployment_filter=DeploymentFilter(tags=tags)):
            if f"{client.read_flow(found.flow_id).name}/{found.name}" not in wanted:
                client.delete_deployment(found.id)


def _in_words(item: Any) -> str:
    schedule = item.schedule
    said = f"{schedule.cron} {schedule.timezone}" if hasattr(schedule, "cron") else type(schedule).__name__
    return said if item.active else f"{said} (paused)"


def _runs(client: "SyncPrefectClient", deployment: str, tags: Sequence[str], states: Sequence[str]) -> "list[FlowRun]":
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        FlowRunFilterTags,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    found = _deployment(client, deployment)
    if found is None:
        return []
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[found.id])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType(state) for state in states])),
            tags=FlowRunFilterTags(all_=list(tags)) if tags else None,
        ),
        # A server answers at most 200: those that schedules foresee come last.
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
    )


def _foreseen(run: "FlowRun") -> bool:
    due = run.expected_start_time
    return (
        run.auto_scheduled
        and run.state_name == "Scheduled"
        and due is not None
        and due > datetime.datetime.now(due.tzinfo)
    )


def _run(run: "FlowRun", deployment: str) -> Run:
    return Run(str(run.id), run.name, deployment, run.state_name or "", tuple(run.tags), run.parameters)


def _deployment(client: "SyncPrefectClient", deployment: str) -> "DeploymentResponse | None":
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(deployment)
    except ObjectNotFound:
        return None


@contextmanager
def connected(action: str) -> "Iterator[SyncPrefectClient]":
    """Prefect's client of the server that its own settings name; what goes wrong becomes one sentence."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        with get_client(sync_client=True) as client:
            yield client
    except PrefectHTTPStatusError as error:
        reason = " ".join(error.response.text.split())[:300]
        raise PrefectError(
            f"Prefect could not {action}: it answers {error.response.status_code} ({reason}); correct what it names."
        ) from error
    except (httpx.HTTPError, RuntimeError) as error:
        raise PrefectError(
            f"Prefect could not {action}: its server does not answer ({str(error) or type(error).__name__}); "
            "start it, or correct the setting prefect_api_url."
        ) from error
