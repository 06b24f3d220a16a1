"""A client of TVM's RPC tracker in which every request has a time-out; TVM's own waits for ever."""

import contextlib
import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from tvmflow.errors import RemoteError

# TVM's protocol (tvm/rpc/tracker.py): a magic number both ways, then JSON texts behind their lengths.
_MAGIC, _SERVER_MAGIC = 0x2F271, 0xFF271
_REQUEST, _SUMMARY = 4, 6
_SUCCESS = 0
# The protocol's own bound: a longer text comes from something that is no tracker.
_MAX_BYTES = 1 << 20
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Address:
    """Where a tracker or a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """The address that HOST:PORT says. Raises ValueError."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{text!r} is not of the form HOST:PORT")
        return cls(host.strip("[]"), int(port))


@dataclass(frozen=True)
class Queue:
    """The servers of one key: those that wait for a session, and the sessions that wait for a server."""

    free: int
    pending: int


@dataclass(frozen=True)
class Summary:
    """What a tracker knows: every server with its key, and the queue of each key."""

    servers: tuple[tuple[str, Address], ...]
    queues: dict[str, Queue]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that some server has."""
        return tuple(sorted({key for key, _ in self.servers}))


@dataclass(frozen=True)
class Place:
    """A server that the tracker gave away: its address, and the word with which it takes one session."""

    address: Address
    word: str


@dataclass(frozen=True)
class Tracker:
    """The tracker at an address; each method is a connection of its own."""

    address: Address

    def summary(self, timeout: float = _CONNECT_SECONDS) -> Summary:
        """What the tracker knows. Raises RemoteError when it does not answer within `timeout` seconds."""
        document = self._ask([_SUMMARY], timeout)
        servers = [
            (str(item["key"]).partition(":")[2], Address(str(item["addr"][0]), int(item["addr"][1])))
            for item in document["server_info"]
        ]
        queues = {key: Queue(int(item["free"]), int(item["pending"])) for key, item in document["queue_info"].items()}
        return Summary(tuple(sorted(servers, key=str)), queues)

    def request(self, key: str, timeout: float) -> Place | None:
        """A free server with `key`; None when there is none within `timeout` seconds.

        Raises RemoteError when there is no tracker.
        """
        try:
            host, port, word = self._ask([_REQUEST, key, "", 1], timeout)
        except TimeoutError:
            return None
        return Place(Address(str(host), int(port)), str(word))

    def _ask(self, question: list[Any], timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        connected = False
        try:
            with socket.create_connection(
                (self.address.host, self.address.port), min(timeout, _CONNECT_SECONDS)
            ) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(struct.pack("<i", _MAGIC))
                if _receive(connection, 4, time.monotonic() + _CONNECT_SECONDS) != struct.pack("<i", _MAGIC):
                    raise OSError("it is something else")
                connected = True
                text = json.dumps(question).encode()
                connection.sendall(struct.pack("<i", len(text)) + text)
                (size,) = struct.unpack("<i", _receive(connection, 4, deadline))
                if not 0 < size <= _MAX_BYTES:
                    raise OSError("it is something else")
                code, answer = json.loads(_receive(connection, size, deadline))
                if code != _SUCCESS:
                    raise OSError(f"it refuses with code {code}")
                return answer
        except TimeoutError as error:
            if connected and question[0] == _REQUEST:
                raise
            raise self._gone(error) from error
        except (OSError, ValueError, TypeError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> RemoteError:
        return RemoteError(f"there is no RPC tracker at {self.address} ({error}); start one with `tvmflow devices up`")


def answers(server: Address, timeout: float) -> bool:
    """Whether a server that has no session answers within `timeout` seconds; it is asked with a wrong word."""
    word = b"client:nobody"
    try:
        with socket.create_connection((server.host, server.port), timeout) as connection:
            connection.sendall(struct.pack("<ii", _SERVER_MAGIC, len(word)) + word)
            return bool(_receive(connection, 4, time.monotonic() + timeout))
    except OSError:
        return False


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it does not answer")
        connection.settimeout(left)
        with contextlib.suppress(OSError, AttributeError):
            # The tracker sends length and text apart: the second waits for our acknowledgement of the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise OSError("it closed the connection")
        data += chunk
    return data
