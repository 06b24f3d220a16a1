"""Promotion: wishes for a channel, its policy, and its moves together with the registry's alias of its name.

The channel's document in the release store decides what the channel holds. The alias in MLflow with the channel's name
only shows it to MLflow's readers. To ask for a release in MLflow, set the alias CHANNEL-wanted; the channel's own alias
is set back when somebody changes it by hand.
"""

import getpass
import hashlib
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from tvmflow.documents import decode, encode
from tvmflow.errors import RegistryError, SpecError, StatementError, StoreError
from tvmflow.registry import Registry
from tvmflow.release import Release
from tvmflow.services import Services
from tvmflow.spec import Policy
from tvmflow.spec.fields import WANTED, likely_name
from tvmflow.store import ReleaseStore, channels
from tvmflow.store.channel_document import Channel, Move, PolicyChange
from tvmflow.store.statements import Claim, Envelope, Subject, check, sign
from tvmflow.verdict import Verdict

VERDICT = "verdict.json"
VERDICT_STATEMENT = "verdict.statement.json"
# Characters; MLflow's servers refuse much longer tags.
_LONGEST_TAG = 4000


class VerdictClaim(Claim):
    """The outcome of a promotion; the statement's subjects are verdict.json and the release's document."""

    predicate_type = "urn:tvmflow:verdict:1"
    name: str
    version: str
    channel: str
    verdict: str


@dataclass(frozen=True)
class ChannelState:
    """A channel as the release store and MLflow have it.

    `alias_version` is the version that the channel's own alias of the registered model `model` names, `wanted_version`
    the one that the alias CHANNEL-wanted asks for; None where there is no such alias.
    """

    channel: Channel
    model: str
    alias_version: str | None
    wanted_version: str | None

    @property
    def is_settled(self) -> bool:
        """Whether MLflow shows what the channel holds, and nobody asks for anything else."""
        version = self.channel.version
        return self.alias_version == version and self.wanted_version is None and self.channel.wish is None

    @property
    def hand_set_version(self) -> str | None:
        """The version to which somebody has set the channel's own alias by hand, None if nobody has."""
        is_followed = self.channel.version == self.channel.shown
        is_elsewhere = self.alias_version not in (None, self.channel.version)
        return self.alias_version if is_elsewhere and is_followed else None


def read_state(services: Services, name: str, channel: str, model: str | None = None) -> ChannelState:
    """Read the channel `channel` of the releases of `name`, and the aliases of their registered model in MLflow.

    `model` is the name of the registered model. By default it is the one that the release in the channel names, or the
    latest release if the channel is empty. Raises StoreError or RegistryError when a server fails.
    """
    document = channels.find(services.store, name, channel)
    if model is None:
        versions = services.store.list_versions(name) if document.version is None else [document.version]
        model = services.store.get_release(name, versions[-1]).registered_version.model if versions else name
    aliases = services.registry.list_aliases(model)
    return ChannelState(document, model, aliases.get(channel), aliases.get(channel + WANTED))


def read_refusal(services: Services, model: str, version: str, channel: str) -> str | None:
    """Return the reason why a channel refused a registered version, None if it did not. Raises RegistryError."""
    return services.registry.get_version_tags(model, version).get(format_refusal_tag(channel))


@dataclass(frozen=True)
class EffectivePolicy:
    """The policy that applies to a release in a channel.

    `adoption` is the change that gives the channel this policy; None where the channel has it already or no release
    proposes one. `proposal` is the policy that the release proposes if that is another one, else None.
    """

    policy: Policy
    adoption: PolicyChange | None = None
    proposal: Policy | None = None


def find_policy(channel: Channel, release: Release, current: Release | None, *, who: str) -> EffectivePolicy:
    """Find the policy that applies to a release in a channel.

    It is the channel's own policy. A channel without one adopts the policy that `current`, the release that it holds,
    proposes, or else the one that `release` proposes; a proposal without conditions is not adopted. Without either, the
    policy has no conditions. `who` is recorded as the author of the adoption. Raises SpecError for a channel that does
    not exist yet and is not among the channels of the release file.
    """
    proposal = release.channels.get(channel.channel)
    if channel.policy is not None:
        return EffectivePolicy(channel.policy, proposal=None if proposal == channel.policy else proposal)
    for document in (current, release):
        policy = None if document is None else document.channels.get(channel.channel)
        if document is not None and policy is not None and policy != Policy():
            why = f"proposed by {document.name} {document.version}"
            adoption = channels.make_policy_change(None, policy, who=who, why=why)
            return EffectivePolicy(policy, adoption, None if proposal == policy else proposal)
    if release.channels and proposal is None and not channel.exists:
        close = get_close_matches(channel.channel, release.channels, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise SpecError(
            f"{release.name} {release.version} is released for the channels "
            f"{', '.join(sorted(release.channels))}: {channel.channel!r} is not among them{hint}"
        )
    return EffectivePolicy(Policy())


def read_policy(store: ReleaseStore, channel: Channel, version: str) -> Policy:
    """Return the policy that applies to a release in a channel: the channel's own, or the one that it would adopt.

    `find_policy` has the rules of the adoption. Raises SpecError for a channel that does not exist yet and is not among
    the channels of the release file; StoreError when the release does not exist or the server fails.
    """
    release = store.get_release(channel.name, version)
    return find_policy(channel, release, read_current(store, channel), who=identify_user()).policy


def read_proposals(store: ReleaseStore, name: str) -> dict[str, Policy]:
    """Return the policies that the newest release of `name` proposes for its channels; none without a release.

    Raises StoreError when the server fails.
    """
    versions = store.list_versions(name)
    return dict(store.get_release(name, versions[-1]).channels) if versions else {}


def proposed_policy(store: ReleaseStore, channel: Channel) -> Policy | None:
    """Return the policy that a channel without one would adopt: of the release that it holds, or else of the newest.

    None without a proposal. Raises StoreError when the server fails.
    """
    current = read_current(store, channel)
    own = None if current is None else current.channels.get(channel.channel)
    return read_proposals(store, channel.name).get(channel.channel) if own is None or own == Policy() else own


def check_order(store: ReleaseStore, name: str, channel: str, policy: Policy) -> None:
    """Raise SpecError for a policy whose `after` no release can meet: an unknown channel, or one that waits for this.

    Raises StoreError when the server fails.
    """
    proposals = read_proposals(store, name)
    own_policies = {document.channel: document.policy for document in channels.list_all(store, name)}
    policies = {**proposals, **{key: value for key, value in own_policies.items() if value is not None}}
    earlier, visited = policy.after, {channel}
    while earlier is not None:
        if earlier in visited:
            raise SpecError(f"after={policy.after}: a release would have to reach {earlier!r} before itself")
        if earlier not in own_policies.keys() | proposals.keys():
            names = sorted((own_policies.keys() | proposals.keys()) - {channel})
            others = ", ".join(names) or "none"
            raise SpecError(
                f"after={earlier}: {name} has no such channel; its others: {others}{likely_name(earlier, names)}"
            )
        visited.add(earlier)
        earlier = policies[earlier].after if earlier in policies else None


def read_current(store: ReleaseStore, channel: Channel) -> Release | None:
    """Return the release that a channel holds; None if it holds none, or that is gone from the store.

    Raises StoreError.
    """
    version = channel.version
    if version is None or not store.has_release(channel.name, version):
        return None
    return store.get_release(channel.name, version)


def hash_release(release: Release) -> str:
    """Return the SHA-256, in hexadecimal, of a release's document, which names all its blobs by their digests."""
    return hashlib.sha256(encode(release)).hexdigest()


def identify_user() -> str:
    """Return the user of this process, as USER@HOST."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def format_refusal_tag(channel: str) -> str:
    """Return the name of the tag that says why a channel refused a registered version."""
    return f"tvmflow.refused.{channel}"


def is_same_person(one: str, other: str) -> bool:
    """Whether two names, each as USER@HOST, are of one user, on whatever machines."""
    return one.partition("@")[0] == other.partition("@")[0]


def make_wish(
    services: Services, name: str, version: str, channel: str, *, who: str, why: str, id: str | None = None
) -> Channel:
    """Record the wish that a channel hold a published release, and return the channel.

    The new wish ends an open one for another version; an open one for this version stays. No wish is made for the
    version that the channel holds, nor for the `id` of an earlier wish; with None the id is random. The aliases in
    MLflow are corrected: the channel's own alias is set to the version that the channel holds, and an alias
    CHANNEL-wanted for another version is deleted. Raises StoreError for a version that is not published or a server
    that fails, RegistryError when MLflow fails.
    """
    model, number = services.store.get_release(name, version).registered_version
    document = channels.wish(services.store, name, channel, version, who=who, why=why, id=id)
    update_alias(services, name, channel, model)
    if services.registry.get_alias_version(model, channel + WANTED) not in (None, number):
        services.registry.delete_alias(model, channel + WANTED)
    return document


def update_alias(services: Services, name: str, channel: str, model: str) -> Channel:
    """Set the alias in MLflow with the channel's name to the version that the channel holds; return the channel.

    If the channel holds nothing, the alias is deleted from the registered model `model`. If the release is gone from
    the store, the alias stays as it is. Call this after each move of a channel: it repeats until the channel has not
    moved meanwhile. Raises StoreError, also for a channel whose signed statement does not hold where this
    machine demands one, and RegistryError.
    """
    registry = services.registry
    while True:
        document = channels.find_checked(services.store, name, channel)
        if document.version is None:
            if registry.get_alias_version(model, channel) is not None:
                registry.delete_alias(model, channel)
            return document
        release = read_current(services.store, document)
        if release is None:
            return document
        held_model, number = release.registered_version
        if registry.get_alias_version(held_model, channel) != number:
            registry.set_alias(held_model, channel, number)
        after = channels.mark_shown(services.store, name, channel, document.version)
        if after.version == document.version:
            return after


def grant(services: Services, name: str, channel: str, wish: str, *, why: str, policy: EffectivePolicy) -> Channel:
    """Move a channel to the version of its open wish if that wish has the id `wish`; return the channel.

    The aliases in MLflow are set accordingly. If the wish is no longer open, nothing moves, and the history of the
    channel says how the wish ended. `policy` is the policy that the release has met. Raises StoreError, also when the
    channel's policy has changed meanwhile, and RegistryError.
    """
    after = channels.grant(services.store, name, channel, wish, why=why, policy=policy.policy, adoption=policy.adoption)
    move = after.find_end(wish)
    if not isinstance(move, Move):
        return after
    model, number = services.store.get_release(name, move.to_version).registered_version
    after = update_alias(services, name, channel, model)
    _forget_alias(services, model, channel, number)
    if read_refusal(services, model, number, channel) is not None:
        services.registry.delete_version_tag(model, number, format_refusal_tag(channel))
    return after


def refuse(services: Services, release: Release, channel: str, wish: str, *, who: str, reason: str) -> None:
    """End the wish with this id as refused, and tag the registered version with the reason.

    An alias `CHANNEL-wanted` of the registered model for this version is deleted. The channel's history keeps the
    `reason` and `who` refused. If the wish has ended already, only tag and alias change. Raises StoreError or
    RegistryError when the store or MLflow does not answer or refuses.
    """
    model, number = release.registered_version
    services.registry.set_version_tag(model, number, format_refusal_tag(channel), reason[:_LONGEST_TAG])
    _forget_alias(services, model, channel, number)
    channels.end_wish(services.store, release.name, channel, wish, "refused", who=who, why=reason)


def _forget_alias(services: Services, model: str, channel: str, number: str) -> None:
    """Delete the alias that asks for a version, unless it asks for another by now."""
    if services.registry.get_alias_version(model, channel + WANTED) == number:
        services.registry.delete_alias(model, channel + WANTED)


def roll_back(
    services: Services, name: str, channel: str, *, who: str, why: str, to: str | None = None
) -> tuple[Channel, Channel]:
    """Move a channel back to the version `to`, by default the one before; return the channel before and after.

    `who` moves it and `why` are kept in the channel's history. Every digest of that release is checked. No gates run,
    because the release has passed them. An open wish ends as superseded. Without `to`, a rollback that ended before the
    channel's alias in MLflow was moved is completed. Raises StoreError when the channel has never held such a version,
    when a file of the release is missing or damaged, or when someone else moves the channel meanwhile; RegistryError
    when MLflow fails.
    """
    before = channels.read(services.store, name, channel)
    if to is None and before.moves and before.moves[-1].rollback and before.shown != before.version:
        # An earlier rollback has moved the channel, and ended before its alias.
        to = before.version
    if to is None:
        if len(before.rollback_stack) < 2:
            raise StoreError(
                f"The channel {name}@{channel} has held nothing before {before.version}: promote another release to it."
            )
        to = before.rollback_stack[-2]
    elif not before.has_held(to):
        earlier = ", ".join(dict.fromkeys(move.to_version for move in before.moves)) or "nothing"
        raise StoreError(
            f"The channel {name}@{channel} has never held {to}, only {earlier}: promote it with `tvmflow promote`."
        )
    model = services.store.verify_release(name, to).registered_version.model
    channels.roll_back(services.store, before, to, who=who, why=why)
    try:
        if services.registry.get_alias_version(model, channel + WANTED) is not None:
            services.registry.delete_alias(model, channel + WANTED)
        # Last, for it says that nothing is left to do.
        return before, update_alias(services, name, channel, model)
    except RegistryError as error:
        raise type(error)(
            f"{error}. The channel {name}@{channel} holds {to} by now: the same command, or `tvmflow reconcile`, moves "
            "its alias"
        ) from error


def log_verdict(
    services: Services, release: Release, verdict: Verdict, *, report: str, files: Mapping[str, Path]
) -> str:
    """Log the verdict on a promotion as a run in MLflow, inside the run of the release; return the run's id.

    The run gets `verdict` as verdict.json, `report` (Markdown) as report.md, and `files` by their paths in the run.
    With a signing key, it also gets a signed statement on the verdict. If the verdict is `waiting`, the run in MLflow
    stays open. A later call whose verdict has the same `flow_run`, an id of Prefect's, goes on with that run. Raises
    RegistryError when MLflow fails or one of the `files` is missing. With a signing key, raises StoreError when the
    release's document cannot be read, and SettingsError when the key cannot be used.
    """
    tags = {
        **_promotion_tags(verdict.name, verdict.channel, verdict.version),
        "tvmflow.verdict": verdict.verdict,
        "tvmflow.who": verdict.who,
    }
    registry = services.registry
    title = f"promote {verdict.name} {verdict.version} to {verdict.channel}"
    run = registry.open_promotion_run(release.mlflow_run_id, title, tags, verdict.flow_run)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        contents = {VERDICT: encode(verdict), "report.md": report.encode()}
        key = services.store.config.signing_key
        if key is not None:
            claim = VerdictClaim(
                name=verdict.name, version=verdict.version, channel=verdict.channel, verdict=verdict.verdict
            )
            document = services.store.list_subjects(release.name, release.version, ())[0]
            subjects = (Subject.of(VERDICT, contents[VERDICT]), document)
            contents[VERDICT_STATEMENT] = sign(claim, subjects, key).to_bytes()
        for file, content in contents.items():
            Path(scratch, file).write_bytes(content)
        registry.log_artifacts(run, {**{file: Path(scratch, file) for file in contents}, **files})
    if verdict.verdict != "waiting":
        registry.finish_run(run, "FINISHED")
    return run


class LoggedVerdict(NamedTuple):
    """A verdict in MLflow: the id of its run, and the key in hexadecimal that signed it, None where that is unknown."""

    run: str
    verdict: Verdict
    signer: str | None


def read_verdict(
    registry: Registry, name: str, channel: str, version: str | None = None, trusted: Sequence[Path] | None = None
) -> LoggedVerdict | None:
    """Return the last verdict on a promotion to a channel, of `version` or any; None if there is none.

    With `trusted`, files of public keys, one of them must have signed the statement on the verdict; with an empty list
    the key that the statement names is returned unchecked, with None the statement is not read. Raises RegistryError,
    StoreError for a damaged verdict, and StatementError for one that is not signed or was changed.
    """
    runs = registry.find_runs(_promotion_tags(name, channel, version))
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        path = registry.fetch_artifact(runs[0], VERDICT, Path(scratch)) if runs else None
        if path is None:
            return None
        content, signer = path.read_bytes(), None
        verdict = decode(Verdict, content, f"{VERDICT} of MLflow run {runs[0]}")
        if trusted is not None:
            statement = registry.fetch_artifact(runs[0], VERDICT_STATEMENT, Path(scratch))
            signed = None if statement is None else statement.read_bytes()
            signer = check_verdict(content, signed, name, version or verdict.version, channel, trusted)
    return LoggedVerdict(runs[0], verdict, signer)


def _promotion_tags(name: str, channel: str, version: str | None) -> dict[str, str]:
    tags = {"tvmflow.kind": "promotion", "tvmflow.name": name, "tvmflow.channel": channel}
    return tags if version is None else {**tags, "tvmflow.version": version}


def check_verdict(
    content: bytes, statement: bytes | None, name: str, version: str, channel: str, trusted: Sequence[Path]
) -> str | None:
    """Check that a trusted key has signed the statement on a verdict; return the key in hexadecimal.

    `content` and `statement` are the files that `log_verdict` writes. Without `trusted` keys nothing is checked, and
    the key is the one that the statement names, None without a statement. Raises StatementError for a verdict that is
    not signed, was changed, or is about another promotion.
    """
    topic = f"The verdict on {name} {version} for {channel}"
    envelope = None if statement is None else Envelope.parse(statement, topic)
    if trusted:
        remedy = "promote it again where a key signs"
        claim, digests = check(envelope, VerdictClaim, trusted, topic, remedy)
        is_same = digests.get(VERDICT) == Subject.of(VERDICT, content).digest["sha256"]
        if not is_same or (claim.name, claim.version, claim.channel) != (name, version, channel):
            raise StatementError(f"{topic} was changed after it was signed, or is another one: do not trust it.")
    return None if envelope is None else envelope.signer
