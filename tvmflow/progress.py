"""What a run tells the person or program that watches it: steps as they start and end, and progress within them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

Status = Literal["ran", "cached", "failed"]

_log = logging.getLogger("tvmflow")


class Reporter(Protocol):
    """Receives the events of a run, possibly from several threads; `target` is None for steps shared by all."""

    def started(self, step: str, target: str | None) -> None:
        """A step begins its work; steps that are skipped never start."""

    def progressed(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """A step is `done` of `total` units on its way."""

    def ended(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """A step ended, or was found done."""


class LogReporter:
    """Reports to the log; what runs without a terminal uses."""

    def started(self, step: str, target: str | None) -> None:
        """Log the start."""
        _log.info("%s started%s", step, _of(target))

    def progressed(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Log the progress where it is looked for."""
        _log.debug("%s%s: %g of %g %s", step, _of(target), done, total, message)

    def ended(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Log the end with its time in seconds."""
        _log.info("%s %s%s in %.1f s", step, status, _of(target), seconds)


_current: Reporter = LogReporter()


def reporter() -> Reporter:
    """The reporter of this process."""
    return _current


@contextmanager
def reporting_to(new: Reporter) -> Iterator[None]:
    """Send the events of this process to `new` for a while."""
    global _current
    before, _current = _current, new
    try:
        yield
    finally:
        _current = before


def _of(target: str | None) -> str:
    return f" for {target}" if target else ""
