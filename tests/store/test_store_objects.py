"""Objects, the shared workspace and shared tuning records on a server that honours conditions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders

from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig, blobs, objects
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


def test_a_conditional_write_succeeds_only_for_what_was_read(store: ReleaseStore) -> None:
    each = store.objects
    assert each.get_with_etag("a") is None
    assert each.put_if_unchanged("a", b"1", None)
    assert not each.put_if_unchanged("a", b"2", None)
    first = each.get_with_etag("a")
    assert first is not None
    assert first[0] == b"1"
    assert each.put_if_unchanged("a", b"2", first[1])
    assert not each.put_if_unchanged("a", b"3", first[1])
    assert each.get("a") == b"2"


def test_objects_are_listed_below_a_prefix_with_their_sizes(store: ReleaseStore) -> None:
    for key, content in (("a/1", b"x"), ("a/2", b"xx"), ("b/1", b"")):
        store.objects.put(key, content, "writing")
    assert [(entry.key, entry.size) for entry in store.objects.list_objects("a/")] == [("a/1", 1), ("a/2", 2)]
    store.objects.delete("a/1", "deleting")
    store.objects.delete("a/1", "deleting again")
    assert [entry.key for entry in store.objects.list_objects("")] == ["a/2", "b/1"]


def test_a_store_without_a_prefix_has_the_bucket_to_itself(moto_server: StoreConfig) -> None:
    whole = ObjectStore(replace(moto_server, bucket="whole-bucket"))
    whole.ensure_bucket()
    whole.put("a", b"1", "writing")
    assert whole.full_key("a") == "a"
    assert whole.uri("a") == "s3://whole-bucket/a"
    assert [entry.key for entry in whole.list_objects("")] == ["a"]


def test_an_object_that_was_just_written_is_looked_for_again(
    store: ReleaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def appear(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            store.objects.put("late", b"1", "writing late")

    monkeypatch.setattr(objects.time, "sleep", appear)
    assert store.objects.get("late") is None
    assert pauses == []
    assert store.objects.get("late", just_written=True) == b"1"
    assert pauses == [objects.SETTLE_SECONDS] * 2
    pauses.clear()
    monkeypatch.setattr(objects, "_LOOKS_FOR_WRITTEN", 3)
    assert store.objects.get("never", just_written=True) is None
    assert len(pauses) == 2


def test_a_pause_is_long_enough_for_two_servers_on_one_folder_and_short_for_a_person() -> None:
    assert 0.01 < objects.SETTLE_SECONDS < 0.1


def test_a_file_of_more_than_the_most_parts_is_sent_in_larger_ones(
    store: ReleaseStore, write_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "MAX_PARTS", 2)
    path, digest = write_file(b"x" * (12 * MIB + 1))
    steps: list[int] = []
    blob_store = BlobStore(ObjectStore(replace(store.config, part_size=5 * MIB)))
    numbers: list[int] = []
    hooks: Any = blob_store._objects.s3.meta.events
    hooks.register("before-parameter-build.s3.UploadPart", lambda params, **_: numbers.append(params["PartNumber"]))
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
        blob_store = BlobStore(ObjectStore(replace(store.config, part_size=5 * MIB)))
        first = next(blob_store._read_parts(file, tmp_path / "large", "0" * 64, size, lambda count: None))  # type: ignore[arg-type]
    assert len(first) == part_size


def _overlook_new_objects(client: Any) -> list[str]:
    """Have the server of a client overlook each object once after it was written; return these objects' addresses."""
    written: set[str] = set()
    addresses: list[str] = []

    def note(request: Any, **_: Any) -> None:
        written.add(request.url.partition("?")[0])

    def overlook(request: Any, **_: Any) -> Any:
        address = request.url.partition("?")[0]
        if address not in written:
            return None
        written.discard(address)
        addresses.append(address)
        return AWSResponse(request.url, 404, HTTPHeaders(), _Body(b"<Error><Code>NoSuchKey</Code></Error>"))

    client.meta.events.register("before-send.s3.PutObject", note)
    client.meta.events.register("before-send.s3.GetObject", overlook)
    return addresses


class _Body:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self) -> list[bytes]:
        return [self._content]


def test_a_server_that_overlooks_a_new_object_for_a_moment_is_asked_again(
    store: ReleaseStore, write_file: WriteFile
) -> None:
    overlooked = _overlook_new_objects(store.objects.s3)
    path, digest = write_file(b"a bundle")
    store.publish("resnet", "1", {"sha256": digest}, [(path, digest)])
    assert [address.rpartition("/")[2] for address in overlooked] == [digest, "release.json"]
    assert store.verify_release("resnet", "1") == {"sha256": digest}


def test_a_record_that_the_server_overlooks_for_a_moment_is_written(store: ReleaseStore) -> None:
    work = WorkStore(store)
    overlooked = _overlook_new_objects(work.objects.s3)
    work.write_record("build", "k", b"{}")
    assert len(overlooked) == 1
    assert work.read_record("build", "k") == b"{}"


def test_an_object_that_nobody_has_just_written_is_not_waited_for(
    store: ReleaseStore, write_file: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(objects.time, "sleep", pauses.append)
    _, digest = write_file(b"a bundle")
    assert store.objects.get("absent") is None
    assert BlobStore(store.objects).find_fault(digest, []) == "is missing"
    with pytest.raises(StoreError, match="is missing"):
        store.get_blob(digest, tmp_path / "copy")
    assert not WorkStore(store).fetch(digest, tmp_path / "copy")
    assert pauses == []


@pytest.mark.parametrize(("status", "is_written"), [(409, False), (412, False), (501, True), (403, None), (400, None)])
def test_a_conditional_write_is_refused_done_or_an_error_by_the_servers_answer(
    store: ReleaseStore, status: int, is_written: bool | None
) -> None:
    def answer(request: Any, **_: Any) -> Any:
        if "If-None-Match" not in request.headers:
            return None
        return AWSResponse(request.url, status, HTTPHeaders(), _Body(b"<Error><Code>Odd</Code></Error>"))

    hooks: Any = store.objects.s3.meta.events
    hooks.register("before-send.s3.PutObject", answer)
    if is_written is None:
        with pytest.raises(StoreError, match="Odd"):
            store.objects.put_if_unchanged(str(status), b"1", None)
    else:
        assert store.objects.put_if_unchanged(str(status), b"1", None) is is_written
    assert store.objects.get(str(status)) == (b"1" if is_written else None)


def test_the_check_leaves_one_object_and_waits_no_longer_than_it_must(
    store: ReleaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[StoreConfig] = []
    connect = objects.connect

    def remember(config: StoreConfig) -> object:
        configs.append(config)
        return connect(config)

    monkeypatch.setattr(objects, "connect", remember)
    store.check()
    assert [entry.key for entry in store.objects.list_objects("")] == ["checks/writable"]
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


def test_an_artifact_that_cannot_be_fetched_leaves_no_file(moto_server: StoreConfig, tmp_path: Path) -> None:
    away = WorkStore(ReleaseStore(replace(moto_server, endpoint="http://127.0.0.1:1", attempts=1)))
    assert away.uri == f"s3://{moto_server.bucket}/work"
    with pytest.raises(StoreError):
        away.fetch("0" * 64, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_tuning_records_are_files_of_their_own(store: ReleaseStore) -> None:
    work = WorkStore(store)
    assert work.tuning_records() == {}
    assert work.read_tuning_records("a.jsonl") is None
    work.write_tuning_records("a.jsonl", b"1\n")
    assert work.tuning_records() == {"a.jsonl": 2}
    assert work.read_tuning_records("a.jsonl") == b"1\n"

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
