"""Hundreds of damaged and forged bundles: each is refused in one sentence or changes nothing, and none runs here.

The caller opens every one itself, as the runtime does before it loads anything; what a forger made consistent, digests
included, is left to `verify`, which runs it in another process.
"""

import gzip
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.mutants import (
    MEMBERS,
    MUTATORS,
    NASTY,
    ORIGINAL,
    ORIGINAL_FILE,
    Mutator,
    archive,
    changed_manifest,
    compressed,
    flipped,
    manifest_value,
    member_set,
    members,
    mutant,
    plain,
    spelled,
)
from tvmflow.bundle import extract, keygen, read_manifest, sign
from tvmflow.errors import BundleError, VerdictError
from tvmflow.verification import verify

MANIFEST = read_manifest(ORIGINAL_FILE)


@pytest.mark.few(5)
@pytest.mark.parametrize("mutator", MUTATORS, ids=lambda mutator: mutator.__name__)
def test_a_mutated_bundle_is_refused_or_changes_nothing(mutator: Mutator, tmp_path: Path) -> None:
    path, messages = tmp_path / "mutated.tar.gz", list[str]()
    for seed in range(MUTATORS[mutator]):
        path.write_bytes(mutant(mutator, seed))
        origin = f"mutant({mutator.__name__}, {seed})"
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            manifest = extract(path, folder, trusted=())
        except BundleError as error:
            messages.append(str(error))
            continue
        assert manifest.files == MANIFEST.files, origin
        for name, entry in manifest.files.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry.sha256, origin
        if manifest != MANIFEST:
            # Nothing of it was damaged: this is what a signature is for.
            assert mutator is manifest_value, origin
    assert not (tmp_path.parent / "evil").exists()
    for sentence in messages:
        assert sentence.isprintable()
        assert str(path) in sentence
        assert len(sentence) < 500 + 2 * len(str(path))
    assert len(messages) > MUTATORS[mutator] * (0.5 if mutator in (manifest_value, member_set) else 0.9)


def test_any_change_of_a_signed_manifest_is_refused(tmp_path: Path) -> None:
    public = keygen(tmp_path / "key")
    (tmp_path / "plain.tar.gz").write_bytes(ORIGINAL)
    sign(tmp_path / "plain.tar.gz", tmp_path / "key", tmp_path / "signed.tar.gz")
    signed = members(gzip.decompress((tmp_path / "signed.tar.gz").read_bytes()))
    harmless = (*NASTY, "another", 3, [3], ["avx2"], "0" * 64, "float32")
    for seed in range(80):
        text = changed_manifest(random.Random(seed), harmless)  # noqa: S311
        assert text != MEMBERS[0][1]
        (tmp_path / "forged.tar.gz").write_bytes(compressed(archive([plain("bundle.json", text), *signed[1:]])))
        folder = tmp_path / str(seed)
        folder.mkdir()
        with pytest.raises(BundleError, match="was changed after it was signed"):
            extract(tmp_path / "forged.tar.gz", folder, trusted=[public])
        assert not list(folder.iterdir())


def forged(name: str, content: bytes) -> bytes:
    """A bundle with another file, and a manifest that says so."""
    document = json.loads(MEMBERS[0][1])
    document["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    parts = [plain(info.name, content if info.name == name else data) for info, data in MEMBERS[1:]]
    return compressed(archive([plain("bundle.json", spelled(document)), *parts]))


def consistent() -> Iterator[tuple[str, str, bytes]]:
    """Files that are wrong and have the right digests."""
    contents = {info.name: content for info, content in MEMBERS}
    library, sample = contents["mod.so"], contents["sample.npz"]
    yield "empty library", "mod.so", b""
    yield "text", "mod.so", b"#!/bin/sh\necho evil\n"
    yield "library cut in its middle", "mod.so", library[: len(library) // 2]
    yield "library cut after its headers", "mod.so", library[:4096]
    yield "library of zeros after its headers", "mod.so", library[:1024] + bytes(len(library) - 1024)
    for seed in range(3):
        chance = random.Random(seed)  # noqa: S311
        damage = bytearray(library)
        for _ in range(200):
            damage[chance.randrange(64, len(library))] = chance.randrange(256)
        yield f"library with 200 bytes changed ({seed})", "mod.so", bytes(damage)
    yield "sample cut", "sample.npz", sample[: len(sample) // 2]
    yield "sample of nothing", "sample.npz", b"PK\x05\x06" + bytes(18)
    yield "sample that is none", "sample.npz", b"none"
    yield "sample with a byte flipped", "sample.npz", flipped(sample, random.Random(0), 200, 220)  # noqa: S311


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "content"), [pytest.param(*rest, id=label) for label, *rest in consistent()])
def test_a_forged_file_takes_only_the_process_of_verify_down(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "forged.tar.gz"
    path.write_bytes(forged(name, content))
    messages, worst = "", 0.0
    try:
        worst = verify(path, trusted=(), timeout=60).max_abs_error
    except (BundleError, VerdictError) as error:
        messages = str(error)
    assert messages.isprintable()
    if messages:
        assert str(path) in messages or repr(MANIFEST.name) in messages
    else:
        # Bytes that nothing reads: the library still computes what it did.
        assert name == "mod.so"
        assert worst < 1e-5
