"""Promotions that wait for a person: which there are, and answering one."""

from typing import TYPE_CHECKING, Any

from flows.deployments import connected
from tvmflow.errors import PrefectError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun


def waiting() -> list[dict[str, Any]]:
    """The promotions that wait for approval, the oldest first.

    Of each `run`, the flow run's id; `name`, `version`, `channel`, `who` asked and `why`; `since` (UTC, ISO 8601); and
    `report`, what was found, in Markdown. Raises PrefectError.
    """
    with connected("look for promotions that wait") as client:
        return [_told(client, run) for run in _suspended(client)]


def answer(run: str, *, approve: bool, who: str, why: str) -> dict[str, Any]:
    """Answer the promotion that waits in the flow run `run`, an id or its beginning; return it as `waiting` does.

    The run goes on from there: it moves the channel, or keeps the refusal. Raises PrefectError when none waits there.
    """
    with connected("answer the promotion") as client:
        runs = _suspended(client)
        found = [item for item in runs if str(item.id).startswith(run.lower())]
        if len(found) != 1:
            told = ", ".join(str(item.id) for item in found or runs) or "none"
            said = "more than one promotion waits" if found else "no promotion waits"
            raise PrefectError(f"{said} in a flow run {run!r}; those that wait: {told}")
        described = _told(client, found[0])
        result = client.resume_flow_run(found[0].id, run_input={"approve": approve, "why": why, "who": who})
        if result.status.value != "ACCEPT":
            reason = getattr(result.details, "reason", None) or result.status.value
            raise PrefectError(f"the promotion in flow run {found[0].id} was not answered: {reason}; look at it again")
        return described


def _suspended(client: "SyncPrefectClient") -> "list[FlowRun]":
    from prefect.client.schemas.filters import (
        FlowFilter,
        FlowFilterName,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=["promote"])),
        flow_run_filter=FlowRunFilter(state=paused),
        sort=FlowRunSort.START_TIME_ASC,
    )


def _told(client: "SyncPrefectClient", run: "FlowRun") -> dict[str, Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import ArtifactSort

    reports = client.read_artifacts(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])), sort=ArtifactSort.CREATED_DESC, limit=1
    )
    parameters = {key: str(run.parameters.get(key, "")) for key in ("name", "version", "channel", "who", "why")}
    since = run.state.timestamp.isoformat(timespec="seconds") if run.state is not None else ""
    return {"run": str(run.id), **parameters, "since": since, "report": str(reports[0].data) if reports else ""}
