"""A release store in a folder of this machine: each object is a plain file, `FOLDER/KEY`."""

import contextlib
import datetime
import errno
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tvmflow.errors import StoreError
from tvmflow.store.config import StoreConfig
from tvmflow.store.objects import CHUNK_BYTES, Object, ObjectEntry, ObjectStore, lock_file

PARTIAL = ".partial-"
"""The beginning of the names of unfinished files, which lie beside the bucket."""


class FolderObjects(ObjectStore):
    """The objects in `folder`, which is the bucket. All writers are processes of this machine.

    Each file is renamed into place when it is complete and on the disk. What a method has written or deleted when it
    returns stays so after a power cut, so that no document appears without the objects that were written before it. The
    lock file and unfinished files lie beside the folder, where no listing shows them.
    """

    def __init__(self, config: StoreConfig, folder: Path) -> None:
        super().__init__(config)
        self._folder = folder
        self._lock = folder.with_name(f".{folder.name}.lock")

    def prepare(self) -> None:
        """Create the folder if it is missing. Raises StoreError."""
        with self._explain_errors("creating the folder"):
            _make_folder(self._folder)

    def require_conditions(self) -> None:
        """Do nothing: all writers are processes of this machine, and `create` and `replace` hold a file lock."""

    def list_objects(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects whose keys begin with `prefix`, sorted by key. Raises StoreError."""
        start, full_prefix = len(self.full_key("")), self.full_key(prefix)
        top = self._folder / full_prefix.rpartition("/")[0]
        with self._explain_errors(f"listing {prefix}"):
            keys = [
                key
                for folder, _, files in os.walk(top, onerror=_require_absence, followlinks=True)
                for key in (str((Path(folder) / file).relative_to(self._folder)) for file in files)
                if key.startswith(full_prefix)
            ]
            for key in sorted(keys):
                with contextlib.suppress(FileNotFoundError):
                    status = (self._folder / key).stat()
                    yield ObjectEntry(key[start:], status.st_size, _last_modified(status))

    def read(self, key: str) -> Object | None:
        """Return an object, None if there is none; its tag is the SHA-256 of its content. Raises StoreError."""
        with self._explain_errors(f"reading {key}"):
            try:
                with self._path(key).open("rb") as file:
                    content, last_write = file.read(), _last_modified(os.fstat(file.fileno()))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Object(content, hashlib.sha256(content).hexdigest(), last_write)

    def stream(self, key: str, consume: Callable[[bytes], object]) -> str | None:
        """Pass an object's content to `consume` in chunks; return its SHA-256, None if there is no such object.

        Raises StoreError when the object cannot be read, and whatever `consume` raises.
        """
        hasher = hashlib.sha256()
        with self._explain_errors(f"reading {key}"):
            try:
                file = self._path(key).open("rb")
            except (FileNotFoundError, NotADirectoryError):
                return None
        with file:
            while True:
                with self._explain_errors(f"reading {key}"):
                    chunk = file.read(CHUNK_BYTES)
                if not chunk:
                    return hasher.hexdigest()
                hasher.update(chunk)
                consume(chunk)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether the object now has this content.

        An object that exists stays as it is: the result is True if it has the same content, else False. Raises
        StoreError when the folder cannot be read or written.
        """
        with lock_file(self._lock):
            entry = self.read(key)
            if entry is None:
                self._write(key, [content], f"writing {key}")
        return entry is None or entry.content == content

    def replace(self, key: str, content: bytes, tag: str) -> bool:
        """Replace the object if its tag is still `tag`; return whether it was replaced.

        An object that has changed or is gone stays as it is. Raises StoreError when the folder cannot be read or
        written.
        """
        with lock_file(self._lock):
            entry = self.read(key)
            if entry is None or entry.tag != tag:
                return False
            self._write(key, [content], f"writing {key}")
        return True

    def put(self, key: str, content: bytes, action: str) -> None:
        """Write an object, or replace it; `action` completes "while ..." in the StoreError."""
        self._write(key, [content], action)

    def put_in_parts(self, key: str, parts: Iterable[bytes], action: str) -> None:
        """Write an object, or replace it, from parts of any size; when `parts` raises, nothing is written.

        `action` completes "while ..." in the StoreError.
        """
        self._write(key, parts, action)

    def delete(self, key: str, action: str) -> None:
        """Delete an object, if it exists; `action` completes "while ..." in the StoreError."""
        path = self._path(key)
        with self._explain_errors(action), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            _sync(path.parent)

    def _path(self, key: str) -> Path:
        return self._folder / self.full_key(key)

    def _write(self, key: str, parts: Iterable[bytes], action: str) -> None:
        """Write a file beside the bucket and rename it into place when it is on the disk."""
        path = self._path(key)
        with self._explain_errors(action):
            _make_folder(path.parent)
            descriptor, partial = tempfile.mkstemp(dir=self._folder.parent, prefix=PARTIAL)
        try:
            file = os.fdopen(descriptor, "wb")
            try:
                for part in parts:
                    with self._explain_errors(action):
                        file.write(part)
                with self._explain_errors(action):
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                # On a full disk, it would raise the error of the writing again.
                with contextlib.suppress(OSError):
                    file.close()
            with self._explain_errors(action):
                Path(partial).chmod(0o644)
                Path(partial).replace(path)
                _sync(path.parent)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _explain_errors(self, action: str) -> Iterator[None]:
        """Turn an OSError of the body into one StoreError; `action` completes "while ..."."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"The release store's folder {self._folder} cannot be used while {action}: {error.strerror or error}."
            ) from error


def _last_modified(status: os.stat_result) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(status.st_mtime, datetime.UTC)


def _require_absence(error: OSError) -> None:
    """Raise an error of a listing, unless there is nothing to list: no folder, or one that was removed meanwhile."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _make_folder(folder: Path) -> None:
    """Create a folder and those above it, and have the new names on the disk."""
    missing = list(itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        _sync(each.parent)


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk, where its file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
