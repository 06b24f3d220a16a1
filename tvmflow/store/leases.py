"""Leases: one process at a time registers and publishes the releases of a model.

leases/<name>.json

A holder renews its lease while it works. A lease that is not renewed for its duration, or whose process has died on
this machine, is free. Its number grows with every holder: who has lost a lease learns that before it writes.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tvmflow.errors import StoreError
from tvmflow.store.keys import require_name
from tvmflow.store.releases import ReleaseStore
from tvmflow.workspace import Record

SECONDS = 60.0
"""How long a lease lasts without being renewed."""
_POLL_SECONDS = 0.5
# Renewals within the duration of a lease.
_RENEWALS = 4
_LONGEST_PID = 10


class Lease(Record):
    """A lease on the releases of a model; `number` grows with every holder, `beat` with every renewal.

    `holder` is a name for people, `process` identifies the holder's process, `seconds` is the lease's duration.
    """

    format: Literal[1] = 1
    name: str
    number: int
    beat: int
    holder: str
    process: str
    seconds: float
    is_held: bool


class HeldLease:
    """A lease that this process holds and renews."""

    def __init__(self, store: ReleaseStore, lease: Lease, tag: str) -> None:
        self._store, self._lease, self._tag = store, lease, tag
        self._writing = threading.Lock()
        self._has_ended = threading.Event()
        self._renewal = threading.Thread(target=self._renew, daemon=True)
        self._renewal.start()

    def require(self) -> None:
        """Raise StoreError unless this process still holds the lease; call this before a write that is made once."""
        found = _read(self._store, self._lease.name)
        if found is None or not found[0].is_held or found[0].number != self._lease.number:
            by = found[0].holder if found is not None else "somebody"
            raise StoreError(
                f"This process has lost the lease on the releases of {self._lease.name} to {by}, because it did not "
                "renew it in time: run the same command again."
            )

    def end(self) -> None:
        """Give the lease back; one that was lost or cannot be written stays as it is."""
        self._has_ended.set()
        self._renewal.join()
        with contextlib.suppress(StoreError):
            self._write(is_held=False)

    def _renew(self) -> None:
        while not self._has_ended.wait(self._lease.seconds / _RENEWALS):
            # A server that is away for a moment is asked again; a lease that is lost is noticed by `require`.
            with contextlib.suppress(StoreError):
                self._write(is_held=True)

    def _write(self, *, is_held: bool) -> None:
        with self._writing:
            after = self._lease.model_copy(update={"beat": self._lease.beat + 1, "is_held": is_held})
            if self._store.objects.replace(_key(after.name), _encode(after), self._tag):
                found = self._store.objects.read(_key(after.name))
                if found is not None and found.content == _encode(after):
                    self._lease, self._tag = after, found.tag


@contextlib.contextmanager
def hold(store: ReleaseStore, name: str, who: str, seconds: float = SECONDS) -> Iterator[HeldLease]:
    """Be the only one who registers and publishes releases of a model while the body runs.

    Waits while a living process holds the lease. Raises StoreError for a damaged lease, and when the server fails.
    """
    held = _acquire(store, name, who, seconds)
    try:
        yield held
    finally:
        held.end()


def _acquire(store: ReleaseStore, name: str, who: str, seconds: float) -> HeldLease:
    last_beat: tuple[int, int] | None = None
    since = time.monotonic()
    while True:
        found = _read(store, name)
        number = 1 if found is None else found[0].number + 1
        own = Lease(
            name=name,
            number=number,
            beat=0,
            holder=who,
            process=_describe_process(os.getpid()),
            seconds=seconds,
            is_held=True,
        )
        content = _encode(own)
        if found is None:
            has_written = store.objects.create(_key(name), content)
        else:
            lease, tag = found
            if (lease.number, lease.beat) != last_beat:
                last_beat, since = (lease.number, lease.beat), time.monotonic()
            has_expired = time.monotonic() - since > lease.seconds
            is_free = not lease.is_held or has_expired or _is_dead(lease.process)
            has_written = is_free and store.objects.replace(_key(name), content, tag)
        if has_written and (written := store.objects.read(_key(name))) is not None and written.content == content:
            return HeldLease(store, own, written.tag)
        time.sleep(_POLL_SECONDS)


def _key(name: str) -> str:
    require_name("name", name)
    return f"leases/{name}.json"


def _encode(lease: Lease) -> bytes:
    return f"{lease.model_dump_json(indent=2)}\n".encode()


def _read(store: ReleaseStore, name: str) -> tuple[Lease, str] | None:
    """The lease and the tag of its object, None if there is none. Raises StoreError for a damaged one."""
    found = store.objects.read(_key(name))
    if found is None:
        return None
    try:
        return Lease.model_validate_json(found.content, strict=True), found.tag
    except ValidationError as error:
        uri = store.objects.uri(_key(name))
        raise StoreError(f"{uri} is damaged ({error.errors()[0]['msg']}): remove it when no release runs.") from error


def _describe_process(pid: int) -> str:
    """Return a text that identifies one process of this machine for all time; empty when no process has the id.

    It has the id of the system's start, the namespace of process ids, the process's id, and the time of its birth.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        # The name, in parentheses, may hold any characters, also spaces and parentheses.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if values[0] in "ZX" else f"{machine} {namespace} {pid} {values[19]}"


def _is_dead(process: str) -> bool:
    """Whether a description is of a process of this machine, and of this container, that has ended."""
    words, own = process.split(), _describe_process(os.getpid()).split()
    if len(words) != 4 or len(own) != 4 or words[:2] != own[:2]:
        return False
    pid = words[2]
    return pid.isascii() and pid.isdigit() and len(pid) <= _LONGEST_PID and _describe_process(int(pid)) != process
