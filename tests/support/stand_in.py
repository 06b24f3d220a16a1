"""A program that stands in for a child process which a server of forks runs: each of the two ends with the other.

It returns that process's exit code, or ends by the signal that ended it.

Its arguments are the root of the project, the server's socket, and those of `tvmflow.processes.launch`.
"""

import json
import os
import re
import signal
import socket
import sys
from contextlib import suppress


def main() -> int:
    """Ask for the process, wait for its end and return its exit code."""
    root, address, parent, *arguments = sys.argv[1:]
    sys.path.insert(0, root)
    from tvmflow.processes.launch import die_with_parent

    die_with_parent(int(parent))
    if "TVM_USE_RUNTIME_LIB" in os.environ:
        # What has loaded the compiler cannot leave it out any more.
        address = re.sub("compiler$", "steps", address)
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        code = int(connection.recv(16) or 1)
    if code < 0:
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    os._exit(main())
