"""Leases: one process at a time registers and publishes the releases of a model, and none while the store is swept.

leases/<name>.json         held by the process that registers and publishes the releases of a model
leases/work/<id>.json      held by each run that uses the shared workspace
sweep.json                 held by the process that removes objects that nothing refers to

A holder renews its lease while it works. A lease that is not renewed for its duration, or whose process has died on
this machine, is free. Its number grows with every holder, so that a process that has lost its lease can see that before
it writes.

A process that takes a lease in `leases/` looks for a sweep afterwards. A process that sweeps takes its own lease first
and looks at those in `leases/` afterwards. So at least one of the two sees the other.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tvmflow.documents.encoding import Document, decode, encode
from tvmflow.errors import StoreError
from tvmflow.store.keys import require_name
from tvmflow.store.releases import ReleaseStore

SECONDS = 60.0
"""How long a lease lasts without being renewed."""
_POLL_SECONDS = 0.5
# Renewals within the duration of a lease.
_RENEWALS = 4
_LONGEST_PID = 10
_FOLDER, _WORK, _SWEEP = "leases/", "leases/work/", "sweep.json"


class Lease(Document):
    """The document of a lease; `number` grows with every holder, `beat` with every renewal.

    `name` is the lease's own, such as a model's name. `holder` is a name for people to read, `process` identifies the
    holder's process, and `seconds` is how long the lease lasts without being renewed.
    """

    format: Literal[1] = 1
    name: str
    number: int
    beat: int
    holder: str
    process: str
    seconds: float
    is_held: bool

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "lease digits"."""
        return f"lease {self.name}"


class HeldLease:
    """A lease that this process holds and renews until `end`.

    `key` is the key of its object, `tag` the object's tag. `subject` says in messages what the lease is on.
    """

    def __init__(self, store: ReleaseStore, key: str, subject: str, lease: Lease, tag: str) -> None:
        self._store, self._key, self._subject, self._lease, self._tag = store, key, subject, lease, tag
        self._writing = threading.Lock()
        self._has_ended = threading.Event()
        self._renewal = threading.Thread(target=self._renew, daemon=True)
        self._renewal.start()

    def require(self) -> None:
        """Raise StoreError unless this process still holds the lease; call it before a write that needs the lease."""
        lease = _read(self._store, self._key)
        if lease is None or not lease[0].is_held or lease[0].number != self._lease.number:
            by = lease[0].holder if lease is not None else "somebody"
            raise StoreError(
                f"This process has lost the lease on {self._subject} to {by}, because it did not renew it in time: run "
                "the same command again."
            )

    def end(self) -> None:
        """Give the lease back; one that was lost or cannot be written stays as it is."""
        self._has_ended.set()
        # A finalizer may run in any thread.
        if self._renewal is not threading.current_thread():
            self._renewal.join()
        with contextlib.suppress(StoreError):
            self._write(is_held=False)
            # No other holder will ever take a lease with a random name.
            if self._key.startswith(_WORK):
                self._store.objects.delete(self._key, "giving back a lease")

    def _renew(self) -> None:
        while not self._has_ended.wait(self._lease.seconds / _RENEWALS):
            # A server that is away for a moment is asked again; a lease that is lost is noticed by `require`.
            with contextlib.suppress(StoreError):
                self._write(is_held=True)

    def _write(self, *, is_held: bool) -> None:
        with self._writing:
            after = self._lease.model_copy(update={"beat": self._lease.beat + 1, "is_held": is_held})
            if self._store.objects.replace(self._key, encode(after), self._tag):
                entry = self._store.objects.read(self._key)
                if entry is not None and entry.content == encode(after):
                    self._lease, self._tag = after, entry.tag


@contextlib.contextmanager
def hold(store: ReleaseStore, name: str, who: str, seconds: float = SECONDS) -> Iterator[HeldLease]:
    """Let no other process register or publish releases of the model `name` while the body runs; yield the lease.

    `who` names the holder for people; `seconds` is how long the lease lasts without being renewed. Waits while a living
    process holds the lease or sweeps the store. Raises StoreError for a damaged lease, and when the server fails.
    """
    lease = _acquire_unswept(store, _model_key(name), f"the releases of {name}", who, seconds)
    try:
        yield lease
    finally:
        lease.end()


def use_work(store: ReleaseStore, who: str) -> HeldLease:
    """Return a lease that keeps `tvmflow gc` from sweeping the shared workspace until the lease's `end` is called.

    `who` names the holder for people. Waits while a living process sweeps the store. Raises StoreError for a damaged
    lease, and when the server fails.
    """
    return _acquire_unswept(store, f"{_WORK}{secrets.token_hex(8)}.json", "the shared workspace", who, SECONDS)


@contextlib.contextmanager
def sweep(store: ReleaseStore, who: str, seconds: float = SECONDS) -> Iterator[HeldLease]:
    """Let no process register or publish a release, or begin to use the shared workspace, while the body runs.

    Yields the lease. Before it takes the lease, it waits for processes that publish, and others may begin to publish
    meanwhile; after it has taken the lease, it waits for those. It does not wait for runs that use the shared workspace
    already: see `find_idle_work`. `who` names the holder for people; `seconds` is how long the lease lasts without
    being renewed. Raises StoreError for a damaged lease, and when the server fails.
    """
    publishers: dict[str, _Watch] = {}
    _await_publishers(store, publishers)
    lease = _acquire(store, _SWEEP, "the sweep of the store", who, seconds)
    try:
        _await_publishers(store, publishers)
        yield lease
    finally:
        lease.end()


def _await_publishers(store: ReleaseStore, watches: dict[str, "_Watch"]) -> None:
    """Wait until nobody publishes; `watches` are those of earlier calls, and get new ones."""
    for entry in store.objects.list_objects(_FOLDER):
        if not entry.key.startswith(_WORK):
            watches.setdefault(entry.key, _Watch(store, entry.key))
    while [watch for watch in watches.values() if not watch.is_free()]:
        time.sleep(_POLL_SECONDS)


def let_others_in() -> None:
    """Sleep so long that every process that waits for the end of a sweep looks at its lease at least once."""
    time.sleep(2 * _POLL_SECONDS)


def await_sweep(store: ReleaseStore) -> None:
    """Wait while a living process sweeps the store. Raises StoreError for a damaged lease or a server that fails."""
    _Watch(store, _SWEEP).await_free()


def find_idle_work(store: ReleaseStore) -> "IdleWork | None":
    """Return the leases on the shared workspace that dead runs have left, None when a living run uses it.

    When a run has died on another machine, the call takes as long as that run's lease lasts. Raises StoreError for a
    damaged lease, and when the server fails.
    """
    watches = {entry.key: _Watch(store, entry.key) for entry in store.objects.list_objects(_WORK)}
    while busy := [watch for watch in watches.values() if not watch.is_free()]:
        if any(watch.is_alive for watch in busy):
            return None
        time.sleep(_POLL_SECONDS)
    return IdleWork(store, watches)


class IdleWork:
    """A shared workspace that no living run used when `find_idle_work` returned this object."""

    def __init__(self, store: ReleaseStore, watches: "dict[str, _Watch]") -> None:
        self._store, self._watches = store, watches

    @property
    def keys(self) -> list[str]:
        """The keys of the leases that dead runs have left."""
        return list(self._watches)

    def is_idle(self) -> bool:
        """Whether no run has begun to use the workspace since; during a `sweep` no run can begin.

        Raises StoreError for a damaged lease, and when the server fails.
        """
        keys = {entry.key for entry in self._store.objects.list_objects(_WORK)}
        return keys <= self._watches.keys() and all(watch.is_free() for watch in self._watches.values())


class _Watch:
    """A lease that this process looks at again and again, to see whether its holder renews it."""

    def __init__(self, store: ReleaseStore, key: str) -> None:
        self.key = key
        self.number = 0
        self.tag: str | None = None
        self.is_alive = False
        self._store = store
        self._last_beat: tuple[int, int] | None = None
        self._since = time.monotonic()

    def is_free(self) -> bool:
        """Look at the lease: whether nobody holds it, its holder has died, or it was not renewed for its duration.

        `number` and `tag` are the lease's from then on, 0 and None where there is none; `is_alive` says whether the
        holder is known to live.
        """
        entry = _read(self._store, self.key)
        if entry is None:
            self.number, self.tag = 0, None
            return True
        lease, self.tag = entry
        self.number = lease.number
        beat = (lease.number, lease.beat)
        if beat != self._last_beat:
            self.is_alive = lease.is_held and (self._last_beat is not None or _is_living(lease.process))
            self._last_beat, self._since = beat, time.monotonic()
        return not lease.is_held or time.monotonic() - self._since > lease.seconds or _is_dead(lease.process)

    def await_free(self) -> None:
        """Wait until the lease is free."""
        while not self.is_free():
            time.sleep(_POLL_SECONDS)


def _acquire_unswept(store: ReleaseStore, key: str, subject: str, who: str, seconds: float) -> HeldLease:
    """Acquire a lease while nobody sweeps the store."""
    sweeping = _Watch(store, _SWEEP)
    while True:
        lease = _acquire(store, key, subject, who, seconds)
        if sweeping.is_free():
            return lease
        lease.end()
        sweeping.await_free()


def _acquire(store: ReleaseStore, key: str, subject: str, who: str, seconds: float) -> HeldLease:
    watch = _Watch(store, key)
    while True:
        is_free = watch.is_free()
        own = Lease(
            name=key.removeprefix(_FOLDER).removesuffix(".json"),
            number=watch.number + 1,
            beat=0,
            holder=who,
            process=_describe_process(os.getpid()),
            seconds=seconds,
            is_held=True,
        )
        content = encode(own)
        if watch.tag is None:
            has_written = store.objects.create(key, content)
        else:
            has_written = is_free and store.objects.replace(key, content, watch.tag)
        if has_written and (entry := store.objects.read(key)) is not None and entry.content == content:
            return HeldLease(store, key, subject, own, entry.tag)
        time.sleep(_POLL_SECONDS)


def _model_key(name: str) -> str:
    require_name("name", name)
    return f"{_FOLDER}{name}.json"


def _read(store: ReleaseStore, key: str) -> tuple[Lease, str] | None:
    """The lease and the tag of its object, None if there is none. Raises StoreError for a damaged one."""
    entry = store.objects.read(key)
    if entry is None:
        return None
    uri = store.objects.uri(key)
    return decode(Lease, entry.content, uri, "remove it when no release runs"), entry.tag


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
    pid = _find_pid(process)
    return pid is not None and _describe_process(pid) != process


def _is_living(process: str) -> bool:
    """Whether a description is of a process of this machine, and of this container, that has not ended."""
    pid = _find_pid(process)
    return pid is not None and _describe_process(pid) == process


def _find_pid(process: str) -> int | None:
    """The id of the process of a description; None when it is not of this machine and this container."""
    words, own = process.split(), _describe_process(os.getpid()).split()
    if len(words) != 4 or len(own) != 4 or words[:2] != own[:2]:
        return None
    pid = words[2]
    return int(pid) if pid.isascii() and pid.isdigit() and len(pid) <= _LONGEST_PID else None
