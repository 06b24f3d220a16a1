"""Channels: named pointers to releases, each with the history of its moves.

channels/<name>/<channel>.json        the pointer
claims/<name>/@<channel>/<nonce>      the claim of a mover on the channel; short-lived
"""

import contextlib
import datetime
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvmflow.errors import StoreError
from tvmflow.store import claims
from tvmflow.store.keys import channel_key, require_name
from tvmflow.store.objects import SETTLE_SECONDS, InterruptedReadError
from tvmflow.store.releases import ReleaseStore

# Raised whenever a reader of the previous number could misread a pointer of the new number.
FORMAT = 1
# While another server writes the folder, an embedded server may return the new content cut to the old length, or no
# object, for some milliseconds; a busy one may overlook a new object for up to a second.
_MAX_LOOKS = 20
_MAX_LOOKS_FOR_ABSENT = 5


@dataclass(frozen=True)
class Move:
    """One move of a channel: who moved it, when (UTC, ISO 8601), from which version to which, and why.

    `from_version` is None for a new channel.
    """

    who: str
    when: str
    from_version: str | None
    to_version: str
    why: str
    id: str
    """Random, so that no two moves are the same."""
    rollback: bool = False
    """Whether the move is a rollback, to a version that the channel held before."""


@dataclass(frozen=True)
class Pointer:
    """The version that a channel holds, and the channel's moves, the oldest first."""

    name: str
    channel: str
    version: str
    history: tuple[Move, ...]

    @property
    def last_move(self) -> Move:
        """The move that brought the channel to its version."""
        return self.history[-1]

    def has_held(self, version: str) -> bool:
        """Whether the channel holds a version or ever did."""
        return any(move.to_version == version for move in self.history)

    @property
    def rollback_stack(self) -> tuple[str, ...]:
        """The versions that rollbacks can return to, the current one last: after 1, 2, 3 and one rollback, 1, 2."""
        versions: list[str] = []
        for move in self.history:
            if move.rollback and move.to_version in versions:
                while versions[-1] != move.to_version:
                    versions.pop()
            else:
                versions.append(move.to_version)
        return tuple(versions)


def read(store: ReleaseStore, name: str, channel: str) -> Pointer:
    """Read the pointer of a channel.

    Raises StoreError for a channel that was never moved; the message names the others.
    """
    pointer = find(store, name, channel)
    if pointer is None:
        channels = ", ".join(_list_channels(store, name)) or "none"
        raise StoreError(f"There is no channel {channel!r} of {name} in {store.config.uri}; its channels: {channels}.")
    return pointer


def find(store: ReleaseStore, name: str, channel: str) -> Pointer | None:
    """Read the pointer of a channel, None if it was never moved. Raises StoreError for a damaged pointer."""
    return _read_with_etag(store, name, channel)[0]


def list_all(store: ReleaseStore, name: str) -> list[Pointer]:
    """Read the pointers of all channels of a release name, sorted by channel; an empty list for an unknown name.

    Raises StoreError for a damaged pointer or when the server fails.
    """
    return [read(store, name, channel) for channel in _list_channels(store, name)]


def move(
    store: ReleaseStore,
    name: str,
    channel: str,
    version: str,
    *,
    who: str,
    why: str,
    expected: str | None,
    rollback: bool = False,
    prepare: Callable[[], None] = lambda: None,
) -> Pointer:
    """Point a channel at a published version; return the new pointer.

    `who` moves it, `why`, and whether it is a `rollback` become part of its history. `expected` is the version that the
    caller saw in the channel, None for a channel that does not exist yet. When the channel holds another version by
    now, nothing is written, and the StoreError says who moved it: of several callers that expect the same version
    exactly one succeeds. Readers see the old pointer or the new one. A channel that holds `version` already stays as it
    is. `prepare` is called when the channel is claimed and holds `expected`, before the pointer is written. Raises
    StoreError for a version that is not published, too.
    """
    key = channel_key(name, channel)
    if not store.has_release(name, version):
        store.get_release(name, version)  # its error names the versions that are published
    with claim(store, name, channel, who):
        before, etag = _read_with_etag(store, name, channel)
        current_version = before.version if before else None
        if current_version != expected:
            raise StoreError(_moved_meanwhile(name, channel, before, expected))
        prepare()
        if before is not None and current_version == version:
            return before
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        latest = Move(who, now, current_version, version, why, secrets.token_hex(8), rollback)
        after = Pointer(name, channel, version, (*(before.history if before else ()), latest))
        # A refusal is not an error here: when the answer to the first try of a request is lost, the server refuses the
        # second try because of the first. The pointer that is read back decides.
        store.objects.put_if_unchanged(key, _encode(after), etag)
        # After this time every server on the same storage shows the pointer; no other mover reads it earlier.
        time.sleep(SETTLE_SECONDS)
        pointer = find(store, name, channel)
        for _ in range(_MAX_LOOKS):
            if pointer != before:
                break
            time.sleep(SETTLE_SECONDS)
            pointer = find(store, name, channel)
        if pointer is None or latest not in pointer.history:
            raise StoreError(_moved_meanwhile(name, channel, pointer, expected))
        return after


@contextlib.contextmanager
def claim(store: ReleaseStore, name: str, channel: str, who: str) -> Iterator[None]:
    """Be the only one who moves a channel while the body runs, on servers that ignore `IfMatch` too (see `claims`).

    `who` is the name that a rival sees. The claim of a process of this machine that has ended is void at once. Raises
    StoreError when another process keeps the channel for longer than 15 seconds.
    """
    prefix = f"claims/{name}/@{channel}/"
    deadline = time.monotonic() + claims.PATIENCE_SECONDS
    own_claims: set[str] = set()
    content = f"{who}\n{claims.describe_process(os.getpid())}\n".encode()
    try:
        while True:
            own_claim = f"{prefix}{secrets.token_hex(8)}"
            own_claims.add(own_claim)
            claims.leave_claim(store.objects, own_claim, content, "claiming the channel")
            rivals = [each for each in claims.list_claims(store.objects, prefix) if each not in own_claims]
            abandoned = [each for each in rivals if claims.is_abandoned(store.objects.get(each) or b"")]
            claims.withdraw_claims(store.objects, abandoned)
            rivals = [each for each in rivals if each not in abandoned]
            if not rivals:
                break
            if time.monotonic() > deadline:
                rival = (store.objects.get(rivals[0]) or b"somebody else").decode(errors="replace").partition("\n")[0]
                raise StoreError(
                    f"The channel {name}@{channel} is being moved by {rival} ({store.objects.uri(rivals[0])}): try "
                    f"again, at the latest in {claims.LIFETIME.seconds // 60} minutes if that mover was killed."
                )
            # Earlier claims are withdrawn again: a busy rclone may confirm a deletion and not do it.
            claims.withdraw_claims(store.objects, own_claims)
            claims.pause_before_retry()
        yield
    finally:
        claims.withdraw_claims(store.objects, own_claims)


def _read_with_etag(store: ReleaseStore, name: str, channel: str) -> tuple[Pointer | None, str | None]:
    """The pointer and the entity tag of the object that was read, both None if there is none."""
    key = channel_key(name, channel)
    unreadable = absent = 0
    while absent < _MAX_LOOKS_FOR_ABSENT:
        try:
            answer = store.objects.get_with_etag(key)
            if answer is not None:
                content, etag = answer
                return _decode(content, name, channel), etag
            absent += 1
        except InterruptedReadError as error:
            unreadable += 1
            if unreadable == _MAX_LOOKS:
                raise StoreError(str(error)) from error
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            unreadable += 1
            if unreadable == _MAX_LOOKS:
                raise StoreError(f"{store.objects.uri(key)} is damaged ({error}): restore it from a backup.") from error
        time.sleep(SETTLE_SECONDS)
    return None, None


def _list_channels(store: ReleaseStore, name: str) -> list[str]:
    require_name("name", name)
    prefix = f"channels/{name}/"
    keys = (entry.key.removeprefix(prefix) for entry in store.objects.list_objects(prefix))
    return sorted(key.removesuffix(".json") for key in keys if key.endswith(".json") and "/" not in key)


def _moved_meanwhile(name: str, channel: str, pointer: Pointer | None, expected: str | None) -> str:
    """The message for a mover that expected another version in the channel."""
    expectation = f"at {expected}" if expected is not None else "new"
    if pointer is None:
        return f"The channel {name}@{channel} does not exist, and was expected {expectation}: move it as a new one."
    last = pointer.last_move
    return (
        f"The channel {name}@{channel} was expected {expectation}, but {last.who} moved it to {pointer.version} at "
        f"{last.when} ({last.why}): check whether it is still to be moved, then try again."
    )


def _encode(pointer: Pointer) -> bytes:
    document = {
        "format": FORMAT,
        "name": pointer.name,
        "channel": pointer.channel,
        "version": pointer.version,
        "history": [
            {
                "who": move.who,
                "when": move.when,
                "from": move.from_version,
                "to": move.to_version,
                "why": move.why,
                "id": move.id,
                **({"rollback": True} if move.rollback else {}),
            }
            for move in pointer.history
        ],
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _decode(content: bytes, name: str, channel: str) -> Pointer:
    """Read a pointer.

    Raises StoreError for another format, and one of Python's own errors for a document that is no pointer of this
    channel.
    """
    document = json.loads(content)
    if document["format"] != FORMAT:
        raise StoreError(
            f"The channel {name}@{channel} has format {document['format']!r}, this tvmflow reads {FORMAT}; "
            "upgrade tvmflow."
        )
    history = tuple(_decode_move(item) for item in document["history"])
    pointer = Pointer(document["name"], document["channel"], document["version"], history)
    if (pointer.name, pointer.channel, pointer.version) != (name, channel, history[-1].to_version):
        raise ValueError("it contradicts its own history or its place")
    return pointer


def _decode_move(item: dict[str, Any]) -> Move:
    who, when, to_version, why, number = (item[key] for key in ("who", "when", "to", "why", "id"))
    from_version, rollback = item["from"], item.get("rollback", False)
    texts = (who, when, to_version, why, number, "" if from_version is None else from_version)
    if not all(isinstance(text, str) for text in texts) or not isinstance(rollback, bool):
        raise TypeError("a move of its history has a value of the wrong type")
    for text in texts:
        text.encode()  # a lone surrogate, which JSON may hold, could not be written again
    return Move(who, when, from_version, to_version, why, number, rollback)
