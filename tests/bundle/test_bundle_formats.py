"""Every format ever written stays readable: `files` holds a bundle of each, as the tvmflow of its time packed it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow.bundle import FORMAT, extract, pack, read_manifest, sha256_file
from tvmflow.bundle.manifest import _READERS
from tvmflow.errors import BundleError
from tvmflow.verification import verify

FILES = Path(__file__).parent / "files"
OLD = sorted(FILES.glob("format-*.tar.gz"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_every_format_has_a_reader_and_a_file() -> None:
    formats = set(range(1, FORMAT + 1))
    assert set(_READERS) == formats
    assert {read_manifest(path).format for path in OLD} == formats


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.name)
def test_an_old_bundle_opens(path: Path, folder: Path) -> None:
    manifest = extract(path, folder)
    assert (manifest.name, manifest.target, manifest.arch) == ("tiny", "x86-64-v2", "x86_64")
    assert [(item.name, item.shape, item.dtype) for item in manifest.inputs] == [("x", ("batch", 8), "float32")]
    assert [(item.name, item.shape, item.dtype) for item in manifest.outputs] == [("y", ("batch", 4), "float32")]
    assert manifest.dimensions == {"batch": (1, None)}
    assert ("mod.params" in manifest.files) == manifest.has_weights_file == ("apart" in path.name)
    assert {item.name: sha256_file(item) for item in folder.iterdir()} == {
        name: entry.sha256 for name, entry in manifest.files.items()
    }
    with np.load(folder / "sample.npz") as sample:
        assert {name: sample[name].shape for name in sample.files} == {"input:x": (1, 8), "output:y": (1, 4)}


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.name)
def test_an_old_bundle_is_packed_to_the_same_content_in_fewer_bytes(path: Path, folder: Path, tmp_path: Path) -> None:
    manifest = extract(path, folder)
    again, unpacked = tmp_path / "again.tar.gz", tmp_path / "unpacked"
    pack(again, manifest, {item.name: item for item in folder.iterdir()})
    assert again.stat().st_size <= path.stat().st_size
    unpacked.mkdir()
    assert extract(again, unpacked) == manifest
    assert {item.name: item.read_bytes() for item in unpacked.iterdir()} == {
        item.name: item.read_bytes() for item in folder.iterdir()
    }


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.name)
def test_an_old_bundle_runs_where_its_tvm_does(path: Path) -> None:
    try:
        read_manifest(path).check_host()
    except BundleError as error:
        pytest.skip(str(error))
    assert verify(path).max_abs_error < 1e-5


@pytest.mark.parametrize("number", [0, FORMAT + 1, 1 << 62])
def test_a_format_without_a_reader_is_refused_before_anything_else_of_the_manifest_is_read(
    tmp_path: Path, write_archive: Any, number: int
) -> None:
    bundle = write_archive({"format": number, "unheard": "of"}, [])
    with pytest.raises(BundleError, match=f"has format {number}, this tvmflow reads {FORMAT}; upgrade tvmflow$"):
        extract(bundle, tmp_path)


def test_what_a_later_writer_adds_to_the_same_format_is_left_alone(
    manifest_document: dict[str, Any], content: dict[str, bytes], write_archive: Any, folder: Path
) -> None:
    plain = json.dumps(manifest_document)
    manifest_document["remark"] = "of use to people"
    manifest = extract(write_archive(manifest_document, sorted(content.items())), folder)
    assert json.loads(manifest.to_json()) == json.loads(plain)
