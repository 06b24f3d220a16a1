"""Bundles without their weights: opened with these beside them, wherever they came from, and only if they are right."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmflow.bundle import Manifest, extract, missing_weights, pack, read_manifest, sha256_file
from tvmflow.errors import BundleError

WriteFiles = Callable[[Path], dict[str, Path]]
WEIGHTS = b"weights" * 1000


@pytest.fixture
def files(write_files: WriteFiles, tmp_path: Path) -> dict[str, Path]:
    files = write_files(tmp_path / "files")
    (tmp_path / "files" / "mod.params").write_bytes(WEIGHTS)
    return {**files, "mod.params": tmp_path / "files" / "mod.params"}


@pytest.fixture
def apart(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, weights="apart")


@pytest.fixture
def without(apart: Manifest, files: dict[str, Path], tmp_path: Path) -> Path:
    pack(tmp_path / "place" / "without.tar.gz", apart, files, leave_weights_out=True)
    return tmp_path / "place" / "without.tar.gz"


@pytest.fixture
def beside(without: Path, files: dict[str, Path]) -> Path:
    """Where the weights are looked for, with them there."""
    path = without.with_name(sha256_file(files["mod.params"]))
    path.write_bytes(WEIGHTS)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_the_manifest_is_that_of_the_complete_bundle(
    without: Path, apart: Manifest, files: dict[str, Path], tmp_path: Path
) -> None:
    pack(tmp_path / "complete.tar.gz", apart, files)
    assert read_manifest(without) == read_manifest(tmp_path / "complete.tar.gz")
    assert missing_weights(tmp_path / "complete.tar.gz") is None


def test_it_is_opened_with_the_weights_beside_it(without: Path, beside: Path, folder: Path) -> None:
    digest = missing_weights(without)
    assert digest is not None
    assert (digest.sha256, digest.size) == (beside.name, len(WEIGHTS))
    extract(without, folder)
    assert (folder / "mod.params").read_bytes() == WEIGHTS


def test_bundles_of_two_targets_share_one_file(
    without: Path, beside: Path, apart: Manifest, files: dict[str, Path], tmp_path: Path
) -> None:
    pack(
        without.with_name("other.tar.gz"),
        dataclasses.replace(apart, target="other"),
        files,
        leave_weights_out=True,
    )
    for name in ("without.tar.gz", "other.tar.gz"):
        (tmp_path / name).mkdir()
        extract(without.with_name(name), tmp_path / name)
        assert (tmp_path / name / "mod.params").read_bytes() == WEIGHTS


def test_missing_weights_are_reported_with_the_name_they_need(without: Path, beside: Path, folder: Path) -> None:
    beside.unlink()
    with pytest.raises(BundleError, match=f"lacks its weights, and '.*{beside.name}' cannot be read"):
        extract(without, folder)


@pytest.mark.parametrize("wrong", [WEIGHTS[:-1], WEIGHTS + b"x", WEIGHTS[::-1], b""])
def test_wrong_weights_are_refused(without: Path, beside: Path, folder: Path, wrong: bytes) -> None:
    beside.write_bytes(wrong)
    with pytest.raises(BundleError, match="not what its manifest says"):
        extract(without, folder)
    assert not (folder / "mod.params").exists()


def test_a_bundle_with_weights_inside_needs_none(bundle: Path) -> None:
    assert missing_weights(bundle) is None
