"""The reconcile flow: it starts runs that are asked for and nobody has started, and completes interrupted moves.

Aliases CHANNEL-wanted and open wishes ask for promotions, an alias of the source model for a release. Webhooks only
make the runs start sooner.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from prefect import flow, get_run_logger
from prefect.states import Failed

from flows.runs import is_registered, list_active, list_ended, start
from tvmflow.errors import TvmflowError, VerdictError
from tvmflow.promotion.moves import ChannelState, make_wish, read_refusal, read_state, update_alias
from tvmflow.promotion.policies import read_policy
from tvmflow.services import Services, open_services
from tvmflow.settings import Settings
from tvmflow.spec.fields import WANTED, explain_channel
from tvmflow.store import channels
from tvmflow.triggers import Alias, ManagedModel, RunRequest, load
from tvmflow.workspace import Record

_WHO = "reconcile"
# After as many failed runs, a version is not released or promoted again by itself.
MAX_TRIES = 3

Action = Literal[
    "started",
    "ran",
    "refused",
    "alias set",
    "alias put back",
    "alias deleted",
    "waiting",
    "given up",
    "approval needed",
]


class Finding(Record):
    """One alias that disagrees with its channel or has no release, and the action that was taken.

    `what` describes the disagreement. `done` is the action: `waiting` means that a run is active already; `given up`,
    that the runs failed too often; `approval needed`, that a person must approve and no deployment can ask one.
    `flow_run` is the id of the run that was started, None for other actions.
    """

    name: str
    alias: str
    version: str
    what: str
    done: Action
    flow_run: str | None = None


class ReconcileSummary(Record):
    """The outcome of reconciling, which `tvmflow reconcile --json` prints; `problems` are errors, a sentence each."""

    models: tuple[str, ...]
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]


@flow(name="reconcile", flow_run_name="reconcile", validate_parameters=True)
def reconcile() -> Any:
    """Make channels and releases agree with the aliases, for every release file in the setting models.

    Returns a ReconcileSummary as JSON, in a failed state when there were problems; an error of one model does not stop
    the others.
    """
    log = get_run_logger()
    settings = Settings.load()
    findings: list[Finding] = []
    problems: list[str] = []
    entries = load(settings.models).entries
    for entry in entries:
        # An error of one model must not keep the others from being reconciled.
        try:
            with open_services(settings, entry.spec.store, entry.spec.registry) as services:
                for check in _checks(services, entry):
                    try:
                        finding = check()
                    except TvmflowError as error:
                        problems.append(f"{entry.name}: {error}")
                        log.error("%s: %s", entry.name, error)
                        continue
                    if finding is not None:
                        findings.append(finding)
                        log.info("%s %s: %s: %s", finding.alias, finding.version, finding.what, finding.done)
        except TvmflowError as error:
            problems.append(f"{entry.name}: {error}")
            log.error("%s: %s", entry.name, error)
    summary = ReconcileSummary(
        models=tuple(entry.name for entry in entries), findings=tuple(findings), problems=tuple(problems)
    ).model_dump(mode="json")
    return Failed(message=problems[0], data=summary) if problems else summary


def _checks(services: Services, entry: ManagedModel) -> Iterator[Callable[[], Finding | None]]:
    for channel in _channels(services, entry):
        yield partial(_reconcile_channel, services, entry, channel)
    if entry.source_alias is not None:
        yield partial(_reconcile_source, services, entry)


def _channels(services: Services, entry: ManagedModel) -> list[str]:
    """Return the channels of the release file; where it names none, those of the store and of aliases that can be."""
    if entry.spec.channels:
        return list(entry.spec.channels)
    documents = {document.channel for document in channels.list_all(services.store, entry.name)}
    aliases = {alias.removesuffix(WANTED) for alias in services.registry.list_aliases(entry.registered_model)}
    return sorted(documents | {alias for alias in aliases if explain_channel(alias) is None})


def _reconcile_channel(services: Services, entry: ManagedModel, channel: str) -> Finding | None:
    """Show what a channel holds, and start the promotion that somebody asks for; return None when all is done."""
    model = entry.registered_model
    channels.renew_statement(services.store, entry.name, channel)
    state = read_state(services, entry.name, channel, model)
    if state.is_settled:
        return None
    held_version = state.channel.version
    asking = Alias(model, channel + WANTED)
    if state.wanted_version is not None:
        reason = _why_not_promotable(services, entry, channel, state.wanted_version)
        if reason is None and state.wanted_version == held_version:
            reason = "the channel holds it already"
        if reason is None:
            return _start_promotion(services, entry, state, asking, state.wanted_version)
        services.registry.delete_alias(model, asking.alias)
        return Finding(
            name=entry.name, alias=str(asking), version=state.wanted_version, what=reason, done="alias deleted"
        )
    own_alias = Alias(model, channel)
    version = state.hand_set_version
    if version is not None:
        reason = _why_not_promotable(services, entry, channel, version)
        if reason is None and read_policy(services.store, state.channel, version).by_hand == "refuse":
            reason = f"it was set by hand, and {asking.alias} asks for a release"
        if reason is None:
            return _start_promotion(services, entry, state, own_alias, version)
        update_alias(services, entry.name, channel, model)
        return Finding(name=entry.name, alias=str(own_alias), version=version, what=reason, done="alias put back")
    if state.alias_version != held_version:
        update_alias(services, entry.name, channel, model)
        what = f"the alias names {state.alias_version or 'nothing'}, the channel holds this version"
        return Finding(name=entry.name, alias=str(own_alias), version=held_version or "", what=what, done="alias set")
    wish = state.channel.wish
    return None if wish is None else _start_promotion(services, entry, state, own_alias, wish.version)


def _start_promotion(
    services: Services, entry: ManagedModel, state: ChannelState, alias: Alias, version: str
) -> Finding:
    """Keep what an alias asks for as a wish, and start the promotion of the open wish if nobody does it yet."""
    channel = state.channel.channel
    what = f"the channel holds {state.channel.version or 'nothing'}"
    policy = read_policy(services.store, state.channel, version)
    why = f"the alias {alias} was set to {version} in MLflow"
    make_wish(services, entry.name, version, channel, who="mlflow", why=why)
    request = entry.request_promotion(channel, version, who=_WHO, why=why)
    if policy.approval != "none" and not is_registered(request.deployment):
        return Finding(name=entry.name, alias=str(alias), version=version, what=what, done="approval needed")
    return _start(request, entry, str(alias), version, what)


def _why_not_promotable(services: Services, entry: ManagedModel, channel: str, version: str) -> str | None:
    """Return why a version that an alias names cannot be promoted; None when it can."""
    if not services.store.has_release(entry.name, version):
        return "this version is not released"
    refusal = read_refusal(services, entry.registered_model, version, channel)
    return f"the channel refused this version: {refusal}" if refusal is not None else None


def _reconcile_source(services: Services, entry: ManagedModel) -> Finding | None:
    """Release the version that the source model's alias names; return None when it has a release or a verdict."""
    source = entry.source_alias
    version = services.registry.get_alias_version(source.model, source.alias) if source is not None else None
    if source is None or version is None:
        return None
    tags = {"tvmflow.name": entry.name, "tvmflow.source": f"{source.model}/{version}"}
    refused_runs = services.registry.find_runs({**tags, "tvmflow.verdict": "refused"})
    passed_runs = set(services.registry.find_runs({**tags, "tvmflow.verdict": "passed"}))
    is_released = any(
        version.run_id in passed_runs and version.tags.get("tvmflow.status") == "published"
        for version in (services.registry.list_versions(entry.registered_model) if passed_runs else ())
    )
    if refused_runs or is_released:
        return None
    what = "this version has no release and no verdict"
    return _start(entry.request_release(version), entry, str(source), version, what)


def _start(request: RunRequest, entry: ManagedModel, alias: str, version: str, what: str) -> Finding:
    """Start a run unless one is active; where its deployment is not registered, run the flow in this process."""

    def finding(done: Action, flow_run: str | None = None) -> Finding:
        return Finding(name=entry.name, alias=alias, version=version, what=what, done=done, flow_run=flow_run)

    if not is_registered(request.deployment):
        return finding(_run_here(request))
    if list_active(request.deployment, (request.tag,)):
        return finding("waiting")
    tries = list_ended(request.deployment, (request.tag,))
    if sum(run.state != "Completed" for run in tries) >= MAX_TRIES:
        return finding("given up")
    # Two that reconcile at once start one run between them; when it has ended, another one can be started.
    key = f"reconcile-{request.deployment}-{request.tag}-{len(tries)}"
    return finding("started", start(request.deployment, request.parameters, key=key, tags=(request.tag,)))


def _run_here(request: RunRequest) -> Action:
    """Run the flow of a request in this process."""
    from flows.promote import promote
    from flows.release import release

    flows: dict[str, Callable[..., Any]] = {"release": release, "promote": promote}
    try:
        flows[request.deployment.partition("/")[0]](**request.parameters)
    except VerdictError:
        return "refused"
    return "ran"
