"""The bounds that a server keeps for its requests: bytes, seconds, and the room that all requests share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class OverloadedError(Exception):
    """There is no room for another request: too many wait, or those that wait hold too many bytes."""


@dataclass(frozen=True)
class Limits:
    """The server's limits; sizes are in bytes, times in seconds.

    A request is refused if its body is larger than `body`, or if all requests that are not answered yet would hold more
    bytes than `waiting` (or than twice `body`, if that is more). A request that is not answered within `timeout` fails.
    While a batch has been running for longer than `hang`, the server reports that it is not live.
    """

    body: int = 64 * 2**20
    waiting: int = 256 * 2**20
    timeout: float = 60.0
    hang: float = 120.0


class Room:
    """A budget of `capacity` bytes, which all requests share; it is not safe for use by several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.used = 0
        """Bytes that are held now."""

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], int]]:
        """Yield a function that reserves a number of bytes; the bytes are given back when the `with` block ends.

        The function takes the number of bytes, and returns how many it has reserved so far in this `with` block. It
        raises OverloadedError when fewer bytes are left.
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
