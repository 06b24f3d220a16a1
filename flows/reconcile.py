"""The reconcile flow: what aliases ask for and nobody has done yet, and moves that were left half-done.

A webhook only makes things quick. What is wanted stands in the registry's aliases; this compares it with what is there.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from prefect import flow, get_run_logger
from prefect.states import Failed

from flows.deployments import active, ended, registered, start
from tvmflow import settings as machine
from tvmflow.errors import TvmflowError, VerdictError
from tvmflow.promotion import ChannelState, move_channel, read_policy, read_state, restore_alias
from tvmflow.services import Services, open_services
from tvmflow.store import channels
from tvmflow.triggers import Alias, ManagedModel, RunRequest, load
from tvmflow.workspace import Record

_WHO = "reconcile"
# A source version whose release failed as often is not tried again by itself.
MAX_TRIES = 3

Done = Literal["started", "ran", "refused", "alias set", "alias put back", "waiting", "given up", "approval needed"]


class Finding(Record):
    """One thing that did not agree, and what was done about it.

    `waiting`: a run for it is there already; `given up`: its runs failed too often; `approval needed`: a person's, for
    which there is no deployment to ask. `flow_run` is None unless one was started.
    """

    name: str
    alias: str
    version: str
    what: str
    done: Done
    flow_run: str | None = None


class ReconcileSummary(Record):
    """What was found and done: what `tvmflow reconcile --json` prints. `problems` are what could not be looked at."""

    models: tuple[str, ...]
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]


@flow(name="reconcile", flow_run_name="reconcile", validate_parameters=True)
def reconcile() -> Any:
    """Make channels and releases agree with the aliases, for every release file in the setting models.

    Returns a ReconcileSummary as JSON; the flow run fails when there were problems, after all else is done.
    """
    log = get_run_logger()
    settings = machine.load()
    findings: list[Finding] = []
    problems: list[str] = []
    entries = load(settings.models).entries
    for entry in entries:
        # The trouble of one model keeps no other from being repaired.
        try:
            with open_services(settings, entry.spec.store, entry.spec.registry) as services:
                for check in _checks(services, entry):
                    try:
                        found = check()
                    except TvmflowError as error:
                        problems.append(f"{entry.name}: {error}")
                        log.error("%s: %s", entry.name, error)
                        continue
                    if found is not None:
                        findings.append(found)
                        log.info("%s %s: %s: %s", found.alias, found.version, found.what, found.done)
        except TvmflowError as error:
            problems.append(f"{entry.name}: {error}")
            log.error("%s: %s", entry.name, error)
    summary = ReconcileSummary(
        models=tuple(entry.name for entry in entries), findings=tuple(findings), problems=tuple(problems)
    ).model_dump(mode="json")
    return Failed(message=problems[0], data=summary) if problems else summary


def _checks(services: Services, entry: ManagedModel) -> Iterator[Callable[[], Finding | None]]:
    for channel in _channels(services, entry):
        yield lambda channel=channel: _channel(services, entry, channel)  # type: ignore[misc]
    if entry.source_alias is not None:
        yield lambda: _source(services, entry)


def _channels(services: Services, entry: ManagedModel) -> list[str]:
    """The channels of the release file; where it names none, every alias and every pointer is one."""
    if entry.spec.channels:
        return list(entry.spec.channels)
    held = {pointer.channel for pointer in channels.list_all(services.store, entry.name)}
    return sorted(held | set(services.registry.list_aliases(entry.registered_model)))


def _channel(services: Services, entry: ManagedModel, channel: str) -> Finding | None:
    """A channel and its alias."""
    state = read_state(services, entry.name, channel, entry.registered_model)
    if state.is_settled:
        return None
    alias = str(Alias(entry.registered_model, channel))
    if state.alias_version is None:
        held = state.current_version or ""
        move_channel(services, entry.name, held, channel, who=_WHO, why="the alias was gone", expected=held)
        return Finding(
            name=entry.name,
            alias=alias,
            version=held,
            what="the alias of what the channel holds was gone",
            done="alias set",
        )
    reason = _unpromotable(services, entry, state)
    if reason is not None:
        release = {
            "name": entry.name,
            "version": state.alias_version,
            "model": f"models:/{entry.registered_model}/{state.alias_version}",
        }
        restore_alias(services, release, channel, who=_WHO)
        return Finding(name=entry.name, alias=alias, version=state.alias_version, what=reason, done="alias put back")
    wish = entry.request_promotion(
        channel, state.alias_version, who=_WHO, why=f"the alias {alias} points at {state.alias_version}"
    )
    what = f"the channel holds {state.current_version or 'nothing'}"
    asked = read_policy(services.store.get_release(entry.name, state.alias_version), channel).approval == "required"
    if asked and not registered(wish.deployment):
        return Finding(name=entry.name, alias=alias, version=state.alias_version, what=what, done="approval needed")
    return _started(wish, entry, alias, state.alias_version, what, tries=None)


def _unpromotable(services: Services, entry: ManagedModel, state: ChannelState) -> str | None:
    """Why the version that the alias wants cannot be promoted, if it cannot."""
    if state.alias_version is not None and not services.store.has_release(entry.name, state.alias_version):
        return "this version is not released"
    return f"the channel refused this version: {state.refusal}" if state.refusal is not None else None


def _source(services: Services, entry: ManagedModel) -> Finding | None:
    """The alias of the source model, and whether the version that it names has a release or a verdict."""
    source = entry.source_alias
    version = services.registry.get_alias_version(source.model, source.alias) if source is not None else None
    if source is None or version is None:
        return None
    tags = {"tvmflow.name": entry.name, "tvmflow.source": f"{source.model}/{version}"}
    refused = services.registry.find_runs({**tags, "tvmflow.verdict": "refused"})
    passed = set(services.registry.find_runs({**tags, "tvmflow.verdict": "passed"}))
    released = any(
        version.run_id in passed and version.tags.get("tvmflow.status") == "published"
        for version in (services.registry.list_versions(entry.registered_model) if passed else ())
    )
    if refused or released:
        return None
    wish = entry.request_release(version)
    return _started(wish, entry, str(source), version, "this version has no release and no verdict", tries=MAX_TRIES)


def _started(wish: RunRequest, entry: ManagedModel, alias: str, version: str, what: str, tries: int | None) -> Finding:
    """Start what is wished, unless a run for it is there; where nothing is deployed, do it now."""

    def finding(done: Done, flow_run: str | None = None) -> Finding:
        return Finding(name=entry.name, alias=alias, version=version, what=what, done=done, flow_run=flow_run)

    if not registered(wish.deployment):
        return finding(_now(wish))
    if active(wish.deployment, (wish.tag,)):
        return finding("waiting")
    before = len(ended(wish.deployment, (wish.tag,)))
    if tries is not None and before >= tries:
        return finding("given up")
    # Of two that look at once one starts it; once that run has ended, it can be started again.
    key = f"reconcile-{wish.deployment}-{wish.tag}-{before}"
    return finding("started", start(wish.deployment, wish.parameters, key=key, tags=(wish.tag,)))


def _now(wish: RunRequest) -> Done:
    """Run what is wished in this process."""
    from flows.promote import promote
    from flows.release import release

    flows: dict[str, Callable[..., Any]] = {"release": release, "promote": promote}
    try:
        flows[wish.deployment.partition("/")[0]](**wish.parameters)
    except VerdictError:
        return "refused"
    return "ran"
