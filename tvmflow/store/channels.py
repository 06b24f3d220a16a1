"""Channels: named pointers to releases, each with the history of its moves.

channels/<name>/<channel>.json        the pointer
claims/<name>/@<channel>/<nonce>      who is about to move it; short-lived
"""

import contextlib
import datetime
import json
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmflow.errors import StoreError
from tvmflow.store.client import explained
from tvmflow.store.releases import _CLAIM_LIFETIME, _SETTLES_SECONDS, ReleaseStore, _require_name

# Raised whenever a reader of the former number could misread a pointer of the new one.
FORMAT = 1
_PATIENCE_SECONDS = 15.0
# An embedded server on a folder that another one writes may for some milliseconds give the new content in the old
# length, or say that there is nothing; a busy one overlooks for up to a second what was just written.
_LOOKS = 20
_LOOKS_FOR_ABSENT = 5


@dataclass(frozen=True)
class Move:
    """One move of a channel: who moved it, when (UTC, ISO 8601), from which version (None: it is new) to which, why."""

    who: str
    when: str
    from_version: str | None
    to_version: str
    why: str
    id: str
    """Random, so that no two moves are the same."""
    rollback: bool = False
    """Whether it went back to what the channel held before."""


@dataclass(frozen=True)
class Pointer:
    """Where a channel points, and its moves, the oldest first."""

    name: str
    channel: str
    version: str
    history: tuple[Move, ...]

    @property
    def last_move(self) -> Move:
        """The move that brought it here."""
        return self.history[-1]

    def has_held(self, version: str) -> bool:
        """Whether the channel points at a version or ever did."""
        return any(move.to_version == version for move in self.history)

    @property
    def rollback_stack(self) -> tuple[str, ...]:
        """The versions that rollbacks go back through, the present one last: after 1, 2, 3 and one rollback 1, 2."""
        versions: list[str] = []
        for move in self.history:
            if move.rollback and move.to_version in versions:
                while versions[-1] != move.to_version:
                    versions.pop()
            else:
                versions.append(move.to_version)
        return tuple(versions)


def read(store: ReleaseStore, name: str, channel: str) -> Pointer:
    """The pointer of a channel; raises `StoreError` naming the channels there are when it is not among them."""
    pointer = find(store, name, channel)
    if pointer is None:
        known = ", ".join(_channels(store, name)) or "none"
        raise StoreError(f"There is no channel {channel!r} of {name} in {store.config.uri}; its channels: {known}.")
    return pointer


def find(store: ReleaseStore, name: str, channel: str) -> Pointer | None:
    """The pointer of a channel, None if it was never moved."""
    return _found(store, name, channel)[0]


def list_all(store: ReleaseStore, name: str) -> list[Pointer]:
    """The pointers of all channels of a name, sorted by channel."""
    return [read(store, name, channel) for channel in _channels(store, name)]


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

    `expected` is the version that the mover saw there, None for a channel that does not exist yet. When the channel
    points elsewhere by now nothing is written, and the `StoreError` says who moved it: of several movers that saw the
    same, exactly one wins. Readers see the old pointer or the new one. To move it where it is expected to be already
    writes nothing. `prepare` is called once it is certain that the mover is the only one and saw right, before the
    pointer is written.
    """
    key = _key(name, channel)
    if not store.has_release(name, version):
        store.get_release(name, version)  # says which versions there are
    with claim(store, name, channel, who):
        before, etag = _found(store, name, channel)
        current = before.version if before else None
        if current != expected:
            raise StoreError(_told(name, channel, before, expected))
        prepare()
        if before is not None and current == version:
            return before
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        latest = Move(who, now, current, version, why, secrets.token_hex(8), rollback)
        after = Pointer(name, channel, version, (*(before.history if before else ()), latest))
        _write(store, key, _to_json(after), etag)
        # By then every server on the same storage has seen it, and no other mover looks before.
        time.sleep(_SETTLES_SECONDS)
        found = find(store, name, channel)
        for _ in range(_LOOKS):
            if found != before:
                break
            time.sleep(_SETTLES_SECONDS)
            found = find(store, name, channel)
        if found is None or latest not in found.history:
            raise StoreError(_told(name, channel, found, expected))
        return after


@contextlib.contextmanager
def claim(store: ReleaseStore, name: str, channel: str, who: str) -> Iterator[None]:
    """Be the only mover of a channel while the body runs: the protocol of `ReleaseStore._write_once`.

    `IfMatch` alone would do, but some servers ignore it. So each mover leaves a claim and then looks for those of
    others: the later of two is bound to see the other's. Whoever sees one withdraws and tries again after a random
    pause. A claim left behind by a crash is void after fifteen minutes, on the machine of the crash at once.
    """
    prefix = f"claims/{name}/@{channel}/"
    deadline = time.monotonic() + _PATIENCE_SECONDS
    mine: set[str] = set()
    try:
        while True:
            claim = f"{prefix}{secrets.token_hex(8)}"
            mine.add(claim)
            store._put(claim, f"{who}\n{_process(os.getpid())}\n".encode(), "claiming the channel")
            time.sleep(_SETTLES_SECONDS)
            rivals = [other for other in store._live_claims(prefix) if other not in mine]
            dead = [other for other in rivals if _abandoned(store._get(other) or b"")]
            store._withdraw(dead)
            if len(dead) == len(rivals):
                break
            rivals = [other for other in rivals if other not in dead]
            if time.monotonic() > deadline:
                rival = (store._get(rivals[0]) or b"somebody else").decode(errors="replace").partition("\n")[0]
                raise StoreError(
                    f"The channel {name}@{channel} is being moved by {rival} ({store._uri(rivals[0])}): try again, at "
                    f"the latest in {_CLAIM_LIFETIME.seconds // 60} minutes if that mover was killed."
                )
            # All of them: a busy rclone may answer a deletion and not do it.
            store._withdraw(mine)
            time.sleep(random.uniform(0.05, 0.5))  # noqa: S311 - not for secrets, only to part the rivals
        yield
    finally:
        store._withdraw(mine)


def _process(number: int) -> str:
    """A process of this machine, in words that no other process ever has; empty when there is none of that number."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = Path("/proc/self/ns/pid").readlink()
        state, *rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{machine} {numbers} {number} {rest[18]}"


def _abandoned(claim: bytes) -> bool:
    """Whether a claim is of a process of this machine that is gone."""
    _, _, claimant = claim.decode(errors="replace").strip().rpartition("\n")
    parts, mine = claimant.split(), _process(os.getpid()).split()
    return len(parts) == 4 and parts[:2] == mine[:2] and parts[2].isdecimal() and _process(int(parts[2])) != claimant


def _write(store: ReleaseStore, key: str, content: bytes, etag: str | None) -> None:
    """Write the pointer if it is still what was read, as far as the server honours conditions.

    A refusal is not an error here: when the first of two tries of a request was lost on its way back, the second is
    refused for the first. What stands there afterwards decides.
    """
    from botocore.exceptions import ClientError

    condition: Any = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
    with explained(store.config, f"writing {key}"):
        try:
            store._s3.put_object(
                Bucket=store.config.bucket,
                Key=store._key(key),
                Body=content,
                ContentType="application/json",
                **condition,
            )
        except ClientError as error:
            match error.response.get("ResponseMetadata", {}).get("HTTPStatusCode"):
                case 409 | 412:
                    return
                case 501:
                    # The server does not know the condition; the claim has to do.
                    store._put(key, content, f"writing {key}")
                case _:
                    raise


def _found(store: ReleaseStore, name: str, channel: str) -> tuple[Pointer | None, str | None]:
    """The pointer and the entity tag of what was read, both None if there is none."""
    from botocore.exceptions import IncompleteReadError, ResponseStreamingError

    key = _key(name, channel)
    unreadable = absent = 0
    while absent < _LOOKS_FOR_ABSENT:
        with explained(store.config, f"reading {key}"):
            try:
                answer = store._s3.get_object(Bucket=store.config.bucket, Key=store._key(key))
                with contextlib.closing(answer["Body"]) as body:
                    return _from_json(body.read(), name, channel), answer["ETag"]
            except store._s3.exceptions.NoSuchKey:
                absent += 1
            except (IncompleteReadError, ResponseStreamingError):
                unreadable += 1
                if unreadable == _LOOKS:
                    raise
            except (ValueError, KeyError, TypeError, IndexError) as error:
                unreadable += 1
                if unreadable == _LOOKS:
                    raise StoreError(f"{store._uri(key)} is damaged ({error}): restore it from a backup.") from error
        time.sleep(_SETTLES_SECONDS)
    return None, None


def _channels(store: ReleaseStore, name: str) -> list[str]:
    _require_name("name", name)
    prefix = f"channels/{name}/"
    keys = (key.removeprefix(prefix) for key, _ in store._list(prefix))
    return sorted(key.removesuffix(".json") for key in keys if key.endswith(".json") and "/" not in key)


def _key(name: str, channel: str) -> str:
    _require_name("name", name)
    _require_name("channel", channel)
    return f"channels/{name}/{channel}.json"


def _told(name: str, channel: str, found: Pointer | None, expected: str | None) -> str:
    wanted = f"at {expected}" if expected is not None else "new"
    if found is None:
        return f"The channel {name}@{channel} does not exist, and was expected {wanted}: move it as a new one."
    last = found.last_move
    return (
        f"The channel {name}@{channel} was expected {wanted}, but {last.who} moved it to {found.version} at "
        f"{last.when} ({last.why}): look whether your move is still wanted."
    )


def _to_json(pointer: Pointer) -> bytes:
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


def _from_json(content: bytes, name: str, channel: str) -> Pointer:
    document = json.loads(content)
    if document["format"] != FORMAT:
        raise StoreError(
            f"The channel {name}@{channel} has format {document['format']!r}, this tvmflow reads {FORMAT}; "
            "upgrade tvmflow."
        )
    history = tuple(
        Move(item["who"], item["when"], item["from"], item["to"], item["why"], item["id"], item.get("rollback", False))
        for item in document["history"]
    )
    pointer = Pointer(document["name"], document["channel"], document["version"], history)
    if (pointer.name, pointer.channel, pointer.version) != (name, channel, history[-1].to_version):
        raise ValueError("it contradicts its own history or its place")
    return pointer
