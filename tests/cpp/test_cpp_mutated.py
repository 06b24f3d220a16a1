"""The C++ reader of bundles accepts exactly the bundles that the Python reader accepts.

A failure names its mutant: `mutant(mutator, seed)` of tests/support/mutants.py writes it again.
"""

import gzip
import hashlib
import json
import random
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support import scale
from support.cpp import Runner
from support.mutants import (
    DOCUMENT,
    MEMBERS,
    MUTATORS,
    ORIGINAL,
    ORIGINAL_FILE,
    TAR,
    Mutator,
    archive,
    bomb,
    compressed,
    flipped,
    members,
    mutant,
    plain,
    spelled,
)
from tvmflow.bundle import extract, keygen, sign
from tvmflow.errors import BundleError


def is_intact_for_python(path: Path, folder: Path, trusted: Sequence[Path] = ()) -> bool:
    """Whether the Python reader accepts a bundle, where the keys in `trusted` are."""
    folder.mkdir()
    try:
        extract(path, folder, trusted=trusted)
    except BundleError:
        return False
    return True


def verdicts(program: Runner, paths: Iterable[Path], trusted: str = "") -> list[str]:
    """The C++ reader's answer for each bundle, where the keys in `trusted` are; it must not crash on any."""
    text = "".join(f"{path}\n" for path in paths)
    process = program("verify", text=text, env={"TVMFLOW_TRUSTED_KEYS": trusted})
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout.splitlines()


@pytest.mark.parametrize("mutator", MUTATORS, ids=lambda mutator: mutator.__name__)
def test_both_readers_agree_on_a_mutated_bundle(program: Runner, mutator: Mutator, tmp_path: Path) -> None:
    normal = 1 if mutator is bomb else max(2, MUTATORS[mutator] // 10)
    seeds = range(scale.count(normal=normal, long=MUTATORS[mutator] * 4))
    paths = [tmp_path / f"{mutator.__name__}-{seed}.tar.gz" for seed in seeds]
    for seed, path in zip(seeds, paths, strict=True):
        path.write_bytes(mutant(mutator, seed))
    for seed, path, verdict in zip(seeds, paths, verdicts(program, paths), strict=True):
        expected = is_intact_for_python(path, tmp_path / str(seed))
        assert (verdict == "intact") == expected, f"mutant({mutator.__name__}, {seed}): {verdict}"
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.long
@pytest.mark.parametrize("mutator", MUTATORS, ids=lambda mutator: mutator.__name__)
def test_the_runner_survives_every_mutated_bundle(runner: Runner, mutator: Mutator, tmp_path: Path) -> None:
    path = tmp_path / "mutated.tar.gz"
    for seed in range(MUTATORS[mutator]):
        path.write_bytes(mutant(mutator, seed))
        process = runner(path)
        origin = f"mutant({mutator.__name__}, {seed})"
        assert process.returncode in (0, 1), f"{origin}: {process.stderr[-4000:]}"
        assert process.stderr.count("\n") == process.returncode, f"{origin}: {process.stderr[-4000:]}"


@pytest.mark.parametrize("part", ["signature", "manifest", "library"])
def test_both_readers_agree_on_a_mutated_signed_bundle(program: Runner, part: str, tmp_path: Path) -> None:
    public, other = keygen(tmp_path / "key"), keygen(tmp_path / "other")
    sign(ORIGINAL_FILE, tmp_path / "key", tmp_path / "signed.tar.gz")
    signed = gzip.decompress((tmp_path / "signed.tar.gz").read_bytes())
    parts = members(signed)
    number = {"manifest": 0, "signature": 1, "library": 3}[part]
    info, content = parts[number]
    chance = random.Random(part)  # noqa: S311
    paths = []
    for count in range(scale.count(normal=20, long=100)):
        mutated = content if count == 0 else flipped(content, chance)
        if part == "signature" and count % 2:
            # Another digit in place of one: the form stays right.
            place = chance.randrange(len(b"ed25519 "), len(content) - 1)
            mutated = content[:place] + chance.choice(b"0123456789abcdef ").to_bytes() + content[place + 1 :]
        paths.append(tmp_path / f"{count}.tar.gz")
        paths[-1].write_bytes(compressed(archive([*parts[:number], (info, mutated), *parts[number + 1 :]])))
    for trusted in ((), (public,), (other, public), (other,)):
        answers = verdicts(program, paths, ":".join(map(str, trusted)))
        for path, verdict in zip(paths, answers, strict=True):
            expected = is_intact_for_python(path, Path(tempfile.mkdtemp(dir=tmp_path)) / "files", trusted)
            assert (verdict == "intact") == expected, f"{path.name}: {verdict}"
        assert answers[0] == "intact" or trusted == (other,)


def special(kind: bytes, name: str, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    """A member that is not a regular file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, b""


def without(name: str) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [member for member in MEMBERS if member[0].name != name]


CRAFTED = {
    "a symbolic link": [*without("mod.so"), special(tarfile.SYMTYPE, "mod.so", "/etc/passwd")],
    "a hard link": [*without("mod.so"), special(tarfile.LNKTYPE, "mod.so", "mod.json")],
    "a folder": [*MEMBERS, special(tarfile.DIRTYPE, "folder")],
    "a device": [*MEMBERS, special(tarfile.CHRTYPE, "mod.params")],
    "a pipe": [*MEMBERS, special(tarfile.FIFOTYPE, "mod.params")],
    "a file above the folder": [*MEMBERS, plain("../evil", b"evil")],
    "a file at the root": [*MEMBERS, plain("/evil", b"evil")],
    "a file below another": [*MEMBERS, plain("mod.so/evil", b"evil")],
    "the manifest's own name with a prefix": [*without("mod.so"), plain("./mod.so", b"evil")],
    "a file twice": [*MEMBERS, MEMBERS[-1]],
    "a foreign file": [*MEMBERS, plain("evil", b"evil")],
    "a damaged signature": [MEMBERS[0], plain("bundle.sig", b"evil"), *MEMBERS[1:]],
    "a signature before the manifest": [plain("bundle.sig", b"evil"), *MEMBERS],
    "no file": [],
}


def test_crafted_archives_are_refused_by_both_readers(program: Runner, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.tar.gz" for number in range(len(CRAFTED))]
    for path, parts in zip(paths, CRAFTED.values(), strict=True):
        path.write_bytes(compressed(archive(parts)))
    for path, label, verdict in zip(paths, CRAFTED, verdicts(program, paths), strict=True):
        assert str(path) in verdict, label
        assert not is_intact_for_python(path, tmp_path / path.stem), label
    assert not (tmp_path.parent / "evil").exists()


def test_extended_headers_are_refused_by_both_readers(program: Runner, tmp_path: Path) -> None:
    paths = []
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        info = tarfile.TarInfo("n" * 200)
        info.size = 4
        header = info.tobuf(form)
        path = tmp_path / f"{form}.tar.gz"
        path.write_bytes(compressed(header + b"evil" + bytes(508) + TAR))
        paths.append(path)
    for path, verdict in zip(paths, verdicts(program, paths), strict=True):
        assert str(path) in verdict
        assert not is_intact_for_python(path, tmp_path / path.stem)


# Values at the edges of what a manifest may hold, and whether a bundle with them is intact.
EDGES: list[tuple[str, Any, bool]] = [
    ("tvm_target", {"kind": (1 << 64) - 1}, True),
    ("tvm_target", {"kind": 1 << 64}, False),
    ("tvm_target", {"kind": -(1 << 63)}, True),
    ("tvm_target", {"kind": -(1 << 63) - 1}, False),
    ("tvm_target", {"kind": [0.1, -2.5, 1e300, 1e-07, 1e22], "\x7f": "\u202e\x7f\x08\x1f\u2028"}, True),
    ("tvm_target", [], False),
    ("name", "\u00e9\u65e5\u672c\U0001f600", True),
    ("name", "a\x7f", False),
    ("name", "a\u00a0", False),
    ("name", "a\u200b", False),
    ("name", "a\U000e0020", False),
    ("threads", (1 << 63) - 1, True),
    ("threads", 1 << 63, False),
    ("threads", True, False),
    ("threads", 2.0, False),
    ("dimensions", {"batch": [0, 0]}, True),
    ("dimensions", {"batch": [2, 1]}, False),
    ("dimensions", {"batch": "12"}, False),
    ("dimensions", {"batch": [1, 2, 3]}, False),
    ("dimensions", {"\n": [1, 2]}, False),
    ("indices", {DOCUMENT["inputs"][0]["name"]: [-(1 << 63) + 1, (1 << 63) - 1]}, True),
    ("indices", {DOCUMENT["inputs"][0]["name"]: [-(1 << 63), 0]}, False),
    ("indices", {DOCUMENT["inputs"][0]["name"]: [0, 1 << 63]}, False),
    ("indices", {DOCUMENT["inputs"][0]["name"]: [0, 1, 2]}, False),
    ("indices", {DOCUMENT["inputs"][0]["name"]: [0, None]}, False),
    ("indices", {"no such input": [0, 1]}, False),
    ("unaligned_inputs", True, True),
    ("unaligned_inputs", False, True),
    ("unaligned_inputs", 1, False),
    ("variants", [{"function": "main", "sizes": {"batch": 1}}], True),
    ("variants", [{"function": "main", "sizes": {"height": 1}}], False),
    ("provenance", {"note": 1}, False),
    ("versions", {"tvm": "1", "tvm_ffi": "1", "llvm": "1"}, False),
    ("a key that no reader knows", [None, {}], True),
]


def test_both_readers_agree_on_the_edges_of_a_manifest(program: Runner, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.tar.gz" for number in range(len(EDGES))]
    for path, (key, value, _) in zip(paths, EDGES, strict=True):
        manifest = plain("bundle.json", spelled({**DOCUMENT, key: value}))
        path.write_bytes(compressed(archive([manifest, *MEMBERS[1:]])))
    for path, edge, verdict in zip(paths, EDGES, verdicts(program, paths), strict=True):
        assert (verdict == "intact") == edge[2], (edge, verdict)
        assert is_intact_for_python(path, tmp_path / path.stem) == edge[2], edge


def test_a_bomb_is_refused_before_it_fills_the_disk(program: Runner, tmp_path: Path) -> None:
    size = 1 << 26
    document = json.loads(spelled(DOCUMENT))
    document["files"]["mod.so"] = {"sha256": hashlib.sha256(bytes(size)).hexdigest(), "size": size}
    members = [plain("bundle.json", spelled(document)), MEMBERS[1], plain("mod.so", bytes(size)), MEMBERS[3]]
    path = tmp_path / "bomb.tar.gz"
    # A bundle's header, and a thousand times smaller than its content, which the level of bundles cannot reach.
    path.write_bytes(ORIGINAL[:10] + gzip.compress(archive(members), compresslevel=9, mtime=0)[10:])
    # No file may grow beyond 40,960 blocks of 512 bytes.
    limited = ["/bin/sh", "-c", 'ulimit -f 40960; exec "$0" "$@"', *program.command]
    process = Runner(tuple(limited), {**program.environment, "TMPDIR": str(tmp_path)})("verify", text=f"{path}\n")
    assert process.returncode == 0, process.stderr
    assert str(path) in process.stdout


def test_the_original_is_intact(program: Runner) -> None:
    assert verdicts(program, [ORIGINAL_FILE]) == ["intact"]
