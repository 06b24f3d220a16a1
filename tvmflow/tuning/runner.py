"""Runs candidates: in a worker process on this machine, or through one on a device of an RPC tracker."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tvmflow.errors import RemoteError, TuneError
from tvmflow.runtime.tracker import Address, Match, Tracker
from tvmflow.tuning.worker_process import CrashError, LateError, LostError, TrialError, WorkerProcess

# A candidate fails when its session has ended this often, each time on a device that worked before.
_ATTEMPTS = 3
_CONNECT_SECONDS = 10.0
_DISCONNECT_SECONDS = 5.0
# A device ends a session by itself this long after its timeout, so that a hanging candidate does not hold it for ever.
_SESSION_MARGIN_SECONDS = 2.0
# How long one request waits at the tracker, and the pause after one that failed at once.
_WAIT_SECONDS, _PAUSE_SECONDS = 2.0, 0.2
_MAX_DEVICES = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """The devices that have `key` at a tracker; a run ends when none of them has answered for `patience` seconds."""

    key: str
    tracker: Address
    patience: float = 60.0

    def __str__(self) -> str:
        return f"key {self.key!r} at the RPC tracker {self.tracker}"


class Runner(Protocol):
    """Runs the operations of a worker, one at a time."""

    def run(self, operation: str, arguments: Mapping[str, object], remaining: Callable[[], float]) -> Any:
        """Run an operation of the worker, such as `time`, with these arguments, and return its value.

        `remaining` returns the seconds that the operation may take. Raises TrialError when the operation fails or takes
        longer.
        """


class LocalRunner:
    """Runs operations on this machine."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker

    def run(self, operation: str, arguments: Mapping[str, object], remaining: Callable[[], float]) -> Any:
        """Run an operation here, again in a new process if the first one dies, and return its value.

        Raises TrialError when the operation fails, or takes more than `remaining()` seconds.
        """
        return self._worker.request(operation, arguments, remaining())


class Devices:
    """The devices of a key, shared by all runners of a pool; the tracker says which of them is free.

    `count` is their number, at most 16. Raises RemoteError when there is no tracker, or when it has no device of the
    key.
    """

    def __init__(self, device: Device, deadline: float) -> None:
        self.device = device
        self._deadline = deadline
        self._tracker = Tracker(device.tracker)
        keys = [key for key, _ in self._tracker.summary().servers]
        self.count = min(keys.count(device.key), _MAX_DEVICES)
        if self.count == 0:
            others = f"its keys are {', '.join(sorted(set(keys)))}" if keys else "it has none at all"
            raise RemoteError(f"the RPC tracker at {device.tracker} has no device with key {device.key!r}; {others}")
        self._lock = threading.Lock()
        self._busy = 0
        self._last_answer = 0.0
        self._stop = threading.Event()

    def stop(self) -> None:
        """Make `take` raise TrialError from now on, also in threads that wait in it."""
        self._stop.set()

    def take(self, since: float) -> Match:
        """Wait for a free device and return its match; the caller began to wait at `since`, in `time.monotonic`.

        Raises TrialError after `stop` or at the deadline, TuneError when no device has answered for `patience` seconds.
        """
        while True:
            if self._stop.is_set():
                raise TrialError("tuning has ended")
            if time.monotonic() >= self._deadline:
                raise TrialError("the budget's time is over")
            self._give_up_if_lost(since)
            try:
                match = self._tracker.request(self.device.key, _WAIT_SECONDS)
            except RemoteError:
                self._stop.wait(_PAUSE_SECONDS)
                continue
            if match is not None:
                return match

    def note_connection(self) -> None:
        """Count one more device with an open session."""
        with self._lock:
            self._busy += 1

    def note_disconnection(self) -> None:
        """Count one device fewer with an open session, and record this moment as the last answer of a device."""
        with self._lock:
            self._busy -= 1
            self._last_answer = time.monotonic()

    def _give_up_if_lost(self, since: float) -> None:
        patience = self.device.patience
        with self._lock:
            if self._busy or time.monotonic() < max(self._last_answer, since) + patience:
                return
        try:
            keys = self._tracker.summary().keys
            cause = "all are busy or hang" if self.device.key in keys else "they have left the tracker"
        except RemoteError:
            cause = "the tracker does not answer either"
        raise TuneError(
            f"no device with {self.device} has answered for {patience:.0f} s ({cause}); all that was measured is kept: "
            "start them again with `tvmflow devices up`, and tune again to go on"
        )


class DeviceRunner:
    """Runs each operation on a free device, in a session of its own."""

    def __init__(self, worker: WorkerProcess, devices: Devices, threads: int) -> None:
        self._worker = worker
        self._devices = devices
        self._threads = threads

    def run(self, operation: str, arguments: Mapping[str, object], remaining: Callable[[], float]) -> Any:
        """Run an operation on a free device and return its value; if that device is lost, try the next free one.

        There are three attempts at most. `remaining` returns the seconds that an attempt may take, and is called for
        each. A timeout counts as the candidate's failure. Raises TrialError when the operation fails or too many
        devices are lost while it runs, and TuneError when no device comes back.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            match = self._connect(remaining)
            try:
                value = self._worker.request(operation, arguments, remaining(), attempts=1)
                self._disconnect()
                return value
            except (CrashError, LostError) as error:
                logger.warning("the device at %s was lost (%s: %s)", match.address, operation, error)
                if attempt == _ATTEMPTS:
                    raise CrashError(f"{operation} ended its session on {_ATTEMPTS} devices: {error}") from error
            except LateError:
                raise  # The session ended with the worker.
            except TrialError:
                self._disconnect()
                raise
            finally:
                self._devices.note_disconnection()
        raise AssertionError

    def _connect(self, remaining: Callable[[], float]) -> Match:
        """Open a session on the next free device that takes one."""
        since = time.monotonic()
        while True:
            match = self._devices.take(since)
            seconds = remaining()
            try:
                session = {
                    "host": match.address.host,
                    "port": match.address.port,
                    "match_key": match.key,
                    "seconds": seconds + _SESSION_MARGIN_SECONDS,
                    "threads": self._threads,
                }
                self._worker.request("connect", session, min(_CONNECT_SECONDS, seconds), attempts=1)
            except TrialError as error:
                if seconds <= 0:
                    raise
                logger.warning("the device at %s takes no session: %s", match.address, error)
                continue
            self._devices.note_connection()
            return match

    def _disconnect(self) -> None:
        """Close the session; its measurements count even if that fails."""
        try:
            self._worker.request("disconnect", {}, _DISCONNECT_SECONDS, attempts=1)
        except TrialError as error:
            logger.debug("a session was not closed: %s", error)
