"""Pointers of channels: what they tell of their history, what damages them, and a server that shows an old one."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig, channels, claims
from tvmflow.store.channels import Move, Pointer
from tvmflow.store.objects import SETTLE_SECONDS, InterruptedReadError

MOVE = {"who": "ann", "when": "2026-01-01T00:00:00+00:00", "from": None, "to": "1", "why": "test", "id": "00"}
POINTER = {"format": 1, "name": "resnet", "channel": "production", "version": "1", "history": [MOVE]}


@pytest.fixture
def empty(moto_server: StoreConfig, request: pytest.FixtureRequest) -> ReleaseStore:
    """A store of the test alone, without a release."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower()).strip("-")
    return ReleaseStore(replace(moto_server, prefix=f"pointers/{name}"))


@pytest.fixture
def store(empty: ReleaseStore) -> ReleaseStore:
    """A store with the releases 1 and 2 of `resnet`."""
    for version in ("1", "2"):
        empty.objects.put(f"releases/resnet/{version}/release.json", b"{}", "planting a release")
    return empty


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, in seconds, that moving and reading channels makes."""
    made: list[float] = []
    monkeypatch.setattr(channels, "time", SimpleNamespace(sleep=made.append, monotonic=time.monotonic))
    return made


def _move(store: ReleaseStore, version: str, expected: str | None, *, rollback: bool = False) -> Pointer:
    return channels.move(
        store, "resnet", "production", version, who="ann", why="test", expected=expected, rollback=rollback
    )


def _put(store: ReleaseStore, document: object) -> None:
    store.objects.put("channels/resnet/production.json", json.dumps(document).encode(), "planting a pointer")


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
    history = tuple(Move("ann", "", None, text.lstrip("<"), "", "", text.startswith("<")) for text in moves.split())
    pointer = Pointer("resnet", "production", history[-1].to_version, history)
    assert pointer.rollback_stack == tuple(stack.split())
    assert pointer.last_move == history[-1]
    assert pointer.has_held("1")
    assert not pointer.has_held("8")
    assert not Move("ann", "", None, "1", "", "").rollback


def test_a_rollback_is_kept_in_the_history(store: ReleaseStore) -> None:
    _move(store, "1", None)
    _move(store, "2", "1")
    back = _move(store, "1", "2", rollback=True)
    assert [move.rollback for move in back.history] == [False, False, True]
    assert channels.read(store, "resnet", "production") == back
    content = store.objects.get("channels/resnet/production.json") or b""
    assert ["rollback" in move for move in json.loads(content)["history"]] == [False, False, True]


@pytest.mark.parametrize(
    "document",
    [
        [],
        {**POINTER, "history": []},
        {**POINTER, "history": [MOVE, {**MOVE, "to": "2"}]},
        {**POINTER, "name": "bert"},
        {**POINTER, "channel": "staging"},
        {**POINTER, "version": "2"},
        {**POINTER, "history": [{**MOVE, "who": 3}]},
        {**POINTER, "history": [{**MOVE, "from": 3}]},
        {**POINTER, "history": [{**MOVE, "rollback": "no"}]},
        {**POINTER, "history": [{**MOVE, "why": "\ud800"}]},
        {**POINTER, "history": [{"to": "1"}]},
    ],
)
def test_a_pointer_that_contradicts_itself_or_its_place_is_damaged(
    empty: ReleaseStore, pauses: list[float], document: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_MAX_LOOKS", 2)
    _put(empty, POINTER)
    assert channels.read(empty, "resnet", "production").version == "1"
    _put(empty, document)
    with pytest.raises(StoreError, match=r"production\.json is damaged"):
        channels.read(empty, "resnet", "production")
    assert set(pauses) == {SETTLE_SECONDS}


def test_a_pointer_nested_too_deep_is_damaged(empty: ReleaseStore, pauses: list[float]) -> None:
    empty.objects.put("channels/resnet/production.json", b"[" * 100_000, "planting a pointer")
    with pytest.raises(StoreError, match=r"production\.json is damaged"):
        channels.read(empty, "resnet", "production")
    assert pauses


@pytest.mark.parametrize("failures", [0, 2, 3])
def test_a_pointer_whose_sending_breaks_off_is_read_again_a_few_times(
    empty: ReleaseStore, pauses: list[float], monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    _put(empty, POINTER)
    monkeypatch.setattr(channels, "_MAX_LOOKS", 3)
    answer, looks = empty.objects.get_with_etag, []

    def break_off(key: str) -> Any:
        looks.append(key)
        if len(looks) <= failures:
            raise InterruptedReadError("the server broke off")
        return answer(key)

    monkeypatch.setattr(empty.objects, "get_with_etag", break_off)
    if failures < 3:
        assert channels.read(empty, "resnet", "production").version == "1"
        assert len(looks) == failures + 1
    else:
        with pytest.raises(StoreError, match="the server broke off"):
            channels.read(empty, "resnet", "production")
        assert len(looks) == 3


def test_an_absent_pointer_is_looked_for_several_times(empty: ReleaseStore, pauses: list[float]) -> None:
    assert channels.find(empty, "resnet", "production") is None
    assert len(pauses) == channels._MAX_LOOKS_FOR_ABSENT
    assert channels._MAX_LOOKS_FOR_ABSENT > 1


@pytest.mark.parametrize("stale_looks", [0, 2])
def test_a_server_that_still_shows_the_old_pointer_after_a_move_is_asked_again(
    store: ReleaseStore, pauses: list[float], monkeypatch: pytest.MonkeyPatch, stale_looks: int
) -> None:
    before = _move(store, "1", None)
    find, looks = channels.find, []

    def find_late(*place: Any) -> Pointer | None:
        looks.append(place)
        return before if len(looks) <= stale_looks else find(*place)

    monkeypatch.setattr(channels, "find", find_late)
    pauses.clear()
    assert _move(store, "2", "1").version == "2"
    assert len(looks) == stale_looks + 1
    assert pauses == [SETTLE_SECONDS] * (stale_looks + 1)


@pytest.mark.parametrize(("expected", "words"), [(None, "was expected new"), ("2", "was expected at 2")])
def test_a_refused_mover_learns_what_it_expected(store: ReleaseStore, expected: str | None, words: str) -> None:
    _move(store, "1", None)
    with pytest.raises(StoreError, match=rf"{words}, .* ann .* 1 at \d{{4}}-.* \(test\)"):
        _move(store, "2" if expected is None else "1", expected)


def test_the_claim_of_a_mover_that_was_killed_on_this_machine_is_void_at_once(
    store: ReleaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.0)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        content = f"carl\n{claims.describe_process(process.pid)}\n".encode()
        process.communicate(b"\n")
    store.objects.put("claims/resnet/@production/dead", content, "planting a claim")
    assert _move(store, "1", None).version == "1"
    assert list(store.objects.list_objects("claims/resnet/@production")) == []


def test_the_claim_of_a_mover_that_lives_is_respected(store: ReleaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.0)
    content = f"carl\n{claims.describe_process(os.getpid())}\n".encode()
    store.objects.put("claims/resnet/@production/alive", content, "planting a claim")
    with pytest.raises(StoreError, match=r"carl \(s3://.*/alive\)"):
        _move(store, "1", None)
    assert [entry.key for entry in store.objects.list_objects("claims/resnet/@")] == ["claims/resnet/@production/alive"]


def test_a_mover_waits_for_another_to_finish(store: ReleaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = "claims/resnet/@production/alive"
    store.objects.put(claim, f"carl\n{claims.describe_process(os.getpid())}\n".encode(), "planting a claim")
    waits: list[str] = []

    def finish() -> None:
        waits.append(claim)
        store.objects.delete(claim, "ending the other move")

    monkeypatch.setattr(claims, "pause_before_retry", finish)
    assert _move(store, "1", None).version == "1"
    assert waits == [claim]
