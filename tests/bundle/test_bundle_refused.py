"""Whatever is wrong with a bundle is one BundleError of one sentence, and nothing else."""

import contextlib
import copy
import errno
import gzip
import hashlib
import io
import json
import os
import random
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tvmflow.bundle import FORMAT, Manifest, extract, pack, read_manifest
from tvmflow.errors import BundleError

WriteArchive = Callable[..., Path]
Document = dict[str, Any]
Content = dict[str, bytes]


@pytest.fixture
def refusal(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Extract a bundle that must be refused, and return what is said."""
    rounds = iter(range(1000))

    def refused(bundle: Path) -> str:
        folder = tmp_path / f"out-{next(rounds)}"
        folder.mkdir()
        with pytest.raises(BundleError) as caught:
            extract(bundle, folder)
        message = str(caught.value)
        assert bundle.name in message
        assert "\n" not in message
        return message

    yield refused
    assert not (tmp_path.parent / "evil").exists()


Refusal = Callable[[Path], str]


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Hold that the body never has more than a few MiB in memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tenth", range(10))
def test_a_truncated_bundle_is_refused(bundle: Path, refusal: Refusal, tenth: int) -> None:
    data = bundle.read_bytes()
    bundle.write_bytes(data[: len(data) * tenth // 10])
    refusal(bundle)


@pytest.mark.parametrize("count", [1, 8, 9])
def test_a_bundle_without_its_last_bytes_is_refused(bundle: Path, refusal: Refusal, count: int) -> None:
    bundle.write_bytes(bundle.read_bytes()[:-count])
    assert "early" in refusal(bundle)


def test_a_flipped_byte_is_refused_or_changes_nothing(bundle: Path, content: Content, tmp_path: Path) -> None:
    data, chance = bundle.read_bytes(), random.Random(0)  # noqa: S311
    places = [*range(12), *(chance.randrange(len(data)) for _ in range(90)), *range(len(data) - 8, len(data))]
    manifest = read_manifest(bundle)
    message = []
    for index, place in enumerate(places):
        damage = bytearray(data)
        damage[place] ^= chance.randrange(1, 256)
        bundle.write_bytes(damage)
        folder = tmp_path / f"flip-{index}"
        folder.mkdir()
        try:
            assert extract(bundle, folder) == manifest
        except BundleError as error:
            message.append(str(error))
        else:
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == content
    assert len(message) > 90
    assert not any("\n" in sentence for sentence in message)


@pytest.mark.parametrize("place", range(0, 10240, 160))
def test_a_flipped_byte_before_compression_is_refused_or_changes_nothing(
    bundle: Path, content: Content, tmp_path: Path, place: int, zipped: Callable[[bytes], bytes]
) -> None:
    data = bytearray(gzip.decompress(bundle.read_bytes()))
    data[place] ^= 0x15
    bundle.write_bytes(zipped(bytes(data)))
    (tmp_path / "out").mkdir()
    try:
        extract(bundle, tmp_path / "out")
    except BundleError:
        return
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == content


@pytest.mark.parametrize("name", ["../evil", "/evil", "files/../../evil", "./mod.so", "mod.so/", "a/mod.so"])
def test_a_member_outside_the_folder_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal, name: str
) -> None:
    bundle = write_archive(manifest_document, [(name, b"evil"), *content.items()])
    assert repr(name) in refusal(bundle)


def test_a_manifest_that_names_a_file_outside_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal
) -> None:
    manifest_document["files"]["../evil"] = {"sha256": hashlib.sha256(b"evil").hexdigest(), "size": 4}
    assert "'../evil'" in refusal(write_archive(manifest_document, [*content.items(), ("../evil", b"evil")]))


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        tarfile.DIRTYPE,
        tarfile.CONTTYPE,
        tarfile.AREGTYPE,
        b"Z",
    ],
)
def test_a_member_that_is_no_plain_file_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal, kind: bytes
) -> None:
    special = tarfile.TarInfo("mod.so")
    special.type, special.linkname = kind, "/etc/passwd"
    others = [(name, data) for name, data in content.items() if name != "mod.so"]
    assert "'mod.so'" in refusal(write_archive(manifest_document, [(special, content["mod.so"]), *others]))


def test_a_sparse_member_is_refused(manifest_document: Document, write_archive: WriteArchive, refusal: Refusal) -> None:
    sparse = tarfile.TarInfo("mod.so")
    sparse.type = tarfile.GNUTYPE_SPARSE
    assert "'mod.so'" in refusal(write_archive(manifest_document, [(sparse, b"")]))


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_member_with_an_extended_name_is_refused(
    manifest_document: Document, write_archive: WriteArchive, refusal: Refusal, form: int
) -> None:
    refusal(write_archive(manifest_document, [("long" * 100, b"")], form=form))


def test_a_duplicate_member_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal
) -> None:
    bundle = write_archive(manifest_document, [*content.items(), ("mod.so", content["mod.so"])])
    assert "'mod.so'" in refusal(bundle)


def test_a_second_manifest_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal
) -> None:
    assert "'bundle.json'" in refusal(write_archive(manifest_document, [*content.items(), ("bundle.json", b"{}")]))


def test_an_extra_member_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal
) -> None:
    assert "'readme'" in refusal(write_archive(manifest_document, [*content.items(), ("readme", b"")]))


@pytest.mark.parametrize("name", ["mod.json", "mod.so", "sample.npz"])
def test_a_missing_member_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal, name: str
) -> None:
    del content[name]
    assert repr(name) in refusal(write_archive(manifest_document, list(content.items())))


@pytest.mark.parametrize("name", ["mod.json", "mod.so", "sample.npz"])
def test_a_manifest_that_leaves_a_needed_file_out_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal, name: str
) -> None:
    del content[name], manifest_document["files"][name]
    assert name in refusal(write_archive(manifest_document, list(content.items())))


def test_weights_apart_without_weights_are_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal
) -> None:
    manifest_document["weights"] = "apart"
    assert "weights" in refusal(write_archive(manifest_document, list(content.items())))


@pytest.mark.parametrize(
    ("number", "weights"), [(1, "unpacked"), (1, "shared"), (2, "inside"), (2, "shared"), (3, "apart")]
)
def test_weights_of_another_format_are_refused(
    manifest_document: Document,
    content: Content,
    write_archive: WriteArchive,
    refusal: Refusal,
    number: int,
    weights: str,
) -> None:
    manifest_document |= {"format": number, "weights": weights}
    assert weights in refusal(write_archive(manifest_document, list(content.items())))


def test_a_manifest_that_is_not_first_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal
) -> None:
    members = [*content.items(), ("bundle.json", json.dumps(manifest_document).encode())]
    assert "bundle.json" in refusal(write_archive(None, members))


def test_an_empty_archive_is_refused(write_archive: WriteArchive, refusal: Refusal) -> None:
    assert "bundle.json" in refusal(write_archive(None, []))


def test_a_manifest_that_is_a_link_is_refused(write_archive: WriteArchive, refusal: Refusal) -> None:
    link = tarfile.TarInfo("bundle.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    assert "bundle.json" in refusal(write_archive(None, [(link, b"")]))


def test_a_manifest_that_is_too_large_is_refused(
    manifest_document: Document, write_archive: WriteArchive, refusal: Refusal
) -> None:
    manifest_document["provenance"]["note"] = "x" * (1 << 20)
    assert str(1 << 20) in refusal(write_archive(manifest_document, []))


def test_a_wrong_digest_is_refused_and_the_file_removed(
    manifest_document: Document, content: Content, write_archive: WriteArchive, tmp_path: Path
) -> None:
    content["mod.so"] = content["mod.so"][::-1]
    bundle = write_archive(manifest_document, sorted(content.items()))
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match=r"mod\.so"):
        extract(bundle, tmp_path / "out")
    assert not (tmp_path / "out" / "mod.so").exists()


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_wrong_size_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal, difference: int
) -> None:
    manifest_document["files"]["mod.so"]["size"] += difference
    assert "'mod.so'" in refusal(write_archive(manifest_document, list(content.items())))


def test_a_bundle_that_needs_more_than_the_disk_holds_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal
) -> None:
    manifest_document["files"]["mod.so"]["size"] = 1 << 60
    # In MiB.
    assert str(1 << 40) in refusal(write_archive(manifest_document, list(content.items())))


def test_a_member_that_grows_beyond_its_manifest_is_refused_unread(
    manifest_document: Document, write_archive: WriteArchive, refusal: Refusal
) -> None:
    bundle = write_archive(manifest_document, [("mod.so", bytes(50 << 20))])
    with little_memory():
        assert "'mod.so'" in refusal(bundle)


def test_an_extended_header_that_declares_gigabytes_is_refused_unread(
    manifest_document: Document, write_archive: WriteArchive, refusal: Refusal, zipped: Callable[[bytes], bytes]
) -> None:
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, 4 << 30
    bundle = write_archive(manifest_document, [])
    manifest = gzip.decompress(bundle.read_bytes()).rstrip(b"\0")
    start = manifest + bytes(-len(manifest) % tarfile.BLOCKSIZE) + header.tobuf(tarfile.USTAR_FORMAT)
    bundle.write_bytes(zipped(start + bytes(50 << 20)))
    with little_memory():
        refusal(bundle)


def test_data_after_the_end_is_refused(
    manifest_document: Document,
    content: Content,
    write_archive: WriteArchive,
    refusal: Refusal,
    zipped: Callable[[bytes], bytes],
) -> None:
    bundle = write_archive(manifest_document, list(content.items()))
    bundle.write_bytes(zipped(gzip.decompress(bundle.read_bytes()) + bytes(1 << 20)))
    assert "after its end" in refusal(bundle)


def test_a_format_of_the_future_is_refused_with_what_to_do(
    manifest_document: Document, write_archive: WriteArchive, refusal: Refusal
) -> None:
    manifest_document["format"] = FORMAT + 1
    message = refusal(write_archive(manifest_document, []))
    assert [str(number) for number in (FORMAT, FORMAT + 1) if str(number) not in message] == []
    assert "upgrade tvmflow" in message


WRONG: Sequence[tuple[Sequence[str | int], Sequence[object]]] = [
    *(((key,), [None, 3, ["x"]]) for key in ("name", "target", "arch", "weights")),
    *(((key,), [None, "avx2", {"a": 1}, [3]]) for key in ("cpu_features", "inputs", "outputs")),
    *(((key,), [None, "x", [], {"a": 3}]) for key in ("dimensions", "provenance", "files", "versions")),
    (("tvm_target",), [None, "llvm", [["kind", "llvm"]]]),
    (("threads",), [None, "2", 2.0, -1, 0, True, 1 << 63]),
    (("max_threads",), ["2", 2.0, -1, 0, True, 1 << 63]),
    (("fresh_outputs",), [None, 0, 1, "true", []]),
    (("unaligned_inputs",), [None, 0, 1, "true", []]),
    (("indices",), [None, "x", [], {"x": [1]}, {"x": "12"}, {"x": ["a", 1]}, {"x": [0, 1 << 63]}, {"y": [0, 1]}]),
    (("versions", "tvm"), [None, 27]),
    (("format",), [None, "1", 1.0, True, [1]]),
    (("weights",), ["outside"]),
    (("dimensions", "batch"), [[1], ["1", 8], [1, 2.5], [-1, 2], [3, 2], "12"]),
    (("variants",), [None, "x", {"a": 1}, [3], [{}], [{"function": 3, "sizes": {}}]]),
    (("variants",), [[{"function": "f", "sizes": []}], [{"function": "f", "sizes": {"batch": "2"}}]]),
    (("variants",), [[{"function": "f", "sizes": {"width": 2}}]]),
    (("inputs", 0), [None, "x", [], {}]),
    (("inputs", 0, "shape"), ["abc", [1.5], [-1], [None]]),
    (("inputs", 0, "name"), [None, 3]),
    (("outputs", 0, "dtype"), [None, 3, "object", "U5", "float32\n"]),
    (("name",), ["small\nbundle", "\x1b[2J"]),
    (("files", "mod.so"), [None, "abc", {}]),
    (("files", "mod.so", "sha256"), [None, "AB" * 32, "ab" * 31]),
    (("files", "mod.so", "size"), [None, -1, "12", 1.0]),
]


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in WRONG for value in values])
def test_a_wrong_type_in_the_manifest_is_refused(
    manifest_document: Document,
    write_archive: WriteArchive,
    refusal: Refusal,
    place: Sequence[str | int],
    value: object,
) -> None:
    part: Any = manifest_document
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    refusal(write_archive(manifest_document, []))


def test_a_manifest_without_any_one_of_its_keys_is_refused(
    manifest_document: Document, write_archive: WriteArchive, refusal: Refusal
) -> None:
    # `max_threads` is younger than the format.
    for key in manifest_document.keys() - {"max_threads"}:
        document = copy.deepcopy(manifest_document)
        del document[key]
        assert repr(key) in refusal(write_archive(document, []))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"name"', b'"name": "other",\n  "name"', 1),
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text.replace(b'"threads": 2', b'"threads": 2 '),
        lambda text: text.replace(b'"kind": "llvm"', b'"kind": NaN'),
        lambda text: text.replace(b'"kind": "llvm"', b'"kind": 1e999'),
        lambda text: text.replace(b'"kind": "llvm"', b'"kind": "\\ud800"'),
        lambda text: text.replace(b'"small"', b'"sm\\u0061ll"'),
        lambda text: text + b" ",
        lambda text: b"\xef\xbb\xbf" + text,
    ],
)
def test_a_manifest_that_says_the_same_in_another_way_is_refused(
    bundle: Path, write_archive: WriteArchive, refusal: Refusal, change: Callable[[bytes], bytes]
) -> None:
    text = read_manifest(bundle).to_json()
    assert change(text) != text
    assert "manifest" in refusal(write_archive(None, [("bundle.json", change(text))]))


def test_more_than_compression_of_its_size_can_hold_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal
) -> None:
    zeros = bytes(8 << 20)
    manifest_document["files"]["mod.so"] = {"sha256": hashlib.sha256(zeros).hexdigest(), "size": len(zeros)}
    bundle = write_archive(manifest_document, sorted((content | {"mod.so": zeros}).items()))
    tar = gzip.decompress(bundle.read_bytes())
    bundle.write_bytes(bundle.read_bytes()[:10] + gzip.compress(tar, compresslevel=9, mtime=0)[10:])
    assert "size" in refusal(bundle)


def test_zeros_that_were_packed_come_back(
    manifest: Manifest, write_files: Callable[[Path], dict[str, Path]], tmp_path: Path
) -> None:
    files = write_files(tmp_path / "files")
    files["mod.so"].write_bytes(bytes(8 << 20))
    pack(tmp_path / "zeros.tar.gz", manifest, files)
    (tmp_path / "out").mkdir()
    extract(tmp_path / "zeros.tar.gz", tmp_path / "out")
    assert not any((tmp_path / "out" / "mod.so").read_bytes())


@pytest.mark.parametrize("field", ["mode", "uid", "mtime", "uname"])
def test_a_header_that_says_more_than_name_and_size_is_refused(
    manifest_document: Document, content: Content, write_archive: WriteArchive, refusal: Refusal, field: str
) -> None:
    member = tarfile.TarInfo("mod.so")
    setattr(member, field, "x" if field == "uname" else 1)
    others = [(name, data) for name, data in content.items() if name != "mod.so"]
    bundle = write_archive(manifest_document, [(member, content["mod.so"]), *others])
    assert "'mod.so'" in refusal(bundle)


def test_what_stands_between_the_files_is_refused(
    bundle: Path, refusal: Refusal, zipped: Callable[[bytes], bytes]
) -> None:
    data = bytearray(gzip.decompress(bundle.read_bytes()))
    end = tarfile.BLOCKSIZE + len(read_manifest(bundle).to_json())
    assert data[end : end + 1] == b"\0"
    data[end] = 1
    bundle.write_bytes(zipped(bytes(data)))
    refusal(bundle)


@pytest.mark.parametrize("place", [3, 4, 8, 9])
def test_a_gzip_header_of_another_writer_is_refused(bundle: Path, refusal: Refusal, place: int) -> None:
    data = bytearray(bundle.read_bytes())
    data[place] ^= 1
    bundle.write_bytes(data)
    refusal(bundle)


@pytest.mark.parametrize("read_size", [1, 1 << 17])
@pytest.mark.parametrize("more", [b"\0", b"\0" * 512, gzip.compress(b"more", mtime=0), b"x"])
def test_bytes_after_the_compressed_stream_are_refused(
    bundle: Path, refusal: Refusal, more: bytes, read_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One byte at a time, the stream ends where a read ends, and nothing of what follows has been read.
    monkeypatch.setattr("tvmflow.bundle.archive._READ", read_size)
    bundle.write_bytes(bundle.read_bytes() + more)
    assert "after its end" in refusal(bundle)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, refusal: Refusal) -> None:
    os.mkfifo(tmp_path / "pipe.tar.gz")
    refusal(tmp_path / "pipe.tar.gz")


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": ' + b"9" * 9999])
def test_a_manifest_that_is_no_json_mapping_is_refused(
    write_archive: WriteArchive, refusal: Refusal, text: bytes
) -> None:
    assert "manifest" in refusal(write_archive(None, [("bundle.json", text)]))


@pytest.mark.parametrize(
    "data",
    [
        b"not a bundle at all",
        b"\x1f\x8b",
        gzip.compress(b"", mtime=0),
        gzip.compress(b"no tar" * 200, mtime=0),
        bytes(4096),
    ],
    ids=["text", "a gzip header", "an empty gzip", "a gzip of text", "zeros"],
)
def test_another_file_is_refused(tmp_path: Path, refusal: Refusal, data: bytes) -> None:
    (tmp_path / "other.tar.gz").write_bytes(data)
    refusal(tmp_path / "other.tar.gz")


def test_an_uncompressed_archive_is_refused(tmp_path: Path, refusal: Refusal, content: Content) -> None:
    with tarfile.open(tmp_path / "plain.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("bundle.json"), io.BytesIO())
    refusal(tmp_path / "plain.tar")


def test_an_empty_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "empty.tar.gz").touch()
    refusal(tmp_path / "empty.tar.gz")


def test_a_folder_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "folder").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder")


def test_a_missing_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    refusal(tmp_path / "absent.tar.gz")


def test_a_path_through_a_file_is_refused(bundle: Path, refusal: Refusal) -> None:
    assert os.strerror(errno.ENOTDIR) in refusal(bundle / bundle.name)


def test_a_place_that_cannot_be_written_is_reported(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=os.strerror(errno.ENOENT)):
        extract(bundle, tmp_path / "absent")


def test_reading_the_manifest_alone_refuses_the_same_ways(bundle: Path, tmp_path: Path) -> None:
    for length in (0, 5, 100):
        bundle.write_bytes(bundle.read_bytes()[:length])
        with pytest.raises(BundleError):
            read_manifest(bundle)
    with pytest.raises(BundleError, match="absent"):
        read_manifest(tmp_path / "absent")
