"""Small bundles of arbitrary content, and archives put together by hand."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tvmflow.bundle import Manifest, TensorSpec, installed_versions, pack
from tvmflow.hardware.target import host

WriteFiles = Callable[[Path], dict[str, Path]]
WriteArchive = Callable[..., Path]

CONTENT = {
    "mod.json": b'{"nodes": []}' * 20,
    "mod.so": bytes(range(256)) * 40,
    "sample.npz": b"PK\x05\x06" + bytes(18),
}


def spelled(document: Mapping[str, Any]) -> bytes:
    """A manifest as bundles spell it."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def compressed(data: bytes) -> bytes:
    """Compressed as bundles are."""
    with io.BytesIO() as raw:
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0) as stream:
            stream.write(data)
        return raw.getvalue()


@pytest.fixture
def content() -> dict[str, bytes]:
    return dict(CONTENT)


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        name="small",
        target="native",
        tvm_target={"kind": "llvm", "mtriple": f"{host().arch}-linux-gnu"},
        arch=host().arch,
        cpu_features=(),
        threads=2,
        inputs=(TensorSpec("x", ("batch", 3), "float32"),),
        outputs=(TensorSpec("y", ("batch", 3), "float32"),),
        dimensions={"batch": (1, 8)},
        weights="inside",
        versions=installed_versions("22"),
        provenance={"onnx": "ab" * 32},
    )


@pytest.fixture
def write_files() -> WriteFiles:
    """Write the content of a small bundle to a folder."""

    def write(folder: Path) -> dict[str, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in CONTENT.items():
            (folder / name).write_bytes(data)
        return {name: folder / name for name in CONTENT}

    return write


@pytest.fixture
def bundle(tmp_path: Path, manifest: Manifest, write_files: WriteFiles) -> Path:
    path = tmp_path / "small.tar.gz"
    pack(path, manifest, write_files(tmp_path / "files"))
    return path


@pytest.fixture
def manifest_document(manifest: Manifest) -> dict[str, Any]:
    """The manifest's document for the small content."""
    document: dict[str, Any] = json.loads(manifest.to_json())
    document["files"] = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in CONTENT.items()
    }
    return document


@pytest.fixture
def zipped() -> Callable[[bytes], bytes]:
    return compressed


@pytest.fixture
def write_archive(tmp_path: Path) -> WriteArchive:
    """Write a compressed tar of (name or header, content) pairs after a manifest."""

    def write(
        document: Mapping[str, Any] | None,
        members: Sequence[tuple[str | tarfile.TarInfo, bytes]],
        form: int = tarfile.USTAR_FORMAT,
        name: str = "crafted.tar.gz",
    ) -> Path:
        path = tmp_path / name
        first = [] if document is None else [("bundle.json", spelled(document))]
        with io.BytesIO() as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
                for member, data in [*first, *members]:
                    info = tarfile.TarInfo(member) if isinstance(member, str) else member
                    if info.isreg():
                        info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
                    archive.format = form
            path.write_bytes(compressed(stream.getvalue()))
        return path

    return write
