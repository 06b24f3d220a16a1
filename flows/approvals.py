"""Promotions that wait for a person: a list of them, and the answer to one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from flows.runs import connect
from tvmflow.errors import PrefectError
from tvmflow.workspace import Record

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun


class WaitingPromotion(Record):
    """A promotion that waits for approval: the flow run's id, the promotion, who asked for it and why.

    It waits `since` that time (UTC, ISO 8601). `report` is the outcome of the checks, in Markdown.
    """

    run: str
    name: str
    version: str
    channel: str
    who: str
    why: str
    since: str
    report: str


def list_waiting() -> list[WaitingPromotion]:
    """List the promotions that wait for approval, the oldest first. Raises PrefectError when the server fails."""
    with connect("look for promotions that wait") as client:
        return [_describe(client, run) for run in _suspended_runs(client)]


def answer(
    run: str, *, approve: bool, who: str, why: str, check: Callable[[WaitingPromotion], None] = lambda promotion: None
) -> WaitingPromotion:
    """Approve or reject the promotion that waits in the flow run `run`, an id or the beginning of one.

    The run goes on: it moves the channel, or records that `who` rejected the release and `why`. Returns the promotion
    at once, without waiting for the run. `check` gets the promotion before it is answered, and raises to prevent that.
    Raises PrefectError when none or several runs match, the run no longer waits, or the server fails.
    """
    with connect("answer the promotion") as client:
        runs = _suspended_runs(client)
        matches = [item for item in runs if str(item.id).startswith(run.lower())]
        if len(matches) != 1:
            ids = ", ".join(str(item.id) for item in matches or runs) or "none"
            problem = "more than one promotion waits" if matches else "no promotion waits"
            raise PrefectError(f"{problem} in a flow run {run!r}; those that wait: {ids}")
        promotion = _describe(client, matches[0])
        check(promotion)
        result = client.resume_flow_run(matches[0].id, run_input={"approve": approve, "why": why, "who": who})
        if result.status.value != "ACCEPT":
            reason = getattr(result.details, "reason", None) or result.status.value
            raise PrefectError(
                f"the promotion in flow run {matches[0].id} was not answered: {reason}; look at it again"
            )
        return promotion


def _suspended_runs(client: "SyncPrefectClient") -> "list[FlowRun]":
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


def _describe(client: "SyncPrefectClient", run: "FlowRun") -> WaitingPromotion:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import ArtifactSort

    reports = client.read_artifacts(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])), sort=ArtifactSort.CREATED_DESC, limit=1
    )
    parameters = {key: str(run.parameters.get(key, "")) for key in ("name", "version", "channel", "who", "why")}
    since = run.state.timestamp.isoformat(timespec="seconds") if run.state is not None else ""
    report = str(reports[0].data) if reports else ""
    return WaitingPromotion(run=str(run.id), **parameters, since=since, report=report)
