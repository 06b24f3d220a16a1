"""The servers of `support/command_server.py`, which run tests' processes as forks: no caller's end stops a server."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from support.command_server import _stand_in

# Both run with the descriptor of a listening socket as their argument. A fork runs the code that the request has.
SERVER = """
import socket, sys
from support.command_server import _serve
(code,) = _serve(socket.socket(fileno=int(sys.argv[1])))
exec(code)
"""
STARTER_OF_A_SERVER_THAT_ENDS = """
import socket, sys
from support import command_server
command_server._command = lambda kind, listener: [sys.executable, "-c", ""]
command_server._start_when_asked([socket.socket(fileno=int(sys.argv[1]))])
"""
# What a fork runs: it says its number, and ends when it has read a line.
WAITS = "import os; print(os.getpid(), flush=True); input()"
SECONDS = 60
Caller = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "server")


@pytest.fixture
def start(address: str) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Start a process that listens at the address."""
    with ExitStack() as stack:

        def run(source: str) -> "subprocess.Popen[str]":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                process = subprocess.Popen(
                    [sys.executable, "-c", source, str(listener.fileno())],
                    pass_fds=[listener.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    text=True,
                )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


@pytest.fixture
def call(address: str) -> Iterator[Caller]:
    """Start what stands for a process that runs code, and is one of the server's forks."""
    with ExitStack() as stack:

        def run(code: str) -> "subprocess.Popen[str]":
            command = [*_stand_in(address), str(os.getpid()), code]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def test_a_fork_ends_as_its_code_does(start: Caller, call: Caller) -> None:
    start(SERVER)
    assert call("import sys; print(sys.stdin.read()); sys.exit(7)").communicate("text", SECONDS)[0] == "text\n"
    process = call("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert process.wait(SECONDS) == -signal.SIGTERM


def test_a_caller_that_ends_before_its_request_leaves_the_others_their_server(
    start: Caller, call: Caller, address: str
) -> None:
    start(SERVER)
    for part in (b"", b'{"arguments"'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(part)
    assert call("print('alive')").communicate(timeout=SECONDS)[0] == "alive\n"


def test_a_fork_and_its_caller_that_end_at_once_leave_the_others_their_ends(start: Caller, call: Caller) -> None:
    server = start(SERVER)
    first, second = call(WAITS), call(WAITS)
    numbers = [int(_open(process).readline()) for process in (first, second)]
    os.kill(server.pid, signal.SIGSTOP)
    os.waitpid(server.pid, os.WUNTRACED)
    first.kill()
    first.wait(SECONDS)
    _kill(numbers[0])
    os.kill(server.pid, signal.SIGCONT)
    second.communicate("\n", SECONDS)
    assert second.returncode == 0


def test_a_fork_ends_with_its_caller(start: Caller, call: Caller) -> None:
    start(SERVER)
    process = call(WAITS)
    fork = os.pidfd_open(int(_open(process).readline()))
    process.kill()
    assert _ends(fork)


def test_whoever_waits_for_a_server_that_has_ended_is_refused(start: Caller, call: Caller) -> None:
    start(STARTER_OF_A_SERVER_THAT_ENDS)
    for _ in range(2):
        process = call(WAITS)
        _, error = process.communicate(timeout=SECONDS)
        assert process.returncode != 0
        assert "Connection" in error


def _open(process: "subprocess.Popen[str]") -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _kill(pid: int) -> None:
    """Kill a process that is another's child, and wait for its end."""
    descriptor = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert _ends(descriptor)


def _ends(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = bool(poll.poll(1000 * SECONDS))
    os.close(descriptor)
    return ended
