"""The promotion flow: it checks a release, asks a person where the channel requires it, and moves the channel."""

from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.input import RunInput
from pydantic import AliasChoices, Field

from flows.context import RunContext
from tasks.gate import Check, GateJob, gate, integrity
from tasks.step import StepRunner
from tvmflow import promotion
from tvmflow import settings as machine
from tvmflow.errors import VerdictError
from tvmflow.fetch import cache_folder
from tvmflow.services import Services, open_services, open_workspace
from tvmflow.settings import Settings
from tvmflow.spec import RegistrySection, Store
from tvmflow.store import channels
from tvmflow.store.channels import Pointer
from tvmflow.workspace import Record, Workspace


class Approval(RunInput):
    """A person's answer: whether the release may be promoted, the reason, and the person."""

    approve: bool
    why: str
    who: str


class PromotionSummary(Record):
    """The outcome of a promotion, which `tvmflow promote --json` prints.

    `status` is `moved`; `unchanged` when the channel holds the release already; `waiting` for a person's approval in
    the flow run `flow_run_id`; `left` when the channel was not changed; or, of an automatic channel, `refused`.
    `message` says it in a sentence. `checks` are the checks of the release, `mlflow_run_id` is the run that keeps them.
    """

    name: str
    version: str
    channel: str
    from_version: str | None
    status: Literal["moved", "unchanged", "waiting", "refused", "left"]
    message: str = Field(validation_alias=AliasChoices("message", "told"), serialization_alias="told")
    who: str
    when: str | None = None
    why: str = ""
    checks: tuple[Check, ...] = ()
    mlflow_run_id: str | None = None
    flow_run_id: str | None = None
    moved: bool = False


@flow(name="promote", flow_run_name="promote {name} {version} to {channel}", validate_parameters=True)
def promote(
    name: str,
    version: str,
    channel: str,
    who: str = "",
    why: str = "",
    approved: bool = False,
    while_wanted: bool = False,
) -> dict[str, Any]:
    """Promote a release to a channel when it is complete and passes the channel's gates.

    `who` promotes, by default the user or the flow run, and `why` are kept in the channel's history. `approved` says
    that `who` approves of it; without it, a channel that requires approval suspends a run of a deployment until a
    person answers. With `while_wanted`, the channel stays if its alias names another version by now. Returns a
    PromotionSummary as JSON. Raises VerdictError when the release is refused: the channel stays, and an alias that was
    set to the release is set back.
    """
    from prefect.runtime import deployment, flow_run

    settings = machine.load()
    with open_services(settings, Store(), RegistrySection()) as services:
        summary = promote_release(
            services,
            settings,
            open_workspace(settings, services.store),
            name,
            version,
            channel,
            who=who or (f"flow run {flow_run.name}" if deployment.id else promotion.identify_user()),
            why=why,
            approved=approved,
            while_wanted=while_wanted,
            flow_run_id=flow_run.id if deployment.id else None,
        )
        return summary.model_dump(mode="json")


def promote_release(
    services: Services,
    settings: Settings,
    workspace: Workspace,
    name: str,
    version: str,
    channel: str,
    *,
    who: str,
    why: str,
    approved: bool = False,
    while_wanted: bool = False,
    flow_run_id: str | None = None,
) -> PromotionSummary:
    """Promote a release to a channel when it is complete and passes the channel's gates; call this within a flow.

    `who` promotes and `why` are kept in the channel's history. `approved` says that `who` approves. `flow_run_id` is
    the id of a deployment's run, which is suspended where the channel requires approval; None for other runs. With
    `while_wanted`, the channel stays (status `left`) when the channel's alias in MLflow names another version by now.
    Raises VerdictError when the release is refused or lacks an approval, StoreError or RegistryError when a server
    fails.
    """
    job = GateJob.of(services.store, name, version, channel)
    before = job.current_version
    summary = PromotionSummary(
        name=name,
        version=version,
        channel=channel,
        from_version=before,
        status="unchanged",
        message="",
        who=who,
        why=why,
    )
    model, number = promotion.get_registered_version(job.release)
    if while_wanted and (alias_version := services.registry.get_alias_version(model, channel)) != number:
        now = f"names {alias_version}" if alias_version else "is gone"
        return summary.model_copy(update={"status": "left", "message": f"the alias {model}@{channel} {now} by now"})
    if before == version:
        promotion.move_channel(services, name, version, channel, who=who, why=why, expected=before)
        return summary.model_copy(update={"message": f"{channel} holds {version} already"})
    is_required = job.policy.approval == "required"
    if is_required and not approved and flow_run_id is None:
        raise VerdictError(f"{name}@{channel} needs a person's approval: {how_to_approve(job)}")
    checks = _check(job, services, settings, workspace)
    reasons = [check.message for check in checks if not check.passed]
    answer: Approval | None = None
    if is_required and not reasons:
        if approved:
            answer = Approval(approve=True, why=why, who=who)
        else:
            _log_verdict(services, job, checks, [], None, who, why, flow_run_id, is_waiting=True)
            answer = _ask(job, checks, who, why)
        if not answer.approve:
            reasons = [f"{answer.who} rejected it" + (f" ({answer.why})" if answer.why else "")]
    run = _log_verdict(services, job, checks, reasons, answer, who, why, flow_run_id)
    if reasons:
        promotion.refuse(services, job.release, channel, who=who, reason="; ".join(reasons))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise VerdictError(
            f"{job.label} is refused: {reasons[0]}{more}; {channel} stays at {before or 'nothing'}, "
            f"the verdict is kept in MLflow run {run}"
        )
    if answer is not None and not approved:
        why = "; ".join(part for part in (why, f"approved by {answer.who}", answer.why) if part)
    pointer = promotion.move_channel(services, name, version, channel, who=who, why=why, expected=before)
    services.registry.set_run_tag(run, "tvmflow.moved", "true")
    message = f"{channel} moved from {before} to {version}" if before else f"{channel} is new and holds {version}"
    return summary.model_copy(
        update={
            "status": "moved",
            "moved": True,
            "message": message,
            "why": why,
            "when": pointer.last_move.when,
            "checks": checks,
            "mlflow_run_id": run,
        }
    )


def promote_automatically(context: RunContext, version: str) -> tuple[PromotionSummary, ...]:
    """Promote a new release to the automatic channels of its release file; return an outcome for each channel.

    A refusal is an outcome, not an error. A channel is left to a person if it refused the release before, or held it
    and was moved away since. So is one that requires approval, unless a deployment can ask for it. Raises StoreError
    and RegistryError.
    """
    outcomes = []
    for channel in context.spec.automatic_channels():
        pointer = channels.find(context.store, context.spec.name, channel)
        outcomes.append(_promote_automatically(context, version, channel, pointer))
    return tuple(outcomes)


def _promote_automatically(
    context: RunContext, version: str, channel: str, pointer: Pointer | None
) -> PromotionSummary:
    from flows.runs import is_registered

    settings, spec = context.settings, context.spec
    policy = spec.channels[channel]
    current_version = pointer.version if pointer is not None else None
    summary = PromotionSummary(
        name=spec.name,
        version=version,
        channel=channel,
        from_version=current_version,
        status="left",
        message="",
        who=promotion.identify_user(),
        why="every release is promoted to it",
    )

    def outcome(message: str, **fields: str) -> PromotionSummary:
        return summary.model_copy(update={"message": message, **fields})

    command = f"tvmflow promote {spec.name} {version} --channel {channel}"
    by_hand = f"promote it with `{command}`"
    before = None if policy.after is None else channels.find(context.store, spec.name, policy.after)
    tags = context.registry.get_version_tags(spec.registry.model or spec.name, version)
    refusal = tags.get(promotion.format_refusal_tag(channel))
    if current_version != version:
        if refusal is not None:
            message = f"{channel} refused {version} before ({refusal}): {by_hand} to try again"
            return outcome(message, status="refused")
        if pointer is not None and pointer.has_held(version):
            return outcome(f"{channel} held {version} before and was moved to {current_version} since: {by_hand}")
        if policy.after is not None and not (before is not None and before.has_held(version)):
            return outcome(
                f"{channel} comes after {policy.after}, which has never held {version}: once it has, {by_hand}"
            )
        if policy.approval == "required":
            if settings.prefect_api_url is None or not is_registered(f"promote/{spec.name}"):
                return outcome(f"{channel} needs a person's approval: promote it with `{command} --approve`")
            run = ask_for_approval(spec.name, version, channel, who=summary.who, why=summary.why)
            message = f"{channel} needs a person's approval: `tvmflow approve` lists what waits"
            return outcome(message, status="waiting", flow_run_id=run)
    try:
        return promote_release(
            context.services, settings, context.workspace, spec.name, version, channel, who=summary.who, why=summary.why
        )
    except VerdictError as error:
        return outcome(str(error), status="refused")


def ask_for_approval(name: str, version: str, channel: str, *, who: str, why: str) -> str:
    """Start the deployment promote/NAME, which suspends its run for approval; return the run's id.

    If a run waits for the same promotion already, its id is returned. Raises PrefectError.
    """
    from flows.runs import list_active, start

    deployment, tags = f"promote/{name}", [f"promote:{channel}/{version}"]
    for run in list_active(deployment, tags):
        return run.id
    parameters = {"name": name, "version": version, "channel": channel, "who": who, "why": why}
    return start(deployment, parameters, tags=tags)


def how_to_approve(job: GateJob) -> str:
    """Return how a person promotes to a channel that requires approval, as part of a sentence."""
    return (
        f"approve it yourself with `tvmflow promote {job.name} {job.version} --channel {job.channel} --approve`, "
        f"or register the deployment promote/{job.name} with `tvmflow deploy`, which asks for it"
    )


def _check(job: GateJob, services: Services, settings: Settings, workspace: Workspace) -> tuple[Check, ...]:
    """Make all checks of a promotion; the gates do not run for a release that is not complete."""
    runner = StepRunner.with_settings(workspace, job.name, Path(), settings)
    cache = cache_folder(settings)
    first = integrity(runner, job, services.store, cache).result
    if first.reasons:
        return first.checks
    return (*first.checks, *gate(runner, job, services.store, cache).result.checks)


def _log_verdict(
    services: Services,
    job: GateJob,
    checks: tuple[Check, ...],
    reasons: list[str],
    answer: Approval | None,
    who: str,
    why: str,
    flow_run_id: str | None,
    *,
    is_waiting: bool = False,
) -> str:
    """Write the verdict to MLflow; return the id of its run."""
    verdict = "waiting" if is_waiting else "refused" if reasons else "passed"
    document = {
        "name": job.name,
        "version": job.version,
        "channel": job.channel,
        "from": job.current_version,
        "verdict": verdict,
        "reasons": reasons,
        "checks": [check.model_dump(mode="json") for check in checks],
        "policy": job.policy.model_dump(mode="json"),
        "approval": answer and {"approve": answer.approve, "who": answer.who, "why": answer.why},
        "who": who,
        "why": why,
        "flow_run": flow_run_id,
    }
    return promotion.log_verdict(
        services,
        job.release,
        job.channel,
        document,
        tags={"tvmflow.verdict": verdict, "tvmflow.who": who},
        report=_report(job, checks, who, why),
        flow_run=flow_run_id,
        done=not is_waiting,
    )


def _ask(job: GateJob, checks: tuple[Check, ...], who: str, why: str) -> Approval:
    """Suspend this flow run until a person answers; the resumed run calls this again and gets the answer."""
    from prefect import suspend_flow_run
    from prefect.artifacts import create_markdown_artifact

    report = _report(job, checks, who, why)
    create_markdown_artifact(report, key="promotion", description=job.label)
    return suspend_flow_run(wait_for_input=Approval.with_initial_data(description=report))


def _report(job: GateJob, checks: tuple[Check, ...], who: str, why: str) -> str:
    """Return the report on which a person decides, in Markdown."""
    lines = [
        f"# {job.name}: {job.channel} from {job.current_version or 'nothing'} to {job.version}",
        "",
        f"Asked for by {who}{f': {why}' if why else ''}. "
        f"Released {job.release['created_at']} in MLflow run {job.release['mlflow_run_id']}.",
        "",
        "| check | passed | what was found |",
        "|---|---|---|",
        *(
            f"| {check.name} | {'yes' if check.passed else '**no**'} | {check.message.replace('|', '/')} |"
            for check in checks
        ),
    ]
    return "\n".join(lines) + "\n"
