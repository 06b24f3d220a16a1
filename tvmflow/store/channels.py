"""Channels: reads and changes their documents, in which each has its policy, its open wish and the release it holds.

A wish asks that the channel hold a certain release. A wish is either granted, which moves the channel, or it ends as
refused, withdrawn, or superseded by a newer one. A writer reads the document first, and writes it only if it has not
changed meanwhile.

Where a key signs, a document carries a signed statement on the version that the channel holds, its policy and the
versions that it has held. A wish needs no signature: anybody may ask.
"""

import datetime
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from tvmflow.bundle.signature import trusted_keys
from tvmflow.documents.encoding import decode, encode
from tvmflow.errors import StoreError
from tvmflow.spec import Policy
from tvmflow.spec.fields import explain_channel
from tvmflow.store import leases
from tvmflow.store.channel_document import Channel, Move, PolicyChange, Wish, WishEnd
from tvmflow.store.channel_statements import check_statement, find_remaining_time, sign_change, sign_statement
from tvmflow.store.highest import Highest
from tvmflow.store.keys import NAME, channel_key, require_name
from tvmflow.store.releases import ReleaseStore

# Each failure to write means that somebody else has written.
_TRIES = 100


def find(store: ReleaseStore, name: str, channel: str) -> Channel:
    """Read a channel; one that was never used holds nothing. Raises StoreError for a damaged document."""
    return _read(store, name, channel)[0]


def find_checked(store: ReleaseStore, name: str, channel: str) -> Channel:
    """Read a channel; one that was never used holds nothing. If this machine trusts keys, check the statement on it.

    Raises StoreError for a damaged document; StatementError for a statement that is missing, that has expired, that is
    older than one that this host has seen, or that differs from the channel or its release.
    """
    document = find(store, name, channel)
    if trusted := trusted_keys():
        check_statement(store, document, trusted)
    return document


def read(store: ReleaseStore, name: str, channel: str) -> Channel:
    """Read a channel that is in use.

    Raises StoreError for a damaged document, and for a channel that was never used; the message then lists the channels
    of `name`.
    """
    document = find(store, name, channel)
    if not document.exists:
        others = ", ".join(_list_channels(store, name)) or "none"
        raise StoreError(f"There is no channel {channel!r} of {name} in {store.config.uri}; its channels: {others}.")
    return document


def read_version(store: ReleaseStore, name: str, channel: str, trusted: Sequence[Path] | None = None) -> str:
    """Return the version that a channel holds.

    One of the keys in the files `trusted`, by default those of TVMFLOW_TRUSTED_KEYS, must have signed the statement on
    it; if there are none, statements are not checked. Raises StoreError for a channel that holds none or was never
    used; StatementError for a statement that is missing, that has expired, that is older than one that this host has
    seen, or that differs from the channel or its release.
    """
    return read_held(store, name, channel, trusted_keys() if trusted is None else trusted)[1]


def read_held(store: ReleaseStore, name: str, channel: str, trusted: Sequence[Path]) -> tuple[Channel, str]:
    """Return a channel and the version that it holds, both of one read.

    One of the keys in the files `trusted` must have signed the statement on the channel; if there are none, it is not
    checked. Raises StoreError for a channel that holds none or was never used; StatementError for a statement that does
    not hold.
    """
    document = read(store, name, channel)
    if trusted:
        check_statement(store, document, trusted)
    if document.version is None:
        raise StoreError(f"The channel {name}@{channel} in {store.config.uri} holds nothing: promote a release to it.")
    return document, document.version


def sign_channel(store: ReleaseStore, name: str, channel: str) -> Channel:
    """Sign a new statement on a channel as it is now, and return the channel.

    An earlier statement is not checked: the signature covers what any writer has put there. Raises StoreError for a
    channel that was never used, StatementError when this machine trusts keys and none of them has signed the channel's
    release, SettingsError when no signing key is set or it cannot be read.
    """
    read(store, name, channel)
    return _update(store, name, channel, lambda before: sign_statement(store, before, before))


def renew_statement(store: ReleaseStore, name: str, channel: str) -> bool:
    """Sign the statement on a channel again if at least half of its time is over; return whether it was signed.

    Without a signing key, or a statement, nothing happens. Raises StatementError for a statement that does not pass
    `check_statement`.
    """
    key = store.config.signing_key
    before = find(store, name, channel)
    if key is None or before.statement is None:
        return False
    trusted = trusted_keys() or (key,)

    def change(current: Channel) -> Channel:
        claim = check_statement(store, current, trusted)
        rest = datetime.timedelta(days=store.config.statement_days / 2)
        if claim is None or find_remaining_time(claim) > rest:
            return current
        return sign_statement(store, current, current)

    return _update(store, name, channel, change).number > before.number


def list_all(store: ReleaseStore, name: str) -> list[Channel]:
    """Read all channels of a release name, sorted; an empty list for an unknown name. Raises StoreError."""
    return [read(store, name, channel) for channel in _list_channels(store, name)]


def wish(
    store: ReleaseStore, name: str, channel: str, version: str, *, who: str, why: str, id: str | None = None
) -> Channel:
    """Ask that a channel hold a published version; return the channel.

    `who` asks, for the reason `why`. An open wish for another version ends as superseded. An open wish for the same
    version stays; if `who` made it, a reason that is not empty replaces the earlier one. If the channel holds the
    version already, no wish is made. A call with the `id` of a wish that has ended changes nothing; by default the id
    is random. Raises StoreError for a version that is not published, or whose release is removed during the call, for
    the `id` of an open wish for another version, and when the server fails.
    """
    _require_release(store, name, version)
    number = id or secrets.token_hex(8)

    def change(before: Channel) -> Channel:
        if before.find_end(number) is not None:
            return before
        if before.wish is not None and before.wish.id == number and before.wish.version != version:
            # The end of the one would be taken for the end of the other.
            raise StoreError(
                f"The open wish {number} on {name}@{channel} asks for {before.wish.version}, not for {version}: "
                "ask with another id."
            )
        if before.wish is not None and before.wish.version == version:
            has_reason = why != "" and who == before.wish.who and why != before.wish.why
            return _with(before, wish=before.wish.model_copy(update={"why": why})) if has_reason else before
        after = _supersede(before, who, f"superseded by the wish for {version} of {who}")
        if version == before.version:
            return after
        return _with(after, wish=Wish(who=who, when=_now(), why=why, id=number, version=version))

    after = _update(store, name, channel, change)
    if not _outlasts_sweep(store, name, version):
        end_wish(store, name, channel, number, "withdrawn", who=who, why="its release was removed meanwhile")
        _require_release(store, name, version)
    return after


def end_wish(
    store: ReleaseStore,
    name: str,
    channel: str,
    wish_id: str,
    outcome: Literal["refused", "withdrawn"],
    *,
    who: str,
    why: str,
) -> Channel:
    """End a channel's open wish if its id is `wish_id`, and return the channel.

    Without an open wish of that id, the channel stays as it is. The channel's history keeps the `outcome`, `who` ended
    the wish, and `why`. Raises StoreError when the server fails.
    """

    def change(before: Channel) -> Channel:
        if before.wish is None or before.wish.id != wish_id:
            return before
        return _end(before, outcome, who, why)

    return _update(store, name, channel, change)


def grant(
    store: ReleaseStore,
    name: str,
    channel: str,
    number: str,
    *,
    why: str,
    policy: Policy,
    adoption: PolicyChange | None = None,
) -> Channel:
    """Move a channel to the version of its open wish, if the wish's id is `number`; return the channel.

    Without an open wish of that id, the channel stays as it is; `Channel.find_end` says how the wish ended. The move is
    recorded as made by the author of the wish, with the reason `why`. `policy` is the policy that the release was
    checked against. If the channel has none yet, `adoption` gives it its first; None leaves it without. Raises
    StoreError when the channel has another policy than `policy` by now, and when the server fails.
    """

    def change(before: Channel) -> Channel:
        wish = before.wish
        if wish is None or wish.id != number:
            return before
        if before.policy is not None and before.policy != policy:
            raise StoreError(
                f"The policy of {name}@{channel} has changed while {wish.version} was checked: promote it again."
            )
        move = _move(before, wish.version, who=wish.who, why=why, id=wish.id)
        adoptions = () if adoption is None or before.policy is not None else (adoption,)
        return _with(
            before,
            wish=None,
            version=wish.version,
            policy=adoptions[0].after if adoptions else before.policy,
            history=(*before.history, *adoptions, move),
        )

    return _update(store, name, channel, change)


def roll_back(store: ReleaseStore, before: Channel, version: str, *, who: str, why: str) -> Channel:
    """Move a channel back to a version that it held; return the channel.

    `before` is the channel as the caller has read it. An open wish ends as superseded. If the channel holds `version`
    already, nothing changes. Raises StoreError when the channel has moved since `before` was read (the message says who
    moved it), when the release is removed during the call, and when the server fails.
    """
    after = _move_back(store, before, version, who=who, why=why)
    if not _outlasts_sweep(store, before.name, version):
        if before.version is not None:
            why = f"the release {version} was removed meanwhile"
            _move_back(store, after, before.version, who=who, why=why)
        _require_release(store, before.name, version)
    return after


def _move_back(store: ReleaseStore, before: Channel, version: str, *, who: str, why: str) -> Channel:
    def change(current: Channel) -> Channel:
        if current.version != before.version:
            raise StoreError(describe_move(current, before.version))
        if current.version == version:
            return current
        move = _move(current, version, who=who, why=why, id=secrets.token_hex(8), rollback=True)
        after = _supersede(current, who, f"superseded by the rollback to {version} of {who}")
        return _with(after, version=version, history=(*after.history, move))

    return _update(store, before.name, before.channel, change)


def _move(before: Channel, version: str, *, who: str, why: str, id: str, rollback: bool = False) -> Move:
    """The move of a channel to a version that happens now."""
    fields = {"who": who, "when": _now(), "why": why, "id": id, "rollback": rollback}
    return Move.model_validate({**fields, "from": before.version, "to": version})


def set_policy(store: ReleaseStore, name: str, channel: str, policy: Policy, *, who: str, why: str) -> Channel:
    """Give a channel a policy, recorded with `who` and `why` in its history; return the channel.

    A channel that has this policy already stays as it is. Raises StoreError when the server fails.
    """
    return change_policy(store, name, channel, lambda _before: policy, who=who, why=why)


def change_policy(
    store: ReleaseStore, name: str, channel: str, revise: Callable[[Channel], Policy], *, who: str, why: str
) -> Channel:
    """Give a channel the policy that `revise` makes of the channel; return the channel.

    `revise` is called again where somebody else changes the channel meanwhile. The change is recorded with `who` and
    `why` in the channel's history; a channel that has the policy already stays as it is. Raises StoreError when the
    server fails.
    """

    def change(before: Channel) -> Channel:
        policy = revise(before)
        if before.policy == policy:
            return before
        event = make_policy_change(before.policy, policy, who=who, why=why)
        return _with(before, policy=policy, history=(*before.history, event))

    return _update(store, name, channel, change)


def make_policy_change(before: Policy | None, after: Policy, *, who: str, why: str) -> PolicyChange:
    """Return the event of a change of policy that happens now; `before` is None where the channel had none."""
    return PolicyChange(who=who, when=_now(), why=why, id=secrets.token_hex(8), before=before, after=after)


def mark_shown(store: ReleaseStore, name: str, channel: str, version: str) -> Channel:
    """Record in a channel that its alias in MLflow names `version`, if it still holds that; return the channel.

    Raises StoreError when the server fails.
    """

    def change(before: Channel) -> Channel:
        if before.version != version or before.shown == version:
            return before
        return _with(before, shown=version)

    return _update(store, name, channel, change)


def require_version(store: ReleaseStore, name: str, channel: str, version: str) -> None:
    """Raise StoreError if the channel holds another version by now; the message says who moved it.

    Raises StoreError for a damaged document too; StatementError for a statement that is missing, that has expired, that
    is older than one that this host has seen, or that differs from the channel or its release.
    """
    document = find_checked(store, name, channel)
    if document.version != version:
        raise StoreError(describe_move(document, version))


def describe_move(current: Channel, expected: str | None) -> str:
    """Return the message for a caller that expected the version `expected` in the channel, or nothing (None).

    It says who moved the channel last, when, to which version and why, or that the channel holds nothing.
    """
    last = current.moves[-1] if current.moves else None
    by = f"{last.who} moved it to {last.to_version} at {last.when} ({last.why})" if last else "it holds nothing"
    return (
        f"The channel {current.name}@{current.channel} was expected at {expected or 'nothing'}, but {by}: check "
        "whether it is still to be moved, then try again."
    )


def _require_release(store: ReleaseStore, name: str, version: str) -> None:
    if not store.has_release(name, version):
        store.get_release(name, version)  # its error names the versions that are published


def _outlasts_sweep(store: ReleaseStore, name: str, version: str) -> bool:
    """Whether a release is still there when a sweep, which may have read a channel before it named it, has ended."""
    leases.await_sweep(store)
    return store.has_release(name, version)


def _update(store: ReleaseStore, name: str, channel: str, change: Callable[[Channel], Channel]) -> Channel:
    """Replace a channel by what `change` makes of it, until nobody else writes in between; return the new one."""
    key = channel_key(name, channel)
    reason = explain_channel(channel)
    if reason is not None:
        raise StoreError(f"The channel {channel!r} {reason}.")
    for _ in range(_TRIES):
        before, tag = _read(store, name, channel)
        after = change(before)
        if after is before:
            return before
        if after.signed_content != before.signed_content:
            after = sign_change(store, before, after)
        after = after.model_copy(update={"number": before.number + 1})
        content = encode(after)
        if store.objects.create(key, content) if tag is None else store.objects.replace(key, content, tag):
            if after.statement != before.statement:
                Highest.of(store.config, name, channel).raise_to(after.number)
            return after
    raise StoreError(f"{store.objects.uri(key)} is written by others all the time: try again later.")


def _with(channel: Channel, **changes: object) -> Channel:
    return channel.model_copy(update=changes)


def _supersede(before: Channel, who: str, why: str) -> Channel:
    return before if before.wish is None else _end(before, "superseded", who, why)


def _end(before: Channel, outcome: Literal["refused", "superseded", "withdrawn"], who: str, why: str) -> Channel:
    """The channel without its open wish, which ends with this outcome."""
    wish = before.wish
    if wish is None:
        return before
    end = WishEnd(who=who, when=_now(), why=why, id=wish.id, version=wish.version, outcome=outcome)
    return _with(before, wish=None, history=(*before.history, end))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _list_channels(store: ReleaseStore, name: str) -> list[str]:
    require_name("name", name)
    prefix = f"channels/{name}/"
    keys = [entry.key for entry in store.objects.list_objects(prefix) if entry.key.endswith(".json")]
    names = (key.removeprefix(prefix).removesuffix(".json") for key in keys)
    # Other files, such as copies made by hand, are no channels.
    return sorted(name for name in names if NAME.fullmatch(name))


def _read(store: ReleaseStore, name: str, channel: str) -> tuple[Channel, str | None]:
    """A channel, and the tag of the object that was read, None if there is none."""
    key = channel_key(name, channel)
    stored = store.objects.read(key)
    if stored is None:
        return Channel(name=name, channel=channel), None
    uri = store.objects.uri(key)
    content = decode(Channel, stored.content, uri)
    last_version = content.moves[-1].to_version if content.moves else None
    if (content.name, content.channel, content.version) != (name, channel, last_version):
        raise StoreError(f"{uri} is damaged (it contradicts its own history or its place): restore it from a backup.")
    return content, stored.tag
