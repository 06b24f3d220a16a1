"""The events of a run, for the person or program that watches it: a step starts, makes progress, ends."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal, Protocol

from tvmflow.trace import Trace

Status = Literal["ran", "cached", "failed"]

_log = logging.getLogger("tvmflow")


class Reporter(Protocol):
    """A receiver of the events of a run, possibly from several threads; `target` is None for steps of the release."""

    def begin(self, step: str, target: str | None) -> None:
        """Receive that a step begins its work, or to fetch its cached result; other cached steps never start."""

    def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Receive that a step has done `done` of `total` units; `total` is 0 where it is unknown."""

    def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Receive that a step ended, was cached or failed after `seconds`."""


class TracingReporter:
    """A reporter that adds the steps to a trace and passes all events on to another reporter.

    A thread of the trace is a target, or the release itself. `target` is None for steps of the release.
    """

    def __init__(self, trace: Trace, inner: Reporter) -> None:
        """Add to `trace` and pass events on to `inner`."""
        self._trace = trace
        self._inner = inner
        self._lock = Lock()

    def begin(self, step: str, target: str | None) -> None:
        """Pass the event on."""
        self._inner.begin(step, target)

    def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Pass the event on."""
        self._inner.advance(step, target, done, total, message)

    def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Add the step to the trace, and pass the event on."""
        with self._lock:
            start = time.perf_counter() - seconds
            self._trace.add_slice(target or "release", step, start, seconds, status=status)
        self._inner.end(step, target, status, seconds)


class LogReporter:
    """A reporter that writes the events to the log, for runs without a terminal.

    `target` is None for steps of the release.
    """

    def begin(self, step: str, target: str | None) -> None:
        """Log that a step starts."""
        _log.info("%s started%s", step, _of(target))

    def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Log the progress at the level DEBUG."""
        _log.debug("%s%s: %g of %g %s", step, _of(target), done, total, message)

    def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Log that a step ended, with its status and its time in seconds."""
        _log.info("%s %s%s in %.1f s", step, status, _of(target), seconds)


_current: Reporter = LogReporter()


def reporter() -> Reporter:
    """Return the reporter of this process."""
    return _current


@contextmanager
def reporting_to(new: Reporter) -> Iterator[None]:
    """Send the events of this process to `new` while the body runs."""
    global _current
    previous, _current = _current, new
    try:
        yield
    finally:
        _current = previous


def _of(target: str | None) -> str:
    return f" for {target}" if target else ""
