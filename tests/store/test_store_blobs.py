"""Blobs: sent once, checked on the way in and on the way out."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig, parse_uri

Damage = Callable[[str, bytes | None], None]
WriteFile = Callable[[bytes], tuple[Path, str]]
MIB = 2**20
ABSENT = "0" * 64


def test_a_blob_comes_back_as_it_was_sent(store: ReleaseStore, write_file: WriteFile, tmp_path: Path) -> None:
    path, digest = write_file(b"a bundle")
    uri = store.put_blob(path, digest)
    assert uri == f"s3://releases/{store.config.prefix}/blobs/sha256/{digest}"
    store.get_blob(digest, tmp_path / "new" / "folder" / "copy")
    assert (tmp_path / "new" / "folder" / "copy").read_bytes() == b"a bundle"


def test_an_empty_blob_comes_back(store: ReleaseStore, write_file: WriteFile, tmp_path: Path) -> None:
    path, digest = write_file(b"")
    store.put_blob(path, digest)
    store.get_blob(digest, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_large_blob_is_sent_in_parts(config: StoreConfig, write_file: WriteFile, tmp_path: Path) -> None:
    content = b"seven b" * (20 * MIB // 7) + b"and a rest"
    path, digest = write_file(content)
    steps: list[int] = []
    store = ReleaseStore(replace(config, part_size=5 * MIB))
    uri = parse_uri(store.put_blob(path, digest, steps.append))
    assert steps == [5 * MIB] * 4 + [len(content) - 20 * MIB]
    store.get_blob(digest, tmp_path / "copy")
    assert hashlib.sha256((tmp_path / "copy").read_bytes()).hexdigest() == digest
    assert uri.key.endswith(digest)


def test_parts_are_used_above_the_part_size_only(moto_server: StoreConfig, write_file: WriteFile) -> None:
    store = ReleaseStore(replace(moto_server, prefix="parts", part_size=5 * MIB))
    s3 = _client(moto_server)
    for size, suffix in ((5 * MIB, 0), (5 * MIB + 1, 1)):
        path, digest = write_file(bytes(size))
        uri = parse_uri(store.put_blob(path, digest))
        etag = s3.head_object(Bucket=uri.bucket, Key=uri.key)["ETag"]
        assert etag.count("-") == suffix


def test_a_blob_that_is_there_is_not_sent_again(local: StoreConfig, local_folder: Path, write_file: WriteFile) -> None:
    store = ReleaseStore(local)
    path, digest = write_file(b"a bundle")
    store.put_blob(path, digest)
    before = (local_folder / "blobs" / "sha256" / digest).stat()
    steps: list[int] = []
    store.put_blob(path, digest, steps.append)
    after = (local_folder / "blobs" / "sha256" / digest).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert sum(steps) == len(b"a bundle")


@pytest.mark.parametrize("size", [8, 6 * MIB], ids=["whole", "in-parts"])
def test_a_file_that_is_not_what_its_digest_says_is_not_stored(config: StoreConfig, tmp_path: Path, size: int) -> None:
    store = ReleaseStore(replace(config, part_size=5 * MIB))
    path = tmp_path / "changed.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(StoreError, match="changed since it was built"):
        store.put_blob(path, ABSENT)
    with pytest.raises(StoreError, match="is missing"):
        store.get_blob(ABSENT, tmp_path / "copy")


def test_a_refused_upload_in_parts_is_withdrawn(server: StoreConfig, tmp_path: Path) -> None:
    store = ReleaseStore(replace(server, part_size=5 * MIB))
    path = tmp_path / "changed.bin"
    path.write_bytes(bytes(6 * MIB))
    with pytest.raises(StoreError, match="changed since it was built"):
        store.put_blob(path, ABSENT)
    assert not _client(server).list_multipart_uploads(Bucket=server.bucket).get("Uploads")


def test_a_changed_file_is_refused_also_when_the_store_has_its_blob(store: ReleaseStore, write_file: WriteFile) -> None:
    path, digest = write_file(b"a bundle")
    store.put_blob(path, digest)
    path.write_bytes(b"a bungle")
    with pytest.raises(StoreError, match="changed since it was built"):
        store.put_blob(path, digest)


def test_a_missing_blob_is_refused_on_read(store: ReleaseStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is missing: publish the release again"):
        store.get_blob(ABSENT, tmp_path / "copy")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", [b"a bund", b"a bungle", b""], ids=["truncated", "tampered", "emptied"])
def test_a_damaged_blob_is_refused_on_read(
    local: StoreConfig, damage: Damage, write_file: WriteFile, tmp_path: Path, damaged: bytes
) -> None:
    store = ReleaseStore(local)
    path, digest = write_file(b"a bundle")
    store.put_blob(path, digest)
    damage(f"blobs/sha256/{digest}", damaged)
    destination = tmp_path / "folder" / "copy"
    destination.parent.mkdir()
    destination.write_bytes(b"what was there")
    with pytest.raises(StoreError, match="is damaged"):
        store.get_blob(digest, destination)
    assert destination.read_bytes() == b"what was there"
    assert list(destination.parent.iterdir()) == [destination]


@pytest.mark.parametrize("damaged", [b"a bund", b"a bungle"], ids=["truncated", "tampered"])
def test_sending_again_repairs_a_damaged_blob(
    local: StoreConfig, damage: Damage, write_file: WriteFile, tmp_path: Path, damaged: bytes
) -> None:
    store = ReleaseStore(local)
    path, digest = write_file(b"a bundle")
    store.put_blob(path, digest)
    damage(f"blobs/sha256/{digest}", damaged)
    store.put_blob(path, digest)
    store.get_blob(digest, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"a bundle"


def test_a_local_file_that_is_not_there_is_one_sentence(store: ReleaseStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere\.bin cannot be read"):
        store.put_blob(tmp_path / "nowhere.bin", ABSENT)


def test_a_destination_that_cannot_be_written_is_one_sentence(
    store: ReleaseStore, write_file: WriteFile, tmp_path: Path
) -> None:
    path, digest = write_file(b"a bundle")
    store.put_blob(path, digest)
    with pytest.raises(StoreError, match="cannot be written"):
        store.get_blob(digest, path / "below a file")


@pytest.mark.parametrize("digest", ["", "abc", "../../etc/passwd", "A" * 64, "0" * 63 + "\n"])
def test_what_is_no_digest_is_refused(moto_server: StoreConfig, tmp_path: Path, digest: str) -> None:
    store = ReleaseStore(moto_server)
    with pytest.raises(StoreError, match="is not a SHA-256 digest"):
        store.get_blob(digest, tmp_path / "copy")


def _client(config: StoreConfig):  # type: ignore[no-untyped-def]  # boto3's own client, to look behind the store
    return boto3.client(
        "s3",
        endpoint_url=config.endpoint,
        region_name=config.region,
        aws_access_key_id=config.access_key,
        aws_secret_access_key=config.secret_key,
    )
