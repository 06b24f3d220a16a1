"""Objects of every backend; the shared workspace and shared tuning records on a server that honours conditions."""

import errno
import fcntl
import hashlib
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders

from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig, blobs, s3
from tvmflow.store.backends import open_objects
from tvmflow.store.blobs import BlobStore
from tvmflow.store.objects import ObjectStore
from tvmflow.store.records import RecordObjects
from tvmflow.store.work import WorkStore

WriteFile = Callable[[bytes], tuple[Path, str]]
MIB = 2**20


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("_", "-").split("[")[0]


@pytest.fixture
def store(moto_server: StoreConfig, prefix: str) -> ReleaseStore:
    return ReleaseStore(replace(moto_server, prefix=prefix))


@pytest.fixture(params=["folder", "server", "locked server", "real server"])
def objects(request: pytest.FixtureRequest, moto_server: StoreConfig, prefix: str, tmp_path: Path) -> ObjectStore:
    """A folder, servers that honour conditions, moto's and SeaweedFS, and one that this machine alone writes to."""
    each: ObjectStore
    if request.param == "folder":
        each = open_objects(StoreConfig("releases", prefix, folder=tmp_path / "s3" / "releases"))
    elif request.param == "real server":
        each = open_objects(replace(request.getfixturevalue("seaweedfs_server"), prefix=prefix))
    else:
        lock = tmp_path / "lock" if request.param == "locked server" else None
        each = open_objects(replace(moto_server, prefix=f"{prefix}-{request.param[:6]}", lock=lock))
    each.prepare()
    return each


def test_a_conditional_write_succeeds_only_for_what_was_read(objects: ObjectStore) -> None:
    assert objects.read("a/b") is None
    assert objects.create("a/b", b"1")
    assert not objects.create("a/b", b"2")
    assert objects.create("a/b", b"1")
    first = objects.read("a/b")
    assert first is not None
    assert first.content == b"1"
    assert objects.replace("a/b", b"2", first.tag)
    assert not objects.replace("a/b", b"3", first.tag)
    assert objects.get("a/b") == b"2"
    objects.delete("a/b", "deleting")
    assert not objects.replace("a/b", b"4", first.tag)
    assert objects.read("a/b") is None


# Moto's server looks and writes in two steps, between which another of its threads may write.
@pytest.mark.parametrize("objects", ["folder", "locked server", "real server"], indirect=True)
def test_of_several_who_write_at_once_exactly_one_succeeds_each_time(objects: ObjectStore) -> None:
    writers = 4
    start = threading.Barrier(writers)

    def count_up(writer: int) -> int:
        """Add one to the number in the object until it is 12; return how often this writer did."""
        start.wait()
        wins = int(objects.create("n", b"0 %d" % writer))
        while True:
            entry = objects.read("n")
            assert entry is not None
            number = int(entry.content.split()[0])
            if number == 12:
                return wins
            wins += objects.replace("n", b"%d %d" % (number + 1, writer), entry.tag)

    with ThreadPoolExecutor(writers) as pool:
        assert sum(pool.map(count_up, range(writers))) == 13


def test_objects_of_any_backend_are_listed_streamed_and_deleted(objects: ObjectStore) -> None:
    assert list(objects.list_objects("a/")) == []
    for key, content in (("a/1", b"x"), ("a/2/3", b"xx"), ("b", b"")):
        objects.put(key, content, "writing")
    objects.put_in_parts("a/4", iter([b"x" * 5 * MIB, b"y"]), "writing")
    assert [(entry.key, entry.size) for entry in objects.list_objects("a/")] == [
        ("a/1", 1), ("a/2/3", 2), ("a/4", 5 * MIB + 1),
    ]  # fmt: skip
    assert [entry.key for entry in objects.list_objects("a/2")] == ["a/2/3"]
    assert [entry.key for entry in objects.list_objects("")] == ["a/1", "a/2/3", "a/4", "b"]
    assert all(entry.last_modified.tzinfo is not None for entry in objects.list_objects(""))
    chunks: list[bytes] = []
    assert objects.stream("a/4", chunks.append) == hashlib.sha256(b"x" * 5 * MIB + b"y").hexdigest()
    assert len(chunks) > 1
    assert objects.stream("absent/object", chunks.append) is None
    for _ in range(2):
        objects.delete("b", "deleting")
    assert objects.get("b") is None


def test_parts_that_fail_leave_nothing(objects: ObjectStore) -> None:
    def fail() -> Iterator[bytes]:
        yield b"x" * 5 * MIB
        raise StoreError("the file changed")

    with pytest.raises(StoreError, match="the file changed"):
        objects.put_in_parts("a", fail(), "writing")
    assert list(objects.list_objects("")) == []


def test_a_folder_shows_whole_objects_alone(tmp_path: Path) -> None:
    folder = tmp_path / "s3" / "releases"
    objects = open_objects(StoreConfig("releases", folder=folder))
    objects.prepare()

    def look() -> Iterator[bytes]:
        yield b"half"
        assert objects.get("a") == b"before"
        yield b" whole"

    objects.put("a", b"before", "writing")
    objects.put_in_parts("a", look(), "writing")
    assert objects.get("a") == b"half whole"
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert not list(tmp_path.rglob(".partial-*"))


def test_a_write_to_a_folder_is_on_the_disk_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content before its name, each new folder in the one above it, and a name that is gone."""
    folder = tmp_path / "s3" / "releases"
    objects = open_objects(StoreConfig("releases", folder=folder))
    synced: list[str] = []

    def record(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        listing = "".join(sorted(entry.name for entry in place.iterdir())) if place.is_dir() else "content"
        synced.append(f"{place.name}: {listing}")
        if place.is_dir():
            raise OSError(errno.EINVAL, "a file system that cannot sync folders")

    monkeypatch.setattr(os, "fsync", record)

    def take() -> list[str]:
        places = [re.sub(r"^\.partial-\w+", "partial", place) for place in synced]
        synced.clear()
        return places

    objects.prepare()
    assert take() == ["s3: releases", f"{tmp_path.name}: s3"]
    objects.put("a/b/c", b"1", "writing")
    assert take() == ["a: b", "releases: a", "partial: content", "b: c"]
    objects.put_in_parts("a/b/d", [b"1", b"2"], "writing")
    assert take() == ["partial: content", "b: cd"]
    assert objects.create("a/b/e", b"1")
    assert take() == ["partial: content", "b: cde"]
    objects.delete("a/b/d", "deleting")
    assert take() == ["b: ce"]


def test_a_folder_on_a_file_system_without_locks_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StoreError, match=r"lock .*\.releases\.lock cannot be taken: No locks available"):
        open_objects(StoreConfig("releases", folder=tmp_path / "s3" / "releases")).create("a", b"1")


def test_a_folder_whose_disk_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects(StoreConfig("releases", folder=tmp_path / "s3" / "releases"))
    objects.prepare()

    def fail(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="cannot be used while writing: Input/output error"):
        objects.put("a", b"1", "writing")


def test_a_folder_whose_disk_is_full_is_one_sentence(tmp_path: Path) -> None:
    """A lease on it is renewed again when there is space, too: its thread expects no other error than StoreError."""
    objects = open_objects(StoreConfig("releases", folder=tmp_path / "releases"))
    objects.prepare()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(StoreError, match="cannot be used while writing: File too large"):
            objects.put("a", b"1", "writing")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["releases"]


def test_a_folder_has_no_object_below_another(tmp_path: Path) -> None:
    objects = open_objects(StoreConfig("releases", folder=tmp_path / "s3" / "releases"))
    objects.prepare()
    objects.put("a", b"x", "writing")
    assert objects.read("a/b") is None
    assert objects.stream("a/b", pytest.fail) is None
    objects.delete("a/b", "deleting")
    assert objects.get("a") == b"x"


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    objects = open_objects(StoreConfig("releases", folder=tmp_path / "file" / "releases"))
    for act in (objects.prepare, lambda: objects.put("a", b"", "writing"), lambda: objects.create("a", b"")):
        with pytest.raises(StoreError, match="file"):
            act()


def test_objects_are_listed_below_a_prefix_with_their_sizes(store: ReleaseStore) -> None:
    for key, content in (("a/1", b"x"), ("a/2", b"xx"), ("b/1", b"")):
        store.objects.put(key, content, "writing")
    assert [(entry.key, entry.size) for entry in store.objects.list_objects("a/")] == [("a/1", 1), ("a/2", 2)]
    store.objects.delete("a/1", "deleting")
    store.objects.delete("a/1", "deleting again")
    assert [entry.key for entry in store.objects.list_objects("")] == ["a/2", "b/1"]


def test_a_store_without_a_prefix_has_the_bucket_to_itself(moto_server: StoreConfig) -> None:
    whole = open_objects(replace(moto_server, bucket="whole-bucket"))
    whole.prepare()
    whole.put("a", b"1", "writing")
    assert whole.full_key("a") == "a"
    assert whole.uri("a") == "s3://whole-bucket/a"
    assert [entry.key for entry in whole.list_objects("")] == ["a"]


def test_a_file_of_more_than_the_most_parts_is_sent_in_larger_ones(
    store: ReleaseStore, write_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "MAX_PARTS", 2)
    path, digest = write_file(b"x" * (12 * MIB + 1))
    steps: list[int] = []
    blob_store = BlobStore(open_objects(replace(store.config, part_size=5 * MIB)))
    numbers: list[int] = []
    hooks: Any = blob_store._objects
    hooks.s3.meta.events.register(
        "before-parameter-build.s3.UploadPart", lambda params, **_: numbers.append(params["PartNumber"])
    )
    blob_store.put(path, digest, steps.append)
    assert steps == [6 * MIB + 1, 6 * MIB]
    assert numbers == [1, 2]
    assert blob_store.find_fault(digest, [12 * MIB + 1]) is None


@pytest.mark.parametrize(("beyond", "part_size"), [(0, 5 * MIB), (1, 5 * MIB + 1)])
def test_a_file_is_sent_in_ten_thousand_parts_at_most(
    store: ReleaseStore, tmp_path: Path, beyond: int, part_size: int
) -> None:
    size = 10_000 * 5 * MIB + beyond
    with (tmp_path / "large").open("w+b") as file:
        file.truncate(size)  # No block of it is on the disk.
        blob_store = BlobStore(open_objects(replace(store.config, part_size=5 * MIB)))
        first = next(blob_store._read_parts(file, tmp_path / "large", "0" * 64, size, lambda count: None))  # type: ignore[arg-type]
    assert len(first) == part_size


class _Body:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self) -> list[bytes]:
        return [self._content]


@pytest.mark.parametrize("status", [409, 412, 404])
def test_a_conditional_write_that_the_server_refuses_is_not_done(store: ReleaseStore, status: int) -> None:
    store.objects.require_conditions()
    _answer_conditions(store, status)
    assert not store.objects.create("a", b"1")
    assert not store.objects.replace("a", b"1", "tag")
    assert store.objects.get("a") is None


@pytest.mark.parametrize(("status", "words"), [(403, "Odd"), (400, "Odd"), (501, "s3_single_writer")])
def test_a_conditional_write_that_fails_is_an_error(store: ReleaseStore, status: int, words: str) -> None:
    store.objects.require_conditions()
    _answer_conditions(store, status)
    with pytest.raises(StoreError, match=words):
        store.objects.create("a", b"1")
    assert store.objects.get("a") is None


def test_a_write_whose_answer_was_lost_counts(store: ReleaseStore) -> None:
    """The server has done the first try of a request, and refuses the second because of it."""
    store.objects.require_conditions()
    store.objects.put("a", b"1", "the first try")
    assert store.objects.create("a", b"1")
    store.objects.put("a", b"2", "the first try")
    assert store.objects.replace("a", b"2", "the tag before")


def _answer_conditions(store: ReleaseStore, status: int) -> None:
    """Have the server of a store answer every conditional write with this status."""

    def answer(request: Any, **_: Any) -> Any:
        if not {"If-None-Match", "If-Match"} & set(request.headers.keys()):
            return None
        return AWSResponse(request.url, status, HTTPHeaders(), _Body(b"<Error><Code>Odd</Code></Error>"))

    hooks: Any = store.objects
    hooks.s3.meta.events.register("before-send.s3.PutObject", answer)


def test_the_check_leaves_small_objects_and_waits_no_longer_than_it_must(
    store: ReleaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[StoreConfig] = []
    connect = s3.connect

    def remember(config: StoreConfig) -> object:
        configs.append(config)
        return connect(config)

    monkeypatch.setattr(s3, "connect", remember)
    store.check()
    assert [entry.key for entry in store.objects.list_objects("")] == ["checks/conditions", "checks/writable"]
    ReleaseStore(replace(store.config, read_timeout=1.0, attempts=1)).check()
    assert [(config.read_timeout, config.attempts) for config in configs] == [(4.0, 2), (1.0, 1), (1.0, 1)]


def test_step_records_and_artifacts_are_shared_below_work(
    store: ReleaseStore, write_file: WriteFile, tmp_path: Path
) -> None:
    work = WorkStore(store)
    assert work.uri == f"{store.config.uri}/work"
    assert not work.has_record("build", "k")
    assert work.read_record("build", "k") is None
    work.write_record("build", "k", b"{}")
    assert work.has_record("build", "k")
    assert store.objects.get("work/steps/build/k.json") == b"{}"

    path, digest = write_file(b"an artifact")
    sizes: list[int] = []
    work.send(path, digest, sizes.append)
    assert sizes == [11]
    assert work.fetch(digest, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"an artifact"
    work.objects.put(f"blobs/sha256/{digest}", b"an artefact", "damaging it")
    assert not work.fetch(digest, tmp_path / "damaged")
    assert not work.fetch("0" * 64, tmp_path / "missing")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([path.name, "copy"])


def test_a_fetch_leaves_a_file_alone_that_it_did_not_write(local: StoreConfig, tmp_path: Path) -> None:
    place = tmp_path / "of somebody else"
    place.write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        WorkStore(ReleaseStore(local)).fetch("0" * 64, place)
    assert place.read_bytes() == b"theirs"


def test_an_artifact_that_cannot_be_fetched_leaves_no_file(moto_server: StoreConfig, tmp_path: Path) -> None:
    away = WorkStore(ReleaseStore(replace(moto_server, endpoint="http://127.0.0.1:1", attempts=1)))
    assert away.uri == f"s3://{moto_server.bucket}/work"
    with pytest.raises(StoreError):
        away.fetch("0" * 64, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_tuning_records_are_files_of_their_own(store: ReleaseStore) -> None:
    records = RecordObjects(store)
    assert records.uri == f"{store.config.uri}/records"
    records.write("context-run-1.jsonl", b"22\n")
    assert store.objects.get("records/context/run-1.jsonl") == b"22\n"
    assert records.sizes() == records.sizes("context") == {"context-run-1.jsonl": 3}
    assert records.sizes("cont") == {}
    assert records.read("context-run-1.jsonl") == b"22\n"
    records.remove("context-run-1.jsonl")
    records.remove("context-run-1.jsonl")
    assert records.read("context-run-1.jsonl") is None


def test_a_run_that_tunes_waits_less_for_its_records(store: ReleaseStore) -> None:
    patient = RecordObjects(store)._objects.config
    assert (patient.read_timeout, patient.attempts) == (10.0, 2)
    hasty = RecordObjects(ReleaseStore(replace(store.config, read_timeout=1.0, attempts=1)))._objects.config
    assert (hasty.read_timeout, hasty.attempts) == (1.0, 1)
