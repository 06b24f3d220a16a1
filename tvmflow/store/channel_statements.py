"""Statements on channels: what a key has signed about a channel, and whether it holds."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from tvmflow.bundle.signature import trusted_keys
from tvmflow.errors import SettingsError, StatementError
from tvmflow.store.channel_document import Channel, ChannelClaim
from tvmflow.store.highest import Highest
from tvmflow.store.keys import channel_key
from tvmflow.store.releases import ReleaseStore
from tvmflow.store.statements import Subject, check, peek, sign


def check_statement(store: ReleaseStore, document: Channel, trusted: Sequence[Path]) -> ChannelClaim | None:
    """Check the statement on a channel, and return its claim.

    One of the public keys in the files `trusted` must have signed the statement, and the statement must agree with the
    channel and with the release that the channel holds; whether the release itself is signed is not checked. An empty
    channel that this host has never seen in use needs no statement: the result is None. Raises StatementError when the
    statement is missing, has expired, is about another channel, or is older than one that this host has seen, and when
    the channel or its release was changed after the statement was signed.
    """
    highest = Highest.of(store.config, document.name, document.channel)
    if document.signed_content == Channel(name="", channel="").signed_content and document.statement is None:
        if highest.number > 0:
            raise StatementError(f"The {document.label} is empty, and this host has seen it in use: do not trust it.")
        return None
    remedy = f"sign it with `tvmflow sign {_address(document)}`"
    claim, digests = check(document.statement, ChannelClaim, trusted, f"The {document.label}", remedy)
    if (claim.name, claim.channel) != (document.name, document.channel):
        raise StatementError(
            f"The {document.label} has the statement on {claim.name}@{claim.channel}: do not trust it."
        )
    if (claim.version, claim.policy, claim.held) != document.signed_content:
        raise StatementError(f"The {document.label} was changed after it was signed: do not trust it.")
    if find_remaining_time(claim) < datetime.timedelta():
        raise StatementError(
            f"The {document.label} has a statement that expired at {claim.expires}: `tvmflow reconcile` renews one in "
            f"time, `tvmflow sign {_address(document)}` signs it again."
        )
    if claim.number < highest.number:
        raise StatementError(
            f"The {document.label} has number {claim.number}, and this host has seen number {highest.number}: somebody "
            "has put an older one in its place."
        )
    if digests != _list_digests(store, document, ()):
        raise StatementError(f"The {document.label} holds {claim.version}, which was changed since: do not trust it.")
    highest.raise_to(claim.number)
    return claim


def read_claim(document: Channel) -> ChannelClaim | None:
    """Return the claim of a channel's statement without checking it; None if it has none or one of another kind."""
    return None if document.statement is None else peek(document.statement, ChannelClaim)


def sign_change(store: ReleaseStore, before: Channel, after: Channel) -> Channel:
    """Return the changed channel with a statement, where a key signs or signatures are demanded.

    What nobody has signed, or another key, must not get a signature by the next change. So the statement on the channel
    before must hold: by a trusted key, or by the key that signs where none is trusted. In that case a channel without
    a statement is signed as it is, unless this host has seen it with one.
    """
    key, trusted = store.config.signing_key, trusted_keys()
    if key is None:
        if before.statement is not None or trusted:
            raise StatementError(
                f"The {before.label} needs a signature, and this machine has no key to sign its change: set "
                "TVMFLOW_SIGNING_KEY, or change it where the key is."
            )
        return after
    was_signed = before.statement is not None or Highest.of(store.config, before.name, before.channel).number > 0
    if trusted or was_signed:
        check_statement(store, before, trusted or (key,))
    return sign_statement(store, before, after)


def sign_statement(store: ReleaseStore, before: Channel, after: Channel) -> Channel:
    """Return the channel with a statement on what it will be when it replaces `before`."""
    key = store.config.signing_key
    if key is None:
        raise SettingsError("a channel is signed with the setting signing_key; set TVMFLOW_SIGNING_KEY")
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=store.config.statement_days)
    version, policy, earlier_versions = after.signed_content
    claim = ChannelClaim(
        name=after.name,
        channel=after.channel,
        version=version,
        policy=policy,
        held=earlier_versions,
        number=before.number + 1,
        expires=expires.isoformat(timespec="seconds"),
    )
    digests = _list_digests(store, after, trusted_keys())
    subjects = [Subject(name=name, digest={"sha256": sha256}) for name, sha256 in digests.items()]
    return after.model_copy(update={"statement": sign(claim, subjects, key)})


def _list_digests(store: ReleaseStore, channel: Channel, trusted: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of what a statement on a channel is about, by name: the release and its blobs, or the empty channel.

    Raises StatementError when none of the keys in the files `trusted`, if there are any, has signed the release.
    """
    subjects: tuple[Subject, ...] = (Subject.of(channel_key(channel.name, channel.channel), b""),)
    if channel.version is not None:
        subjects = store.list_subjects(channel.name, channel.version, trusted)
    return {subject.name: subject.digest["sha256"] for subject in subjects}


def _address(channel: Channel) -> str:
    return f"release://{channel.name}@{channel.channel}"


def find_remaining_time(claim: ChannelClaim) -> datetime.timedelta:
    """Return the time until a statement expires, negative afterwards.

    Raises StatementError where it names no time with its zone.
    """
    try:
        time = datetime.datetime.fromisoformat(claim.expires)
    except ValueError:
        time = datetime.datetime.min
    if time.tzinfo is None:
        raise StatementError(f"A statement expires at {claim.expires!r}, which is no time: sign it again.")
    return time - datetime.datetime.now(datetime.UTC)
