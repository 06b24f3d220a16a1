"""Packing a bundle deterministically, and opening one safely."""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from tvmflow.bundle.manifest import FileEntry, Manifest
from tvmflow.errors import BundleError

MANIFEST = "bundle.json"
# Every file a bundle may hold; weights apart add mod.params.
MEMBERS = ("mod.json", "mod.params", "mod.so", "sample.npz")
_REQUIRED = ("mod.json", "mod.so", "sample.npz")
_MANIFEST_LIMIT = 1 << 20
_CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def pack(destination: Path, manifest: Manifest, files: Mapping[str, Path]) -> Manifest:
    """Write a bundle: `files` by member name, and the manifest completed with their digests and sizes.

    The same manifest and files give the same bytes. The file appears at `destination` whole or not at all.
    """
    unknown = set(files) - set(MEMBERS)
    if unknown:
        raise ValueError(f"no bundle holds {', '.join(sorted(unknown))}")
    complete = dataclasses.replace(
        manifest,
        files={name: FileEntry(sha256_file(path), path.stat().st_size) for name, path in sorted(files.items())},
    )
    destination.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
    try:
        with (
            os.fdopen(descriptor, "wb") as raw,
            # Trained weights hardly compress: the fastest level costs a per cent of size and a third of the time.
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            data = complete.to_json()
            archive.addfile(_member(MANIFEST, len(data)), io.BytesIO(data))
            for name, path in sorted(files.items()):
                with path.open("rb") as source:
                    archive.addfile(_member(name, complete.files[name].size), source)
        Path(partial).chmod(0o644)
        Path(partial).replace(destination)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return complete


def read_manifest(bundle: Path) -> Manifest:
    """The manifest of a bundle; the other files are not looked at."""
    with _members(bundle) as members:
        return _first_manifest(members, bundle)


def extract(bundle: Path, destination: Path) -> Manifest:
    """Extract a bundle into an empty folder, each file checked against the manifest's digest as it is written.

    Raises BundleError for a file that is no bundle, truncated, altered, or that holds anything but the regular files
    its manifest names; nothing of it may be used then.
    """
    with _members(bundle) as members:
        manifest = _first_manifest(members, bundle)
        absent = set(_REQUIRED) - set(manifest.files)
        if absent or (manifest.weights == "apart") != ("mod.params" in manifest.files):
            raise BundleError(
                f"bundle {str(bundle)!r} lacks {', '.join(sorted(absent)) or 'its weights'}; build it again"
            )
        foreign = set(manifest.files) - set(MEMBERS)
        if foreign:
            raise BundleError(f"bundle {str(bundle)!r} names the foreign file {sorted(foreign)[0]!r}; do not trust it")
        needed = sum(entry.size for entry in manifest.files.values())
        free = shutil.disk_usage(destination).free
        if needed > free:
            raise BundleError(
                f"bundle {str(bundle)!r} needs {needed >> 20} MiB in {str(destination)!r}, {free >> 20} MiB are free"
            )
        left = dict(manifest.files)
        for info, stream in members:
            entry = left.pop(info.name, None)
            if entry is None or not info.isreg() or info.size != entry.size:
                raise BundleError(
                    f"bundle {str(bundle)!r} holds {info.name!r}, which its manifest does not describe; do not trust it"
                )
            _write_checked(stream, entry, destination / info.name, bundle)
        if left:
            raise BundleError(f"bundle {str(bundle)!r} ends before {sorted(left)[0]!r}; fetch it again")
    return manifest


def _member(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info


@contextlib.contextmanager
def _members(bundle: Path) -> Iterator[Iterator[tuple[tarfile.TarInfo, IO[bytes]]]]:
    """Iterate the archive's members in order, with every way an archive can be broken turned into BundleError."""
    try:
        with bundle.open("rb") as raw, gzip.GzipFile(fileobj=raw) as stream:

            def members(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
                for info in archive:
                    yield info, archive.extractfile(info) if info.isreg() else io.BytesIO()  # type: ignore[misc]

            with tarfile.open(fileobj=stream, mode="r|") as archive:
                yield members(archive)
                while stream.read(_CHUNK):
                    pass  # to the end, so that gzip's own check sum is compared
    except FileNotFoundError as error:
        if error.filename != str(bundle):
            raise
        raise BundleError(f"there is no bundle {str(bundle)!r}") from error
    except IsADirectoryError as error:
        raise BundleError(f"{str(bundle)!r} is a folder, not a bundle") from error
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, UnicodeError, ValueError) as error:
        raise BundleError(f"{str(bundle)!r} is not a bundle or is damaged ({error}); fetch it again") from error


def _first_manifest(members: Iterator[tuple[tarfile.TarInfo, IO[bytes]]], bundle: Path) -> Manifest:
    first = next(members, None)
    if first is None or first[0].name != MANIFEST or not first[0].isreg() or first[0].size > _MANIFEST_LIMIT:
        raise BundleError(f"{str(bundle)!r} is not a bundle: it does not begin with {MANIFEST}")
    return Manifest.from_json(first[1].read(), str(bundle))


def _write_checked(stream: IO[bytes], entry: FileEntry, path: Path, bundle: Path) -> None:
    digest = hashlib.sha256()
    with path.open("xb") as output:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            output.write(chunk)
    if digest.hexdigest() != entry.sha256:
        path.unlink()
        raise BundleError(f"bundle {str(bundle)!r}: {path.name} is not what its manifest says; fetch it again")
