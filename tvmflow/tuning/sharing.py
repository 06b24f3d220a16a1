"""Tuning records that several machines share: what is new there comes here, what is new here goes there."""

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator
from typing import Protocol

from tvmflow.errors import TvmflowError
from tvmflow.tuning.record_store import FETCHED, RecordStore, context_digest, hold_lock, whole_lines

# How often what a run has measured is sent while it goes on, in seconds.
_INTERVAL = 5.0

logger = logging.getLogger(__name__)


class SharedRecords(Protocol):
    """A place that holds files of records by name, each replaced as a whole. One that fails raises StoreError."""

    def sizes(self, context: str | None = None) -> dict[str, int]:
        """The files, or those of one context (`Context.digest`), with their sizes in bytes."""

    def read(self, name: str) -> bytes | None:
        """What a file holds, None where there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it."""

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""


class Sharing:
    """A folder of records and the shared place; what is here is never lost when that fails.

    Files only grow, so sizes say what is new. Only what was written in this folder is sent.
    """

    def __init__(self, store: RecordStore, shared: SharedRecords) -> None:
        self._store = store
        self._shared = shared

    def fetch(self, context: str | None = None) -> int:
        """Bring the files here, of one context or all, that are new or have grown; their number. Raises StoreError."""
        fetched = self._store.folder / FETCHED
        own = {path.name for path in self._store.own_files()}
        replaced = self._store.replaced_files()
        count = 0
        for name, size in sorted(self._shared.sizes(context).items()):
            place = fetched / name
            known = place.stat().st_size if place.is_file() else replaced.get(name, 0)
            if context_digest(name) is None or name in own or size <= known:
                continue
            content = self._shared.read(name)
            if content is not None:
                fetched.mkdir(parents=True, exist_ok=True)
                partial = place.with_suffix(f".{secrets.token_hex(4)}.part")
                partial.write_bytes(content)
                partial.replace(place)
                count += 1
        return count

    def send(self) -> int:
        """Send the files that were written here and have grown since; their number. Raises StoreError."""
        # One process of this machine at a time: a slow one must not put a shorter state in the place of a longer one.
        with hold_lock(self._store.folder / ".sending"):
            replaced = self._store.replaced_files()
            files = [path for path in self._store.own_files() if path.stat().st_size > replaced.get(path.name, 0)]
            there: dict[str, int] = {}
            for context in sorted({context for path in files if (context := context_digest(path.name)) is not None}):
                there |= self._shared.sizes(context)
            count = 0
            for path in files:
                content = whole_lines(path.read_bytes())
                if len(content) > there.get(path.name, 0):
                    self._shared.write(path.name, content)
                    count += 1
            return count

    def clear(self) -> int:
        """Remove from the shared place what other files replace entirely; the number of files. Raises StoreError."""
        replaced = self._store.replaced_files()
        gone = [name for name, size in self._shared.sizes().items() if size <= replaced.get(name, -1)]
        for name in gone:
            self._shared.remove(name)
        return len(gone)


@contextlib.contextmanager
def sharing(store: RecordStore, shared: SharedRecords | None, context: str) -> Iterator[None]:
    """Fetch what others know of a context (`Context.digest`), then send what is recorded while the body runs.

    When the shared place fails, one warning says so and the work goes on with what is here; what could not be sent is
    sent by the next run.
    """
    if shared is None:
        yield
        return
    both = Sharing(store, shared)
    failures: list[str] = []

    def attempt(what: str) -> None:
        try:
            if what == "fetch":
                both.fetch(context)
            else:
                both.send()
        except (TvmflowError, OSError) as error:
            if not failures:
                logger.warning("tuning records stay on this machine until the next run sends them: %s", error)
            failures.append(str(error))

    attempt("fetch")
    ended = threading.Event()

    def send_now_and_then() -> None:
        while not ended.wait(_INTERVAL):
            attempt("send")

    sender = threading.Thread(target=send_now_and_then, name="tvmflow-records", daemon=True)
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join()
        attempt("send")
