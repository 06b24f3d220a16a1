"""Flow runs of deployments: they are started and listed here, and the runs of one model take turns."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmflow.errors import PrefectError, PrefectUnavailableError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

_ACTIVE_STATES = ("RUNNING", "PENDING", "PAUSED", "CANCELLING", "SCHEDULED")
_FINAL_STATES = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
LOGIN_REFUSED = "its server refuses the login; set PREFECT_API_AUTH_STRING to USER:PASSWORD"


@dataclass(frozen=True)
class Run:
    """A flow run of a deployment; `state` is Prefect's name of its state, e.g. `Running`, `Suspended`, `Late`."""

    id: str
    name: str
    deployment: str
    state: str
    tags: tuple[str, ...]
    parameters: dict[str, Any]


def start(deployment: str, parameters: Mapping[str, Any], *, key: str | None = None, tags: Sequence[str] = ()) -> str:
    """Start a flow run of the deployment `FLOW/NAME`, without waiting for it; return its id.

    `parameters` are added to those of the deployment, or replace them. When a run was started with the same `key`
    before, none is started, and its id is returned. Raises PrefectError when the server does not answer, refuses, or
    has no such deployment.
    """
    with connect(f"start {deployment}") as client:
        response = find_deployment(client, deployment)
        if response is None:
            raise PrefectError(f"There is no deployment {deployment!r}; register it with `tvmflow deploy`.")
        run = client.create_flow_run_from_deployment(
            response.id, parameters=dict(parameters), tags=list(tags), idempotency_key=key
        )
        return str(run.id)


def is_deployed() -> bool:
    """Whether the flow run that calls this is one of a deployment; a flow that a command starts is none."""
    from prefect.context import FlowRunContext
    from prefect.runtime import deployment

    context = FlowRunContext.get()
    run = context.flow_run if context else None
    # Prefect's attribute asks the server, by a client of its own, for what a run that is no part of another one holds.
    return bool(run.deployment_id if run and run.parent_task_run_id is None else deployment.id)


def is_registered(deployment: str) -> bool:
    """Whether the server has the deployment `FLOW/NAME`. Raises PrefectError when the server fails."""
    with connect(f"look for {deployment}") as client:
        return find_deployment(client, deployment) is not None


def list_active(deployment: str, tags: Sequence[str]) -> list[Run]:
    """List the runs of a deployment that are running, suspended or due, with all of these tags; the oldest first.

    Runs that a schedule plans for later are left out. Raises PrefectError when the server fails.
    """
    with connect(f"look for runs of {deployment}") as client:
        runs = _read_runs(client, deployment, tags, _ACTIVE_STATES)
    return [_run(run, deployment) for run in runs if not _is_planned(run)]


def list_ended(deployment: str, tags: Sequence[str]) -> list[Run]:
    """List the runs of a deployment in a final state, with all of these tags; the oldest first. Raises PrefectError."""
    with connect(f"look for runs of {deployment}") as client:
        runs = _read_runs(client, deployment, tags, _FINAL_STATES)
    return [_run(run, deployment) for run in runs]


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Wait until no other flow run releases, retrains or retunes this model, and exclude others while the body runs.

    Runs wait on a server that has a concurrency limit for the model, which `flows.deployments.register` creates; on
    other servers they do not wait. Prefect frees the concurrency slot of a dead run within five minutes. Raises
    PrefectError.
    """
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import ObjectNotFound

    limit = limit_name(name)
    with connect("look for the limit of its runs") as client:
        try:
            client.read_global_concurrency_limit_by_name(limit)
        except ObjectNotFound:
            limit = ""
    with concurrency(limit) if limit else nullcontext():
        yield


def limit_name(name: str) -> str:
    """Return the name of the concurrency limit of a model's runs."""
    return f"tvmflow-{name}"


def find_deployment(client: "SyncPrefectClient", deployment: str) -> "DeploymentResponse | None":
    """Return the deployment `FLOW/NAME` as the server has it; None where there is none."""
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(deployment)
    except ObjectNotFound:
        return None


@contextmanager
def connect(action: str) -> "Iterator[SyncPrefectClient]":
    """Open Prefect's client for the body, connected to the server that Prefect's own settings name.

    Raises PrefectUnavailableError when the server does not answer or is failing, PrefectError when it refuses.
    `action` completes the error's sentence "Prefect could not ...".
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        with get_client(sync_client=True) as client:
            yield client
    except PrefectHTTPStatusError as error:
        if is_login_refused(error):
            raise PrefectError(f"Prefect could not {action}: {LOGIN_REFUSED}") from error
        reason = " ".join(error.response.text.split())[:300]
        kind = PrefectUnavailableError if error.response.is_server_error else PrefectError
        raise kind(
            f"Prefect could not {action}: it answers {error.response.status_code} ({reason}); correct what it names."
        ) from error
    except (httpx.HTTPError, RuntimeError) as error:
        raise PrefectUnavailableError(
            f"Prefect could not {action}: its server does not answer ({str(error) or type(error).__name__}); "
            "start it, or correct the setting prefect_api_url."
        ) from error


def is_login_refused(error: Exception) -> bool:
    """Whether an error of Prefect's client says that the server requires a login or refuses the given one."""
    import httpx

    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403)


def _read_runs(
    client: "SyncPrefectClient", deployment: str, tags: Sequence[str], states: Sequence[str]
) -> "list[FlowRun]":
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

    response = find_deployment(client, deployment)
    if response is None:
        return []
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[response.id])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType(state) for state in states])),
            tags=FlowRunFilterTags(all_=list(tags)) if tags else None,
        ),
        # A server answers with 200 runs at most: those that schedules plan come last.
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
    )


def _is_planned(run: "FlowRun") -> bool:
    """Whether a schedule plans the run for later."""
    due = run.expected_start_time
    return (
        run.auto_scheduled
        and run.state_name == "Scheduled"
        and due is not None
        and due > datetime.datetime.now(due.tzinfo)
    )


def _run(run: "FlowRun", deployment: str) -> Run:
    return Run(str(run.id), run.name, deployment, run.state_name or "", tuple(run.tags), run.parameters)
