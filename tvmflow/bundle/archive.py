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
    with _opened(bundle) as stream:
        return _first_manifest(_members(stream), bundle)


def extract(bundle: Path, destination: Path) -> Manifest:
    """Extract a bundle into an empty folder, each file checked against the manifest's digest as it is written.

    Raises BundleError for a file that is no bundle, truncated, altered, or that holds anything but the regular files
    its manifest names; nothing of it may be used then.
    """
    with _opened(bundle) as stream:
        members = _members(stream)
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
        for info, content in members:
            entry = left.pop(info.name, None)
            if entry is None or info.type != tarfile.REGTYPE or info.size != entry.size:
                raise BundleError(
                    f"bundle {str(bundle)!r} holds {info.name!r}, which its manifest does not describe; do not trust it"
                )
            _write_checked(content, entry, destination / info.name, bundle)
        if left:
            raise BundleError(f"bundle {str(bundle)!r} ends before {sorted(left)[0]!r}; fetch it again")
    return manifest


def _member(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info


@contextlib.contextmanager
def _opened(bundle: Path) -> Iterator[gzip.GzipFile]:
    """The bundle's tar stream, with every way a file can be broken or unreadable turned into BundleError."""
    try:
        with bundle.open("rb") as raw, gzip.GzipFile(fileobj=raw) as stream:
            yield stream
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise BundleError(f"{str(bundle)!r} is not a bundle or is damaged ({error}); fetch it again") from error
    except OSError as error:
        if error.filename != str(bundle):
            raise BundleError(
                f"bundle {str(bundle)!r} cannot be unpacked ({error.strerror or error}); "
                f"free space, or set TMPDIR to another folder"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise BundleError(f"there is no bundle {str(bundle)!r}") from error
        if isinstance(error, IsADirectoryError):
            raise BundleError(f"{str(bundle)!r} is a folder, not a bundle") from error
        raise BundleError(f"bundle {str(bundle)!r} cannot be read ({error.strerror})") from error


def _members(stream: gzip.GzipFile) -> Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]]:
    """The archive's members in order, each with its content in chunks, to be consumed before the next is asked for.

    Reads what `pack` writes and no more. tarfile's own reader also follows long names, extended headers and sparse
    files, and holds in memory whatever sizes those declare.
    """
    while (header := _exactly(stream, tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        yield info, _content(stream, info.size)
        _exactly(stream, -info.size % tarfile.BLOCKSIZE)
    # To the end, so that gzip's own check sum is compared; but no further than tar pads.
    padding = stream.read(tarfile.RECORDSIZE + 1)
    if len(padding) > tarfile.RECORDSIZE or any(padding):
        raise ValueError("it goes on after its end")


def _content(stream: gzip.GzipFile, size: int) -> Iterator[bytes]:
    for start in range(0, size, _CHUNK):
        yield _exactly(stream, min(_CHUNK, size - start))


def _exactly(stream: gzip.GzipFile, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("it ends too early")
    return data


def _first_manifest(members: Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]], bundle: Path) -> Manifest:
    first = next(members, None)
    if first is None or first[0].name != MANIFEST or first[0].type != tarfile.REGTYPE:
        raise BundleError(f"{str(bundle)!r} is not a bundle: it does not begin with {MANIFEST}")
    info, content = first
    if info.size > _MANIFEST_LIMIT:
        raise BundleError(f"{str(bundle)!r} is not a bundle: its {MANIFEST} is larger than {_MANIFEST_LIMIT} bytes")
    return Manifest.from_json(b"".join(content), str(bundle))


def _write_checked(content: Iterator[bytes], entry: FileEntry, path: Path, bundle: Path) -> None:
    digest = hashlib.sha256()
    with path.open("xb") as output:
        for chunk in content:
            digest.update(chunk)
            output.write(chunk)
    if digest.hexdigest() != entry.sha256:
        path.unlink()
        raise BundleError(f"bundle {str(bundle)!r}: {path.name} is not what its manifest says; fetch it again")
