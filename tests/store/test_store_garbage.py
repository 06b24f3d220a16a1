"""Garbage of a release store: what anything refers to stays whole, the rest goes, at whatever moment it is killed."""

import datetime
import errno
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.releases import make_release, make_target
from support.waits import wait_until
from tvmflow.documents.release import Blob
from tvmflow.errors import StoreError
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig, channels, garbage, leases
from tvmflow.store.garbage import Garbage, Retention
from tvmflow.store.work import WorkStore

WriteFile = Callable[[bytes], tuple[Path, str]]
NEWEST = Retention(days=0, releases=1)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that were written a moment ago may go: an S3 server's clock cannot be set back."""
    monkeypatch.setattr(garbage, "_GRACE", datetime.timedelta(seconds=-60))


def never(model: str) -> tuple[str, ...]:
    """No alias names a version."""
    return ()


@pytest.fixture
def publish(store: ReleaseStore, write_file: WriteFile) -> Callable[..., str]:
    """Publishes a release of `resnet` with a bundle of its own and one that all share; returns its bundle's digest."""
    return lambda version: publish_to(store, version, write_file)


def publish_to(store: ReleaseStore, version: str, write_file: WriteFile) -> str:
    blobs = [write_file(f"bundle {version}".encode()), write_file(b"weights")]
    (bundle, weights) = (Blob(sha256=digest, size=path.stat().st_size) for path, digest in blobs)
    target = make_target(bundle=bundle, weights=weights)
    store.publish(make_release("resnet", version, target, model=f"models:/resnet/{version}"), blobs)
    return blobs[0][1]


def move(store: ReleaseStore, channel: str, *versions: str) -> None:
    """Move a channel to one version after the other."""
    for version in versions:
        document = channels.wish(store, "resnet", channel, version, who="ann", why="")
        assert document.wish is not None
        policy = document.policy or Policy()
        channels.grant(store, "resnet", channel, document.wish.id, why="", policy=policy)


def keys(store: ReleaseStore) -> set[str]:
    return {entry.key for entry in store.objects.list_objects("")}


def test_what_nobody_needs_goes_and_every_other_release_stays_whole(
    store: ReleaseStore, publish: Callable[[str], str], write_file: WriteFile
) -> None:
    digests = {str(version): publish(str(version)) for version in range(1, 10)}
    channels.set_policy(store, "resnet", "production", Policy(keep=2), who="ann", why="")
    move(store, "production", "1", "2", "3", "4")
    channels.wish(store, "resnet", "staging", "5", who="ann", why="")
    store.put_blob(*write_file(b"of a release that was never published"))
    store.objects.put("records/x/run.jsonl", b"{}", "writing tuning records")
    garbage = Garbage(store, NEWEST, lambda model: ["7"])

    planned = garbage.find()
    assert store.list_versions("resnet") == [*"123456789"]  # nothing goes in a dry run
    assert garbage.collect("ann") == planned
    assert {piece.kind: sum(item.kind == piece.kind for item in planned) for piece in planned} == {
        "releases": 4,
        "blobs": 5,
    }
    # Held, held before, wished for, named, newest.
    assert store.list_versions("resnet") == [*"34579"]
    for version in store.list_versions("resnet"):
        store.verify_release("resnet", version)
    blobs = {entry.key.rpartition("/")[2] for entry in store.objects.list_objects("blobs/")}
    assert blobs == {*(digests[version] for version in "34579"), hashlib.sha256(b"weights").hexdigest()}
    assert store.objects.get("records/x/run.jsonl") == b"{}"
    assert garbage.collect("ann") == []


def test_a_channel_keeps_what_its_rollbacks_return_to(store: ReleaseStore, publish: Callable[[str], str]) -> None:
    for version in range(1, 8):
        publish(str(version))
    channels.set_policy(store, "resnet", "production", Policy(keep=2), who="ann", why="")
    move(store, "production", *"12345")
    for _ in range(3):
        before = channels.read(store, "resnet", "production")
        channels.roll_back(store, before, before.rollback_stack[-2], who="ann", why="")
    Garbage(store, NEWEST, never).collect("ann")
    # It holds 2, held 3 before, and the next rollback returns to 1; 7 is the newest.
    assert store.list_versions("resnet") == [*"1237"]


@pytest.mark.parametrize(("rule", "versions"), [(Retention(1, 1), "123"), (Retention(0, 2), "23")])
def test_the_rule_keeps_young_releases_and_the_newest(
    store: ReleaseStore, publish: Callable[[str], str], rule: Retention, versions: str
) -> None:
    for version in "123":
        publish(version)
    Garbage(store, rule, never).collect("ann")
    assert store.list_versions("resnet") == [*versions]


def test_nothing_younger_than_a_day_goes(
    store: ReleaseStore, publish: Callable[[str], str], write_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for version in "12":
        publish(version)
    store.put_blob(*write_file(b"of an older tvmflow, which takes no lease"))
    assert Garbage(store, NEWEST, never).find() == []


# The second release stays, and what it needs is not known.
@pytest.mark.parametrize("content", [b"{", b""], ids=["half", "empty"])
@pytest.mark.parametrize(
    "key", ["channels/resnet/production", "releases/resnet/1/release", "releases/resnet/2/release"]
)
def test_nothing_goes_while_a_document_cannot_be_read(
    store: ReleaseStore, publish: Callable[[str], str], key: str, content: bytes
) -> None:
    for version in "12":
        publish(version)
    store.objects.put(f"{key}.json", content, "damaging a document")
    before = keys(store)
    with pytest.raises(StoreError, match="is damaged"):
        Garbage(store, NEWEST, never).collect("ann")
    assert keys(store) == before


@pytest.mark.parametrize("prefix", ["releases", "work", "releases/resnet", "blobs"])
def test_a_store_whose_prefix_is_a_folder_of_this_one_stays(
    local: StoreConfig, write_file: WriteFile, prefix: str
) -> None:
    inner = ReleaseStore(replace(local, prefix=f"{local.prefix}/{prefix}"))
    publish_to(inner, "1", write_file)
    move(inner, "production", "1")
    assert Garbage(ReleaseStore(local), NEWEST, never).find() == []


@pytest.mark.parametrize("folder", ["releases", "releases/resnet", "channels/resnet"])
def test_nothing_goes_while_a_folder_cannot_be_read(
    local: StoreConfig, local_folder: Path, write_file: WriteFile, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    store = ReleaseStore(local)
    for version in "12":
        publish_to(store, version, write_file)
    move(store, "production", "1")
    scan = os.scandir

    def fail(place: Any) -> Any:
        if Path(place) == local_folder / folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(StoreError, match=r"cannot be used while listing (releases|channels/resnet)/: Input/output"):
        Garbage(store, NEWEST, never).find()


def test_releases_of_a_folder_that_was_moved_to_another_disk_stay(
    local: StoreConfig, local_folder: Path, write_file: WriteFile, tmp_path: Path
) -> None:
    store = ReleaseStore(local)
    publish_to(store, "1", write_file)
    (local_folder / "releases" / "resnet").rename(tmp_path / "resnet")
    (local_folder / "releases" / "resnet").symlink_to(tmp_path / "resnet")
    assert Garbage(store, NEWEST, never).find() == []
    assert store.list_versions("resnet") == ["1"]


def test_a_release_whose_blobs_are_sent_before_its_document_is_waited_for(
    store: ReleaseStore, write_file: WriteFile, publish: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blob that it found in the store belongs to nobody until its document is there."""
    publish("1")
    publish("2")
    orphan = write_file(b"sent by a release that died")
    store.put_blob(*orphan)
    is_sent, may_go_on = threading.Event(), threading.Event()

    def publish_slowly() -> None:
        with leases.hold(store, "other", "bert") as lease:
            store.put_blob(*orphan)  # it is there already
            is_sent.set()
            may_go_on.wait(60)
            lease.require()
            store.publish(make_release("other", "1", make_target(sha256=orphan[1], size=orphan[0].stat().st_size)), [])

    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(publish_slowly)
        assert is_sent.wait(60)
        looks: list[str] = []
        read = store.objects.read
        monkeypatch.setattr(store.objects, "read", lambda key: (looks.append(key), read(key))[1])
        collecting = pool.submit(Garbage(store, NEWEST, never).collect, "ann")
        wait_until(lambda: looks.count("leases/other.json") > 1, 60)
        assert not collecting.done()
        # Others who publish do not wait for that.
        assert store.objects.get("sweep.json") is None
        may_go_on.set()
        publishing.result()
        assert [piece.kind for piece in collecting.result()] == ["releases", "blobs"]
    store.verify_release("other", "1")


def test_who_has_lost_its_lease_while_it_sent_blobs_writes_no_document(
    store: ReleaseStore, write_file: WriteFile
) -> None:
    """A process that was stopped for minutes may refer to blobs that are gone by now."""
    path, digest = write_file(b"bundle")
    release = make_release("resnet", "1", make_target(sha256=digest, size=6))

    def lose_lease(count: int) -> None:
        lease = json.loads(store.objects.get("leases/resnet.json") or b"")
        content = json.dumps({**lease, "number": lease["number"] + 1, "is_held": False}).encode()
        store.objects.put("leases/resnet.json", content, "taking the lease")

    with (
        leases.hold(store, "resnet", "ann") as lease,
        pytest.raises(StoreError, match="has lost the lease on the releases of resnet"),
    ):
        store.publish(release, [(path, digest)], lose_lease, lease.require)
    assert store.list_versions("resnet") == []


def test_a_release_that_begins_during_the_sweep_waits_for_its_end(
    store: ReleaseStore, publish: Callable[[str], str]
) -> None:
    with ThreadPoolExecutor(1) as pool:

        def begin() -> set[str]:
            with leases.hold(store, "resnet", "bert"):
                return keys(store)

        with leases.sweep(store, "ann"):
            begun = pool.submit(begin)
            wait_until(lambda: store.objects.get("leases/resnet.json") is not None, 60)
            store.objects.put("swept", b"", "marking the end of the sweep")
            assert not begun.done()
        assert "swept" in begun.result()


@pytest.mark.long
def test_a_release_comes_in_between_while_much_is_removed(
    local: StoreConfig, write_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refers to a blob that was about to go when it began to wait."""
    store = ReleaseStore(local)
    for version in range(1, 10):
        publish_to(store, str(version), write_file)
    orphan = write_file(b"of a release that died")
    store.put_blob(*orphan)
    # Each time one object is removed.
    monkeypatch.setattr(garbage, "_HOLD_SECONDS", 0.0)
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.1)
    delete, publishing = store.objects.delete, []

    def publish_between() -> int:
        with leases.hold(store, "other", "bert") as lease:
            rest = len(store.list_versions("resnet"))
            target = make_target(sha256=orphan[1], size=orphan[0].stat().st_size)
            store.publish(make_release("other", "1", target), [orphan], require_lease=lease.require)
        return rest

    with ThreadPoolExecutor(1) as pool:

        def delete_and_start(key: str, action: str) -> None:
            if not publishing:
                publishing.append(pool.submit(publish_between))
                wait_until(lambda: store.objects.get("leases/other.json") is not None, 60)
            delete(key, action)

        monkeypatch.setattr(store.objects, "delete", delete_and_start)
        pieces = Garbage(store, NEWEST, never).collect("ann")
        assert 1 < publishing[0].result() < 9
    assert len(pieces) == len({piece.key for piece in pieces}) == 16
    assert store.list_versions("resnet") == ["9"]
    for name, version in (("resnet", "9"), ("other", "1")):
        store.verify_release(name, version)


@pytest.mark.few(2)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_wish_during_the_sweep_keeps_its_release_or_ends(
    store: ReleaseStore, publish: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Of a wish that is made before the channels are read the release stays; one that comes later is withdrawn."""
    for version in "123":
        publish(version)
    move(store, "production", "3")
    list_kept_versions = garbage._list_kept_versions
    with ThreadPoolExecutor(1) as pool:
        wishes: list[Any] = []

        def wish() -> None:
            if store.objects.get("sweep.json") is not None:
                wishes.append(pool.submit(channels.wish, store, "resnet", "production", "1", who="bert", why=""))
                wait_until(lambda: channels.find(store, "resnet", "production").wish is not None, 60)

        def list_kept(each: ReleaseStore, name: str, versions: Any) -> set[str]:
            if moment == "before":
                wish()
            versions_to_keep = list_kept_versions(each, name, versions)
            if moment == "after":
                wish()
            return versions_to_keep

        monkeypatch.setattr(garbage, "_list_kept_versions", list_kept)
        Garbage(store, NEWEST, never).collect("ann")
        (only_wish,) = wishes
        document = None
        if moment == "before":
            document = only_wish.result()
            assert document.wish.version == "1"
            store.verify_release("resnet", "1")
        else:
            with pytest.raises(StoreError, match="There is no release resnet 1"):
                only_wish.result()
            document = channels.read(store, "resnet", "production")
            assert document.wish is None
            assert document.history[-1].outcome == "withdrawn"
    assert document.version == "3"
    assert store.list_versions("resnet") == (["1", "3"] if moment == "before" else ["3"])


def test_a_rollback_to_a_release_that_goes_is_undone(
    store: ReleaseStore, publish: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in "123":
        publish(version)
    channels.set_policy(store, "resnet", "production", Policy(keep=1), who="ann", why="")
    move(store, "production", *"123")
    before = channels.read(store, "resnet", "production")

    def remove(each: ReleaseStore) -> None:
        each.objects.delete("releases/resnet/1/release.json", "sweeping")

    monkeypatch.setattr(leases, "await_sweep", remove)
    with pytest.raises(StoreError, match="There is no release resnet 1"):
        channels.roll_back(store, before, "1", who="bert", why="")
    assert channels.read(store, "resnet", "production").version == "3"


@pytest.mark.parametrize(
    ("channel", "stays"), [("signed", "36"), ("altered", "123456"), ("unsigned", "123456"), ("held by nobody", "6")]
)
def test_a_channel_that_this_machine_would_not_follow_keeps_every_release(
    local: StoreConfig, key: Path, write_file: WriteFile, monkeypatch: pytest.MonkeyPatch, channel: str, stays: str
) -> None:
    """Somebody without the key could make a channel forget what it held, and gc would remove it."""
    store = ReleaseStore(local)
    signing = ReleaseStore(replace(local, signing_key=key))
    for version in "123456":
        publish_to(signing, version, write_file)
        signing.publish(make_release("bert", version), [])
    if channel != "held by nobody":
        writer = store if channel == "unsigned" else signing
        channels.set_policy(writer, "resnet", "production", Policy(keep=1), who="ann", why="")
        move(writer, "production", "3")
    if channel == "altered":
        document = json.loads(store.objects.get("channels/resnet/production.json") or b"")
        changed = json.dumps({**document, "version": "5", "history": [{**document["history"][-1], "to": "5"}]})
        store.objects.put("channels/resnet/production.json", changed.encode(), "altering a channel")
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", f"{key}.pub")
    Garbage(store, NEWEST, never).collect("ann")
    assert store.list_versions("resnet") == [*stays]
    for version in stays:
        store.verify_release("resnet", version)
    # Other models are collected all the same.
    assert store.list_versions("bert") == ["6"]


def collect_and_die(config: StoreConfig, count: int) -> int:
    """Collect garbage in a process that is killed when it has removed `count` objects; return its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            store = ReleaseStore(config)
            delete, done = store.objects.delete, list[str]()

            def die_after(key: str, action: str) -> None:
                if len(done) == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                done.append(key)
                delete(key, action)

            store.objects.delete = die_after
            Garbage(store, NEWEST, never).collect("killed")
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_at_any_moment_it_leaves_whole_releases_and_the_next_one_ends_it(
    store: ReleaseStore, publish: Callable[[str], str]
) -> None:
    for version in "1234":
        publish(version)
    store.objects.put("releases/resnet/1/statement.json", b"{}", "writing a statement")
    move(store, "production", "3")
    count = 1 if store.config.folder is not None else 3
    rest = len(Garbage(store, NEWEST, never).find())
    assert rest == 5
    while rest > count:
        assert collect_and_die(store.config, count) == -signal.SIGKILL
        rest -= count
        assert len(Garbage(store, NEWEST, never).find()) == rest
        assert {"3", "4"} <= set(store.list_versions("resnet"))
        for version in store.list_versions("resnet"):
            store.verify_release("resnet", version)
    Garbage(store, NEWEST, never).collect("ann")
    assert store.list_versions("resnet") == ["3", "4"]
    assert Garbage(store, NEWEST, never).find() == []


def test_unused_results_of_the_shared_workspace_go_and_used_ones_stay(
    store: ReleaseStore, write_file: WriteFile
) -> None:
    work = WorkStore(store)
    for name in ("used", "unused"):
        path, digest = write_file(name.encode())
        work.send(path, digest, lambda count: None)
        work.write_record("build", name, json.dumps({"sha256": digest}).encode())
    work.send(*write_file(b"of no record"), lambda count: None)
    # A run uses the workspace.
    assert Garbage(store, NEWEST, never).collect("ann") == []
    del work
    assert not [key for key in keys(store) if key.startswith("leases/work/")]
    pieces = Garbage(store, Retention(1, 1), never).collect("ann")
    assert [piece.kind for piece in pieces] == ["artifacts"]
    assert {piece.kind for piece in Garbage(store, NEWEST, never).collect("ann")} == {"results of steps", "artifacts"}
    assert not [key for key in keys(store) if key.startswith("work/")]


def test_a_result_that_is_used_again_is_young_again(local: StoreConfig, local_folder: Path) -> None:
    store = ReleaseStore(local)
    WorkStore(store).write_record("build", "used", b"{}")
    WorkStore(store).write_record("build", "unused", b"{}")
    for path in (local_folder / "work" / "steps" / "build").iterdir():
        os.utime(path, (time.time() - 40 * 86400,) * 2)
    assert WorkStore(store).has_record("build", "used")
    (piece,) = Garbage(store, Retention(30, 1), never).find()
    assert piece.key == "work/steps/build/unused.json"


def test_the_lease_of_a_run_that_died_on_another_machine_runs_out(store: ReleaseStore, write_file: WriteFile) -> None:
    WorkStore(store).send(*write_file(b"of no record"), lambda count: None)
    lease = {
        "format": 1, "name": "work/x", "number": 1, "beat": 0, "holder": "a run on elsewhere",
        "process": "other-start pid:[1] 12 34", "seconds": 0.2, "is_held": True,
    }  # fmt: skip
    store.objects.put("leases/work/x.json", json.dumps(lease).encode(), "planting a lease")
    assert [piece.kind for piece in Garbage(store, NEWEST, never).collect("ann")] == ["artifacts"]
    assert store.objects.get("leases/work/x.json") is None
