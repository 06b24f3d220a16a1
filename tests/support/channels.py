"""Moves of channels, as promotions make them, without checks."""

from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, channels
from tvmflow.store.channels import Channel


def move_channel(
    store: ReleaseStore, name: str, channel: str, version: str, *, who: str = "ann", why: str = "test"
) -> Channel:
    """Ask for a version and grant it, whatever the policy; return the channel."""
    wished = channels.wish(store, name, channel, version, who=who, why=why)
    if wished.wish is None:
        return wished
    return channels.grant(store, name, channel, wished.wish.id, why=why, policy=wished.policy or Policy())
