"""Blobs: files under their SHA-256, which is checked when they are written and read."""

import hashlib
import io
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tvmflow.errors import StoreError
from tvmflow.files import replacing
from tvmflow.store.keys import blob_key
from tvmflow.store.objects import MAX_PARTS, ObjectStore

Progress = Callable[[int], None]
"""Called with the number of bytes sent since the last call."""


class BlobStore:
    """The blobs of an object store, below `blobs/sha256/`. Every method raises StoreError when the server fails."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def put(self, path: Path, sha256: str, on_progress: Progress | None = None) -> str:
        """Send a file whose SHA-256 is `sha256`, unless the store has it undamaged; return its `s3://` address.

        The file is hashed while it is sent, and no blob appears when its digest differs. The blob is then read back and
        hashed too. A damaged blob in the store is replaced. `on_progress` gets the number of bytes sent since its last
        call. Raises StoreError when the digest differs, the file cannot be read, or the server fails.
        """
        key = blob_key(sha256)
        report = on_progress or _ignore
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if self.find_fault(sha256, [size]) is None:
                    _require_digest(hashlib.file_digest(file, "sha256").hexdigest(), path, sha256)
                    report(size)
                    return self._objects.uri(key)
                if size <= self._objects.config.part_size:
                    content = file.read()
                    _require_digest(hashlib.sha256(content).hexdigest(), path, sha256)
                    self._objects.put(key, content, f"sending {path.name}")
                    report(len(content))
                else:
                    self._objects.put_in_parts(
                        key, self._read_parts(file, path, sha256, size, report), f"sending {path.name}"
                    )
        except OSError as error:
            raise StoreError(f"{path} cannot be read for the release store: {error.strerror or error}.") from error
        if fault := self.find_fault(sha256, [size]):
            raise StoreError(
                f"{self._objects.uri(key)} {fault} right after it was written: check the server's disk and log, then "
                "publish again."
            )
        return self._objects.uri(key)

    def fetch(self, sha256: str, destination: Path) -> None:
        """Fetch a blob into `destination`, which appears, or is replaced, only when the digest is right.

        Raises StoreError for a blob that is missing or damaged, a file that cannot be written, and a server that fails.
        """
        key = blob_key(sha256)
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            with replacing(destination, 0o644) as file:
                digest = self._objects.stream(key, file.write)
                if digest is None:
                    raise StoreError(
                        f"{self._objects.uri(key)} is missing: publish the release again from where it was built."
                    )
                if digest != sha256:
                    raise StoreError(
                        f"{self._objects.uri(key)} is damaged (its content has the digest {digest}): publish the "
                        "release again from where it was built."
                    )
        except OSError as error:
            raise StoreError(
                f"{destination} cannot be written with a blob of the release store: {error.strerror or error}."
            ) from error

    def find_fault(self, sha256: str, sizes: Collection[int]) -> str | None:
        """Read a whole blob, and check that its digest is `sha256` and its size in bytes equals each of `sizes`.

        Returns the first fault as the end of a sentence, such as "is missing", or None if there is none. Raises
        StoreError when the server fails.
        """
        length = 0

        def count(chunk: bytes) -> None:
            nonlocal length
            length += len(chunk)

        digest = self._objects.stream(blob_key(sha256), count)
        if digest is None:
            return "is missing"
        for size in sizes:
            if size != length:
                return f"has {length} bytes instead of {size}"
        if digest != sha256:
            return f"is damaged (its content has the digest {digest})"
        return None

    def _read_parts(
        self, file: io.BufferedReader, path: Path, sha256: str, size: int, report: Progress
    ) -> Iterator[bytes]:
        """The parts of a file, each reported when the next is asked for; raises StoreError if the digest differs."""
        part_size = max(self._objects.config.part_size, -(-size // MAX_PARTS))
        hasher = hashlib.sha256()
        while part := file.read(part_size):
            hasher.update(part)
            yield part
            report(len(part))
        _require_digest(hasher.hexdigest(), path, sha256)


def _require_digest(digest: str, path: Path, sha256: str) -> None:
    if digest != sha256:
        raise StoreError(
            f"{path} has the SHA-256 {digest} instead of {sha256}: it changed since it was built; build it again."
        )


def _ignore(count: int) -> None:
    """Report progress to nobody."""
