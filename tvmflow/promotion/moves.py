"""Moves of a channel on somebody's wish, together with the registry's alias of the channel's name.

The channel's document in the release store decides what the channel holds. The alias in MLflow with the channel's name
only shows it to MLflow's readers. To ask for a release in MLflow, set the alias CHANNEL-wanted; the channel's own alias
is set back when somebody changes it by hand.
"""

from dataclasses import dataclass

from tvmflow.documents.release import Release
from tvmflow.errors import RegistryError, StoreError
from tvmflow.promotion.policies import EffectivePolicy, read_current
from tvmflow.services import Services
from tvmflow.spec.fields import WANTED
from tvmflow.store import channels
from tvmflow.store.channel_document import Channel, Move

# Characters; MLflow's servers refuse much longer tags.
_LONGEST_TAG = 4000


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


def format_refusal_tag(channel: str) -> str:
    """Return the name of the tag that says why a channel refused a registered version."""
    return f"tvmflow.refused.{channel}"


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
