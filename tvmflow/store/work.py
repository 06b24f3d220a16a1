"""The workspace that machines share: artifacts and step records of releases, beside the releases themselves.

work/blobs/sha256/<digest>      artifacts, by content
work/steps/<step>/<key>.json    the record of a step, written after its artifacts
"""

import datetime
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tvmflow.errors import StoreError
from tvmflow.store import leases
from tvmflow.store.backends import open_objects
from tvmflow.store.blobs import BlobStore
from tvmflow.store.keys import blob_key
from tvmflow.store.releases import ReleaseStore

# A record that is used again is marked at most once in such a time.
_MARKED_AGAIN = datetime.timedelta(days=1)


class WorkStore:
    """The part of a release store that `tvmflow.workspace.Workspace` shares.

    From the first use of a record or an artifact on, the object holds a lease, so that no sweep removes files that its
    run needs (see `tvmflow.store.garbage`). The lease ends with the object or its process. A sweep goes by the time of
    a record's last use, which `read_record` marks at most once a day.

    Anyone who may write to the bucket can change results: give that right only to the machines that release. Every
    method raises StoreError when the server fails.
    """

    def __init__(self, store: ReleaseStore) -> None:
        prefix = f"{store.config.prefix}/work" if store.config.prefix else "work"
        self.objects = open_objects(replace(store.config, prefix=prefix))
        self._store = store
        self._blobs = BlobStore(self.objects)
        self._joining = threading.Lock()
        self._has_joined = False

    @property
    def uri(self) -> str:
        """The address of the shared workspace."""
        return self.objects.config.uri

    def has_record(self, step: str, key: str) -> bool:
        """Whether there is a record of the step under this cache key. Raises StoreError."""
        return self.read_record(step, key) is not None

    def read_record(self, step: str, key: str) -> bytes | None:
        """Return the record of a step as JSON; None if there is none. Raises StoreError."""
        self._join()
        place = _record_key(step, key)
        entry = self.objects.read(place)
        if entry is None:
            return None
        if datetime.datetime.now(datetime.UTC) - entry.last_modified > _MARKED_AGAIN:
            self.objects.put(place, entry.content, f"marking the record of step {step} as used")
        return entry.content

    def write_record(self, step: str, key: str, record: bytes) -> None:
        """Write the record of a step, or replace it, and check that the server has it.

        Raises StoreError when the server fails, or the record is missing right after it was written.
        """
        self._join()
        place = _record_key(step, key)
        self.objects.put(place, record, f"sharing the record of step {step}")
        if self.objects.get(place) is None:
            raise StoreError(
                f"{self.objects.uri(place)} is missing right after it was written: check the server's disk and log, "
                "then run again."
            )

    def fetch(self, sha256: str, place: Path) -> bool:
        """Write an artifact into the new file `place`; return False, without a file, when it is missing or damaged.

        Raises StoreError when the server fails, FileExistsError for a file that exists, which stays as it is.
        """
        self._join()
        is_whole = False
        with place.open("xb") as file:
            try:
                is_whole = self.objects.stream(blob_key(sha256), file.write) == sha256
            finally:
                if not is_whole:
                    place.unlink(missing_ok=True)
        return is_whole

    def send(self, path: Path, sha256: str, on_progress: Callable[[int], None]) -> None:
        """Send an artifact unless the store has it complete; a damaged one is replaced. Raises StoreError."""
        self._join()
        self._blobs.put(path, sha256, on_progress)

    def _join(self) -> None:
        """Take the lease on the shared workspace, once."""
        with self._joining:
            if not self._has_joined:
                lease = leases.use_work(self._store, f"a run on {socket.gethostname()}")
                weakref.finalize(self, lease.end)
                self._has_joined = True


def _record_key(step: str, key: str) -> str:
    return f"steps/{step}/{key}.json"
