"""The bounds that a server keeps for its requests: bytes, seconds, and the room that all requests share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class OverloadedError(Exception):
    """There is no room for another request: too many wait, or those that wait hold too many bytes."""


@dataclass(frozen=True)
class Limits:
    """The server's limits; sizes are in bytes, times in seconds.

    A request is refused whose body is larger than `body`, and one whose body has no room in `waiting` beside those of
    all requests that are not answered yet. It is answered within `timeout`, or ends. A batch that runs for longer than
    `hang` makes the server not live.
    """

    body: int = 64 * 2**20
    waiting: int = 256 * 2**20
    timeout: float = 60.0
    hang: float = 120.0


class Room:
    """The bytes that requests may hold together; one thread uses it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.used = 0
        """Bytes that are held now."""

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], int]]:
        """Yield a function that takes so many bytes more, and returns how many it has taken in all.

        The body's end gives them back. The function raises OverloadedError when there are not so many left.
        """
        body_bytes = 0

        def take(count: int) -> int:
            nonlocal body_bytes
            if self.used + count > self._capacity:
                raise OverloadedError
            self.used += count
            body_bytes += count
            return body_bytes

        try:
            yield take
        finally:
            self.used -= body_bytes
