"""A TCP proxy that interferes with one request."""

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
    with _proxy(endpoint, request, lambda die: act()) as address:
        yield address


@contextmanager
def dying(endpoint: str, request: bytes) -> Iterator[str]:
    """Yield the address of a proxy before `endpoint` that is gone, with all connections, once it sees `request`."""
    with _proxy(endpoint, request, lambda die: die()) as address:
        yield address


@contextmanager
def _proxy(endpoint: str, request: bytes, on_request: Callable[[Callable[[], None]], None]) -> Iterator[str]:
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
                if request in data:
                    on_request(die)
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
