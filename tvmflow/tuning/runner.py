"""Where candidates run: in a worker process here, or through one on a device that an RPC tracker gives away."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tvmflow.errors import RemoteError, TuneError
from tvmflow.runtime.tracker import Address, Match, Tracker
from tvmflow.tuning.worker_process import CrashError, LateError, LostError, TrialError, WorkerProcess

# A candidate that ends its session this many times, each time on a device that was well, is taken for the cause.
_ATTEMPTS = 3
_CONNECT_SECONDS = 10.0
_DISCONNECT_SECONDS = 5.0
# A device ends a session by itself this long after we would have: what hangs there must not hold it for ever.
_SESSION_MARGIN_SECONDS = 2.0
# How long one request waits at the tracker, and how long after one that failed at once.
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
    """Runs one operation of a worker at a time."""

    def run(self, operation: str, arguments: Mapping[str, object], allowed: Callable[[], float]) -> Any:
        """What the operation returns; `allowed` are the seconds that it may take from now. Raises TrialError."""


class LocalRunner:
    """Runs candidates on this machine."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker

    def run(self, operation: str, arguments: Mapping[str, object], allowed: Callable[[], float]) -> Any:
        """Run it here, again in a new process when the first one dies."""
        return self._worker.request(operation, arguments, allowed())


class Devices:
    """The devices of a key, as all runners of a pool see them together: the tracker says which of them is free.

    Raises RemoteError when there is no tracker, or no such device at first.
    """

    def __init__(self, device: Device, deadline: float) -> None:
        self.device = device
        self._deadline = deadline
        self._tracker = Tracker(device.tracker)
        keys = [key for key, _ in self._tracker.summary().servers]
        self.count = min(keys.count(device.key), _MAX_DEVICES)
        if self.count == 0:
            known = f"its keys are {', '.join(sorted(set(keys)))}" if keys else "it has none at all"
            raise RemoteError(f"the RPC tracker at {device.tracker} has no device with key {device.key!r}; {known}")
        self._lock = threading.Lock()
        self._busy = 0
        self._answered = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Let nobody wait any longer."""
        self._stopped.set()

    def take(self, since: float) -> Match:
        """The next free device, for one who has waited for it since then (of `time.monotonic`).

        Raises TrialError at the end of the run, TuneError when no device comes back.
        """
        while True:
            if self._stopped.is_set():
                raise TrialError("tuning has ended")
            if time.monotonic() >= self._deadline:
                raise TrialError("the budget's time is over")
            self._give_up_if_lost(since)
            try:
                place = self._tracker.request(self.device.key, _WAIT_SECONDS)
            except RemoteError:
                self._stopped.wait(_PAUSE_SECONDS)
                continue
            if place is not None:
                return place

    def connected(self) -> None:
        """Note that a device has answered and works for us."""
        with self._lock:
            self._busy += 1

    def released(self) -> None:
        """Note that it no longer does."""
        with self._lock:
            self._busy -= 1
            self._answered = time.monotonic()

    def _give_up_if_lost(self, since: float) -> None:
        patience = self.device.patience
        with self._lock:
            if self._busy or time.monotonic() < max(self._answered, since) + patience:
                return
        try:
            keys = self._tracker.summary().keys
            told = "all are busy or hang" if self.device.key in keys else "they have left the tracker"
        except RemoteError:
            told = "the tracker does not answer either"
        raise TuneError(
            f"no device with {self.device} has answered for {patience:.0f} s ({told}); all that was measured is kept: "
            "start them again with `tvmflow devices up`, and tune again to go on"
        )


class DeviceRunner:
    """Runs candidates on whatever device is free, each operation in a session of its own on one of them."""

    def __init__(self, worker: WorkerProcess, devices: Devices, threads: int) -> None:
        self._worker = worker
        self._devices = devices
        self._threads = threads

    def run(self, operation: str, arguments: Mapping[str, object], allowed: Callable[[], float]) -> Any:
        """Run it on a device, again on another when the first one is lost; a time-out counts as the candidate's."""
        for attempt in range(1, _ATTEMPTS + 1):
            place = self._connect(allowed)
            try:
                value = self._worker.request(operation, arguments, allowed(), attempts=1)
                self._disconnect()
                return value
            except (CrashError, LostError) as error:
                logger.warning("the device at %s was lost (%s: %s)", place.address, operation, error)
                if attempt == _ATTEMPTS:
                    raise CrashError(f"{operation} ended its session on {_ATTEMPTS} devices: {error}") from error
            except LateError:
                raise  # The session ended with the worker.
            except TrialError:
                self._disconnect()
                raise
            finally:
                self._devices.released()
        raise AssertionError

    def _connect(self, allowed: Callable[[], float]) -> Match:
        """Open a session on the next free device that takes one."""
        since = time.monotonic()
        while True:
            place = self._devices.take(since)
            seconds = allowed()
            try:
                session = {
                    "host": place.address.host,
                    "port": place.address.port,
                    "word": place.key,
                    "seconds": seconds + _SESSION_MARGIN_SECONDS,
                    "threads": self._threads,
                }
                self._worker.request("connect", session, min(_CONNECT_SECONDS, seconds), attempts=1)
            except TrialError as error:
                if seconds <= 0:
                    raise
                logger.warning("the device at %s takes no session: %s", place.address, error)
                continue
            self._devices.connected()
            return place

    def _disconnect(self) -> None:
        """Close the session; what was measured in it counts all the same when that fails."""
        try:
            self._worker.request("disconnect", {}, _DISCONNECT_SECONDS, attempts=1)
        except TrialError as error:
            logger.debug("a session was not closed: %s", error)
