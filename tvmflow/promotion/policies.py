"""Policies of channels: which one applies to a release, and which ones release files propose."""

from dataclasses import dataclass
from difflib import get_close_matches

from tvmflow.documents.release import Release
from tvmflow.errors import SpecError
from tvmflow.promotion.people import identify_user
from tvmflow.spec import Policy
from tvmflow.spec.fields import likely_name
from tvmflow.store import ReleaseStore, channels
from tvmflow.store.channel_document import Channel, PolicyChange


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
