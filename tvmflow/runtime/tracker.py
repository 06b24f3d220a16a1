"""A client of TVM's RPC tracker. Every request has a timeout; TVM's own client would wait for ever."""

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvmflow.errors import RemoteError

# TVM's protocol (tvm/rpc/tracker.py): a magic number both ways, then JSON texts behind their lengths.
_MAGIC, _SERVER_MAGIC = 0x2F271, 0xFF271
_REQUEST, _SUMMARY = 4, 6
_SUCCESS = 0
# The longest text of the protocol; only something that is no tracker sends a longer one.
_MAX_BYTES = 1 << 20
_FOREIGN = "it is something else"
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Address:
    """The host and port on which a tracker or a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse HOST:PORT, where an IPv6 address may be in brackets. Raises ValueError for another form."""
        host, colon, port = text.rpartition(":")
        is_port = re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 1 << 16
        if not colon or not host or not is_port:
            raise ValueError(f"{text!r} is not of the form HOST:PORT")
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True)
class Queue:
    """The queue of one key: the number of servers without a session, and of sessions that wait for a server."""

    free: int
    pending: int


@dataclass(frozen=True)
class Summary:
    """The state of a tracker: every server with its key, and the queue of each key."""

    servers: tuple[tuple[str, Address], ...]
    queues: dict[str, Queue]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the servers, sorted."""
        return tuple(sorted({key for key, _ in self.servers}))


@dataclass(frozen=True)
class Match:
    """A server that the tracker assigned to this client: its address, and the match key that opens one session."""

    address: Address
    key: str


@dataclass(frozen=True)
class Tracker:
    """The tracker at an address; each method opens a connection of its own."""

    address: Address

    def summary(self, timeout: float = _CONNECT_SECONDS) -> Summary:
        """Return the tracker's state. Raises RemoteError when it does not answer within `timeout` seconds."""
        match self._query([_SUMMARY], timeout):
            case {"server_info": [*servers], "queue_info": dict(queues)}:
                return Summary(tuple(sorted(_servers(servers), key=str)), dict(_queues(queues)))
        raise self._no_tracker(_FOREIGN)

    def request(self, key: str, timeout: float) -> Match | None:
        """Request a server with `key` that has no session; return None when none is free within `timeout` seconds.

        Raises RemoteError when there is no tracker.
        """
        try:
            answer = self._query([_REQUEST, key, "", 1], timeout)
        except TimeoutError:
            return None
        match answer:
            case [str(host), int(port), str(match_key)]:
                return Match(Address(host, port), match_key)
        raise self._no_tracker(_FOREIGN)

    def _query(self, message: list[Any], timeout: float) -> Any:
        """Send a message and return the answer.

        Raises RemoteError when there is no tracker, TimeoutError when a tracker has no server to give in time.
        """
        deadline = time.monotonic() + timeout
        is_connected = False
        try:
            with socket.create_connection(
                (self.address.host, self.address.port), min(timeout, _CONNECT_SECONDS)
            ) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(struct.pack("<i", _MAGIC))
                if _receive(connection, 4, time.monotonic() + _CONNECT_SECONDS) != struct.pack("<i", _MAGIC):
                    raise OSError(_FOREIGN)
                is_connected = True
                text = json.dumps(message).encode()
                connection.sendall(struct.pack("<i", len(text)) + text)
                (size,) = struct.unpack("<i", _receive(connection, 4, deadline))
                if not 0 < size <= _MAX_BYTES:
                    raise OSError(_FOREIGN)
                code, answer = json.loads(_receive(connection, size, deadline))
                if code != _SUCCESS:
                    raise OSError(f"it refuses with code {code}")
                return answer
        except TimeoutError as error:
            if is_connected and message[0] == _REQUEST:
                raise
            raise self._no_tracker(error) from error
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise self._no_tracker(error) from error

    def _no_tracker(self, reason: Exception | str) -> RemoteError:
        return RemoteError(f"there is no RPC tracker at {self.address} ({reason}); start one with `tvmflow devices up`")


def _servers(items: list[Any]) -> Iterator[tuple[str, Address]]:
    """Yield servers with their keys; what registered without an address is left out, as a tracker lists anything."""
    for item in items:
        match item:
            case {"key": str(key), "addr": [str(host), int(port)]}:
                yield key.partition(":")[2], Address(host, port)


def _queues(items: dict[str, Any]) -> Iterator[tuple[str, Queue]]:
    for key, item in items.items():
        match item:
            case {"free": int(free), "pending": int(pending)}:
                yield key, Queue(free, pending)


def is_answering(server: Address, timeout: float) -> bool:
    """Whether a server without a session answers within `timeout` seconds; the check opens no session."""
    match_key = b"client:nobody"
    try:
        with socket.create_connection((server.host, server.port), timeout) as connection:
            connection.sendall(struct.pack("<ii", _SERVER_MAGIC, len(match_key)) + match_key)
            return bool(_receive(connection, 4, time.monotonic() + timeout))
    except OSError:
        return False


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive exactly `size` bytes. Raises TimeoutError at the deadline, OSError when the connection ends."""
    data = b""
    while len(data) < size:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("it does not answer")
        connection.settimeout(remaining)
        with contextlib.suppress(OSError, AttributeError):
            # The tracker sends length and text apart: the second waits for our acknowledgement of the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise OSError("it closed the connection")
        data += chunk
    return data
