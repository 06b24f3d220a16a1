"""Tuning records in the bucket of the release store, beside the releases.

records/<context>/<run>.jsonl    the records of one run for one target, TVM version and search space
"""

from dataclasses import replace

from tvmflow.store.backends import open_objects
from tvmflow.store.releases import ReleaseStore

_FOLDER = "records/"
# A tuning run should not wait long for a server that is gone.
_READ_TIMEOUT, _ATTEMPTS = 10.0, 2


class RecordObjects:
    """Files of tuning records as objects, which are replaced whole because S3 cannot append.

    A file's name is its context and its run, joined by `-`. Anyone who may write to the bucket can change the records.
    Every method raises StoreError when the server fails.
    """

    def __init__(self, store: ReleaseStore) -> None:
        config = store.config
        self._objects = open_objects(
            replace(
                config, read_timeout=min(config.read_timeout, _READ_TIMEOUT), attempts=min(config.attempts, _ATTEMPTS)
            )
        )

    @property
    def uri(self) -> str:
        """The address of the folder of tuning records."""
        return self._objects.uri(_FOLDER.rstrip("/"))

    def sizes(self, context: str | None = None) -> dict[str, int]:
        """Return the size in bytes of each file of a context, or of all contexts (None), by its name in the store.

        `context` is the digest of a `Context`. Raises StoreError when the server fails.
        """
        prefix = _FOLDER if context is None else f"{_FOLDER}{context}/"
        sizes = {
            entry.key.removeprefix(_FOLDER).replace("/", "-", 1): entry.size
            for entry in self._objects.list_objects(prefix)
        }
        return {name: size for name, size in sizes.items() if "/" not in name}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None if there is none. Raises StoreError."""
        return self._objects.get(_key(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it. Raises StoreError."""
        self._objects.put(_key(name), content, "sending tuning records")

    def remove(self, name: str) -> None:
        """Remove a file if it exists. Raises StoreError."""
        self._objects.delete(_key(name), "removing tuning records")


def _key(name: str) -> str:
    return _FOLDER + name.replace("-", "/", 1)
