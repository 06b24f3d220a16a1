"""The document of a channel, channels/<name>/<channel>.json: what the channel holds, and its history.

`store.channels` reads and changes it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tvmflow.documents.encoding import Document, Reader
from tvmflow.spec import Policy
from tvmflow.store.statements import Claim, Envelope
from tvmflow.workspace import Record


class Event(Record):
    """An event in a channel's history: who made it, when (UTC, ISO 8601), and why; `id` is unique."""

    who: str
    when: str
    why: str
    id: str


class Move(Event):
    """A move of the channel to another release; `from_version` is None where it held nothing.

    A wish that is granted gives the move its id.
    """

    kind: Literal["move"] = "move"
    from_version: str | None = Field(alias="from")
    to_version: str = Field(alias="to")
    rollback: bool = False
    """Whether the move is a rollback, to a version that the channel held before."""


class PolicyChange(Event):
    """A change of the policy; `before` is None where the channel had none."""

    kind: Literal["policy"] = "policy"
    before: Policy | None
    after: Policy


class WishEnd(Event):
    """The end of a wish for `version` that was not granted; `id` is that of the wish, and `why` is the reason.

    `who` refused the wish, withdrew it, or made the newer wish or the rollback that supersedes it.
    """

    kind: Literal["wish"] = "wish"
    version: str
    outcome: Literal["refused", "superseded", "withdrawn"]


class Wish(Event):
    """The request of a person or a program that the channel hold `version`."""

    version: str


def _read_first(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 1: a pointer with its moves. Its alias, which moved first, was the wish."""
    moves = document.get("history")
    if not isinstance(moves, list) or not moves:
        raise ValueError("it has no history")
    fields = {key: document[key] for key in ("name", "channel", "version")}
    history = [{"kind": "move", **move} if isinstance(move, dict) else move for move in moves]
    return {**fields, "number": len(moves), "shown": document["version"], "history": history}


def _read_unsigned(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 2, which has no statement."""
    return {**document, "statement": None}


class ChannelClaim(Claim):
    """The version that a channel holds, its policy and the versions that it has held, the oldest first.

    `number` is the number of the channel's document with which the claim was signed. The claim is valid until `expires`
    (UTC, ISO 8601).
    """

    predicate_type = "urn:tvmflow:channel:1"
    name: str
    channel: str
    version: str | None
    policy: Policy | None
    held: tuple[str, ...]
    number: int
    expires: str


class Channel(Document):
    """A channel: the release `version` that it holds, its policy and its open wish, each None where there is none.

    `shown` is the version that the channel's alias in MLflow was last set to; after a move it is the earlier version
    until the alias is set. `number` grows with every change. `statement` is the signed ChannelClaim on the channel,
    None where no key signs.
    """

    older: ClassVar[Mapping[int, Reader]] = {1: _read_first, 2: _read_unsigned}

    format: Literal[3] = 3
    name: str
    channel: str
    number: int = 0
    policy: Policy | None = None
    wish: Wish | None = None
    version: str | None = None
    shown: str | None = None
    history: tuple[Annotated[Move | PolicyChange | WishEnd, Field(discriminator="kind")], ...] = ()
    statement: Envelope | None = None

    @property
    def signed_content(self) -> tuple[str | None, Policy | None, tuple[str, ...]]:
        """The content that a statement is about: the version, the policy, and all versions that the channel has held.

        The version is None where the channel holds no release, the policy None where it has none.
        """
        return self.version, self.policy, tuple(move.to_version for move in self.moves)

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "channel digits@production"."""
        return f"channel {self.name}@{self.channel}"

    @property
    def exists(self) -> bool:
        """Whether the channel was ever used."""
        return self.number > 0

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves, the oldest first."""
        return tuple(event for event in self.history if isinstance(event, Move))

    def has_held(self, version: str) -> bool:
        """Whether the channel holds a version or ever did."""
        return any(move.to_version == version for move in self.moves)

    def find_end(self, wish: str) -> Move | WishEnd | None:
        """Return how the wish of that id ended: the move that granted it, or another end; None while it is open."""
        ends = (event for event in self.history if isinstance(event, Move | WishEnd) and event.id == wish)
        return next(ends, None)

    @property
    def rollback_stack(self) -> tuple[str, ...]:
        """The versions that rollbacks can return to, the current one last: after 1, 2, 3 and one rollback, 1, 2."""
        versions: list[str] = []
        for move in self.moves:
            if move.rollback and move.to_version in versions:
                while versions[-1] != move.to_version:
                    versions.pop()
            else:
                versions.append(move.to_version)
        return tuple(versions)

    @property
    def kept_versions(self) -> frozenset[str]:
        """The versions whose releases must not be removed: the one held, the one wished for, and some earlier ones.

        With the policy's `keep` as n, these are the last n distinct versions that the channel moved to, and the last n
        of `rollback_stack`.
        """
        depth = (self.policy or Policy()).keep
        latest = list(dict.fromkeys(move.to_version for move in reversed(self.moves)))[:depth]
        versions = {*latest, *self.rollback_stack[-depth:], *([] if self.version is None else [self.version])}
        return frozenset(versions if self.wish is None else {*versions, self.wish.version})
