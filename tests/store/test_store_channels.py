"""Channels: wishes of which the newest wins, moves, policies, their history, and documents of every format."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support.releases import make_release
from tvmflow.errors import StoreError
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.store.channel_document import Channel, Move, PolicyChange, WishEnd

Damage = Callable[[str, bytes | None], None]
FORMATS = Path(__file__).parent / "formats"
KEY = "channels/resnet/production.json"
OPEN = Policy()
WISHERS = 5


def _publish(store: ReleaseStore, *versions: str) -> None:
    for version in versions:
        store.publish(make_release("resnet", version), [])


def _wish(store: ReleaseStore, version: str, who: str = "ann", why: str = "test", id: str | None = None) -> Channel:
    return channels.wish(store, "resnet", "production", version, who=who, why=why, id=id)


def _grant(store: ReleaseStore, channel: Channel, policy: Policy = OPEN, **more: Any) -> Channel:
    assert channel.wish is not None
    why = channel.wish.why
    return channels.grant(store, "resnet", "production", channel.wish.id, why=why, policy=policy, **more)


def _move(store: ReleaseStore, version: str, who: str = "ann") -> Channel:
    return _grant(store, _wish(store, version, who))


def _find(store: ReleaseStore) -> Channel:
    return channels.find(store, "resnet", "production")


@pytest.fixture
def store(store: ReleaseStore) -> ReleaseStore:
    """A store with the releases 1, 2 and 3."""
    _publish(store, "1", "2", "3")
    return store


@pytest.fixture
def local_store(local: StoreConfig) -> ReleaseStore:
    """The same in a folder of this machine."""
    local_store = ReleaseStore(local)
    _publish(local_store, "1", "2", "3")
    return local_store


def test_who_relies_on_a_version_learns_who_has_moved_the_channel_from_it(local_store: ReleaseStore) -> None:
    _move(local_store, "1")
    channels.require_version(local_store, "resnet", "production", "1")
    _move(local_store, "2", "bert")
    with pytest.raises(StoreError, match="resnet@production was expected at 1, but bert moved it to 2"):
        channels.require_version(local_store, "resnet", "production", "1")


def test_a_granted_wish_moves_the_channel_and_is_in_its_history(store: ReleaseStore) -> None:
    document = _wish(store, "1", "ann", "first")
    assert document.version is None
    assert document.wish is not None
    assert (document.wish.version, document.wish.who, document.wish.why) == ("1", "ann", "first")
    assert _find(store) == document
    first = _grant(store, document)
    assert (first.version, first.wish, first.moves[-1].id) == ("1", None, document.wish.id)
    second = _move(store, "2", "bert")
    assert channels.read(store, "resnet", "production") == second
    moves = [(move.who, move.from_version, move.to_version, move.why) for move in second.moves]
    assert moves == [("ann", None, "1", "first"), ("bert", "1", "2", "test")]
    assert second.moves[0].when <= second.moves[1].when
    assert second.number == 4


def test_the_newest_wish_wins_and_an_older_one_ends_as_superseded(store: ReleaseStore) -> None:
    older = _wish(store, "1", "ann")
    newer = _wish(store, "2", "bert")
    after = _grant(store, older)
    assert (after.version, after.wish) == (None, newer.wish)
    assert older.wish is not None
    end = after.find_end(older.wish.id)
    assert isinstance(end, WishEnd)
    assert (end.version, end.outcome, end.who) == ("1", "superseded", "bert")
    assert "the wish for 2 of bert" in end.why
    assert _grant(store, newer).version == "2"


def test_a_wish_for_the_same_version_is_joined_and_keeps_its_person(store: ReleaseStore) -> None:
    first = _wish(store, "1", "ann")
    assert _wish(store, "1", "bert") == first
    assert first.number == _find(store).number


def test_the_person_of_an_open_wish_gives_it_a_reason_by_asking_again(store: ReleaseStore) -> None:
    first = _wish(store, "1", "ann", why="")
    assert first.wish is not None
    for who, why, reason in (("bert", "urgent", ""), ("ann", "faster", "faster"), ("ann", "", "faster")):
        assert _wish(store, "1", who, why).wish == first.wish.model_copy(update={"why": reason})
    assert _grant(store, _find(store)).moves[-1].why == "faster"


def test_a_wish_for_what_the_channel_holds_ends_an_open_one(store: ReleaseStore) -> None:
    _move(store, "1")
    before = _find(store)
    assert _wish(store, "1") == before
    open_wish = _wish(store, "2").wish
    after = _wish(store, "1", "carla")
    assert (after.version, after.wish) == ("1", None)
    assert open_wish is not None
    end = after.find_end(open_wish.id)
    assert isinstance(end, WishEnd)
    assert end.outcome == "superseded"


def test_the_id_of_an_open_wish_asks_for_no_other_version(store: ReleaseStore) -> None:
    first = _wish(store, "1", id="run-1")
    with pytest.raises(StoreError, match="run-1 on resnet@production asks for 1, not for 2"):
        _wish(store, "2", id="run-1")
    assert channels.find(store, "resnet", "production") == first


def test_a_wish_of_a_known_id_is_made_once(store: ReleaseStore) -> None:
    older = _wish(store, "1", id="run-1")
    assert _wish(store, "1", id="run-1") == older
    newer = _wish(store, "2", id="run-2")
    # The run of the older wish goes on after a suspension: its wish has ended and does not come back.
    assert _wish(store, "1", id="run-1") == newer
    after = _grant(store, newer)
    assert _wish(store, "2", id="run-2") == after


def test_a_grant_is_made_once(store: ReleaseStore) -> None:
    document = _wish(store, "1")
    after = _grant(store, document)
    assert _grant(store, document) == after


@pytest.mark.parametrize("outcome", ["refused", "withdrawn"])
def test_a_wish_that_is_not_granted_ends_with_who_and_why(store: ReleaseStore, outcome: Any) -> None:
    document = _wish(store, "1")
    assert document.wish is not None
    number = document.wish.id
    ended = channels.end_wish(store, "resnet", "production", number, outcome, who="gate", why="too slow")
    (end,) = ended.history
    assert isinstance(end, WishEnd)
    assert (end.version, end.outcome, end.who, end.why, end.id) == ("1", outcome, "gate", "too slow", number)
    assert (ended.version, ended.wish) == (None, None)
    assert channels.end_wish(store, "resnet", "production", number, outcome, who="gate", why="again") == ended
    assert _grant(store, document) == ended


def test_a_rollback_supersedes_an_open_wish(store: ReleaseStore) -> None:
    _move(store, "1")
    before = _move(store, "2")
    document = _wish(store, "3")
    back = channels.roll_back(store, before, "1", who="bert", why="slow")
    assert (back.version, back.wish, back.moves[-1].rollback) == ("1", None, True)
    after = _grant(store, document)
    assert after == back
    assert document.wish is not None
    end = after.find_end(document.wish.id)
    assert isinstance(end, WishEnd)
    assert "the rollback to 1 of bert" in end.why
    with pytest.raises(StoreError, match=r"was expected at 2, but bert moved it to 1 at .* \(slow\)"):
        channels.roll_back(store, before, "1", who="carla", why="late")
    assert channels.roll_back(store, back, "1", who="carla", why="again") == back


def test_a_policy_is_kept_with_who_changed_it_and_why(store: ReleaseStore) -> None:
    strict = Policy(approval="required")
    after = channels.set_policy(store, "resnet", "production", strict, who="ann", why="careful")
    assert (after.policy, after.version) == (strict, None)
    looser = channels.set_policy(store, "resnet", "production", OPEN, who="bert", why="fast")
    assert channels.set_policy(store, "resnet", "production", OPEN, who="bert", why="fast") == looser
    changes = [event for event in looser.history if isinstance(event, PolicyChange)]
    assert [(event.who, event.before, event.after, event.why) for event in changes] == [
        ("ann", None, strict, "careful"), ("bert", strict, OPEN, "fast"),
    ]  # fmt: skip
    assert _find(store) == looser


def test_a_policy_that_changes_while_a_release_is_checked_stops_its_move(store: ReleaseStore) -> None:
    channels.set_policy(store, "resnet", "production", OPEN, who="ann", why="")
    document = _wish(store, "1")
    channels.set_policy(store, "resnet", "production", Policy(signature="required"), who="bert", why="")
    with pytest.raises(StoreError, match=r"policy of resnet@production has changed while 1 was checked"):
        _grant(store, document)
    assert (_find(store).version, _find(store).wish) == (None, document.wish)


def test_a_channel_adopts_its_first_policy_with_a_move(store: ReleaseStore) -> None:
    proposed = Policy(after="staging")
    adoption = channels.make_policy_change(None, proposed, who="ann", why="proposed by resnet 1")
    after = _grant(store, _wish(store, "1"), proposed, adoption=adoption)
    assert after.policy == proposed
    assert [event.kind for event in after.history] == ["policy", "move"]


def test_the_alias_is_marked_for_the_version_that_the_channel_holds(store: ReleaseStore) -> None:
    moved = _move(store, "1")
    assert moved.shown is None
    assert channels.mark_shown(store, "resnet", "production", "2") == moved
    after = channels.mark_shown(store, "resnet", "production", "1")
    assert after.shown == "1"
    assert channels.mark_shown(store, "resnet", "production", "1") == after
    assert _move(store, "2").shown == "1"


@pytest.mark.parametrize(
    ("moves", "stack"),
    [
        ("1", "1"),
        ("1 2 3", "1 2 3"),
        ("1 2 3 <2", "1 2"),
        ("1 2 3 <1", "1"),
        ("1 2 3 <2 <1", "1"),
        ("1 2 <1 2", "1 2"),
        ("1 2 1", "1 2 1"),
        ("1 2 3 <9", "1 2 3 9"),
    ],
)
def test_rollbacks_go_back_through_what_the_channel_held(moves: str, stack: str) -> None:
    event = {"who": "ann", "when": "", "why": "", "id": "", "from": None}
    history = tuple(
        Move.model_validate({**event, "to": text.lstrip("<"), "rollback": text.startswith("<")})
        for text in moves.split()
    )
    channel = Channel(name="resnet", channel="production", version=history[-1].to_version, history=history)
    assert channel.rollback_stack == tuple(stack.split())
    assert channel.has_held("1")
    assert not channel.has_held("8")


def test_an_unknown_channel_is_refused_with_those_there_are(store: ReleaseStore) -> None:
    with pytest.raises(StoreError, match=r"its channels: none\."):
        channels.read(store, "resnet", "staging")
    _wish(store, "1")
    assert not channels.find(store, "resnet", "staging").exists
    with pytest.raises(StoreError, match=r"no channel 'staging' of resnet in .*; its channels: production\."):
        channels.read(store, "resnet", "staging")
    with pytest.raises(StoreError, match=r"resnet@production in .* holds nothing"):
        channels.read_version(store, "resnet", "production")
    _move(store, "1")
    assert channels.read_version(store, "resnet", "production") == "1"


def test_the_channels_of_a_name_are_listed(store: ReleaseStore) -> None:
    assert channels.list_all(store, "resnet") == []
    for channel in ("staging", "production"):
        channels.wish(store, "resnet", channel, "1", who="ann", why="test")
    for odd in ("staging copy.json", "._staging.json", ".json", "notes.txt", "old/staging.json"):
        store.objects.put(f"channels/resnet/{odd}", b"", "making a copy by hand")
    assert [item.channel for item in channels.list_all(store, "resnet")] == ["production", "staging"]
    assert channels.list_all(store, "res") == []


def test_a_version_that_is_not_released_cannot_be_wished_for(store: ReleaseStore) -> None:
    with pytest.raises(StoreError, match=r"no release resnet 9 .*published versions: 1, 2, 3"):
        _wish(store, "9")
    assert not _find(store).exists


def test_of_several_who_wish_at_once_one_is_last_and_all_others_are_superseded(store: ReleaseStore) -> None:
    versions = [str(number) for number in range(10, 10 + WISHERS)]
    _publish(store, *versions)
    start = threading.Barrier(WISHERS)

    def wish(version: str) -> Channel:
        start.wait()
        return _grant(store, _wish(store, version, f"wisher {version}"))

    with ThreadPoolExecutor(WISHERS) as pool:
        list(pool.map(wish, versions))
    last = _find(store)
    assert last.wish is None
    after = [move.to_version for move in last.moves]
    superseded = [event.version for event in last.history if isinstance(event, WishEnd)]
    assert sorted([*after, *superseded]) == versions
    assert last.version == after[-1]


COUNT_UP = """
import json, sys
from pathlib import Path
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.store.channel_document import Move
config = json.loads(sys.argv[1])
store = ReleaseStore(StoreConfig(**{**config, "folder": Path(config["folder"])}))
for _ in range(int(sys.argv[2])):
    while True:
        wished = channels.wish(store, "resnet", "production", sys.argv[3], who="?", why="?")
        if wished.wish is None:
            break
        number = wished.wish.id
        after = channels.grant(store, "resnet", "production", number, why="?", policy=Policy())
        if isinstance(after.find_end(number), Move):
            break
"""


def test_no_event_of_racing_processes_is_lost(local_store: ReleaseStore) -> None:
    rounds = 5
    config = json.dumps(asdict(local_store.config), default=str)
    running = [
        subprocess.Popen([sys.executable, "-c", COUNT_UP, config, str(rounds), version]) for version in ("1", "2", "3")
    ]
    assert [each.wait(120) for each in running] == [0, 0, 0]
    last = _find(local_store)
    assert last.number >= len(last.history)
    for before, after in zip(last.moves, last.moves[1:], strict=False):
        assert after.from_version == before.to_version
    assert len({event.id for event in last.history}) == len(last.history)


def test_readers_see_the_old_document_or_the_new(local_store: ReleaseStore) -> None:
    _move(local_store, "1")
    finished, numbers = threading.Event(), []

    def read() -> None:
        while not finished.is_set():
            numbers.append(_find(local_store).number)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(read)
        try:
            for number in range(40):
                _move(local_store, "231"[number % 3])
        finally:
            finished.set()
        running.result()
    assert numbers == sorted(numbers)


def test_a_write_between_reading_and_writing_is_not_lost(local_store: ReleaseStore) -> None:
    """Somebody else writes the document between our reading and our writing: ours is made again on theirs."""
    _move(local_store, "1")
    create_or_replace, interferences = local_store.objects.replace, []

    def interfere(key: str, content: bytes, tag: str) -> bool:
        if not interferences:
            interferences.append(key)
            _wish(ReleaseStore(local_store.config), "3", "carl")
        return create_or_replace(key, content, tag)

    local_store.objects.replace = interfere  # type: ignore[method-assign]
    after = _wish(local_store, "2", "ann")
    assert after.wish is not None
    assert after.wish.version == "2"
    assert [event.version for event in after.history if isinstance(event, WishEnd)] == ["3"]


def test_a_pointer_of_the_first_format_is_read_and_moved_on_without_loss(
    local_store: ReleaseStore, local_folder: Path
) -> None:
    content = (FORMATS / "channel-1.json").read_bytes()
    local_store.objects.put(KEY, content, "planting a pointer")
    old = channels.read(local_store, "resnet", "production")
    assert (old.version, old.shown, old.policy, old.wish, old.rollback_stack) == ("1", "1", None, None, ("1",))
    assert [(move.who, move.from_version, move.to_version, move.rollback) for move in old.moves] == [
        ("ann@host", None, "1", False), ("bert@host", "1", "2", False), ("ann@host", "2", "1", True),
    ]  # fmt: skip
    moved = _move(local_store, "3")
    assert moved.moves[:3] == old.moves
    document = json.loads((local_folder / KEY).read_text())
    assert (document["format"], document["version"], document["history"][1]["why"]) == (3, "3", "schöner")
    assert channels.read(local_store, "resnet", "production") == moved


def test_a_channel_of_the_second_format_is_read_and_moved_on_without_loss(
    local_store: ReleaseStore, local_folder: Path
) -> None:
    content = json.loads((FORMATS / "channel-2.json").read_bytes())
    local_store.objects.put(KEY, json.dumps(content).encode(), "planting a channel")
    old = channels.read(local_store, "resnet", "production")
    assert (old.version, old.shown, old.number, old.statement) == ("2", "2", content["number"], None)
    assert old.policy is not None
    assert (old.policy.signature, old.policy.gates.max_latency_ms) == ("required", 5)
    assert old.wish is not None
    moved = _grant(local_store, old, old.policy)
    assert moved.history[:3] == old.history
    document = json.loads((local_folder / KEY).read_text())
    assert (document["format"], document["version"], document["history"][0]["why"]) == (3, "3", "schöner")


EVENT = {"who": "ann", "when": "2026-01-01T00:00:00+00:00", "why": "test", "id": "00"}
MOVE = {**EVENT, "from": None, "to": "1"}
FIRST = {"format": 1, "name": "resnet", "channel": "production", "version": "1", "history": [MOVE]}
SECOND = {**FIRST, "format": 2, "number": 1, "history": [{**MOVE, "kind": "move"}]}
THIRD = {**SECOND, "format": 3}


@pytest.mark.parametrize("whole", [FIRST, SECOND, THIRD], ids=["format 1", "format 2", "format 3"])
@pytest.mark.parametrize(
    "change",
    [
        {"history": []},
        {"history": [MOVE, {**MOVE, "to": "2"}]},
        {"name": "bert"},
        {"channel": "staging"},
        {"version": "2"},
        {"history": [{**MOVE, "who": 3}]},
        {"history": [{**MOVE, "from": 3}]},
        {"history": [{**MOVE, "rollback": "no"}]},
        {"history": [{**MOVE, "why": "\ud800"}]},
        {"history": [{"to": "1"}]},
        {"history": [{**MOVE, "kind": "dance"}]},
        {"format": "1"},
        {"format": 0},
        {"format": None},
        {"format": [1]},
    ],
    ids=str,
)
def test_a_document_that_contradicts_itself_or_its_place_is_damaged(
    local_store: ReleaseStore, whole: dict[str, Any], change: dict[str, Any]
) -> None:
    local_store.objects.put(KEY, json.dumps(whole).encode(), "planting a channel")
    assert _find(local_store).version == "1"
    local_store.objects.put(KEY, json.dumps({**whole, **change}).encode(), "planting a channel")
    with pytest.raises(StoreError, match=r"production\.json is damaged"):
        _find(local_store)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"{}", b"", b"[" * 100_000, b"\xff"], ids=range(6))
def test_what_is_no_document_is_damaged(local_store: ReleaseStore, damage: Damage, content: bytes) -> None:
    _move(local_store, "1")
    damage(KEY, content)
    with pytest.raises(StoreError, match=r"production\.json is damaged"):
        _find(local_store)


def test_a_document_of_a_later_format_asks_for_an_upgrade(local_store: ReleaseStore) -> None:
    local_store.objects.put(KEY, b'{"format": 4}', "planting a channel")
    with pytest.raises(StoreError, match=r"production\.json has format 4, .* reads up to 3; upgrade"):
        _find(local_store)


@pytest.mark.parametrize("text", ["", "..", "a/b", "a b"])
def test_a_channel_that_is_no_plain_name_is_refused(local_store: ReleaseStore, text: str) -> None:
    with pytest.raises(StoreError, match=r"release channel .* is not valid"):
        channels.read(local_store, "resnet", text)


def test_a_channel_with_the_name_of_an_asking_alias_is_refused(local_store: ReleaseStore) -> None:
    with pytest.raises(StoreError, match="'production-wanted' ends in -wanted"):
        channels.wish(local_store, "resnet", "production-wanted", "1", who="ann", why="")
