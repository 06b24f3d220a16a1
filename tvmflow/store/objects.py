"""The object store below releases, channels and records: objects, some of them written under a condition.

`create` and `replace` write under a condition: when several processes write different content to one object at once,
exactly one succeeds. A server ensures that by conditional writes, a folder of this machine by a file lock.
"""

import abc
import contextlib
import datetime
import fcntl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tvmflow.errors import StoreError
from tvmflow.store.config import StoreConfig

MAX_PARTS = 10_000
"""S3's limit on the parts of one upload."""
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class ObjectEntry:
    """An object in a listing: its key relative to the prefix, its size in bytes, and when it was written."""

    key: str
    size: int
    last_modified: datetime.datetime


@dataclass(frozen=True)
class Object:
    """An object as it was read: its content, its tag, and when it was written.

    The tag changes with the content: given to `replace`, it shows whether the object has changed since.
    """

    content: bytes
    tag: str
    last_modified: datetime.datetime


class ObjectStore(abc.ABC):
    """The objects below one prefix of one bucket. Keys are relative to the prefix.

    A write is complete or absent. Every method raises StoreError, in one sentence, when the server is unreachable or
    refuses. Threads may share an instance.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config

    def uri(self, key: str) -> str:
        """Return the `s3://` address of an object."""
        return f"{self.config.uri}/{key}"

    def full_key(self, key: str) -> str:
        """Return the key of an object in the bucket: the store's prefix and `key`."""
        return f"{self.config.prefix}/{key}" if self.config.prefix else key

    def get(self, key: str) -> bytes | None:
        """Return the content of an object, None if there is none. Raises StoreError."""
        entry = self.read(key)
        return None if entry is None else entry.content

    @abc.abstractmethod
    def prepare(self) -> None:
        """Create the bucket if it is missing. Raises StoreError when it may not be listed or created."""

    @abc.abstractmethod
    def require_conditions(self) -> None:
        """Raise StoreError unless `create` and `replace` let only one of several concurrent writers succeed."""

    @abc.abstractmethod
    def list_objects(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects whose keys begin with `prefix`, sorted by key. Raises StoreError."""

    @abc.abstractmethod
    def read(self, key: str) -> Object | None:
        """Return an object with its tag, None if there is none. Raises StoreError."""

    @abc.abstractmethod
    def stream(self, key: str, consume: Callable[[bytes], object]) -> str | None:
        """Pass an object's content to `consume` in chunks; return its SHA-256, None if there is no such object.

        Raises StoreError.
        """

    @abc.abstractmethod
    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether the object now has this content.

        An object that exists stays as it is: the result is True if it has the same content, else False. Raises
        StoreError.
        """

    @abc.abstractmethod
    def replace(self, key: str, content: bytes, tag: str) -> bool:
        """Replace the object that `read` returned with `tag`; return whether it was replaced.

        Returns False, and writes nothing, if the object has changed or is gone since. If it has changed to just this
        content, the result may be True. Raises StoreError.
        """

    @abc.abstractmethod
    def put(self, key: str, content: bytes, action: str) -> None:
        """Write an object, or replace it; `action` completes "while ..." in the StoreError.

        Use it only for objects that have one writer, or the same content whoever writes them.
        """

    @abc.abstractmethod
    def put_in_parts(self, key: str, parts: Iterable[bytes], action: str) -> None:
        """Write an object like `put`, from parts of at least 5 MiB but the last; if `parts` raises, write nothing."""

    @abc.abstractmethod
    def delete(self, key: str, action: str) -> None:
        """Delete an object, if it exists; `action` completes "while ..." in the StoreError."""


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, which is created, while the body runs; wait while another one holds it.

    The lock excludes all processes of this machine and all their threads. The kernel frees the lock of a process that
    dies. Raises StoreError when the file cannot be opened for writing, or its file system knows no locks.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("ab")), fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(f"The release store's lock {path} cannot be taken: {error.strerror or error}.") from error
        yield
