"""Channels: a pointer that moves atomically, keeps its history and lets one of several movers win."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders

from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig, channels, claims
from tvmflow.store.embedded import embedded_s3

Damage = Callable[[str, bytes | None], None]
MOVERS = 5
MOVES = 20


def _publish(store: ReleaseStore, *versions: str) -> None:
    for version in versions:
        store.publish("resnet", version, {"version": version}, [])


def _move(store: ReleaseStore, version: str, expected: str | None, who: str = "ann", why: str = "test") -> Any:
    return channels.move(store, "resnet", "production", version, who=who, why=why, expected=expected)


def test_a_moved_channel_is_read_with_its_history(store: ReleaseStore) -> None:
    _publish(store, "1", "2")
    _move(store, "1", None, "ann", "first")
    moved = _move(store, "2", "1", "bert", "schöner")
    pointer = channels.read(store, "resnet", "production")
    assert pointer == moved
    assert (pointer.version, pointer.last_move) == ("2", pointer.history[1])
    moves = [(move.who, move.from_version, move.to_version, move.why) for move in pointer.history]
    assert moves == [("ann", None, "1", "first"), ("bert", "1", "2", "schöner")]
    assert pointer.history[0].when <= pointer.history[1].when


def test_the_pointer_is_readable_json_and_no_claim_is_left(rclone: StoreConfig, rclone_folder: Path) -> None:
    store = ReleaseStore(rclone)
    _publish(store, "1")
    _move(store, "1", None)
    document = json.loads((rclone_folder / "channels" / "resnet" / "production.json").read_text())
    assert document["version"] == "1"
    assert document["history"][0].keys() == {"who", "when", "from", "to", "why", "id"}
    assert not [path for path in (rclone_folder / "claims").rglob("*") if path.is_file()]


def test_an_unknown_channel_is_refused_with_those_there_are(store: ReleaseStore) -> None:
    _publish(store, "1")
    _move(store, "1", None)
    assert channels.find(store, "resnet", "staging") is None
    with pytest.raises(StoreError, match=r"no channel 'staging' of resnet in .*; its channels: production\."):
        channels.read(store, "resnet", "staging")


def test_the_channels_of_a_name_are_listed(store: ReleaseStore) -> None:
    _publish(store, "1")
    assert channels.list_all(store, "resnet") == []
    for channel in ("staging", "production"):
        channels.move(store, "resnet", channel, "1", who="ann", why="test", expected=None)
    assert [pointer.channel for pointer in channels.list_all(store, "resnet")] == ["production", "staging"]
    assert channels.list_all(store, "res") == []


def test_a_channel_does_not_move_to_a_version_that_is_not_released(store: ReleaseStore) -> None:
    _publish(store, "1")
    with pytest.raises(StoreError, match=r"no release resnet 2 .*published versions: 1"):
        _move(store, "2", None)
    assert channels.find(store, "resnet", "production") is None


@pytest.mark.parametrize("expected", [None, "2"])
def test_a_mover_with_an_outdated_pointer_learns_who_moved(store: ReleaseStore, expected: str | None) -> None:
    _publish(store, "1", "2", "3")
    before = _move(store, "1", None, "ann", "first")
    with pytest.raises(StoreError, match=r"but ann moved it to 1 at .* \(first\)"):
        _move(store, "3", expected, "bert")
    assert channels.read(store, "resnet", "production") == before


def test_a_channel_that_is_gone_is_not_moved_from_where_it_was(store: ReleaseStore) -> None:
    _publish(store, "1", "2")
    with pytest.raises(StoreError, match="does not exist, and was expected at 1"):
        _move(store, "2", "1")


def test_moving_to_where_it_is_writes_nothing(store: ReleaseStore) -> None:
    _publish(store, "1")
    before = _move(store, "1", None)
    assert _move(store, "1", "1") == before
    assert channels.read(store, "resnet", "production") == before


def test_one_of_several_racing_threads_wins_and_the_others_learn_which(store: ReleaseStore) -> None:
    versions = [str(number) for number in range(MOVERS + 1)]
    _publish(store, *versions)
    _move(store, "0", None)
    start = threading.Barrier(MOVERS)

    def move(version: str) -> str | None:
        start.wait()
        try:
            _move(store, version, "0", f"mover {version}")
        except StoreError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(MOVERS) as pool:
        outcomes = dict(zip(versions[1:], pool.map(move, versions[1:]), strict=True))
    pointer = channels.read(store, "resnet", "production")
    assert [version for version, refusal in outcomes.items() if refusal is None] == [pointer.version]
    assert all(f"mover {pointer.version} moved it" in refusal for refusal in outcomes.values() if refusal is not None)
    assert len(pointer.history) == 2


INCREMENT = """
import json, sys
from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig, channels, claims
store, won = ReleaseStore(StoreConfig(**json.loads(sys.argv[1]))), 0
while won < int(sys.argv[2]):
    seen = channels.read(store, "resnet", "production").version
    try:
        channels.move(store, "resnet", "production", str(int(seen) + 1), who="?", why="?", expected=seen)
        won += 1
    except StoreError as error:
        if "moved it to" not in str(error):
            raise
"""


def test_no_move_of_racing_processes_is_lost(rclone: StoreConfig) -> None:
    movers, rounds = 3, 2
    store = ReleaseStore(rclone)
    versions = [str(number) for number in range(movers * rounds + 1)]
    _publish(store, *versions)
    _move(store, "0", None)
    command = [sys.executable, "-c", INCREMENT, json.dumps(vars(rclone)), str(rounds)]
    running = [subprocess.Popen(command) for _ in range(movers)]
    assert [each.wait(120) for each in running] == [0] * movers
    assert [move.to_version for move in channels.read(store, "resnet", "production").history] == versions


def test_readers_through_another_server_see_the_old_pointer_or_the_new(tmp_path: Path) -> None:
    with embedded_s3(tmp_path, bucket="releases") as writing, embedded_s3(tmp_path, bucket="releases") as reading:
        writer, reader = ReleaseStore(writing), ReleaseStore(reading)
        _publish(writer, *(str(number) for number in range(MOVES + 1)))
        _move(writer, "0", None)
        finished, versions = threading.Event(), []

        def read() -> None:
            while not finished.is_set():
                versions.append(int(channels.read(reader, "resnet", "production").version))

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(read)
            try:
                for number in range(MOVES):
                    _move(writer, str(number + 1), str(number))
            finally:
                finished.set()
            running.result()
        assert versions == sorted(versions)
        assert len(set(versions)) > 2


def test_a_server_that_does_not_know_conditional_writes_is_served_too(moto_server: StoreConfig) -> None:
    store = ReleaseStore(StoreConfig(**{**vars(moto_server), "prefix": "channels-unconditional"}))
    _publish(store, "1", "2")
    refusal: list[str] = []

    def refuse_condition(request: Any, **_: Any) -> Any:
        if not {"If-None-Match", "If-Match"} & set(request.headers.keys()):
            return None
        refusal.append(request.url)
        return AWSResponse(request.url, 501, HTTPHeaders(), _Body(b"<Error><Code>NotImplemented</Code></Error>"))

    hooks: Any = store.objects.s3.meta.events
    hooks.register("before-send.s3.PutObject", refuse_condition)
    _move(store, "1", None)
    _move(store, "2", "1")
    assert len(refusal) == 2
    assert channels.read(store, "resnet", "production").version == "2"


class _Body:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self) -> list[bytes]:
        return [self._content]


def test_a_move_that_passes_the_claims_by_is_stopped_by_the_condition(moto_server: StoreConfig) -> None:
    """Another program overwrites the pointer between our read and our write: the server's If-Match decides."""
    store = ReleaseStore(StoreConfig(**{**vars(moto_server), "prefix": "channels-conditional"}))
    _publish(store, "1", "2", "3")
    before = _move(store, "1", None)
    foreign = channels._encode(
        channels.Pointer(
            "resnet",
            "production",
            "3",
            (*before.history, channels.Move("carl", "2026-01-01T00:00:00+00:00", "1", "3", "by hand", "00")),
        )
    )
    other = ReleaseStore(store.config)
    hooks: Any = store.objects.s3.meta.events

    def interfere(params: Any, **_: Any) -> None:
        if params["url_path"].endswith("production.json"):
            other.objects.put("channels/resnet/production.json", foreign, "interfering")

    hooks.register("before-call.s3.PutObject", interfere)
    with pytest.raises(StoreError, match="but carl moved it to 3"):
        _move(store, "2", "1")
    assert channels.read(store, "resnet", "production").version == "3"


def _leave_claim(folder: Path, age_seconds: float) -> None:
    """Leave the claim of a process that was killed before it moved the pointer."""
    claim = folder / "claims" / "resnet" / "@production" / "0123456789abcdef"
    claim.parent.mkdir(parents=True)
    claim.write_bytes(b"carl\n")
    os.utime(claim, (time.time() - age_seconds,) * 2)


def test_a_channel_that_another_mover_has_claimed_is_not_moved(
    rclone: StoreConfig, rclone_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.2)
    store = ReleaseStore(rclone)
    _publish(store, "1")
    _leave_claim(rclone_folder, age_seconds=60)
    with pytest.raises(StoreError, match="is being moved by carl"):
        _move(store, "1", None)
    assert channels.find(store, "resnet", "production") is None


def test_the_claim_of_a_mover_that_died_long_ago_is_void(rclone: StoreConfig, rclone_folder: Path) -> None:
    store = ReleaseStore(rclone)
    _publish(store, "1")
    _leave_claim(rclone_folder, age_seconds=3600)
    assert _move(store, "1", None).version == "1"


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b"{}", b'{"format": 1, "history": []}'], ids=["cut", "list", "empty", "bare"]
)
def test_a_damaged_pointer_is_refused(
    rclone: StoreConfig, damage: Damage, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_MAX_LOOKS", 2)
    store = ReleaseStore(rclone)
    _publish(store, "1")
    _move(store, "1", None)
    damage("channels/resnet/production.json", content)
    with pytest.raises(StoreError, match=r"production\.json is damaged"):
        channels.read(store, "resnet", "production")


def test_a_pointer_of_a_later_format_asks_for_an_upgrade(rclone: StoreConfig, damage: Damage) -> None:
    store = ReleaseStore(rclone)
    _publish(store, "1")
    _move(store, "1", None)
    damage("channels/resnet/production.json", b'{"format": 2}')
    with pytest.raises(StoreError, match=r"resnet@production has format 2.*upgrade"):
        channels.read(store, "resnet", "production")


@pytest.mark.parametrize("text", ["", "..", "a/b", "a b"])
def test_a_channel_that_is_no_plain_name_is_refused(moto_server: StoreConfig, text: str) -> None:
    with pytest.raises(StoreError, match=r"release channel .* is not valid"):
        channels.read(ReleaseStore(moto_server), "resnet", text)
