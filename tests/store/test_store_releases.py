"""Releases: there whole or not at all, and never changed."""

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.rclone import rclone_s3
from support.releases import make_release, make_target
from tvmflow.documents.encoding import encode
from tvmflow.documents.release import Blob, Release
from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig

Damage = Callable[[str, bytes | None], None]
WriteFile = Callable[[bytes], tuple[Path, str]]
KillServer = Callable[[StoreConfig], None]
MIB = 2**20
WRITERS = 6


def _release(digest: str, size: int, **fields: Any) -> Release:
    return make_release("resnet", "1", make_target(sha256=digest, size=size), **fields)


def test_a_release_comes_back_as_it_was_published(store: ReleaseStore, write_file: WriteFile, tmp_path: Path) -> None:
    path, digest = write_file(b"a bundle")
    release = make_release("resnet", "3", make_target(sha256=digest), tvmflow="größer als erwartet")
    uri = store.publish(release, [(path, digest)])
    assert uri == f"s3://releases/{store.config.prefix}/releases/resnet/3/release.json"
    assert store.get_release("resnet", "3") == release
    assert store.has_release("resnet", "3")
    assert store.verify_release("resnet", "3") == release
    store.get_blob(digest, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"a bundle"


def test_the_document_is_canonical_json(local: StoreConfig, local_folder: Path) -> None:
    release = make_release(tvmflow="ü")
    ReleaseStore(local).publish(release, [])
    content = (local_folder / "releases" / "resnet" / "1" / "release.json").read_bytes()
    assert content == encode(release)
    assert '  "tvmflow": "ü",\n' in content.decode()


def test_nothing_but_the_release_and_its_blobs_is_left(
    local: StoreConfig, local_folder: Path, write_file: WriteFile
) -> None:
    path, digest = write_file(b"a bundle")
    ReleaseStore(local).publish(_release(digest, 8), [(path, digest)])
    files = {str(each.relative_to(local_folder)) for each in local_folder.rglob("*") if each.is_file()}
    assert files == {f"blobs/sha256/{digest}", "releases/resnet/1/release.json"}


def test_publishing_the_same_again_succeeds_and_writes_nothing(local: StoreConfig, local_folder: Path) -> None:
    store = ReleaseStore(local)
    first = store.publish(make_release(), [])
    before = (local_folder / "releases" / "resnet" / "1" / "release.json").stat()
    assert store.publish(make_release(), []) == first
    after = (local_folder / "releases" / "resnet" / "1" / "release.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_publishing_the_same_again_repairs_a_lost_blob(
    local: StoreConfig, damage: Damage, write_file: WriteFile
) -> None:
    store = ReleaseStore(local)
    path, digest = write_file(b"a bundle")
    store.publish(_release(digest, 8), [(path, digest)])
    damage(f"blobs/sha256/{digest}", None)
    store.publish(_release(digest, 8), [(path, digest)])
    store.verify_release("resnet", "1")


def test_a_published_version_is_never_changed(store: ReleaseStore, write_file: WriteFile, tmp_path: Path) -> None:
    store.publish(make_release(), [])
    path, digest = write_file(b"a bundle")
    with pytest.raises(StoreError, match="already published with other content"):
        store.publish(_release(digest, 8), [(path, digest)])
    assert store.get_release("resnet", "1") == make_release()
    with pytest.raises(StoreError, match="is missing"):
        store.get_blob(digest, tmp_path / "copy")


def test_one_of_several_racing_publishers_wins_and_the_others_are_refused(store: ReleaseStore) -> None:
    start = threading.Barrier(WRITERS)

    def publish(writer: int) -> int | str:
        start.wait()
        try:
            store.publish(make_release(tvmflow=str(writer)), [])
        except StoreError as error:
            return str(error)
        return writer

    with ThreadPoolExecutor(WRITERS) as pool:
        outcomes = list(pool.map(publish, range(WRITERS)))
    winners = [each for each in outcomes if isinstance(each, int)]
    assert [int(store.get_release("resnet", "1").tvmflow)] == winners
    assert all("published" in each for each in outcomes if isinstance(each, str))


def test_racing_publishers_of_the_same_content_all_succeed(store: ReleaseStore) -> None:
    start = threading.Barrier(WRITERS)

    def publish(_: int) -> str:
        start.wait()
        return store.publish(make_release(), [])

    with ThreadPoolExecutor(WRITERS) as pool:
        assert len(set(pool.map(publish, range(WRITERS)))) == 1
    assert store.get_release("resnet", "1") == make_release()


def test_a_file_that_is_gone_when_it_is_to_be_published_is_one_sentence(
    moto_server: StoreConfig, tmp_path: Path
) -> None:
    store = ReleaseStore(replace(moto_server, prefix="gone"))
    with pytest.raises(StoreError, match=r"absent\.bin"):
        store.publish(_release("0" * 64, 8), [(tmp_path / "absent.bin", "0" * 64)])
    assert not store.has_release("resnet", "1")


def test_a_reference_to_a_blob_that_is_nowhere_is_refused(store: ReleaseStore) -> None:
    blob = Blob(sha256="0" * 64, size=8)
    weights = make_release("resnet", "1", make_target(weights=blob))
    for release in (_release("0" * 64, 8), make_release(report=blob), weights):
        with pytest.raises(StoreError, match=r"refers to the blob 0{64}, which is missing"):
            store.publish(release, [])
    assert store.list_versions("resnet") == []


def test_a_reference_to_a_blob_of_an_earlier_release_is_enough(store: ReleaseStore, write_file: WriteFile) -> None:
    path, digest = write_file(b"a bundle")
    store.put_blob(path, digest)
    store.publish(_release(digest, 8, report=Blob(sha256=digest, size=8)), [])
    store.verify_release("resnet", "1")


def test_a_size_that_contradicts_the_file_is_refused(store: ReleaseStore, write_file: WriteFile) -> None:
    path, digest = write_file(b"a bundle")
    with pytest.raises(StoreError, match="has 8 bytes, but its release says 9"):
        store.publish(_release(digest, 9), [(path, digest)])
    assert not store.has_release("resnet", "1")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "is missing"), (b"a bund", "has 6 bytes instead of 8"), (b"a bungle", "is damaged")],
    ids=["missing", "truncated", "tampered"],
)
def test_verification_finds_a_damaged_blob(
    local: StoreConfig, damage: Damage, write_file: WriteFile, content: bytes | None, complaint: str
) -> None:
    store = ReleaseStore(local)
    path, digest = write_file(b"a bundle")
    store.publish(_release(digest, 8), [(path, digest)])
    damage(f"blobs/sha256/{digest}", content)
    with pytest.raises(StoreError, match=f"is not whole: .*{digest} {complaint}"):
        store.verify_release("resnet", "1")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"], ids=["cut", "a list", "no text"])
def test_a_damaged_document_is_refused(local: StoreConfig, damage: Damage, content: bytes) -> None:
    store = ReleaseStore(local)
    store.publish(make_release(), [])
    damage("releases/resnet/1/release.json", content)
    with pytest.raises(StoreError, match=r"releases/resnet/1/release\.json is damaged"):
        store.get_release("resnet", "1")


def test_a_document_at_the_place_of_another_is_damage(local: StoreConfig, damage: Damage) -> None:
    store = ReleaseStore(local)
    for name, version in (("resnet", "2"), ("bert", "1")):
        store.publish(make_release(), [])
        damage("releases/resnet/1/release.json", encode(make_release(name, version)))
        with pytest.raises(
            StoreError, match=rf"1/release\.json is the document of {name} {version}: publish resnet 1 "
        ):
            store.get_release("resnet", "1")
        damage("releases/resnet/1/release.json", None)


def test_a_release_of_an_older_tvmflow_opens_and_is_never_rewritten(local: StoreConfig, write_file: WriteFile) -> None:
    """The document has the form of before it had types; to publish the same release again is a success."""
    store, key = ReleaseStore(local), "releases/digits/1/release.json"
    path, digest = write_file(b"a bundle")
    document = json.loads((Path(__file__).parent / "formats" / "release-1.json").read_text())
    document["report"] = document["targets"][0]["bundle"] = {"sha256": digest, "size": 8}
    old = json.dumps(document).encode()
    store.objects.put(key, old, "planting an old release")
    assert [each.label for each in store.iterate_releases()] == ["release digits 1"]
    release = store.get_release("digits", "1")
    store.publish(release, [(path, digest)])
    assert store.verify_release("digits", "1") == release
    with pytest.raises(StoreError, match="already published with other content"):
        store.publish(release.model_copy(update={"tvmflow": "9"}), [])
    assert store.objects.get(key) == old


def test_names_and_versions_are_listed_in_numeric_order(store: ReleaseStore) -> None:
    for name, version in [("resnet", "10"), ("resnet", "9"), ("resnet", "1.10"), ("resnet", "1.9"), ("bert", "v2")]:
        store.publish(make_release(name, version), [])
    assert store.list_names() == ["bert", "resnet"]
    assert store.list_versions("resnet") == ["1.9", "1.10", "9", "10"]
    assert store.list_versions("res") == []
    assert [each.version for each in store.iterate_releases("resnet")] == ["1.9", "1.10", "9", "10"]
    assert next(store.iterate_releases()).label == "release bert v2"


def test_an_unknown_version_is_refused_with_those_there_are(store: ReleaseStore) -> None:
    store.publish(make_release("resnet", "1"), [])
    store.publish(make_release("resnet", "2"), [])
    with pytest.raises(StoreError, match=r"no release resnet 3 in .*; published versions: 1, 2\."):
        store.get_release("resnet", "3")
    assert not store.has_release("resnet", "3")


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "../a", ".hidden", "-flag", "a b", "ü", "a\n", "a" * 129])
def test_a_name_or_version_that_is_no_plain_name_is_refused(moto_server: StoreConfig, text: str) -> None:
    store = ReleaseStore(moto_server)
    with pytest.raises(StoreError, match=r"release name .* is not valid"):
        store.publish(make_release(text), [])
    with pytest.raises(StoreError, match=r"release version .* is not valid"):
        store.get_release("resnet", text)
    with pytest.raises(StoreError, match=r"release name .* is not valid"):
        store.list_versions(text)


def test_a_release_that_json_cannot_hold_is_refused(moto_server: StoreConfig) -> None:
    store = ReleaseStore(replace(moto_server, prefix="no-json"))
    with pytest.raises(StoreError, match="release resnet 1 cannot be written as JSON"):
        store.publish(make_release("resnet", "1", make_target(tvm_target={"kind": "llvm", "speed": math.nan})), [])
    assert store.list_names() == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "limit", [5 * MIB, 12 * MIB, 12 * MIB + 5 * MIB], ids=["within the first", "between", "within the second"]
)
def test_a_publication_cut_off_by_the_servers_death_is_invisible_and_can_be_completed(
    tmp_path: Path, write_file: WriteFile, kill_server: KillServer, limit: int
) -> None:
    blobs = [write_file(bytes([number]) * 12 * MIB) for number in range(2)]
    release = make_release("resnet", "1", *(make_target(digest, digest, 12 * MIB) for _, digest in blobs))
    byte_count = 0
    with rclone_s3(tmp_path / "data", bucket="releases") as config:
        store = ReleaseStore(replace(config, attempts=1, part_size=5 * MIB))

        def kill_after_enough(count: int) -> None:
            nonlocal byte_count
            byte_count += count
            if byte_count == limit:
                kill_server(config)

        with pytest.raises(StoreError, match=config.endpoint):
            store.publish(release, blobs, kill_after_enough)
    assert byte_count == limit
    assert not list((tmp_path / "data").rglob("release.json"))

    with rclone_s3(tmp_path / "data", bucket="releases") as config:
        store = ReleaseStore(config)
        assert store.list_names() == []
        store.publish(release, blobs)
        assert store.verify_release("resnet", "1") == release


def test_a_server_that_dies_before_the_document_leaves_no_release(
    tmp_path: Path, write_file: WriteFile, kill_server: KillServer
) -> None:
    path, digest = write_file(b"a bundle")
    with rclone_s3(tmp_path / "data", bucket="releases") as config:
        store = ReleaseStore(replace(config, attempts=1))
        hooks: Any = store.objects
        hooks.s3.meta.events.register("before-call.s3.PutObject", _at_document(lambda: kill_server(config)))
        with pytest.raises(StoreError, match="Cannot reach"):
            store.publish(_release(digest, 8), [(path, digest)])
    with rclone_s3(tmp_path / "data", bucket="releases") as config:
        store = ReleaseStore(config)
        assert not store.has_release("resnet", "1")
        store.publish(_release(digest, 8), [(path, digest)])
        store.verify_release("resnet", "1")


def _at_document(act: Callable[[], None]) -> Callable[..., None]:
    """A botocore hook that acts just before the write that makes a release exist."""

    def hook(params: dict[str, Any], **_: Any) -> None:
        if params["url_path"].endswith("release.json"):
            act()

    return hook
