"""A process that has imported what commands import, and forks for each command: 0.1 s of a processor instead of 3 s.

A command still has a process, a session, an environment and a folder of its own. What a cold process does otherwise is
the import alone, which the tests with embedded servers and of interrupts go through.
"""

import gc
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict

import psutil

from tvmflow.cli import main
from tvmflow.launch import die_with_parent


class Request(TypedDict):
    """A command to run; its output goes to the two file descriptors that come with it."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str


@dataclass(frozen=True)
class CommandServer:
    """Runs `tvmflow` commands in forks of the process that listens at the Unix socket `address`."""

    address: str

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run `tvmflow` with these arguments to its end; it and its children are killed after `timeout` seconds."""
        request = Request(arguments=list(arguments), environment=dict(environment), folder=str(folder))
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            socket.socket(socket.AF_UNIX) as connection,
        ):
            connection.settimeout(timeout)
            connection.connect(self.address)
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [out.fileno(), err.fileno()])
            with connection.makefile() as answers:
                pid = int(answers.readline())
                try:
                    code = int(answers.readline())
                except BaseException:
                    process = psutil.Process(pid)
                    for child in (*process.children(recursive=True), process):
                        child.kill()
                    raise
            return subprocess.CompletedProcess(list(arguments), code, _text(out), _text(err))


@contextmanager
def command_server(environment: Mapping[str, str]) -> Iterator[CommandServer]:
    """Run a command server, which imports under this environment, and yield it; it ends with the thread that calls."""
    with tempfile.TemporaryDirectory(prefix="commands-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/socket"
        listener.bind(address)
        # Commands wait in this socket until the modules are imported.
        listener.listen()
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(os.getpid()), str(listener.fileno())],
                env=dict(environment),
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield CommandServer(address)
        finally:
            process.kill()
            process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _import() -> None:
    """Import what `release` and the commands around it import, as they do."""
    from tvmflow.cli import prefect as prefect_environment
    from tvmflow.registry import connection as mlflow_environment

    prefect_environment.prepare_environment()
    mlflow_environment.prepare_environment()
    import boto3  # noqa: F401
    import mlflow.pyfunc
    import mlflow.store.model_registry.sqlalchemy_store
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    import prefect.flow_engine
    import prefect.task_engine  # noqa: F401

    import flows.deployments
    import flows.promote
    import flows.reconcile
    import flows.release
    import flows.retrain
    import flows.retune  # noqa: F401
    import tvmflow.cli.display  # noqa: F401


def _serve(listener: socket.socket) -> list[str]:
    """Fork for each request; return its command line in the fork, with the fork's environment, folder and output."""
    running: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != listener.fileno():
                poll.unregister(descriptor)
                os.close(descriptor)
                pid, connection = running.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with connection:
                    connection.sendall(f"{code}\n".encode())
                continue
            connection, _ = listener.accept()
            request, outputs = _receive(connection)
            pid = os.fork()
            if pid == 0:
                listener.close()
                for end, (_, other) in running.items():
                    os.close(end)
                    other.close()
                connection.close()
                return _become(request, outputs)
            for output in outputs:
                os.close(output)
            connection.sendall(f"{pid}\n".encode())
            end = os.pidfd_open(pid)
            running[end] = pid, connection
            poll.register(end, select.POLLIN)


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    data, outputs, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    return json.loads(data), outputs


def _become(request: Request, outputs: list[int]) -> list[str]:
    from prefect.context import refresh_global_settings_context

    from tvmflow.cli.prefect import prepare_environment

    os.setsid()
    os.chdir(request["folder"])
    for output, standard in zip(outputs, (1, 2), strict=True):
        os.dup2(output, standard)
        os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    # Prefect has read its settings when it was imported.
    os.environ["PREFECT_API_URL"] = os.environ["TVMFLOW_PREFECT_API_URL"]
    prepare_environment()
    refresh_global_settings_context()
    return ["tvmflow", *request["arguments"]]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    _import()
    # No fork looks through the imported objects for garbage, least of all at its end.
    gc.collect()
    gc.freeze()
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[2])))
    # The end of the command is the end of the interpreter, with all that this runs.
    main()
