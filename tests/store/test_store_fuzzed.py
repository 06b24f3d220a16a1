"""Damaged documents in the store: a reader reads each, or names it in a StoreError.

A failing case prints its seed; `_case(SEED)` makes the same document again.
"""

import copy
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.releases import make_release
from support.scale import count
from tvmflow.cli.list import make_rows
from tvmflow.documents.encoding import decode, encode
from tvmflow.documents.release import Release
from tvmflow.errors import BundleError, StoreError
from tvmflow.report.drift import list_figures
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.store.records import RecordObjects
from tvmflow.store.resolve import TargetEntry

RELEASE: dict[str, Any] = json.loads((Path(__file__).parent / "formats" / "release-1.json").read_text())
MOVE = {"who": "ann", "when": "2026-01-01T00:00:00.000+00:00", "from": None, "to": "1", "why": "test", "id": "00"}
POINTER: dict[str, Any] = {
    "format": 1,
    "name": "resnet",
    "channel": "production",
    "version": "1",
    "history": [MOVE, {**MOVE, "from": "1", "to": "2"}, {**MOVE, "from": "2", "rollback": True}],
}
CHANNEL: dict[str, Any] = {
    **POINTER,
    "format": 2,
    "number": 7,
    "policy": {"after": "staging", "gates": {"max_latency_ms": 5.0}},
    "wish": {"who": "ann", "when": "", "why": "", "id": "01", "version": "2"},
    "shown": "1",
    "history": [
        {**MOVE, "kind": "move"},
        {"kind": "policy", "who": "ann", "when": "", "why": "", "id": "02", "before": None, "after": {}},
        {"kind": "wish", "who": "ann", "when": "", "why": "", "id": "03", "version": "2", "outcome": "refused"},
    ],
}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 10**400, 0.5, float("nan"), float("inf"), "", "1", "resnet", "../..", "a\n", "\0",
    "\ud800", "é" * 200, "models:/m/0", "f" * 64, "s3://b/blobs/sha256/" + "f" * 64, [], {}, [[]], [None],
    {"sha256": 7}, {"sha256": "short", "size": "8"}, {"host": "x"},
)  # fmt: skip


def _places(part: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to every value of a document."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [*([keys] if keys else []), *(place for key, value in items for place in _places(value, (*keys, key)))]


def _change(document: dict[str, Any], draw: random.Random) -> None:
    """Replace, delete or add one value."""
    *path, last = draw.choice(_places(document))
    part: Any = document
    for key in path:
        part = part[key]
    match draw.randrange(4):
        case 0:
            del part[last]
        case 1 if isinstance(part, dict):
            part[draw.choice(["sha256", "size", "format", "extra", "rollback"])] = draw.choice(VALUES)
        case _:
            part[last] = copy.deepcopy(draw.choice(VALUES))


def _case(seed: int, whole: dict[str, Any] = RELEASE) -> bytes:
    """A damaged spelling of a document: some values changed, then in half of the cases some bytes."""
    draw = random.Random(seed)  # noqa: S311 - to choose cases
    document = copy.deepcopy(whole)
    for _ in range(draw.randrange(4)):
        if _places(document):
            _change(document, draw)
    content = bytearray(json.dumps(document).encode())
    for _ in range(draw.choice([0, 0, 1, 3])):
        place = draw.randrange(len(content) + 1)
        match draw.randrange(3):
            case 0:
                del content[place:]
            case 1:
                content[place : place + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
            case 2:
                content[place : place + 1] = draw.choice([b"[" * 5000, b'{"a":' * 5000, b"\xff", b"9" * 5000])
    return bytes(content)


def test_a_damaged_release_document_is_read_or_named() -> None:
    uri = "s3://models/releases/digits/1/release.json"
    refusal = 0
    for seed in range(count(normal=250, long=100_000)):
        try:
            release = decode(Release, _case(seed), uri)
        except StoreError as error:
            refusal += 1
            if uri not in str(error):
                pytest.fail(f"seed {seed}: the document is not named: {error}")
            continue
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
        for entry in TargetEntry.read_all(release):
            with suppress(BundleError):
                entry.check_host()
        assert decode(Release, encode(release), uri) == release
        assert len(list(make_rows(release, ["staging"]))) == len(release.targets)
        assert {target for target, _ in list_figures([release])} == {target.target for target in release.targets}
    assert refusal > 0


def test_a_damaged_channel_is_read_or_named(tmp_path: Path) -> None:
    store = ReleaseStore(StoreConfig("releases", folder=tmp_path / "releases"))
    key, refusal = "channels/resnet/production.json", 0
    for seed in range(count(normal=120, long=20_000)):
        store.objects.put(key, _case(seed, (POINTER, CHANNEL)[seed % 2]), "planting a damaged channel")
        try:
            channel = channels.read(store, "resnet", "production")
            assert channel.moves[-1].to_version == channel.version == channel.rollback_stack[-1]
            assert channel.has_held(channel.version)
            channel.model_dump_json()
        except StoreError as error:
            refusal += 1
            if "production" not in str(error):
                pytest.fail(f"seed {seed}: the channel is not named: {error}")
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
    assert refusal > 0


def test_objects_with_foreign_names_are_passed_over(moto_server: StoreConfig) -> None:
    store = ReleaseStore(StoreConfig(**{**vars(moto_server), "prefix": "foreign"}))
    store.publish(make_release(), [])
    for key in (
        "releases/resnet/release.json",
        "releases/resnet/2/other.json",
        "releases/resnet/2/3/release.json",
        "releases/.hidden/1/release.json",
        "releases/resnet/-x/release.json",
        "channels/resnet/deep/production.json",
        "channels/resnet/production.txt",
        "records/no-folder.jsonl",
        "records/context/deep/run.jsonl",
        "records/context/run.jsonl",
        "records-elsewhere/context/run.jsonl",
        "work/records/run.jsonl",
    ):
        store.objects.put(key, b"x", "planting an object")
    assert store.list_names() == ["resnet"]
    assert store.list_versions("resnet") == ["1"]
    assert channels.list_all(store, "resnet") == []
    records = RecordObjects(store)
    assert records.sizes() == {"no-folder.jsonl": 1, "context-run.jsonl": 1}
    assert records.sizes("context") == {"context-run.jsonl": 1}
