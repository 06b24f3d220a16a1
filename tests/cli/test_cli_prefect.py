"""Whether a Prefect server answers: one that is busy is asked again, one that does not run is not waited for.

An embedded one that ends in the midst is started again.
"""

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tvmflow.cli import prefect
from tvmflow.cli.prefect import answers
from tvmflow.errors import PrefectUnavailableError
from tvmflow.settings import Settings

SECONDS = 60.0
FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ntrue"
BUSY = {
    "dropped": b"",
    "failed": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "unavailable": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


def serve(server: socket.socket, *replies: bytes) -> threading.Thread:
    """Send each request the next of the replies; an empty one drops the connection."""

    def send() -> None:
        for reply in replies:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def address(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}/api"


@pytest.mark.parametrize("reply", BUSY.values(), ids=BUSY.keys())
def test_a_busy_server_is_asked_again(listening: socket.socket, reply: bytes) -> None:
    thread = serve(listening, reply, FINE)
    assert answers(address(listening), SECONDS)
    thread.join()


def test_a_busy_server_is_not_asked_for_ever(listening: socket.socket) -> None:
    serve(listening, *[BUSY["unavailable"]] * 100)
    assert not answers(address(listening), 1.0)


@pytest.mark.parametrize(("status", "expected"), [(401, True), (403, True), (404, False)])
def test_a_server_that_asks_for_a_login_answers(listening: socket.socket, status: int, expected: bool) -> None:
    serve(listening, f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
    assert answers(address(listening), SECONDS) is expected


def test_a_server_that_does_not_speak_http_does_not_answer(listening: socket.socket) -> None:
    serve(listening, b"SSH-2.0-OpenSSH_9.6\r\n")
    assert not answers(address(listening), SECONDS)


def test_a_server_that_does_not_run_is_not_waited_for() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        free = address(server)
    assert not answers(free, SECONDS)


# In the place of Prefect's: it answers with its process id, or a health check with `true`.
_SERVER = """
import os, socket, sys
listening = socket.socket(fileno=int(sys.argv[1]))
while True:
    connection, _ = listening.accept()
    with connection:
        body = b"true" if b"/health" in connection.recv(65536) else str(os.getpid()).encode()
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\n" + body)
"""


def test_an_embedded_server_that_ends_is_started_again_and_its_silence_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect, "_server_command", lambda _, fileno: [sys.executable, "-c", _SERVER, str(fileno)])
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_LOGGING_TO_API_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    processes: list[int] = []

    def end_servers() -> None:
        with prefect.prefect_server(Settings(home=tmp_path)) as await_server:
            await_server()
            # After the last one, connections are refused.
            for _ in range(10):
                processes.append(int(httpx.get(os.environ["PREFECT_API_URL"], timeout=SECONDS).text))
                with os.fdopen(os.pidfd_open(processes[-1])) as end:
                    os.kill(processes[-1], signal.SIGKILL)
                    select.select([end], [], [])

    with pytest.raises(PrefectUnavailableError, match="answered no more before the end of the run"):
        end_servers()
    assert len(processes) == len(set(processes)) == 4
