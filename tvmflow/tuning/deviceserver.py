"""The processes of `tvmflow devices up`: TVM's RPC tracker, and RPC servers that no session can bring down.

`python -m tvmflow.tuning.deviceserver PARENT tracker HOST PORT`, or `... PARENT server HOST TRACKER_HOST TRACKER_PORT
KEY`, prints the port on which it listens and serves until its parent dies.

TVM's own `tvm.exec.rpc_server` puts the server into a child that outlives it, and the server's loop ends, the process
staying, as soon as one session dies. Here the loop runs in the process itself and goes on with the next session, and
sessions die with the server.
"""

import functools
import logging
import os
import socket
import sys
import time

from tvmflow.process import die_with_parent
from tvmflow.runtime import library
from tvmflow.target import request_amx

_BACKLOG = 64
# How soon a server looks again for a tracker that is away; TVM's own looks every five seconds.
_RETRY_SECONDS = 0.5
# So that a loop that fails at once does not keep a core busy.
_PAUSE_SECONDS = 0.2


def track(host: str, port: int) -> None:
    """Run a tracker."""
    listening = _listen(host, port)
    from tvm.rpc import tracker

    tracker.logger.setLevel(logging.WARNING)
    tracker._tracker_server(listening, "")


def serve(host: str, tracker: tuple[str, int], key: str) -> None:
    """Run a server with `key` of a tracker."""
    listening = _listen(host, 0)
    library.load()  # With its extras, which candidates may call.
    request_amx()
    from tvm.rpc import server

    server.logger.setLevel(logging.ERROR)  # Every look of the supervisor would be a warning.
    connect = server.base.connect_with_retry

    def connect_soon(address: tuple[str, int]) -> socket.socket:
        connection: socket.socket = connect(address, retry_period=_RETRY_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    server.base.connect_with_retry = connect_soon
    # Each session is a fork of this process; a fork does not inherit that it dies with its parent.
    os.register_at_fork(after_in_child=functools.partial(_die_with, os.getpid()))
    folder = os.getcwd()  # noqa: PTH109 -- the session that dies has left the process in its own
    while True:
        try:
            server._listen_loop(listening, listening.getsockname()[1], key, tracker, None, None)
        except Exception as error:  # A session that died, or a tracker that is not there.
            print(f"{time.strftime('%H:%M:%S')} {error}", file=sys.stderr, flush=True)  # noqa: T201 -- this is the log
        os.chdir(folder)
        time.sleep(_PAUSE_SECONDS)


def _die_with(parent: int) -> None:
    try:
        die_with_parent(parent)
    except SystemExit:
        os._exit(1)  # An exception would not get out of a fork's hook.


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Of what it accepts as well: lengths and texts are sent apart, and each pair would take 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.bind((host, port))
    listening.listen(_BACKLOG)
    print(listening.getsockname()[1], flush=True)  # noqa: T201 -- whoever started this process reads it
    os.dup2(2, 1)  # Nobody reads what candidates print.
    return listening


def main() -> None:
    """Do what the command line says."""
    parent, what, host, *more = sys.argv[1:]
    die_with_parent(int(parent))
    # tvm_ffi imports torch where it is installed, which costs seconds and is not needed here.
    sys.modules["torch"] = None  # type: ignore[assignment]
    if what == "tracker":
        track(host, int(more[0]))
    else:
        serve(host, (more[0], int(more[1])), more[2])


if __name__ == "__main__":
    main()
