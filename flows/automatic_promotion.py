"""Automatic promotion: a new release goes to the channels that take every release."""

from functools import partial

from flows.context import RunContext
from flows.promote import PromotionRequest, PromotionSummary, ask_for_approval, promote_release
from flows.runs import is_registered
from tvmflow.errors import VerdictError
from tvmflow.promotion import moves, people, policies
from tvmflow.store import channels


def promote_automatically(context: RunContext, version: str) -> tuple[PromotionSummary, ...]:
    """Promote a new release to the automatic channels of its release file; return an outcome for each channel.

    A refusal is an outcome, not an error. A channel is left to a person if it refused the release before, or held it
    and was moved away since. So is one that requires approval, unless a deployment can ask for it. Raises StoreError
    and RegistryError.
    """
    return tuple(
        context.outlast(partial(_promote_automatically, context, version, name))
        for name in context.spec.automatic_channels()
    )


def _promote_automatically(context: RunContext, version: str, channel: str) -> PromotionSummary:
    settings, spec = context.settings, context.spec
    destination = channels.find(context.store, spec.name, channel)
    policy = policies.read_policy(context.store, destination, version)
    current_version = destination.version
    summary = PromotionSummary(
        name=spec.name,
        version=version,
        channel=channel,
        from_version=current_version,
        status="left",
        message="",
        who=people.identify_user(),
        why="every release is promoted to it",
    )

    def outcome(message: str, **fields: str) -> PromotionSummary:
        return summary.model_copy(update={"message": message, **fields})

    command = f"tvmflow promote {spec.name} {version} --channel {channel}"
    by_hand = f"promote it with `{command}`"
    if current_version != version:
        refusal = moves.read_refusal(context.services, spec.registered_model, version, channel)
        if refusal is not None:
            message = f"{channel} refused {version} before ({refusal}): {by_hand} to try again"
            return outcome(message, status="refused")
        if destination.has_held(version):
            return outcome(f"{channel} held {version} before and was moved to {current_version} since: {by_hand}")
        before = policy.after
        if before is not None and not channels.find_checked(context.store, spec.name, before).has_held(version):
            return outcome(f"{channel} comes after {before}, which has never held {version}: once it has, {by_hand}")
        if policy.approval != "none":
            if settings.prefect_api_url is None or not is_registered(f"promote/{spec.name}"):
                return outcome(f"{channel} needs a person's approval: promote it with `{command} --approve`")
            run = ask_for_approval(spec.name, version, channel, who=summary.who, why=summary.why)
            message = f"{channel} needs a person's approval: `tvmflow approve` lists what waits"
            return outcome(message, status="waiting", flow_run_id=run)
    try:
        request = PromotionRequest(spec.name, version, channel, who=summary.who, why=summary.why)
        return promote_release(context.services, settings, context.workspace, request)
    except VerdictError as error:
        return outcome(str(error), status="refused")
