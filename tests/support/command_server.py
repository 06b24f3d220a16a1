"""Processes that have imported what commands and their steps import, and fork for each: 0.1 s instead of 3 s of CPU.

A command still has a process, a session, an environment and a folder of its own, and so has a step; in its place as a
child of the command stands `support/stand_in.py`. What cold processes do otherwise is the import alone, with torch's
table of operators, which the tests with embedded servers, of interrupts and of workers go through: Prefect's server is
one that the settings name, or that of a running stack.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, NamedTuple, TypedDict

from tvmflow import reach
from tvmflow.cli import main
from tvmflow.errors import TvmflowError
from tvmflow.processes import launch, supervisor
from tvmflow.processes.launch import die_with_parent
from tvmflow.runtime.library import without_torch

_STAND_IN = Path(__file__).with_name("stand_in.py")
_TORCHLIB = Path(__file__).with_name("torchlib.py")
_ROOT = Path(__file__).parents[2]
# The steps whose processes have neither the compiler nor torch.
_PLAIN = (
    *("tasks.export:work", "tasks.show:work_show", "tasks.show:work_texts", "tasks.validate:judge_work"),
    *("tasks.benchmark:turn_work", "tasks.comparison:work"),
)
# Those with the compiler, where no shared imports name it.
_COMPILING = ("tasks.relax_import:work", "tasks.build:work")
# Builds that tests compare differ by more than short pairs do.
_PAIR_SECONDS, _MOST_PAIRS = 0.03, 20
# A request comes as a whole; whoever stops within it keeps the others waiting for this long.
_REQUEST_SECONDS = 30.0


class Request(TypedDict):
    """A process to fork; the last of its standard streams are the file descriptors that come with the request."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str


@dataclass(frozen=True)
class CommandServer:
    """Runs `tvmflow` commands in forks of the process that listens at the Unix socket `address`."""

    address: str

    @property
    def stand_in(self) -> list[str]:
        """A command line that stands for `tvmflow`, but for its last words: the parent's id, then the arguments."""
        return _stand_in(self.address)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run `tvmflow` with these arguments to its end; it and its children are killed after `timeout` seconds.

        Arguments that begin with `-m` are those of the interpreter.
        """
        request = Request(arguments=list(arguments), environment=dict(environment), folder=str(folder))
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            socket.socket(socket.AF_UNIX) as connection,
        ):
            connection.settimeout(timeout)
            connection.connect(self.address)
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [out.fileno(), err.fileno()])
            # The end of the connection ends the command and all that it started.
            with connection.makefile() as answers:
                code = int(answers.readline())
            return subprocess.CompletedProcess(list(arguments), code, _text(out), _text(err))


@contextmanager
def command_server(environment: Mapping[str, str]) -> Iterator[CommandServer]:
    """Run a command server, which imports under this environment, and yield it; it ends with the thread that calls.

    It imports nothing before the first command.
    """
    with tempfile.TemporaryDirectory(prefix="commands-") as folder, ExitStack() as stack:
        # Requests wait in these sockets until the modules are imported.
        listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in _KINDS]
        for kind, listener in zip(_KINDS, listeners, strict=True):
            listener.bind(f"{folder}/{kind}")
            listener.listen()
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                _command("all", *listeners),
                env=dict(environment),
                pass_fds=[listener.fileno() for listener in listeners],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield CommandServer(f"{folder}/commands")
        finally:
            process.kill()
            process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _stand_in(address: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(_STAND_IN), str(_ROOT), address]


def _command(kind: str, *listeners: socket.socket) -> list[str]:
    return [sys.executable, "-P", __file__, str(os.getpid()), kind, *(str(item.fileno()) for item in listeners)]


def _import_commands() -> None:
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
    from sqlalchemy.orm import configure_mappers

    import flows.deployments
    import flows.promote
    import flows.reconcile
    import flows.release
    import flows.retrain
    import flows.retune  # noqa: F401
    import tvmflow.cli.display  # noqa: F401

    # What the functions of steps import when they run in the process of the command itself.
    _import_all("scipy.stats", "graphviz", "resvg_py", "tvmflow.registry.flavor", "tvmflow.registry.signature")
    _import_all("tvmflow.tuning.sharing", "grimp", "prefect.artifacts", "sqlalchemy.dialects.sqlite")
    configure_mappers()
    # What each command computes once: the digests of the code of its steps.
    for module in sorted(name for name in sys.modules if name.startswith("tasks.")):
        reach.code_digest(module)


def _import_steps() -> None:
    with without_torch():
        import_module("tvm_ffi")
    _import_all("onnx", "onnxruntime", "tvmflow.runtime", "tvmflow.tuning.worker")
    _import_all("tasks.benchmark", "tasks.comparison")


def _import_compiler() -> None:
    supervisor.forbid_torch()
    _import_all("tvmflow.compiler", "tvmflow.tuning.model", "tasks.build", "tasks.relax_import", "tasks.tune")
    reach.code_digest("tvmflow.compiler.lowering")


def _import_torch() -> None:
    _import_all("torch.onnx", "tasks.export", "tasks.train", "tasks.validate", "mlflow.pytorch")
    # What an optimizer and an export import when they begin, which takes two thirds of a small export.
    _import_all("torch._dynamo", "torch.export._trace", "torch.onnx._internal.exporter._core", "sympy.combinatorics")
    _import_all("onnxscript.optimizer", "onnxscript.rewriter", "onnxscript.version_converter", "onnx_ir.passes.common")
    _import_all("onnx.reference")
    # This process does not have the tests' packages, whose place the user's code may search.
    share_table = runpy.run_path(str(_TORCHLIB))["share_table"]
    # The forks export with the opset that release files have unless they name another.
    share_table()(opset_version=import_module("tvmflow.spec.model").Export().opset)


def _import_all(*modules: str) -> None:
    for module in modules:
        import_module(module)


class _Kind(NamedTuple):
    """What a server imports, and what its forks run, from a request's arguments."""

    imports: Callable[[], None]
    run: Callable[[list[str]], None]


def _run_command(arguments: list[str]) -> None:
    from prefect.context import refresh_global_settings_context

    from tvmflow.cli.prefect import prepare_environment
    from tvmflow.settings import Settings

    # Prefect has read its settings when it was imported. A mistake in tvmflow's own is the command's to report.
    with suppress(TvmflowError):
        if (address := Settings.load().prefect_api_url) is not None:
            os.environ["PREFECT_API_URL"] = address
    prepare_environment()
    refresh_global_settings_context()
    if arguments[0] == "-m":
        _run_module(arguments)
    else:
        sys.argv = ["tvmflow", *arguments]
        main()


def _run_module(arguments: list[str]) -> None:
    """Do what the interpreter and `tvmflow.processes.launch` do with such a command line."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, *sys.argv = arguments
    sys.path[:0] = [*([os.getcwd()] if kind == "local-module" else []), *paths]  # noqa: PTH109
    with warnings.catch_warnings():
        # The module has been imported for others, and runs once more as the main one.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


_KINDS = {
    "commands": _Kind(_import_commands, _run_command),
    "steps": _Kind(_import_steps, _run_module),
    "compiler": _Kind(_import_compiler, _run_module),
    "torch": _Kind(_import_torch, _run_module),
}


def _kind_of(module: str, arguments: Sequence[str]) -> str | None:
    """The server that has imported what a child process imports; None if there is no such server."""
    if module == "tvmflow.processes.children" and arguments[0] == "--fork":
        return "compiler" if "tvmflow.compiler" in arguments else "torch" if "torch" in arguments else "steps"
    if module == "tvmflow.processes.children" and arguments[0] in _COMPILING:
        return "compiler"
    is_plain = module == "tvmflow.verification" or (module == "tvmflow.processes.children" and arguments[0] in _PLAIN)
    return "steps" if is_plain else "compiler" if module == "tvmflow.tuning.worker" else None


def start_steps_in_forks(commands: Path) -> None:
    """Have this process, and those forked from it, start children in forks of the servers beside the one of commands.

    Two builds are compared in fewer and shorter pairs.
    """
    import tasks.comparison

    supervisor.module_command = command_of_fork(commands)
    tasks.comparison._PAIR_SECONDS, tasks.comparison._MOST_PAIRS = _PAIR_SECONDS, _MOST_PAIRS


def command_of_fork(commands: Path) -> Callable[..., list[str]]:
    """Return what stands for `launch.module_command`: its commands have forks of the servers run the module.

    `commands` is the address of the server of commands. A module for which there is no server runs as ever.
    """

    def module_command(module: str, *arguments: str, from_working_folder: bool = False) -> list[str]:
        command = launch.module_command(module, *arguments, from_working_folder=from_working_folder)
        kind = _kind_of(module, arguments)
        if kind is None:
            return command
        return [*_stand_in(str(commands.with_name(kind))), *command[command.index(launch.__file__) + 1 :]]

    return module_command


def _start_when_asked(listeners: Sequence[socket.socket]) -> None:
    """Start the server of each socket when somebody first connects to it; the socket's name is the server's kind."""
    waiting = {listener.fileno(): listener for listener in listeners}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            poll.unregister(descriptor)
            # Without this copy of the socket, a server's end refuses whoever connects or waits for an answer.
            with waiting.pop(descriptor) as listener:
                kind = Path(listener.getsockname()).name
                subprocess.Popen(_command(kind, listener), pass_fds=(descriptor,))


@dataclass(eq=False)
class _Fork:
    """A process that a server has forked, its pidfd, and the connection of whoever waits for its end, if anybody."""

    pid: int
    end: int
    connection: socket.socket | None

    def answer(self) -> None:
        """Reap the process, which has ended, and tell its exit code to whoever still waits."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.connection is not None:
            with suppress(OSError):
                self.connection.sendall(f"{code}\n".encode())
        self.close()

    def kill(self) -> None:
        """Kill the process and all that it started, for nobody waits for it any more."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has no session yet. Nobody has reaped it, so the number is still its own.
            os.kill(self.pid, signal.SIGKILL)
        self._disconnect()

    def close(self) -> None:
        """Close this process's descriptors of the fork."""
        os.close(self.end)
        self._disconnect()

    def _disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def _serve(listener: socket.socket) -> list[str]:
    """Fork for each request; return its arguments in the fork, with the fork's environment, folder and streams."""
    running: list[_Fork] = []
    while True:
        ready = _ready(listener, running)
        # A descriptor is closed with its own fork, and a new one comes after all others: no number means two things.
        for fork in list(running):
            if fork.end in ready:
                running.remove(fork)
                fork.answer()
            elif fork.connection is not None and fork.connection.fileno() in ready:
                fork.kill()
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        try:
            request, streams = _receive(connection)
        except (OSError, EOFError):
            connection.close()
            continue
        pid = os.fork()
        if pid == 0:
            listener.close()
            connection.close()
            for fork in running:
                fork.close()
            _become(request, streams)
            return request["arguments"]
        for stream in streams:
            os.close(stream)
        running.append(_Fork(pid, os.pidfd_open(pid), connection))


def _ready(listener: socket.socket, running: Sequence[_Fork]) -> set[int]:
    """Wait for a request, for the end of a fork or for that of a connection; return their descriptors."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    for fork in running:
        poll.register(fork.end, select.POLLIN)
        if fork.connection is not None:
            poll.register(fork.connection, select.POLLRDHUP)
    return {descriptor for descriptor, _ in poll.poll()}


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """Return a request and the streams that come with it.

    Raises EOFError or OSError where whoever sends it ends, or pauses for too long, before all of it has come.
    """
    connection.settimeout(_REQUEST_SECONDS)
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    try:
        while not data.endswith(b"\n"):
            part = connection.recv(1 << 20)
            if not part:
                raise EOFError
            data += part
    except (OSError, EOFError):
        for stream in streams:
            os.close(stream)
        raise
    return json.loads(data), streams


def _become(request: Request, streams: list[int]) -> None:
    os.setsid()
    os.chdir(request["folder"])
    for stream, standard in zip(streams, range(3 - len(streams), 3), strict=True):
        os.dup2(stream, standard)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    # An import may have asked for the folder of temporary files.
    tempfile.tempdir = None


def _import_once() -> None:
    """Import what the servers import, each kind in a process: Python keeps what it compiles for all later ones.

    The processes run side by side; the kinds have little in common that takes long to compile.
    """
    children = []
    for kind in _KINDS.values():
        pid = os.fork()
        if pid == 0:
            kind.imports()
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["import"]:
        sys.exit(_import_once())
    parent, kind, *descriptors = sys.argv[1:]
    die_with_parent(int(parent))
    listeners = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    if kind == "all":
        _start_when_asked(listeners)
    (listener,) = listeners
    imports, run = _KINDS[kind]
    imports()
    if kind == "commands":
        start_steps_in_forks(Path(listener.getsockname()))
    # No fork looks through the imported objects for garbage, least of all at its end.
    gc.collect()
    gc.freeze()
    # The end of what it runs is the end of the fork's interpreter, with all that this runs.
    run(_serve(listener))
