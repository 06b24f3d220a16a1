"""Shares tuning records between machines: keeps a store in step with a shared place such as a bucket."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from tvmflow.errors import TvmflowError
from tvmflow.files import replacing
from tvmflow.tuning.record_store import FETCHED, RecordStore, context_digest, hold_lock, whole_lines

logger = logging.getLogger(__name__)


class SharedRecords(Protocol):
    """A shared place for files of records, such as a bucket. Its methods raise StoreError when the place fails.

    Files have names, and each is written as a whole.
    """

    def sizes(self, context: str | None = None) -> dict[str, int]:
        """Return the sizes in bytes of the files of one `context` (`Context.digest`), or of all (None), by name."""

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None where there is none of that name."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file or replace it."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""


class Sharing:
    """Exchanges files between a store of records and a shared place.

    Files only grow, so of two files with one name the larger has more records. Only files that this machine wrote are
    sent. When the shared place fails, the store here loses nothing.
    """

    def __init__(self, store: RecordStore, shared: SharedRecords) -> None:
        self._store = store
        self._shared = shared

    def fetch(self, context: str | None = None) -> int:
        """Fetch the files of tuning records that are new or have grown in the shared place; return their number.

        `context` is the digest of the target, TVM's version and search space whose records to fetch (`context_digest`);
        None fetches those of all. Raises StoreError when the shared place fails.
        """
        fetched = self._store.folder / FETCHED
        own = {path.name for path in self._store.own_files()}
        replaced_sizes = self._store.replaced_files()
        count = 0
        for name, size in sorted(self._shared.sizes(context).items()):
            path = fetched / name
            local_size = path.stat().st_size if path.is_file() else replaced_sizes.get(name, 0)
            if context_digest(name) is None or name in own or size <= local_size:
                continue
            content = self._shared.read(name)
            if content is not None:
                fetched.mkdir(parents=True, exist_ok=True)
                with replacing(path, 0o644) as file:
                    file.write(content)
                count += 1
        return count

    def send(self) -> int:
        """Send the files of this machine that have grown, and return their number.

        Raises StoreError when the shared place fails.
        """
        # One process of this machine at a time: a slow one must not replace a longer file by a shorter one.
        with hold_lock(self._store.folder / ".sending"):
            replaced_sizes = self._store.replaced_files()
            files = [path for path in self._store.own_files() if path.stat().st_size > replaced_sizes.get(path.name, 0)]
            shared_sizes: dict[str, int] = {}
            for context in sorted({context for path in files if (context := context_digest(path.name)) is not None}):
                shared_sizes |= self._shared.sizes(context)
            count = 0
            for path in files:
                content = whole_lines(path.read_bytes())
                if len(content) > shared_sizes.get(path.name, 0):
                    self._shared.write(path.name, content)
                    count += 1
            return count

    def clear(self) -> int:
        """Remove files from the shared place that other files replace entirely, and return their number.

        Raises StoreError when the shared place fails.
        """
        replaced_sizes = self._store.replaced_files()
        names = [name for name, size in self._shared.sizes().items() if size <= replaced_sizes.get(name, -1)]
        for name in names:
            self._shared.remove(name)
        return len(names)


@contextlib.contextmanager
def sharing(store: RecordStore, shared: SharedRecords | None, context: str, *, interval: float = 5.0) -> Iterator[None]:
    """Fetch the records of a context (`Context.digest`); while the body runs and at its end, send this machine's.

    New records are sent every `interval` seconds. With None as the `shared` place it does nothing. When the place
    fails, one warning is logged, and the body runs with the records that are on this machine; the next run sends what
    was not sent.
    """
    if shared is None:
        yield
        return
    both = Sharing(store, shared)
    failures: list[str] = []

    def attempt(action: Callable[[], int]) -> None:
        try:
            action()
        except (TvmflowError, OSError) as error:
            if not failures:
                logger.warning("tuning records stay on this machine until the next run sends them: %s", error)
            failures.append(str(error))

    attempt(lambda: both.fetch(context))
    end = threading.Event()

    def send_regularly() -> None:
        while not end.wait(interval):
            attempt(both.send)

    sender = threading.Thread(target=send_regularly, name="tvmflow-records", daemon=True)
    sender.start()
    try:
        yield
    finally:
        end.set()
        sender.join()
        attempt(both.send)
