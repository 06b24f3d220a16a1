"""The bundle as an archive: equal content gives equal bytes, and nothing is used before its digest is checked."""

import contextlib
import dataclasses
import hashlib
import io
import os
import shutil
import stat
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from tvmflow.bundle import signature
from tvmflow.bundle.manifest import FileEntry, Manifest
from tvmflow.errors import BundleError, UncheckedBundleError
from tvmflow.files import replacing

MANIFEST = "bundle.json"
SIGNATURE = "bundle.sig"
WEIGHTS = "mod.params"
# Every file that a bundle can hold beside its manifest and signature; mod.params only where weights are kept apart.
MEMBERS = ("mod.json", WEIGHTS, "mod.so", "sample.npz")
_REQUIRED = ("mod.json", "mod.so", "sample.npz")
_MANIFEST_LIMIT = 1 << 20
_SIGNATURE_LIMIT = 1 << 10
# Bytes; the largest size that tar's header has digits for.
_LARGEST_MEMBER = (8 << 30) - 1
# The header that gzip writes without a name and a time.
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
# The largest ratio of unpacked to packed bytes. What `pack` compresses stays below 240; an archive that
# is meant to fill a disk can reach DEFLATE's 1032.
_LARGEST_RATIO = 256
# A piece of content is stored where its beginning compresses to more than this share of itself.
_LARGEST_SHARE = 0.875
# Bytes of a piece, and of the beginning that tells how well the piece compresses.
_PIECE = 1 << 18
_BEGINNING = 1 << 15
# The level at which a piece is compressed, and the one for pieces of a great ratio, which stays below 240 there.
_LEVEL, _LEAST_LEVEL = 6, 1
_GREAT_RATIO = 200
# Bytes of content that are held at a time, and bytes that are read from the file at a time.
_CHUNK = 1 << 20
_READ = 1 << 17


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def pack(
    destination: Path,
    manifest: Manifest,
    files: Mapping[str, Path],
    *,
    key: Path | None = None,
    leave_weights_out: bool = False,
) -> Manifest:
    """Write a bundle of `files` (paths by member name); return the manifest completed with their digests and sizes.

    The same manifest, files and key give the same bytes. `key` is a file with the private key to sign with, None for a
    bundle without a signature. With `leave_weights_out`, the bundle lacks its weights: a reader takes them from a file
    beside the bundle whose name is their digest. The file appears at `destination` complete or not at all. Raises
    BundleError for content that no reader accepts, ValueError for a file name that no bundle has, SettingsError for a
    key that cannot be read.
    """
    unknown = set(files) - set(MEMBERS)
    if unknown:
        raise ValueError(f"no bundle holds {', '.join(sorted(unknown))}")
    complete = dataclasses.replace(
        manifest,
        files={name: FileEntry(sha256_file(path), path.stat().st_size) for name, path in sorted(files.items())},
    )
    try:
        data = complete.to_json()
        Manifest.parse(data)
        for name, entry in complete.files.items():
            if entry.size > _LARGEST_MEMBER:
                raise ValueError(f"{name} has {entry.size} bytes, more than 8 GiB")
    except (ValueError, TypeError) as error:
        raise BundleError(f"bundle {manifest.name!r} cannot be packed ({error}); change that in the model") from error
    signature_line = None if key is None else signature.sign(data, key)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(destination, 0o644) as raw,
        contextlib.closing(_Zipped(raw)) as stream,
        tarfile.open(fileobj=cast("IO[bytes]", stream), mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        archive.addfile(_member(MANIFEST, len(data)), io.BytesIO(data))
        if signature_line is not None:
            archive.addfile(_member(SIGNATURE, len(signature_line)), io.BytesIO(signature_line))
        for name, path in sorted(files.items()):
            if leave_weights_out and name == WEIGHTS:
                continue
            with path.open("rb") as source:
                archive.addfile(_member(name, complete.files[name].size), source)
    return complete


def read_manifest(bundle: Path) -> Manifest:
    """Read a bundle's manifest; its signature and its other files are not checked.

    Raises BundleError for a file that is no bundle or has a damaged manifest.
    """
    with _open_bundle(bundle) as stream:
        return Manifest.from_json(_read_manifest(_members(stream), bundle), str(bundle))


def missing_weights(bundle: Path) -> FileEntry | None:
    """Return digest and size of the weights that a bundle lacks; None for a bundle that has them or needs none.

    Raises BundleError for a file that is no bundle or is damaged.
    """
    with _open_bundle(bundle) as stream:
        members = _members(stream)
        entry = Manifest.from_json(_read_manifest(members, bundle), str(bundle)).files.get(WEIGHTS)
        if entry is None:
            return None
        for member, content in members:
            if member.name == WEIGHTS:
                return None
            for _ in content:
                pass
    return entry


def read_signer(bundle: Path) -> str | None:
    """Return the public key, in hexadecimal, that a bundle names as its signer's; None for an unsigned bundle.

    The signature itself is not checked: `extract` does so, for a key among the trusted ones. Raises BundleError for a
    file that is no bundle or is damaged.
    """
    with _open_bundle(bundle) as stream:
        members = _members(stream)
        _read_manifest(members, bundle)
        signature_line, _ = _read_signature(members, bundle)
    return None if signature_line is None else signature.signer(signature_line, str(bundle))


def sign(bundle: Path, key: Path, destination: Path) -> Manifest:
    """Write a copy of a bundle, signed with the private key in the file `key`, and return its manifest.

    An earlier signature is replaced. Raises BundleError for a damaged bundle, SettingsError for a key that cannot be
    read.
    """
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        folder = Path(scratch)
        manifest = extract(bundle, folder, trusted=())
        return pack(destination, manifest, {name: folder / name for name in manifest.files}, key=key)


def extract(bundle: Path, destination: Path, *, trusted: Sequence[Path] | None = None) -> Manifest:
    """Extract a bundle into an empty folder, checking each file's digest as it is written; return the manifest.

    `trusted` are files with public keys, by default those that TVMFLOW_TRUSTED_KEYS names. One of them must have signed
    the bundle; if there are none, signatures are not checked. Weights that the bundle lacks are taken from the file
    beside it whose name is their digest. Raises BundleError for a file that is no bundle, is truncated or altered,
    lacks a trusted signature, or has other content than its manifest describes or than `pack` writes; the caller must
    not use the folder then.
    """
    trusted = signature.trusted_keys() if trusted is None else trusted
    with _open_bundle(bundle) as stream:
        members = _members(stream)
        data = _read_manifest(members, bundle)
        signature_line, following = _read_signature(members, bundle)
        signature.check(data, signature_line, trusted, str(bundle))
        if signature_line is not None:
            # Without trusted keys, too, a damaged signature is refused.
            signature.signer(signature_line, str(bundle))
        manifest = Manifest.from_json(data, str(bundle))
        _check_files(manifest, bundle, destination)
        missing = dict(manifest.files)
        while following is not None:
            member, content = following
            entry = missing.pop(member.name, None)
            if entry is None or not member.is_plain or member.size != entry.size:
                raise BundleError(
                    f"bundle {str(bundle)!r} holds {member.name!r}, which its manifest does not describe; "
                    f"do not trust it"
                )
            _write_checked(content, entry, destination / member.name, bundle)
            following = next(members, None)
        stream.finish()
        weights = missing.pop(WEIGHTS, None)
        if missing:
            raise BundleError(f"bundle {str(bundle)!r} ends before {min(missing)!r}; fetch it again")
    if weights is not None:
        _copy_weights(bundle, weights, destination / WEIGHTS)
    return manifest


def _check_files(manifest: Manifest, bundle: Path, destination: Path) -> None:
    """Raise BundleError unless a manifest names the files of a bundle, and they fit into the folder `destination`."""
    absent = set(_REQUIRED) - set(manifest.files)
    if absent or manifest.has_weights_file != (WEIGHTS in manifest.files):
        raise BundleError(f"bundle {str(bundle)!r} lacks {', '.join(sorted(absent)) or 'its weights'}; build it again")
    foreign = set(manifest.files) - set(MEMBERS)
    if foreign:
        raise BundleError(f"bundle {str(bundle)!r} names the foreign file {sorted(foreign)[0]!r}; do not trust it")
    size = sum(entry.size for entry in manifest.files.values())
    free = shutil.disk_usage(destination).free
    if size > free:
        raise UncheckedBundleError(
            f"bundle {str(bundle)!r} needs {size >> 20} MiB in {str(destination)!r}, {free >> 20} MiB are free"
        )


def _member(name: str, size: int) -> tarfile.TarInfo:
    """The header of a member as `pack` writes it: a plain file that tells nothing of the machine or the time."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info


@contextlib.contextmanager
def _open_bundle(bundle: Path) -> "Iterator[_Unzipped]":
    """Open a bundle as a stream of tar's bytes. Whatever is broken or unreadable raises BundleError."""
    try:
        status = bundle.stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise BundleError(f"{str(bundle)!r} is no regular file, and so not a bundle; name a file")
        with bundle.open("rb") as raw:
            yield _Unzipped(raw, status.st_size * _LARGEST_RATIO)
    except (tarfile.TarError, EOFError, zlib.error, ValueError) as error:
        raise BundleError(f"{str(bundle)!r} is not a bundle or is damaged ({error}); fetch it again") from error
    except OSError as error:
        if error.filename != str(bundle):
            raise UncheckedBundleError(
                f"bundle {str(bundle)!r} cannot be unpacked ({error.strerror or error}); "
                f"free space, or set TMPDIR to another folder"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise BundleError(f"there is no bundle {str(bundle)!r}") from error
        if isinstance(error, IsADirectoryError):
            raise BundleError(f"{str(bundle)!r} is a folder, not a bundle") from error
        raise BundleError(f"bundle {str(bundle)!r} cannot be read ({error.strerror})") from error


class _Zipped:
    """A gzip file that is written: each piece of the content is compressed, or stored where that saves little.

    Trained weights hardly compress, and to unpack them would take longer than all the rest of loading a model.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        """Write the header."""
        raw.write(_GZIP_HEADER)
        self._raw, self._waiting = raw, bytearray()
        self._sum, self._size = zlib.crc32(b""), 0

    def write(self, data: bytes) -> int:
        """Add content; return its number of bytes."""
        self._waiting += data
        self._sum, self._size = zlib.crc32(data, self._sum), self._size + len(data)
        whole = len(self._waiting) // _PIECE * _PIECE
        for start in range(0, whole, _PIECE):
            self._raw.write(_compress(bytes(self._waiting[start : start + _PIECE])))
        del self._waiting[:whole]
        return len(data)

    def tell(self) -> int:
        """Return the number of bytes of content so far."""
        return self._size

    def close(self) -> None:
        """Write the rest of the content, the end of the stream and the check sum."""
        self._raw.write(_compress(bytes(self._waiting)))
        self._raw.write(zlib.compressobj(wbits=-zlib.MAX_WBITS).flush())
        self._raw.write(struct.pack("<LL", self._sum, self._size & 0xFFFFFFFF))


def _compress(piece: bytes) -> bytes:
    """A part of a DEFLATE stream with this content; it ends at a whole byte, so that any other part may follow."""
    beginning = piece[:_BEGINNING]
    if len(zlib.compress(beginning, _LEAST_LEVEL)) > _LARGEST_SHARE * len(beginning):
        return _deflate(piece, 0)
    packed = _deflate(piece, _LEVEL)
    return packed if len(packed) * _GREAT_RATIO > len(piece) else _deflate(piece, _LEAST_LEVEL)


def _deflate(piece: bytes, level: int) -> bytes:
    """The same at a level of zlib; 0 stores."""
    compressor = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    return compressor.compress(piece) + compressor.flush(zlib.Z_SYNC_FLUSH)


class _Unzipped:
    """The content of a gzip file as `pack` writes it: a header, one compressed stream, and nothing after it.

    gzip's own reader also accepts names, times and comments, further streams and zeros at the end: no digest covers
    these, so that something could hide there.
    """

    def __init__(self, raw: IO[bytes], limit: int) -> None:
        """Read the header; content of more than `limit` bytes is refused. Raises ValueError for another header."""
        if raw.read(len(_GZIP_HEADER)) != _GZIP_HEADER:
            raise ValueError("it does not begin as one")
        self._raw, self._limit = raw, limit
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._sum, self._size = zlib.crc32(b""), 0

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end. Raises ValueError beyond the limit."""
        parts = []
        while size and not self._inflate.eof:
            compressed = self._inflate.unconsumed_tail or self._raw.read(_READ)
            data = self._inflate.decompress(compressed, size)
            if not data and not compressed:
                break
            parts.append(data)
            size -= len(data)
            self._size += len(data)
            self._sum = zlib.crc32(data, self._sum)
            if self._size > self._limit:
                raise ValueError("it unpacks to more than any bundle of its size")
        return b"".join(parts)

    def finish(self) -> None:
        """Raise ValueError or EOFError unless all was read, the check sum is right, and nothing follows."""
        if self.read(1):
            raise ValueError("it goes on after its end")
        trailer = self._inflate.unused_data + self._raw.read(9)
        if len(trailer) > 8:
            raise ValueError("it goes on after its end")
        if not self._inflate.eof or len(trailer) < 8:
            raise EOFError("it ends too early")
        if trailer != struct.pack("<LL", self._sum, self._size & 0xFFFFFFFF):
            raise ValueError("its check sum is wrong")


class _Member(NamedTuple):
    """A member of the archive: its name, its size in bytes, and whether its header is as `pack` writes it."""

    name: str
    size: int
    is_plain: bool


def _members(stream: _Unzipped) -> Iterator[tuple[_Member, Iterator[bytes]]]:
    """Yield the archive's members in order, each with its content in chunks, which must be consumed before the next.

    Reads the form that `pack` writes and no other. tarfile's own reader also follows long names, extended headers and
    sparse files, and holds in memory whatever sizes these declare. Raises ValueError for another form, EOFError for an
    end too early.
    """
    total = 0
    while (header := _exactly(stream, tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        expected = _member(info.name, info.size) if 0 <= info.size <= _LARGEST_MEMBER else None
        is_plain = expected is not None and header == expected.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
        yield _Member(info.name, info.size, is_plain), _content(stream, info.size)
        padding = -info.size % tarfile.BLOCKSIZE
        if any(_exactly(stream, padding)):
            raise ValueError("something stands between its files")
        total += tarfile.BLOCKSIZE + info.size + padding
    # One block of zeros has been read; tar writes two and fills the last record with more.
    rest = -(total + tarfile.BLOCKSIZE * 2) % tarfile.RECORDSIZE + tarfile.BLOCKSIZE
    if any(_exactly(stream, rest)):
        raise ValueError("it goes on after its end")


def _content(stream: _Unzipped, size: int) -> Iterator[bytes]:
    for start in range(0, size, _CHUNK):
        yield _exactly(stream, min(_CHUNK, size - start))


def _exactly(stream: _Unzipped, size: int) -> bytes:
    """The next `size` bytes. Raises EOFError if there are fewer."""
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("it ends too early")
    return data


def _read_manifest(members: Iterator[tuple[_Member, Iterator[bytes]]], bundle: Path) -> bytes:
    """The bytes of the manifest. Raises BundleError unless it is the first member and of a possible size."""
    first = next(members, None)
    if first is None or first[0].name != MANIFEST or not first[0].is_plain:
        raise BundleError(f"{str(bundle)!r} is not a bundle: it does not begin with {MANIFEST}")
    member, content = first
    if member.size > _MANIFEST_LIMIT:
        raise BundleError(f"{str(bundle)!r} is not a bundle: its {MANIFEST} is larger than {_MANIFEST_LIMIT} bytes")
    return b"".join(content)


def _read_signature(
    members: Iterator[tuple[_Member, Iterator[bytes]]], bundle: Path
) -> tuple[bytes | None, tuple[_Member, Iterator[bytes]] | None]:
    """The bytes of the signature, if one follows the manifest, and the member after it, if there is one."""
    second = next(members, None)
    if second is None or second[0].name != SIGNATURE:
        return None, second
    member, content = second
    if not member.is_plain or member.size > _SIGNATURE_LIMIT:
        raise BundleError(f"bundle {str(bundle)!r} has a damaged signature; fetch it again")
    return b"".join(content), next(members, None)


def _copy_weights(bundle: Path, entry: FileEntry, path: Path) -> None:
    """Copy the weights that a bundle lacks from the file beside it, and check them. Raises BundleError."""
    path_beside = bundle.with_name(entry.sha256)
    try:
        with path_beside.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size != entry.size:
                raise BundleError(
                    f"the weights {str(path_beside)!r} of bundle {str(bundle)!r} are not what its manifest says; "
                    f"fetch them again"
                )
            _write_checked(iter(lambda: stream.read(_CHUNK), b""), entry, path, bundle)
    except OSError as error:
        raise BundleError(
            f"bundle {str(bundle)!r} lacks its weights, and {str(path_beside)!r} cannot be read ({error.strerror}); "
            f"fetch that blob of the release beside it"
        ) from error


def _write_checked(content: Iterator[bytes], entry: FileEntry, path: Path, bundle: Path) -> None:
    """Write a new file; remove it and raise BundleError if its bytes have not the manifest's digest.

    Of a large file, a chunk is hashed and written while the next one is unpacked.
    """
    digest = hashlib.sha256()
    with path.open("xb") as output:

        def take(chunk: bytes) -> None:
            digest.update(chunk)
            output.write(chunk)

        if entry.size <= _CHUNK:
            for chunk in content:
                take(chunk)
        else:
            _take_beside(content, take)
    if digest.hexdigest() != entry.sha256:
        path.unlink()
        raise BundleError(f"bundle {str(bundle)!r}: {path.name} is not what its manifest says; fetch it again")


def _take_beside(content: Iterator[bytes], take: Callable[[bytes], None]) -> None:
    """Call `take` with each chunk in order, in a thread of its own, while the next chunk is made."""
    from concurrent.futures import Future, ThreadPoolExecutor

    pending: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        for chunk in content:
            if pending is not None:
                pending.result()
            pending = pool.submit(take, chunk)
    if pending is not None:
        pending.result()
