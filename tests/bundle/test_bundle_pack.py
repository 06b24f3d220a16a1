"""Packing: the same bytes from the same inputs, and nothing left where it fails."""

import dataclasses
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow.bundle import Manifest, extract, pack, read_manifest, sha256_file
from tvmflow.errors import BundleError

WriteFiles = Callable[[Path], dict[str, Path]]

PACK_AGAIN = """
import pathlib, sys
from tvmflow.bundle import pack, read_manifest
bundle, folder, destination = map(pathlib.Path, sys.argv[1:])
pack(destination, read_manifest(bundle), {path.name: path for path in folder.iterdir()})
"""


def test_packing_from_another_folder_gives_the_same_bytes(
    bundle: Path, manifest: Manifest, write_files: WriteFiles, tmp_path: Path
) -> None:
    files = write_files(tmp_path / "elsewhere" / "deeper")
    for index, path in enumerate(files.values()):
        os.utime(path, (index, index))
        path.chmod(0o700)
    backwards = dict(reversed(files.items()))
    pack(tmp_path / "new folder" / "again.tar.gz", manifest, backwards)
    assert (tmp_path / "new folder" / "again.tar.gz").read_bytes() == bundle.read_bytes()


def test_packing_in_another_process_gives_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo"}
    arguments = [str(bundle), str(tmp_path / "files"), str(tmp_path / "again.tar.gz")]
    subprocess.run([sys.executable, "-c", PACK_AGAIN, *arguments], env=environment, check=True)
    assert (tmp_path / "again.tar.gz").read_bytes() == bundle.read_bytes()


def test_a_changed_manifest_changes_the_bytes(
    bundle: Path, manifest: Manifest, write_files: WriteFiles, tmp_path: Path
) -> None:
    pack(tmp_path / "other.tar.gz", dataclasses.replace(manifest, threads=4), write_files(tmp_path / "files"))
    assert (tmp_path / "other.tar.gz").read_bytes() != bundle.read_bytes()


def test_the_manifest_comes_back_complete(bundle: Path, manifest: Manifest, content: dict[str, bytes]) -> None:
    copy = read_manifest(bundle)
    assert dataclasses.replace(copy, files={}) == manifest
    assert {name: entry.size for name, entry in copy.files.items()} == {k: len(v) for k, v in content.items()}


def test_extracting_gives_the_files_back(bundle: Path, content: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    manifest = extract(bundle, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == content
    assert all(sha256_file(tmp_path / "out" / name) == entry.sha256 for name, entry in manifest.files.items())


def test_weights_apart_travel_in_the_bundle(
    manifest: Manifest, write_files: WriteFiles, content: dict[str, bytes], tmp_path: Path
) -> None:
    files = write_files(tmp_path / "files")
    (tmp_path / "mod.params").write_bytes(b"weights")
    bundle = tmp_path / "apart.tar.gz"
    pack(bundle, dataclasses.replace(manifest, weights="apart"), {**files, "mod.params": tmp_path / "mod.params"})
    (tmp_path / "out").mkdir()
    extract(bundle, tmp_path / "out")
    assert (tmp_path / "out" / "mod.params").read_bytes() == b"weights"


def test_a_bundle_is_an_ordinary_tar_archive(bundle: Path, content: dict[str, bytes]) -> None:
    with tarfile.open(bundle) as archive:
        assert archive.getnames() == ["bundle.json", *sorted(content)]


def test_a_missing_file_leaves_nothing_behind(manifest: Manifest, write_files: WriteFiles, tmp_path: Path) -> None:
    files = write_files(tmp_path / "files")
    files["mod.so"].unlink()
    with pytest.raises(FileNotFoundError):
        pack(tmp_path / "place" / "b.tar.gz", manifest, files)
    assert not list(tmp_path.glob("place/*"))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "files" / "mod.so").write_bytes(os.urandom(1 << 20))
    (tmp_path / "place").mkdir()
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    arguments = [str(bundle), str(tmp_path / "files"), str(tmp_path / "place" / "b.tar.gz")]
    process = subprocess.run([sys.executable, "-c", limited + PACK_AGAIN, *arguments], capture_output=True, text=True)
    assert "OSError: [Errno 27] File too large" in process.stderr
    assert not list((tmp_path / "place").iterdir())


def test_a_former_bundle_stays_when_packing_over_it_fails(
    bundle: Path, manifest: Manifest, write_files: WriteFiles, tmp_path: Path
) -> None:
    before = bundle.read_bytes()
    files = write_files(tmp_path / "files")
    files["mod.so"].unlink()
    files["mod.so"].mkdir()
    with pytest.raises(OSError, match=r"mod\.so"):
        pack(bundle, manifest, files)
    assert bundle.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"threads": "2"}, {"threads": 0}, {"tvm_target": {"cost": float("nan")}}, {"name": "\ud800"}],
    ids=["text", "zero", "nan", "surrogate"],
)
def test_a_manifest_that_no_reader_accepts_is_not_packed(
    manifest: Manifest, write_files: WriteFiles, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(BundleError, match="cannot be packed"):
        pack(tmp_path / "place" / "b.tar.gz", dataclasses.replace(manifest, **change), write_files(tmp_path / "files"))
    assert not (tmp_path / "place").exists()


def test_a_foreign_file_is_not_packed(manifest: Manifest, write_files: WriteFiles, tmp_path: Path) -> None:
    files = write_files(tmp_path / "files")
    with pytest.raises(ValueError, match=r"evil\.sh"):
        pack(tmp_path / "b.tar.gz", manifest, {**files, "evil.sh": files["mod.so"]})


def test_content_that_hardly_compresses_is_stored(
    manifest: Manifest, write_files: WriteFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmflow.bundle.archive._PIECE", 1 << 16)
    random = np.random.default_rng(0)
    weights, code = random.standard_normal(1 << 16).astype("float32").tobytes(), b"mov rax, rbx; " * 10000
    files = write_files(tmp_path / "files")
    files["mod.so"].write_bytes(code + weights + code)
    pack(tmp_path / "mixed.tar.gz", manifest, files)
    packed = (tmp_path / "mixed.tar.gz").read_bytes()
    # Whole pieces of weights stand in the file as they are; the code around them is small.
    assert weights[100_000:101_000] in packed
    assert code[:1000] not in packed
    assert len(packed) < len(weights) + len(code) // 2
    with tarfile.open(tmp_path / "mixed.tar.gz") as archive:
        assert archive.extractfile("mod.so").read() == code + weights + code  # type: ignore[union-attr]
    extract(tmp_path / "mixed.tar.gz", tmp_path)
    assert (tmp_path / "mod.so").read_bytes() == code + weights + code


def test_content_that_compresses_best_is_within_the_readers_limit(
    manifest: Manifest, write_files: WriteFiles, tmp_path: Path
) -> None:
    files = write_files(tmp_path / "files")
    files["mod.so"].write_bytes(bytes(20 << 20))
    pack(tmp_path / "zeros.tar.gz", manifest, files)
    extract(tmp_path / "zeros.tar.gz", tmp_path)
    assert (tmp_path / "mod.so").stat().st_size == 20 << 20
