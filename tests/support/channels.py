"""Moves of channels, as promotions make them, without checks."""

from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, channels
from tvmflow.store.channel_document import Channel


def move_channel(
    store: ReleaseStore, name: str, channel: str, version: str, *, who: str = "ann", why: str = "test"
) -> Channel:
    """Ask for a version and grant it, whatever the policy; return the channel."""
    document = channels.wish(store, name, channel, version, who=who, why=why)
    if document.wish is None:
        return document
    return channels.grant(store, name, channel, document.wish.id, why=why, policy=document.policy or Policy())
