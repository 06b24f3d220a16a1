"""Outages: how long work waits for a server that does not answer, and how often it asks again."""

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from threading import Event
from typing import TypeVar

from tvmflow.errors import UnavailableError

JITTER = 0.3
"""The share by which a delay is longer or shorter at random, so that many waiting processes do not ask at once."""
_FIRST_SECONDS, _LONGEST_SECONDS = 2.0, 30.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


def delays(outage: float) -> list[float]:
    """Return the pauses between attempts, in seconds, for an outage of `outage` seconds: 2, 4, 8, 16, then 30 each.

    The list ends when their sum reaches `outage`; it is empty for 0.
    """
    pauses: list[float] = []
    for pause in _doubling():
        if sum(pauses) >= outage:
            return pauses
        pauses.append(pause)
    raise AssertionError("the pauses never end")


def outlast(function: Callable[[], T], outage: float, stop: Event | None = None) -> T:
    """Call a function, again after each UnavailableError for about `outage` seconds, and return its result.

    The attempts are separated by the pauses of `delays`, varied at random by JITTER. Raises the last UnavailableError
    when the time is over or `stop` is set, and any other error of the function at once.
    """
    stop = stop or Event()
    for pause in delays(outage):
        try:
            return function()
        except UnavailableError as error:
            _log.warning("%s; another attempt follows in %.0f s", error, pause)
            if stop.wait(pause * random.uniform(1 - JITTER, 1 + JITTER)):  # noqa: S311 - no secret depends on it
                raise
    return function()


def _doubling() -> Iterator[float]:
    return (min(_FIRST_SECONDS * 2**index, _LONGEST_SECONDS) for index in itertools.count())
