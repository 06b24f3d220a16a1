"""Damaged and forged bundles, each made from a bundle of format 1 by a mutator and a seed."""

import gzip
import hashlib
import io
import json
import random
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Member = tuple[tarfile.TarInfo, bytes]
Mutator = Callable[[random.Random], bytes]

ORIGINAL_FILE = Path(__file__).parents[1] / "bundle" / "files" / "format-1.tar.gz"
ORIGINAL = ORIGINAL_FILE.read_bytes()
BLOCK = tarfile.BLOCKSIZE
NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 1 << 70, 1e999, float("nan"), [], {}, [[]], [None], {"": {}}, "", "\n", "\0", "\ud800"),
    *("../../evil", "x" * 70_000, "\x1b[2J", "\u202e", [1] * 5000, ["a", "a"]),
)


def members(data: bytes) -> list[Member]:
    """The members of an archive with their content."""
    result, place = [], 0
    while any(header := data[place : place + BLOCK]):
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        result.append((info, data[place + BLOCK : place + BLOCK + info.size]))
        place += BLOCK + info.size + -info.size % BLOCK
    return result


def archive(parts: list[Member]) -> bytes:
    """The bytes of an archive of these members."""
    data = b"".join(
        info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % BLOCK) for info, content in parts
    )
    data += bytes(2 * BLOCK)
    return data + bytes(-len(data) % tarfile.RECORDSIZE)


def compressed(data: bytes) -> bytes:
    """Compress as tvmflow compresses a bundle."""
    with io.BytesIO() as raw:
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0) as stream:
            stream.write(data)
        return raw.getvalue()


def plain(name: str, content: bytes) -> Member:
    """A regular file."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def spelled(document: Any) -> bytes:
    """A manifest as tvmflow spells it."""
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode(errors="surrogatepass")


TAR = gzip.decompress(ORIGINAL)
MEMBERS = members(TAR)
DOCUMENT = json.loads(MEMBERS[0][1])


def flipped(data: bytes, chance: random.Random, start: int = 0, stop: int | None = None) -> bytes:
    """The data with one bit flipped, between two places."""
    damage = bytearray(data)
    damage[chance.randrange(start, stop or len(data))] ^= 1 << chance.randrange(8)
    return bytes(damage)


def flipped_byte(chance: random.Random) -> bytes:
    return flipped(ORIGINAL, chance)


def truncated(chance: random.Random) -> bytes:
    return ORIGINAL[: chance.randrange(len(ORIGINAL))]


def gzip_header(chance: random.Random) -> bytes:
    return flipped(ORIGINAL, chance, 0, 10)


def gzip_trailer(chance: random.Random) -> bytes:
    return flipped(ORIGINAL, chance, len(ORIGINAL) - 8)


def appended(chance: random.Random) -> bytes:
    return ORIGINAL + chance.choice([b"\0", bytes(1000), ORIGINAL, b"\x1f\x8b", gzip.compress(b"", mtime=0), b"evil"])


def swapped_pieces(chance: random.Random) -> bytes:
    a, b, c = sorted(chance.sample(range(len(ORIGINAL)), 3))
    return ORIGINAL[:a] + ORIGINAL[b:c] + ORIGINAL[a:b] + ORIGINAL[c:]


def doubled_gzip(chance: random.Random) -> bytes:
    return compressed(chance.choice([ORIGINAL, ORIGINAL + TAR, TAR[:-BLOCK], TAR + bytes(BLOCK), TAR + TAR]))


def tar_byte(chance: random.Random) -> bytes:
    return compressed(flipped(TAR, chance))


def tar_header(chance: random.Random) -> bytes:
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
    return compressed(TAR[:place] + bytes(header) + TAR[place + BLOCK :])


def special_member(chance: random.Random) -> bytes:
    """A link, a device, an extended header, a sparse file or a folder in the place of, or beside, a member."""
    parts = list(MEMBERS)
    info = tarfile.TarInfo(chance.choice(["mod.so", "sample.npz", "evil", "a/b", "../evil", "bundle.json", "n" * 100]))
    info.type = chance.choice([b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"x", b"g", b"L", b"K", b"S", b"\0", b"Q"])
    info.linkname = chance.choice(["/etc/passwd", "../../evil", "mod.json", ""])
    parts.insert(chance.randrange(len(parts) + 1), (info, b""))
    return compressed(archive(parts))


def member_set(chance: random.Random) -> bytes:
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
    return compressed(archive(parts))


def member_content(chance: random.Random) -> bytes:
    """A file that is not what its digest says, with its own size or another."""
    parts = list(MEMBERS)
    place = chance.randrange(1, len(parts))
    name, content = parts[place][0].name, parts[place][1]
    damage = chance.choice([flipped(content, chance), content[:-1], content + b"\0", b"", content[::-1]])
    parts[place] = plain(name, damage)
    return compressed(archive(parts))


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a document."""
    if where:
        yield where
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*where, key))


def changed_manifest(chance: random.Random, values: tuple[Any, ...]) -> bytes:
    """The manifest with one value replaced by one of `values`, or removed."""
    document = json.loads(MEMBERS[0][1])
    *path, last = chance.choice(list(places(document)))
    part = document
    for key in path:
        part = part[key]
    if chance.randrange(4) == 0 and isinstance(part, dict):
        del part[last]
    else:
        part[last] = chance.choice(values)
    return spelled(document)


def manifest_value(chance: random.Random) -> bytes:
    return compressed(archive([plain("bundle.json", changed_manifest(chance, NASTY)), *MEMBERS[1:]]))


def manifest_size(chance: random.Random) -> bytes:
    """Sizes that no disk, no header or no file here has."""
    document = json.loads(MEMBERS[0][1])
    name = chance.choice(list(document["files"]))
    document["files"][name]["size"] = chance.choice([0, 1, 1 << 33, 1 << 40, (1 << 63) - 1, 1 << 63, 10**4000])
    return compressed(archive([plain("bundle.json", spelled(document)), *MEMBERS[1:]]))


def manifest_text(chance: random.Random) -> bytes:
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
    return compressed(archive([plain("bundle.json", text), *MEMBERS[1:]]))


def bomb(chance: random.Random) -> bytes:
    """Content that unpacks to a thousand times its size, with or without a header that says so."""
    size = chance.choice([1 << 24, 1 << 26])
    document = json.loads(MEMBERS[0][1])
    document["files"]["mod.so"] = {"sha256": hashlib.sha256(bytes(size)).hexdigest(), "size": size}
    parts = [plain("bundle.json", spelled(document)), MEMBERS[1], plain("mod.so", bytes(size)), MEMBERS[3]]
    data = chance.choice([archive(parts), TAR + bytes(size), bytes(size)])
    packed = gzip.compress(data, compresslevel=9, mtime=0)
    return ORIGINAL[:10] + packed[10:-8] + struct.pack("<LL", *struct.unpack("<LL", packed[-8:]))


# The number of mutants of each that one run tries.
MUTATORS: dict[Mutator, int] = {
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


def mutant(mutator: Mutator, seed: int) -> bytes:
    """The bytes of a mutated bundle: always the same for the same mutator and seed."""
    return mutator(random.Random(f"{mutator.__name__} {seed}"))  # noqa: S311
