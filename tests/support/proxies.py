"""A TCP proxy that watches for some bytes, and may interfere with the request that has them."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


@contextmanager
def intercepting(endpoint: str, request: bytes, act: Callable[[], None]) -> Iterator[str]:
    """Yield the address of a proxy before `endpoint` that calls `act` when it sees the bytes `request`.

    The connection with that request ends, and the request does not reach the server. Other connections go on.
    """

    def on_bytes(die: Callable[[], None]) -> bool:
        act()
        return False

    with _proxy(endpoint, request, on_bytes) as address:
        yield address


@contextmanager
def dying(endpoint: str, request: bytes) -> Iterator[str]:
    """Yield the address of a proxy before `endpoint` that is gone, with all connections, once it sees `request`."""

    def on_bytes(die: Callable[[], None]) -> bool:
        die()
        return False

    with _proxy(endpoint, request, on_bytes) as address:
        yield address


@contextmanager
def watching(endpoint: str, expected: bytes) -> Iterator[tuple[str, threading.Event]]:
    """Yield the address of a proxy before `endpoint`, and an event that is set once it has passed on `expected`.

    Requests and responses pass unchanged.
    """
    event = threading.Event()

    def on_bytes(die: Callable[[], None]) -> bool:
        event.set()
        return True

    with _proxy(endpoint, expected, on_bytes) as address:
        yield address, event


@contextmanager
def _proxy(endpoint: str, expected: bytes, on_bytes: Callable[[Callable[[], None]], bool]) -> Iterator[str]:
    """Yield the address of a proxy that calls `on_bytes` with a function that ends the proxy, when it sees `expected`.

    The connection with those bytes ends before they are passed on, unless `on_bytes` returns True.
    """
    place = urlsplit(endpoint)
    listening = socket.create_server(("127.0.0.1", 0))
    open_sockets = [listening]

    def die() -> None:
        for each in open_sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if expected in data and not on_bytes(die):
                    break
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection((place.hostname or "", place.port or 0))
                open_sockets.extend((client, server))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        die()
