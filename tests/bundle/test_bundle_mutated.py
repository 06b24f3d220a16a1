"""Hundreds of damaged and forged bundles: each is refused in one sentence or changes nothing, and none runs here.

The caller opens every one itself, as the runtime does before it loads anything; what a forger made consistent, digests
included, is left to `verify`, which runs it in another process.
"""

import gzip
import hashlib
import json
import random
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tvmflow.bundle import extract, keygen, read_manifest, sign
from tvmflow.errors import BundleError, VerdictError
from tvmflow.verification import verify

Member = tuple[tarfile.TarInfo, bytes]
Zip = Callable[[bytes], bytes]
Mutate = Callable[[random.Random, Zip], bytes]

ORIGINAL = (Path(__file__).parent / "files" / "format-1.tar.gz").read_bytes()
MANIFEST = read_manifest(Path(__file__).parent / "files" / "format-1.tar.gz")
BLOCK = tarfile.BLOCKSIZE
NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 1 << 70, 1e999, float("nan"), [], {}, [[]], [None], {"": {}}, "", "\n", "\0", "\ud800"),
    *("../../evil", "x" * 70_000, "\x1b[2J", "\u202e", [1] * 5000, ["a", "a"]),
)


def members(data: bytes) -> list[Member]:
    """The members of an archive with their content."""
    found, place = [], 0
    while any(header := data[place : place + BLOCK]):
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        found.append((info, data[place + BLOCK : place + BLOCK + info.size]))
        place += BLOCK + info.size + -info.size % BLOCK
    return found


def archive(parts: list[Member]) -> bytes:
    """The bytes of an archive of these members."""
    data = b"".join(
        info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % BLOCK) for info, content in parts
    )
    data += bytes(2 * BLOCK)
    return data + bytes(-len(data) % tarfile.RECORDSIZE)


def plain(name: str, content: bytes) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def spelled(document: Any) -> bytes:
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode(errors="surrogatepass")


TAR = gzip.decompress(ORIGINAL)
MEMBERS = members(TAR)
DOCUMENT = json.loads(MEMBERS[0][1])


def flipped(data: bytes, chance: random.Random, start: int = 0, stop: int | None = None) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(start, stop or len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def flipped_byte(chance: random.Random, zipped: Zip) -> bytes:
    return flipped(ORIGINAL, chance)


def truncated(chance: random.Random, zipped: Zip) -> bytes:
    return ORIGINAL[: chance.randrange(len(ORIGINAL))]


def gzip_header(chance: random.Random, zipped: Zip) -> bytes:
    return flipped(ORIGINAL, chance, 0, 10)


def gzip_trailer(chance: random.Random, zipped: Zip) -> bytes:
    return flipped(ORIGINAL, chance, len(ORIGINAL) - 8)


def appended(chance: random.Random, zipped: Zip) -> bytes:
    return ORIGINAL + chance.choice([b"\0", bytes(1000), ORIGINAL, b"\x1f\x8b", gzip.compress(b"", mtime=0), b"evil"])


def swapped_pieces(chance: random.Random, zipped: Zip) -> bytes:
    a, b, c = sorted(chance.sample(range(len(ORIGINAL)), 3))
    return ORIGINAL[:a] + ORIGINAL[b:c] + ORIGINAL[a:b] + ORIGINAL[c:]


def doubled_gzip(chance: random.Random, zipped: Zip) -> bytes:
    return zipped(chance.choice([ORIGINAL, ORIGINAL + TAR, TAR[:-BLOCK], TAR + bytes(BLOCK), TAR + TAR]))


def tar_byte(chance: random.Random, zipped: Zip) -> bytes:
    return zipped(flipped(TAR, chance))


def tar_header(chance: random.Random, zipped: Zip) -> bytes:
    """A field of a header overwritten, with its check sum put right."""
    places = [TAR.index(info.name.encode() + b"\0" * (100 - len(info.name))) for info, _ in MEMBERS]
    fields = [(0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155)]
    values = (
        b"\xff" * 155,
        b"\x80" + b"\0" * 154,
        b"7" * 155,
        b"../" * 50,
        b"/etc/passwd".ljust(155, b"\0"),
        b" " * 155,
    )
    place, (field, size), value = chance.choice(places), chance.choice(fields), chance.choice(values)
    header = bytearray(TAR[place : place + BLOCK])
    header[field : field + size] = value[:size]
    total = sum(header[:148]) + sum(header[156:]) + 8 * ord(" ")
    header[148:156] = f"{total:06o}\0 ".encode()
    return zipped(TAR[:place] + bytes(header) + TAR[place + BLOCK :])


def special_member(chance: random.Random, zipped: Zip) -> bytes:
    """A link, a device, an extended header, a sparse file or a folder in the place of, or beside, a member."""
    parts = list(MEMBERS)
    info = tarfile.TarInfo(chance.choice(["mod.so", "sample.npz", "evil", "a/b", "../evil", "bundle.json", "n" * 100]))
    info.type = chance.choice([b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"x", b"g", b"L", b"K", b"S", b"\0", b"Q"])
    info.linkname = chance.choice(["/etc/passwd", "../../evil", "mod.json", ""])
    parts.insert(chance.randrange(len(parts) + 1), (info, b""))
    return zipped(archive(parts))


def member_set(chance: random.Random, zipped: Zip) -> bytes:
    """Members doubled, left out, renamed, added or in another order."""
    parts = list(MEMBERS)
    place = chance.randrange(len(parts))
    content = parts[place][1]
    match chance.randrange(5):
        case 0:
            parts.append(parts[place])
        case 1:
            del parts[place]
        case 2:
            names = ["MOD.SO", "mod.so.", "./mod.so", "mod.so/", "/mod.so", "m\u00f6d.so"[:1] + "od.s0", "a" * 99, " "]
            parts[place] = plain(chance.choice(names), content)
        case 3:
            parts.insert(place, plain(chance.choice(["evil", "bundle.sig", "mod.params", "a/b/c/d"]), b"evil"))
        case _:
            chance.shuffle(parts)
    return zipped(archive(parts))


def member_content(chance: random.Random, zipped: Zip) -> bytes:
    """A file that is not what its digest says, with its own size or another."""
    parts = list(MEMBERS)
    place = chance.randrange(1, len(parts))
    name, content = parts[place][0].name, parts[place][1]
    changed = chance.choice([flipped(content, chance), content[:-1], content + b"\0", b"", content[::-1]])
    parts[place] = plain(name, changed)
    return zipped(archive(parts))


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a document."""
    if where:
        yield where
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*where, key))


def changed_manifest(chance: random.Random, values: tuple[Any, ...]) -> bytes:
    document = json.loads(MEMBERS[0][1])
    *way, last = chance.choice(list(places(document)))
    part = document
    for key in way:
        part = part[key]
    if chance.randrange(4) == 0 and isinstance(part, dict):
        del part[last]
    else:
        part[last] = chance.choice(values)
    return spelled(document)


def manifest_value(chance: random.Random, zipped: Zip) -> bytes:
    return zipped(archive([plain("bundle.json", changed_manifest(chance, NASTY)), *MEMBERS[1:]]))


def manifest_size(chance: random.Random, zipped: Zip) -> bytes:
    """Sizes that no disk, no header or no file here has."""
    document = json.loads(MEMBERS[0][1])
    name = chance.choice(list(document["files"]))
    document["files"][name]["size"] = chance.choice([0, 1, 1 << 33, 1 << 40, (1 << 63) - 1, 1 << 63, 10**4000])
    return zipped(archive([plain("bundle.json", spelled(document)), *MEMBERS[1:]]))


def manifest_text(chance: random.Random, zipped: Zip) -> bytes:
    """JSON that parsers disagree about, or that is none."""
    text = MEMBERS[0][1]
    nasty = [
        text.replace(b'"format": 1', b'"format": 1,\n  "format": 1'),
        text.replace(b'"format": 1', b'"format": 1.0'),
        text.replace(b'"format": 1', b'"format": 1e0'),
        text.replace(b'"format": 1', b'"format": ' + b"1" * 5000),
        text.replace(b'"threads": 2', b'"threads": -0'),
        text.replace(b'"threads": 2', b'"threads": NaN'),
        text.replace(b'"tiny"', b'"\xff\xfe"'),
        text.replace(b'"tiny"', b'"\\ud800"'),
        text.replace(b'"tiny"', b'"t\\u0069ny"'),
        text.replace(b'"tiny"', b'"tiny\0"'),
        text.replace(b"\n", b""),
        text + b"{}",
        b"\xef\xbb\xbf" + text,
        text.decode().encode("utf-16"),
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"",
        b"null",
        b'"' + b"x" * (1 << 20) + b'"',
    ]
    text = nasty[chance.randrange(len(nasty))]
    return zipped(archive([plain("bundle.json", text), *MEMBERS[1:]]))


def bomb(chance: random.Random, zipped: Zip) -> bytes:
    """Content that unpacks to a thousand times its size, with or without a header that says so."""
    size = chance.choice([1 << 24, 1 << 26])
    document = json.loads(MEMBERS[0][1])
    document["files"]["mod.so"] = {"sha256": hashlib.sha256(bytes(size)).hexdigest(), "size": size}
    parts = [plain("bundle.json", spelled(document)), MEMBERS[1], plain("mod.so", bytes(size)), MEMBERS[3]]
    data = chance.choice([archive(parts), TAR + bytes(size), bytes(size)])
    packed = gzip.compress(data, compresslevel=9, mtime=0)
    return ORIGINAL[:10] + packed[10:-8] + struct.pack("<LL", *struct.unpack("<LL", packed[-8:]))


KINDS: dict[Mutate, int] = {
    flipped_byte: 60,
    truncated: 30,
    gzip_header: 20,
    gzip_trailer: 12,
    appended: 8,
    swapped_pieces: 10,
    doubled_gzip: 6,
    tar_byte: 60,
    tar_header: 60,
    special_member: 50,
    member_set: 40,
    member_content: 40,
    manifest_value: 80,
    manifest_size: 14,
    manifest_text: 40,
    bomb: 4,
}


def test_there_are_hundreds() -> None:
    assert sum(KINDS.values()) > 300


@pytest.mark.parametrize("mutate", KINDS, ids=lambda mutate: mutate.__name__)
def test_a_mutated_bundle_is_refused_or_changes_nothing(mutate: Mutate, zipped: Zip, tmp_path: Path) -> None:
    path, said = tmp_path / "mutated.tar.gz", list[str]()
    for seed in range(KINDS[mutate]):
        data = mutate(random.Random(f"{mutate.__name__} {seed}"), zipped)  # noqa: S311
        path.write_bytes(data)
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            manifest = extract(path, folder, trusted=())
        except BundleError as error:
            said.append(str(error))
            continue
        assert manifest.files == MANIFEST.files, seed
        for name, entry in manifest.files.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry.sha256, seed
        if manifest != MANIFEST:
            # Nothing of it was damaged: this is what a signature is for.
            assert mutate is manifest_value, seed
    assert not (tmp_path.parent / "evil").exists()
    for sentence in said:
        assert sentence.isprintable()
        assert str(path) in sentence
        assert len(sentence) < 500 + 2 * len(str(path))
    assert len(said) > KINDS[mutate] * (0.5 if mutate in (manifest_value, member_set) else 0.9)


def test_any_change_of_a_signed_manifest_is_refused(zipped: Zip, tmp_path: Path) -> None:
    public = keygen(tmp_path / "key")
    (tmp_path / "plain.tar.gz").write_bytes(ORIGINAL)
    sign(tmp_path / "plain.tar.gz", tmp_path / "key", tmp_path / "signed.tar.gz")
    signed = members(gzip.decompress((tmp_path / "signed.tar.gz").read_bytes()))
    harmless = (*NASTY, "another", 3, [3], ["avx2"], "0" * 64, "float32")
    for seed in range(80):
        text = changed_manifest(random.Random(seed), harmless)  # noqa: S311
        assert text != MEMBERS[0][1]
        (tmp_path / "forged.tar.gz").write_bytes(zipped(archive([plain("bundle.json", text), *signed[1:]])))
        folder = tmp_path / str(seed)
        folder.mkdir()
        with pytest.raises(BundleError, match="was changed after it was signed"):
            extract(tmp_path / "forged.tar.gz", folder, trusted=[public])
        assert not list(folder.iterdir())


def forged(name: str, content: bytes, zipped: Zip) -> bytes:
    """A bundle with another file, and a manifest that says so."""
    document = json.loads(MEMBERS[0][1])
    document["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    parts = [plain(info.name, content if info.name == name else data) for info, data in MEMBERS[1:]]
    return zipped(archive([plain("bundle.json", spelled(document)), *parts]))


def consistent() -> Iterator[tuple[str, str, bytes]]:
    """Files that are wrong and have the right digests."""
    found = {info.name: content for info, content in MEMBERS}
    library, sample = found["mod.so"], found["sample.npz"]
    yield "empty library", "mod.so", b""
    yield "text", "mod.so", b"#!/bin/sh\necho evil\n"
    yield "library cut in its middle", "mod.so", library[: len(library) // 2]
    yield "library cut after its headers", "mod.so", library[:4096]
    yield "library of zeros after its headers", "mod.so", library[:1024] + bytes(len(library) - 1024)
    for seed in range(3):
        chance = random.Random(seed)  # noqa: S311
        changed = bytearray(library)
        for _ in range(200):
            changed[chance.randrange(64, len(library))] = chance.randrange(256)
        yield f"library with 200 bytes changed ({seed})", "mod.so", bytes(changed)
    yield "sample cut", "sample.npz", sample[: len(sample) // 2]
    yield "sample of nothing", "sample.npz", b"PK\x05\x06" + bytes(18)
    yield "sample that is none", "sample.npz", b"none"
    yield "sample with a byte flipped", "sample.npz", flipped(sample, random.Random(0), 200, 220)  # noqa: S311


@pytest.mark.parametrize(("name", "content"), [pytest.param(*rest, id=label) for label, *rest in consistent()])
def test_a_forged_file_takes_only_the_process_of_verify_down(
    name: str, content: bytes, zipped: Zip, tmp_path: Path
) -> None:
    path = tmp_path / "forged.tar.gz"
    path.write_bytes(forged(name, content, zipped))
    said, worst = "", 0.0
    try:
        worst = verify(path, trusted=(), timeout=60).max_abs_error
    except (BundleError, VerdictError) as error:
        said = str(error)
    assert said.isprintable()
    if said:
        assert str(path) in said or repr(MANIFEST.name) in said
    else:
        # Bytes that nothing reads: the library still computes what it did.
        assert name == "mod.so"
        assert worst < 1e-5
