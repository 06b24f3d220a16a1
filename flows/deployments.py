"""Deployments: the flows that run for a release file, their schedules, and their limits; registered with Prefect.

Entry points are modules, so that a worker needs tvmflow installed and no file of this machine; a run starts in the
folder that its work pool names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from flows.automations import HEARTBEAT_SECONDS
from flows.runs import connect, find_deployment, limit_name
from tvmflow import __version__
from tvmflow.errors import PrefectError
from tvmflow.triggers import ManagedModel

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.deployments.runner import RunnerDeployment
    from prefect.events import DeploymentEventTrigger

_TAG = "tvmflow"
NEW_DATA_EVENT = "tvmflow.data.arrived"
RESOURCE_PREFIX = "tvmflow.model."
_RETUNE_MINUTES = 30
# A run waits four minutes for a server that is being restarted, and sends the heartbeats that an automation watches.
_RUN_ENVIRONMENT = {"PREFECT_CLIENT_MAX_RETRIES": "7", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}


@dataclass(frozen=True)
class Deployed:
    """A registered deployment: its schedules in words, its start events, and the default parameters of its runs."""

    name: str
    pool: str
    schedules: tuple[str, ...]
    events: tuple[str, ...]
    parameters: dict[str, Any]


def register(entries: Sequence[ManagedModel], pool: str, target_pools: Sequence[str] = ()) -> list[Deployed]:
    """Register the deployments of release files, reconcile/all and gc/all on a work pool; return all of them.

    Each of `target_pools`, the work pools that make targets of releases, gets the deployment make/POOL. A second call
    updates the deployments: a paused schedule stays paused, and a deployment that a release file no longer asks for is
    deleted. The work pools must exist. Raises PrefectError when the server fails or refuses a deployment.
    """
    deployments = [(item, pool) for entry in entries for item in _deployments_of(entry)]
    deployments += [
        (_reconcile_deployment(), pool),
        (_gc_deployment(), pool),
        *((_make_deployment(name), name) for name in target_pools),
    ]
    events = {item.full_name: _events(item) for item, _ in deployments}
    for deployment, pool_name in deployments:
        _apply(deployment, pool_name)
    with connect("read the deployments") as client:
        for entry in entries:
            client.upsert_global_concurrency_limit_by_name(limit_name(entry.name), 1)
        _delete_others(client, {entry.name for entry in entries}, events)
        responses = {name: find_deployment(client, name) for name in events}
    return [
        Deployed(
            name=name,
            pool=response.work_pool_name or "",
            schedules=tuple(_in_words(item) for item in response.schedules),
            events=events[name],
            parameters=dict(response.parameters),
        )
        for name, response in responses.items()
        if response is not None
    ]


def _deployments_of(entry: ManagedModel) -> "list[RunnerDeployment]":
    """The deployments of one release file."""
    from flows.promote import promote
    from flows.release import release
    from flows.retrain import retrain
    from flows.retune import retune

    name, file = entry.name, {"file": str(entry.file)}
    # A nightly release costs seconds when nothing has changed, since every step is cached.
    deployments = [
        _deployment(release, name, file, schedules=[_cron("nightly", "0 2 * * *")]),
        _deployment(
            promote,
            name,
            {"name": name, "store": entry.spec.store.model_dump(), "registry": entry.spec.registry.model_dump()},
        ),
    ]
    if entry.spec.retrain is not None:
        weekly = _cron("weekly", "0 1 * * 0", {"who": "schedule", "why": "weekly"})
        deployments.append(_deployment(retrain, name, file, schedules=[weekly], triggers=[_new_data(name)]))
    nightly = _cron("nightly", "0 3 * * *")
    deployments.append(_deployment(retune, name, {**file, "minutes": _RETUNE_MINUTES}, schedules=[nightly]))
    return deployments


def _reconcile_deployment() -> "RunnerDeployment":
    from flows.reconcile import reconcile

    # A run does not wait for another, because the next one comes soon.
    return _deployment(reconcile, "all", {}, schedules=[_cron("often", "*/5 * * * *")], waits=False, model=False)


def _gc_deployment() -> "RunnerDeployment":
    from flows.gc import gc

    return _deployment(gc, "all", {}, schedules=[_cron("nightly", "0 5 * * *")], waits=False, model=False)


def _make_deployment(pool: str) -> "RunnerDeployment":
    from flows.make import make

    return _deployment(make, pool, {}, is_limited=False, model=False)


def _deployment(
    flow: "Flow[..., Any]",
    name: str,
    parameters: Mapping[str, Any],
    *,
    schedules: "Sequence[DeploymentScheduleCreate]" = (),
    triggers: "Sequence[DeploymentEventTrigger]" = (),
    model: bool = True,
    is_limited: bool = True,
    waits: bool = True,
) -> "RunnerDeployment":
    """Return a deployment; `model` tags it with its name as a model's.

    With a limit it has one run at a time. Others wait for it in the order in which they came, or, without `waits`, are
    cancelled.
    """
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.types.entrypoint import EntrypointType

    strategy = ConcurrencyLimitStrategy.ENQUEUE if waits else ConcurrencyLimitStrategy.CANCEL_NEW
    deployment = flow.to_deployment(
        name,
        parameters=dict(parameters),
        tags=[_TAG, *([f"model:{name}"] if model else [])],
        schedules=list(schedules),
        triggers=list(triggers),
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=strategy) if is_limited else None,
        job_variables={"env": dict(_RUN_ENVIRONMENT)},
        version=__version__,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    return cast("RunnerDeployment", deployment)  # It would be a coroutine where an event loop runs.


def _cron(slug: str, cron: str, parameters: Mapping[str, Any] | None = None) -> "DeploymentScheduleCreate":
    """Return a schedule in UTC. It does not say whether it is active, so that a paused schedule stays paused."""
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    schedule = CronSchedule(cron=cron, timezone="UTC")
    return DeploymentScheduleCreate(slug=slug, schedule=schedule, parameters=dict(parameters or {}))


def _new_data(name: str) -> "DeploymentEventTrigger":
    """Return the trigger that starts a retraining on an event, which `tvmflow notify` or any program emits:

    prefect event emit tvmflow.data.arrived --resource-id tvmflow.model.NAME --payload '{"arguments": {"epochs": 8}}'
    """
    from prefect.events import DeploymentEventTrigger
    from prefect.events.schemas.automations import Posture

    return DeploymentEventTrigger(
        name=f"retrain {name} when data arrives",
        enabled=True,
        match={"prefect.resource.id": f"{RESOURCE_PREFIX}{name}"},
        expect={NEW_DATA_EVENT},
        posture=Posture.Reactive,
        threshold=1,
        parameters={
            "who": "{{ event.event }}",
            "why": "{{ event.payload.why | default('new data') }}",
            # A template by itself is a string in some versions of Prefect.
            "arguments": {
                "__prefect_kind": "json",
                "value": {
                    "__prefect_kind": "jinja",
                    "template": "{{ event.payload.arguments | default({}) | tojson }}",
                },
            },
        },
    )


def _apply(deployment: "RunnerDeployment", pool: str) -> None:
    """Create or update a deployment on the server."""
    from prefect.client.schemas.objects import VersionInfo
    from prefect.deployments.runner import DeploymentApplyError

    # Without it Prefect takes a version from the git repository of the current folder.
    version = VersionInfo(type="prefect:simple", version=__version__)
    with connect(f"register {deployment.full_name}"):
        try:
            deployment.apply(work_pool_name=pool, version_info=version)
        except DeploymentApplyError as error:
            reason = " ".join(str(error).split())[:300]
            raise PrefectError(
                f"Prefect refuses the deployment {deployment.full_name} ({reason}); correct what it names."
            ) from error


def _delete_others(client: "SyncPrefectClient", names: set[str], deployments: Mapping[str, object]) -> None:
    """Delete the deployments of these models that have not been registered now."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    for name in names:
        tags = DeploymentFilterTags(all_=[_TAG, f"model:{name}"])
        for deployment in client.read_deployments(deployment_filter=DeploymentFilter(tags=tags)):
            if f"{client.read_flow(deployment.flow_id).name}/{deployment.name}" not in deployments:
                client.delete_deployment(deployment.id)


def _events(deployment: "RunnerDeployment") -> tuple[str, ...]:
    return tuple(sorted(event for trigger in deployment.triggers for event in getattr(trigger, "expect", ())))


def _in_words(item: Any) -> str:
    """Return a schedule as "0 2 * * * UTC", or "0 2 * * * UTC (paused)"."""
    schedule = item.schedule
    words = f"{schedule.cron} {schedule.timezone}" if hasattr(schedule, "cron") else type(schedule).__name__
    return words if item.active else f"{words} (paused)"
