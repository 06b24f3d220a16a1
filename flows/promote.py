"""The promotion flow: it checks a release, asks a person where the channel requires it, and moves the channel."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.input import RunInput

from flows.context import outage_seconds
from flows.logs import keeping_logs
from flows.runs import is_deployed, list_active, start
from tasks.gate import GateJob, gate
from tasks.integrity import integrity
from tasks.reproduce import reproduce
from tasks.step import StepRunner
from tvmflow.documents.encoding import Message
from tvmflow.documents.verdict import Answer, Check, Verdict, samples_of
from tvmflow.errors import VerdictError
from tvmflow.fetch import cache_folder
from tvmflow.outages import outlast
from tvmflow.promotion import moves, people, verdicts
from tvmflow.services import Services, open_services, open_workspace, read_sections
from tvmflow.settings import Settings
from tvmflow.spec import Policy, RegistrySection, Store
from tvmflow.spec.fields import WANTED
from tvmflow.store import channels
from tvmflow.store.channel_document import Channel, Move, Wish, WishEnd
from tvmflow.workspace import Record, Workspace


class Approval(RunInput):
    """A person's answer: whether the release may be promoted, the reason, and the person."""

    approve: bool
    why: str
    who: str


class PromotionSummary(Record):
    """The outcome of a promotion, which `tvmflow promote --json` prints.

    `status` is `moved`; `unchanged` when the channel holds the release already; `waiting` for a person's approval in
    the flow run `flow_run_id`; `superseded` by a newer wish; `left` when the channel was not changed; or, of an
    automatic channel, `refused`. `message` says it in a sentence. `checks` are the checks of the release,
    `mlflow_run_id` is the run that keeps them.
    """

    name: str
    version: str
    channel: str
    from_version: str | None
    status: Literal["moved", "unchanged", "waiting", "superseded", "refused", "left"]
    message: Message
    who: str
    when: str | None = None
    why: str = ""
    checks: tuple[Check, ...] = ()
    mlflow_run_id: str | None = None
    flow_run_id: str | None = None
    moved: bool = False


@dataclass(frozen=True)
class PromotionRequest:
    """A request to promote a release to a channel.

    `who` asks for it, for the reason `why`, and approves of it where `approved` is true. With `while_wanted`, the
    channel stays if neither an alias in MLflow nor an open wish asks for the release any more. `flow_run_id` is the id
    of a deployment's run, which is suspended if the channel requires approval; None for other runs.
    """

    name: str
    version: str
    channel: str
    who: str
    why: str
    approved: bool = False
    while_wanted: bool = False
    flow_run_id: str | None = None


@flow(name="promote", flow_run_name="promote {name} {version} to {channel}", validate_parameters=True)
def promote(
    name: str,
    version: str,
    channel: str,
    who: str = "",
    why: str = "",
    approved: bool = False,
    while_wanted: bool = False,
    store: Store | None = None,
    registry: RegistrySection | None = None,
) -> dict[str, Any]:
    """Promote a release to a channel when it is complete and passes the channel's gates.

    `who` promotes, by default the user or the flow run, and `why` are kept in the channel's history. `approved` says
    that `who` approves of it; without it, a channel that requires approval suspends a run of a deployment until a
    person answers. With `while_wanted`, the channel stays if neither an alias nor an open wish asks for the release any
    more. `store` and `registry` are the sections of the release file; by default those that this machine has recorded.
    Returns a PromotionSummary as JSON. Raises VerdictError when the release is refused: the channel stays.
    """
    from prefect.runtime import flow_run

    settings = Settings.load()
    sections = read_sections(settings, name)
    is_deployment = is_deployed()
    who = who or (f"flow run {flow_run.name}" if is_deployment else people.identify_user())
    outage = outage_seconds(settings)
    with open_services(settings, store or sections.store, registry or sections.registry, outage) as services:
        workspace = open_workspace(settings, services.store)

        request = PromotionRequest(
            name,
            version,
            channel,
            who=who,
            why=why,
            approved=approved,
            while_wanted=while_wanted,
            flow_run_id=flow_run.id if is_deployment else None,
        )
        with keeping_logs(name, workspace, services.registry, {}):
            summary = outlast(partial(promote_release, services, settings, workspace, request), outage)
            return summary.model_dump(mode="json")


def promote_release(
    services: Services, settings: Settings, workspace: Workspace, request: PromotionRequest
) -> PromotionSummary:
    """Promote a release to a channel when it is complete and passes the channel's gates; call this within a flow.

    The request is recorded as a wish in the channel. The wish is open until it is granted or refused or somebody makes
    a newer one. A run of a deployment is suspended while it waits for a person's approval. When it goes on, Prefect
    runs the flow, and with it this function, again from the beginning: what comes before the question is done twice.
    Raises VerdictError when the release is refused or lacks an approval, StoreError or RegistryError when a server
    fails.
    """
    name, version, channel = request.name, request.version, request.channel
    destination = channels.find(services.store, name, channel)
    job = GateJob.of(services.store, destination, version, who=request.who)
    before = job.current_version
    summary = PromotionSummary(
        name=name,
        version=version,
        channel=channel,
        from_version=before,
        status="unchanged",
        message=f"{channel} holds {version} already",
        who=request.who,
        why=request.why,
    )
    model = job.release.registered_version.model
    state = moves.read_state(services, name, channel, model)
    if request.while_wanted and (reason := _why_not_wanted(state, job.policy.policy, version)) is not None:
        if version in (before, state.hand_set_version):
            moves.update_alias(services, name, channel, model)
        return summary if before == version else summary.model_copy(update={"status": "left", "message": reason})
    document = moves.make_wish(
        services, name, version, channel, who=request.who, why=request.why, id=request.flow_run_id
    )
    if document.version == version:
        return summary
    wish = document.wish
    if wish is None or wish.version != version:
        return summary.model_copy(update=_describe_end(document, request.flow_run_id or ""))
    job = GateJob.of(services.store, document, version, who=request.who)
    _refuse_without_approver(job, request, wish)
    checks = _check(job, services, settings, workspace)
    reasons = [check.message for check in checks if not check.passed]
    log_verdict = partial(_log_verdict, services, workspace, job, checks, wish, request.flow_run_id)
    answer: Approval | None = None
    if job.policy.policy.approval != "none" and not reasons:
        if request.approved:
            answer = Approval(approve=True, why=request.why, who=request.who)
        else:
            log_verdict("waiting", [], None)
            answer = _ask(job, checks, wish)
        reasons = _objections(answer, wish, needs_another=job.policy.policy.approval == "another")
    run = log_verdict("refused" if reasons else "passed", reasons, answer)
    if reasons:
        moves.refuse(services, job.release, channel, wish.id, who=request.who, reason="; ".join(reasons))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise VerdictError(
            f"{job.label} is refused: {reasons[0]}{more}; {channel} stays at {job.current_version or 'nothing'}, "
            f"the verdict is kept in MLflow run {run}"
        )
    why = wish.why
    if answer is not None and not (request.approved and answer.who == wish.who):
        why = "; ".join(part for part in (why, f"approved by {answer.who}", answer.why) if part)
    summary = summary.model_copy(update={"checks": checks, "mlflow_run_id": run})
    return summary.model_copy(update=_grant(services, job, wish, why, run))


def _refuse_without_approver(job: GateJob, request: PromotionRequest, wish: Wish) -> None:
    """Raise VerdictError where the channel requires an approval that this request can neither give nor ask for."""
    channel, approval = f"{request.name}@{request.channel}", job.policy.policy.approval
    if approval != "none" and not request.approved and request.flow_run_id is None:
        raise VerdictError(f"{channel} needs a person's approval: {how_to_approve(job)}")
    if approval == "another" and request.approved and people.is_same_person(request.who, wish.who):
        raise VerdictError(
            f"{channel} needs the approval of another person than {wish.who}, who asked for {request.version}: "
            f"{how_to_approve(job)}"
        )


def _objections(answer: Approval, wish: Wish, *, needs_another: bool) -> list[str]:
    """Return why a person's answer does not let a release pass; empty where it does."""
    if answer.approve and needs_another and people.is_same_person(answer.who, wish.who):
        return [f"{answer.who} asked for it, and another person must approve it"]
    if not answer.approve:
        return [f"{answer.who} rejected it" + (f" ({answer.why})" if answer.why else "")]
    return []


def _grant(services: Services, job: GateJob, wish: Wish, why: str, run: str) -> dict[str, Any]:
    """Grant a wish for the reason `why`, whose verdict the MLflow run keeps; return the fields of its summary."""
    channel = job.channel
    document = moves.grant(services, job.name, channel, wish.id, why=why, policy=job.policy)
    move = document.find_end(wish.id)
    if not isinstance(move, Move):
        return _describe_end(document, wish.id)
    services.registry.set_run_tag(run, "tvmflow.moved", "true")
    before = job.current_version
    message = (
        f"{channel} moved from {before} to {job.version}" if before else f"{channel} is new and holds {job.version}"
    )
    if job.policy.proposal is not None:
        message += f"; its release file proposes another policy: `tvmflow channel apply FILE --channel {channel}`"
    return {"status": "moved", "moved": True, "message": message, "who": move.who, "why": why, "when": move.when}


def _why_not_wanted(state: moves.ChannelState, policy: Policy, version: str) -> str | None:
    """Return why a version that an alias or an open wish asked for is not promoted; None when it is still wanted."""
    channel, alias = state.channel, f"{state.model}@{state.channel.channel}"
    if version in (state.wanted_version, channel.wish and channel.wish.version):
        return None
    if version == state.hand_set_version:
        if policy.by_hand == "wish":
            return None
        return f"the alias {alias} was set by hand and goes back: ask for a release by the alias {alias}{WANTED}"
    names = f"names {state.wanted_version}" if state.wanted_version else "is gone"
    return f"the alias {alias}{WANTED} {names} by now"


def _describe_end(document: Channel, wish: str) -> dict[str, Any]:
    """Return the fields of a summary whose wish was not granted."""
    end = document.find_end(wish)
    if isinstance(end, WishEnd) and end.outcome == "superseded":
        return {
            "status": "superseded",
            "message": f"{end.why}; {document.channel} holds {document.version or 'nothing'}",
        }
    reason = "has moved on" if end is None or isinstance(end, Move) else f"was {end.outcome}: {end.why}"
    return {"status": "left", "message": f"the wish {reason}; {document.channel} holds {document.version or 'nothing'}"}


def ask_for_approval(name: str, version: str, channel: str, *, who: str, why: str) -> str:
    """Start the deployment promote/NAME, which suspends its run for approval; return the run's id.

    If a run waits for the same promotion already, its id is returned. Raises PrefectError.
    """
    deployment, tags = f"promote/{name}", [f"promote:{channel}/{version}"]
    for run in list_active(deployment, tags):
        return run.id
    parameters = {"name": name, "version": version, "channel": channel, "who": who, "why": why}
    return start(deployment, parameters, tags=tags)


def how_to_approve(job: GateJob) -> str:
    """Return how a person promotes to a channel that requires approval, as part of a sentence."""
    who = "let another person approve it" if job.policy.policy.approval == "another" else "approve it yourself"
    return (
        f"{who} with `tvmflow promote {job.name} {job.version} --channel {job.channel} --approve`, "
        f"or register the deployment promote/{job.name} with `tvmflow deploy`, which asks for it"
    )


def _check(job: GateJob, services: Services, settings: Settings, workspace: Workspace) -> tuple[Check, ...]:
    """Make all checks of a promotion; the gates do not run for a release that is not complete."""
    runner = StepRunner.with_settings(workspace, job.name, Path(), settings)
    cache = cache_folder(settings)
    first = integrity(runner, job, services.store, cache, settings).result
    if first.reasons:
        return first.checks
    second = gate(runner, job, services.store, cache).result
    checks = (*first.checks, *second.checks)
    if second.reasons or job.policy.policy.rebuild != "required":
        return checks
    return (*checks, *reproduce(runner, job, services.store, cache, services.registry).result.checks)


def _log_verdict(
    services: Services,
    workspace: Workspace,
    job: GateJob,
    checks: tuple[Check, ...],
    wish: Wish,
    flow_run_id: str | None,
    outcome: Literal["passed", "refused", "waiting"],
    reasons: list[str],
    answer: Approval | None,
) -> str:
    """Write the verdict to MLflow; return the id of its run."""
    verdict = Verdict(
        name=job.name,
        version=job.version,
        channel=job.channel,
        from_version=job.current_version,
        verdict=outcome,
        reasons=tuple(reasons),
        checks=checks,
        policy=job.policy.policy,
        approval=None if answer is None else Answer(approve=answer.approve, who=answer.who, why=answer.why),
        who=wish.who,
        why=wish.why,
        flow_run=flow_run_id,
    )
    samples = samples_of(workspace, checks)
    return verdicts.log_verdict(services, job.release, verdict, report=_report(job, checks, wish), files=samples)


def _ask(job: GateJob, checks: tuple[Check, ...], wish: Wish) -> Approval:
    """Suspend this flow run until a person answers; the resumed run calls this again and gets the answer."""
    from prefect import suspend_flow_run
    from prefect.artifacts import create_markdown_artifact

    report = _report(job, checks, wish)
    create_markdown_artifact(report, key="promotion", description=job.label)
    return suspend_flow_run(wait_for_input=Approval.with_initial_data(description=report))


def _report(job: GateJob, checks: tuple[Check, ...], wish: Wish) -> str:
    """Return the report on which a person decides, in Markdown."""
    lines = [
        f"# {job.name}: {job.channel} from {job.current_version or 'nothing'} to {job.version}",
        "",
        f"Asked for by {wish.who}{f': {wish.why}' if wish.why else ''}. "
        f"Released {job.release.created_at} in MLflow run {job.release.mlflow_run_id}.",
        "",
        "| check | passed | what was found |",
        "|---|---|---|",
        *(
            f"| {check.name} | {'yes' if check.passed else '**no**'} | {check.message.replace('|', '/')} |"
            for check in checks
        ),
    ]
    return "\n".join(lines) + "\n"
