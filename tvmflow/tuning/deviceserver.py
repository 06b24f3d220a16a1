"""The processes of `tvmflow devices up`: TVM's RPC tracker, and RPC servers that no session can bring down.

`python -m tvmflow.tuning.deviceserver tracker HOST PORT`, or `... server HOST TRACKER_HOST TRACKER_PORT KEY`, sends its
parent the port at which it listens (`{"port": 9190}`) and serves until it is killed.

TVM's own `tvm.exec.rpc_server` puts the server into a child that outlives it, and as soon as one session dies, the
server's loop ends while its process stays. Here the loop runs in the process itself and goes on with the next session,
and sessions die with the server.
"""

import functools
import logging
import os
import socket
import sys
import time

from tvmflow.hardware.target import request_amx
from tvmflow.processes.launch import die_with_parent
from tvmflow.processes.supervisor import Channel, forbid_torch
from tvmflow.runtime import library

_BACKLOG = 64
# How soon a server looks again for a tracker that is away; TVM's own looks every five seconds.
_RETRY_SECONDS = 0.5
# The pause after a failure, so that a loop that fails at once does not keep a core busy.
_PAUSE_SECONDS = 0.2


def run_tracker(channel: Channel, host: str, port: int) -> None:
    """Run a tracker at `host` and `port` until it is killed; first send its port over `channel`.

    Raises OSError when it cannot listen there.
    """
    listening = _listen(channel, host, port)
    from tvm.rpc import tracker

    tracker.logger.setLevel(logging.WARNING)
    tracker._tracker_server(listening, "")


def run_server(channel: Channel, host: str, tracker: tuple[str, int], key: str) -> None:
    """Run an RPC server at a free port of `host` until it is killed; first send its port over `channel`.

    The server registers under `key` at `tracker` (host and port). Raises OSError when it cannot listen there.
    """
    listening = _listen(channel, host, 0)
    library.load()  # With its extras, which candidates may call.
    request_amx()
    from tvm.rpc import server

    server.logger.setLevel(logging.ERROR)  # Every probe of the supervisor would be a warning.
    connect = server.base.connect_with_retry

    def connect_soon(address: tuple[str, int]) -> socket.socket:
        connection: socket.socket = connect(address, retry_period=_RETRY_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    server.base.connect_with_retry = connect_soon
    # Each session is a fork of this process, and a fork does not inherit the setting to die with its parent.
    os.register_at_fork(after_in_child=functools.partial(_die_with, os.getpid()))
    folder = os.getcwd()  # noqa: PTH109 -- a session that dies leaves the process in the session's folder
    while True:
        try:
            server._listen_loop(listening, listening.getsockname()[1], key, tracker, None, None)
        except Exception as error:  # A session has died, or there is no tracker.
            print(f"{time.strftime('%H:%M:%S')} {error}", file=sys.stderr, flush=True)  # noqa: T201 -- this is the log
        os.chdir(folder)
        time.sleep(_PAUSE_SECONDS)


def _die_with(parent: int) -> None:
    try:
        die_with_parent(parent)
    except (SystemExit, OSError):
        os._exit(1)  # An exception would not get out of a fork's hook.


def _listen(channel: Channel, host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit this: lengths and texts are sent apart, and each pair would take 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.bind((host, port))
    listening.listen(_BACKLOG)
    channel.send({"port": listening.getsockname()[1]})
    return listening


def main() -> None:
    """Run the tracker or the server that the command line names."""
    kind, host, *arguments = sys.argv[1:]
    forbid_torch()
    channel = Channel()
    if kind == "tracker":
        run_tracker(channel, host, int(arguments[0]))
    else:
        run_server(channel, host, (arguments[0], int(arguments[1])), arguments[2])


if __name__ == "__main__":
    main()
