"""Automations of Prefect that watch the runs of all deployments: failures are reported, dead runs are ended."""

import datetime
from typing import TYPE_CHECKING, Literal

from flows.runs import connect
from tvmflow.errors import SettingsError

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

DEAD = "tvmflow: end runs whose worker died"
FAILURES = "tvmflow: report runs that failed"
HEARTBEAT_SECONDS = 30
"""Seconds between two heartbeats of a flow run, the fewest that Prefect takes."""
_TAG = "tvmflow"
_EVENT = "prefect.flow-run."
_ENDS = {f"{_EVENT}{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "AwaitingRetry")}
_TEXT = """{{ flow_run.name }} of {{ deployment.name }} is {{ flow_run.state.name }}: {{ flow_run.state.message }}
{{ flow_run|ui_url }}"""


def register_automations(block: str | None, *, silence: float = 5 * HEARTBEAT_SECONDS) -> tuple[str, ...]:
    """Create or update the automations for runs of tvmflow's deployments; return their names.

    A run that sends neither a heartbeat nor its end for `silence` seconds becomes Crashed. With `block`, the TYPE/NAME
    of a notification block of Prefect, each run that fails or crashes sends a notification; without it, none does.
    Raises SettingsError when there is no such block, PrefectError when the server fails.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState, SendNotification
    from prefect.events.schemas.automations import AutomationCore, Posture

    with connect("register the automations") as client:
        crash = ChangeFlowRunState(
            name="Crashed", state=StateType.CRASHED, message="Its worker sends no heartbeat any more.", force=False
        )
        beat = f"{_EVENT}heartbeat"
        dead = _trigger(Posture.Proactive, {beat, *_ENDS}, within=silence, after={beat})
        automations = [AutomationCore(name=DEAD, trigger=dead, actions=[crash])]
        if block is not None:
            send = SendNotification(
                block_document_id=_block_id(client, block), subject="{{ flow_run.name }} failed", body=_TEXT
            )
            failures = _trigger(Posture.Reactive, {f"{_EVENT}Failed", f"{_EVENT}Crashed"})
            automations.append(AutomationCore(name=FAILURES, trigger=failures, actions=[send]))
        for automation in automations:
            _apply(client, automation)
    return tuple(automation.name for automation in automations)


def _trigger(
    posture: "Literal[Posture.Reactive, Posture.Proactive]",
    expect: set[str],
    *,
    within: float = 0.0,
    after: set[str] | None = None,
) -> "EventTrigger":
    """A trigger for each flow run of a deployment of tvmflow's."""
    from prefect.events.schemas.automations import EventTrigger
    from prefect.events.schemas.events import ResourceSpecification

    return EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": f"{_EVENT}*"}),
        match_related=ResourceSpecification({"prefect.resource.id": f"prefect.tag.{_TAG}"}),
        for_each={"prefect.resource.id"},
        after=after or set(),
        expect=expect,
        posture=posture,
        threshold=1,
        within=datetime.timedelta(seconds=within),
    )


def _block_id(client: "SyncPrefectClient", block: str) -> "UUID":
    from prefect.exceptions import ObjectNotFound

    kind, _, name = block.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound as error:
        raise SettingsError(
            f"setting notification_block names {block!r}, which Prefect does not have; create it in Prefect's UI under "
            "Blocks, and give its TYPE/NAME, such as slack-webhook/oncall"
        ) from error


def _apply(client: "SyncPrefectClient", automation: "AutomationCore") -> None:
    """Create an automation, or update the one of its name, which stays disabled where somebody has disabled it."""
    existing = client.read_automations_by_name(automation.name)
    if not existing:
        client.create_automation(automation)
        return
    client.update_automation(existing[0].id, automation.model_copy(update={"enabled": existing[0].enabled}))
