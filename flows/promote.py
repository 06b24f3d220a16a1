"""The promotion flow: a release is checked, judged by the channel's gates, approved where need be, and moved to."""

from typing import Any, Literal

from prefect import flow
from prefect.input import RunInput

from tasks.gate import Candidate, Check, candidate, gate, whole
from tasks.step import Context
from tvmflow import promotion
from tvmflow import settings as machine
from tvmflow.errors import VerdictError
from tvmflow.services import Services, open_services, open_workspace
from tvmflow.settings import Settings
from tvmflow.spec import RegistrySection, Store
from tvmflow.store import channels
from tvmflow.store.channels import Pointer
from tvmflow.workspace import Record, Workspace


class Approval(RunInput):
    """A person's answer: whether the release may be promoted, why, and who says so."""

    approve: bool
    why: str
    who: str


class PromotionSummary(Record):
    """What a promotion came to: what `tvmflow promote --json` prints.

    `status` is `moved`, `unchanged` (the channel holds the release already), `waiting` for a person's approval in the
    flow run `flow_run_id`, `left` as it was, or, of an automatic channel, `refused`; `told` says so in words. `checks`
    is what was looked at, `mlflow_run_id` where that is kept.
    """

    name: str
    version: str
    channel: str
    from_version: str | None
    status: Literal["moved", "unchanged", "waiting", "refused", "left"]
    told: str
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
    """Promote a release to a channel when it is whole and keeps the channel's gates.

    `approved` says that `who` approves of it; without it, a channel that requires approval suspends a run of a
    deployment until somebody answers. With `while_wanted`, a channel whose alias names another version by the time this
    runs is left as it is: what an alias asked for is no longer asked for. Returns a PromotionSummary as JSON. Raises
    VerdictError when it is refused: the channel stays, and an alias that was set to the release is put back.
    """
    from prefect.runtime import deployment, flow_run

    settings = machine.load()
    with open_services(settings, Store(), RegistrySection()) as services:
        summary = promoted(
            services,
            settings,
            open_workspace(settings, services.store),
            (name, version, channel),
            who=who or (f"flow run {flow_run.name}" if deployment.id else promotion.identify_user()),
            why=why,
            approved=approved,
            while_wanted=while_wanted,
            flow_run_id=flow_run.id if deployment.id else None,
        )
        return summary.model_dump(mode="json")


def promoted(
    services: Services,
    settings: Settings,
    workspace: Workspace,
    wanted: tuple[str, str, str],
    *,
    who: str,
    why: str,
    approved: bool = False,
    while_wanted: bool = False,
    flow_run_id: str | None = None,
) -> PromotionSummary:
    """Promote `wanted`, a release's name and version and a channel, within a flow.

    `flow_run_id` is that of a deployment's run, which can be suspended for approval. Raises as `promote` does.
    """
    name, version, channel = wanted
    item = candidate(services, settings, workspace, name, version, channel)
    before = item.pointer.version if item.pointer is not None else None
    summary = PromotionSummary(
        name=name, version=version, channel=channel, from_version=before, status="unchanged", told="", who=who, why=why
    )
    model, number = promotion.get_registered_version(item.release)
    if while_wanted and (wanted_now := services.registry.get_alias_version(model, channel)) != number:
        now = f"names {wanted_now}" if wanted_now else "is gone"
        return summary.model_copy(update={"status": "left", "told": f"the alias {model}@{channel} {now} by now"})
    if before == version:
        promotion.move_channel(services, name, version, channel, who=who, why=why, expected=before)
        return summary.model_copy(update={"told": f"{channel} holds {version} already"})
    required = item.policy.approval == "required"
    if required and not approved and flow_run_id is None:
        raise VerdictError(f"{name}@{channel} needs a person's approval: {how_to_approve(item)}")
    checks = _checks(item)
    reasons = [check.told for check in checks if not check.passed]
    answer: Approval | None = None
    if required and not reasons:
        if approved:
            answer = Approval(approve=True, why=why, who=who)
        else:
            _keep(item, checks, [], None, who, why, flow_run_id, waiting=True)
            answer = _ask(item, checks, who, why)
        if not answer.approve:
            reasons = [f"{answer.who} rejected it" + (f" ({answer.why})" if answer.why else "")]
    run = _keep(item, checks, reasons, answer, who, why, flow_run_id)
    if reasons:
        promotion.refuse(services, item.release, channel, who=who, reason="; ".join(reasons))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise VerdictError(
            f"{item.label} is refused: {reasons[0]}{more}; {channel} stays at {before or 'nothing'}, "
            f"the verdict is kept in MLflow run {run}"
        )
    if answer is not None and not approved:
        why = "; ".join(part for part in (why, f"approved by {answer.who}", answer.why) if part)
    pointer = promotion.move_channel(services, name, version, channel, who=who, why=why, expected=before)
    services.registry.set_run_tag(run, "tvmflow.moved", "true")
    told = f"{channel} moved from {before} to {version}" if before else f"{channel} is new and holds {version}"
    return summary.model_copy(
        update={
            "status": "moved",
            "moved": True,
            "told": told,
            "why": why,
            "when": pointer.last_move.when,
            "checks": checks,
            "mlflow_run_id": run,
        }
    )


def automatic(context: Context, version: str) -> tuple[PromotionSummary, ...]:
    """Promote a new release to the channels that take every release; a refusal is told, and leaves the release be.

    A channel that refused it, or held it before and was moved away since, is left to a person, and so is one that
    requires approval, which a deployment's run asks for where there is one.
    """

    done = []
    for channel in context.spec.automatic_channels():
        pointer = channels.find(context.store, context.spec.name, channel)
        done.append(_automatic(context, version, channel, pointer))
    return tuple(done)


def _automatic(context: Context, version: str, channel: str, pointer: Pointer | None) -> PromotionSummary:
    from flows import deployments

    settings, spec = context.settings, context.spec
    policy = spec.channels[channel]
    held = pointer.version if pointer is not None else None
    summary = PromotionSummary(
        name=spec.name,
        version=version,
        channel=channel,
        from_version=held,
        status="left",
        told="",
        who=promotion.identify_user(),
        why="every release is promoted to it",
    )
    command = f"tvmflow promote {spec.name} {version} --channel {channel}"
    by_hand = f"promote it with `{command}`"
    before = None if policy.after is None else channels.find(context.store, spec.name, policy.after)
    tags = context.registry.get_version_tags(spec.registry.model or spec.name, version)
    refused = tags.get(promotion.format_refusal_tag(channel))
    if held != version:
        if refused is not None:
            told = f"{channel} refused {version} before ({refused}): {by_hand} to try again"
            return summary.model_copy(update={"status": "refused", "told": told})
        if pointer is not None and pointer.has_held(version):
            told = f"{channel} held {version} before and was moved to {held} since: {by_hand}"
            return summary.model_copy(update={"told": told})
        if policy.after is not None and not (before is not None and before.has_held(version)):
            told = f"{channel} comes after {policy.after}, which has never held {version}: once it has, {by_hand}"
            return summary.model_copy(update={"told": told})
        if policy.approval == "required":
            if settings.prefect_api_url is None or not deployments.registered(f"promote/{spec.name}"):
                told = f"{channel} needs a person's approval: promote it with `{command} --approve`"
                return summary.model_copy(update={"told": told})
            run = ask_for_approval(spec.name, version, channel, who=summary.who, why=summary.why)
            told = f"{channel} needs a person's approval: `tvmflow approve` lists what waits"
            return summary.model_copy(update={"status": "waiting", "told": told, "flow_run_id": run})
    services = Services(context.store, context.registry)
    wanted = spec.name, version, channel
    try:
        return promoted(services, settings, context.workspace, wanted, who=summary.who, why=summary.why)
    except VerdictError as refusal:
        return summary.model_copy(update={"status": "refused", "told": str(refusal)})


def ask_for_approval(name: str, version: str, channel: str, *, who: str, why: str) -> str:
    """Start the deployment that promotes releases of this name; return its flow run's id. Raises PrefectError.

    Asking again for the same move of the channel, while nobody has answered, gives the same run.
    """
    from flows import deployments

    deployment, tags = f"promote/{name}", [f"promote:{channel}/{version}"]
    for run in deployments.active(deployment, tags):
        return run.id
    parameters = {"name": name, "version": version, "channel": channel, "who": who, "why": why}
    return deployments.start(deployment, parameters, tags=tags)


def how_to_approve(item: Candidate) -> str:
    """What a person does to promote to a channel that requires approval."""
    return (
        f"approve it yourself with `tvmflow promote {item.name} {item.version} --channel {item.channel} --approve`, "
        f"or register the deployment promote/{item.name} with `tvmflow deploy`, which asks for it"
    )


def _checks(item: Candidate) -> tuple[Check, ...]:
    found = whole(item).result
    # What is not whole is not run.
    return found.checks if found.reasons else (*found.checks, *gate(item).result.checks)


def _keep(
    item: Candidate,
    checks: tuple[Check, ...],
    reasons: list[str],
    answer: Approval | None,
    who: str,
    why: str,
    flow_run_id: str | None,
    *,
    waiting: bool = False,
) -> str:
    """Keep the verdict in MLflow; the id of its run."""
    verdict = "waiting" if waiting else "refused" if reasons else "passed"
    document = {
        "name": item.name,
        "version": item.version,
        "channel": item.channel,
        "from": item.pointer and item.pointer.version,
        "verdict": verdict,
        "reasons": reasons,
        "checks": [check.model_dump(mode="json") for check in checks],
        "policy": item.policy.model_dump(mode="json"),
        "approval": answer and {"approve": answer.approve, "who": answer.who, "why": answer.why},
        "who": who,
        "why": why,
        "flow_run": flow_run_id,
    }
    return promotion.log_verdict(
        item.services,
        item.release,
        item.channel,
        document,
        tags={"tvmflow.verdict": verdict, "tvmflow.who": who},
        report=_report(item, checks, who, why),
        flow_run=flow_run_id,
        done=not waiting,
    )


def _ask(item: Candidate, checks: tuple[Check, ...], who: str, why: str) -> Approval:
    """Suspend this flow run until a person answers; resumed, it comes here again and gets the answer."""
    from prefect import suspend_flow_run
    from prefect.artifacts import create_markdown_artifact

    report = _report(item, checks, who, why)
    create_markdown_artifact(report, key="promotion", description=item.label)
    return suspend_flow_run(wait_for_input=Approval.with_initial_data(description=report))


def _report(item: Candidate, checks: tuple[Check, ...], who: str, why: str) -> str:
    """What a person decides by, in Markdown."""
    before = item.pointer.version if item.pointer is not None else "nothing"
    lines = [
        f"# {item.name}: {item.channel} from {before} to {item.version}",
        "",
        f"Asked for by {who}{f': {why}' if why else ''}. "
        f"Released {item.release['created_at']} in MLflow run {item.release['mlflow_run_id']}.",
        "",
        "| check | passed | what was found |",
        "|---|---|---|",
        *(
            f"| {check.name} | {'yes' if check.passed else '**no**'} | {check.told.replace('|', '/')} |"
            for check in checks
        ),
    ]
    return "\n".join(lines) + "\n"
