"""Steps as child processes: heavy libraries and a user's code run there, and can be killed at any time.

A child gets jobs as JSON from this process and sends back its progress and, for each job, a result or an error. It is a
new interpreter or, within `shared_imports`, a fork of a process that has imported the job's modules.
"""

import contextlib
import importlib
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from tvmflow.errors import StepError, TvmflowError, from_data, to_data
from tvmflow.processes.imports import importing
from tvmflow.processes.launch import die_with_parent
from tvmflow.processes.supervisor import (
    LARGEST_LOG,
    Channel,
    ChildProcess,
    LogLimitError,
    forbid_torch,
    visible_environment,
)

CHILD_VARIABLE = "TVMFLOW_CHILD"
_FORK = "--fork"

T = TypeVar("T", bound=BaseModel)
Emit = Callable[[float, float, str], None]
"""Reports the progress of a job: the units done, the units in all, and a message."""


class Child:
    """A child process that runs `module:function(job, emit)`; `call` sends it more jobs of the same kind."""

    def __init__(
        self,
        function: str,
        *,
        log: Path,
        paths: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        torch: bool = False,
    ) -> None:
        """Start the child. Raises OSError when the process or its log cannot be created.

        `paths` come first in its module search path, `environment` is added to the visible variables of this process
        (`tvmflow.processes.supervisor.visible_environment`), and `torch=False` prevents it from importing torch.
        """
        self.step = _step_name(function)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = ChildProcess(
            "tvmflow.processes.children",
            function,
            environment=_environment(paths, environment or {}, torch),
            log=log,
            pipes=True,
            from_working_folder=True,
        )

    def call(
        self,
        job: BaseModel,
        result: type[T],
        *,
        timeout: float,
        emit: Emit = lambda done, total, message: None,
    ) -> T:
        """Send one job, pass its progress on to `emit`, and return its result as a `result`.

        Raises the TvmflowError that the child raised, and StepError when the child crashed or took longer than
        `timeout` seconds; the child has ended then.
        """
        return _exchange(self._process, self.step, {"job": job.model_dump_json()}, result, timeout, emit)

    def take_turn(self, job: BaseModel, result: type[T], *, timeout: float) -> T:
        """Let the paused child run one job, and pause it again. Returns the job's result, an object of class `result`.

        Where several children measure, one runs at a time: the threads of the others would take cores from it. Raises
        the TvmflowError that the child raised, and StepError when the child crashed or took longer than `timeout`
        seconds.
        """
        self.resume()
        turn = self.call(job, result, timeout=timeout)
        self.pause()
        return turn

    def pause(self) -> None:
        """Stop the child and all that it started until `resume` (SIGSTOP). Raises OSError when it has ended."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the child go on (SIGCONT); one that is not paused just goes on. Raises OSError when it has ended."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the child and all processes that it started."""
        self._process.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call(
    function: str,
    job: BaseModel,
    result: type[T],
    *,
    log: Path,
    timeout: float,
    emit: Emit = lambda done, total, message: None,
    paths: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    torch: bool = False,
    imports: Sequence[str] = (),
) -> T:
    """Run `function`, named as `module:function`, on a job in a new child process; return its result as a `result`.

    The child prints to the file `log`, and `emit` gets the progress of the job. The folders `paths` come first in its
    module search path, the variables `environment` (None: none) are added to its environment, and `torch=False`
    prevents it from importing torch. Within `shared_imports` the child is a fork of a process that has imported the
    modules `imports`, if any are named. Raises the TvmflowError that the child raised, StepError when the child crashed
    or took longer than `timeout` seconds.
    """
    servers = _fork_servers.get()
    if imports and servers is not None:
        server = servers.find(imports, log, paths, torch)
        return server.call(function, job, result, log=log, timeout=timeout, emit=emit, environment=environment or {})
    with Child(function, log=log, paths=paths, environment=environment, torch=torch) as child:
        return child.call(job, result, timeout=timeout, emit=emit)


@contextlib.contextmanager
def shared_imports() -> Iterator[None]:
    """Let calls in the body with the same imports share a process that imports them once and forks for each job.

    Each job still has its own process, environment and log. A fork that crashes or is killed also ends the process from
    which it was forked; the next call starts another.
    """
    servers = _ForkServers()
    token = _fork_servers.set(servers)
    try:
        yield
    finally:
        _fork_servers.reset(token)
        servers.close()


def start_imports(imports: Sequence[str], *, log: Path, paths: Sequence[Path] = (), torch: bool = False) -> None:
    """Within `shared_imports`, start the process that imports these modules for later calls of this thread.

    Returns at once, and does nothing if the process runs already. `log` gets what the imports print; the other
    arguments are those of the later calls.
    """
    servers = _fork_servers.get()
    if servers is not None:
        servers.find(imports, log, paths, torch)


class _ForkServer:
    """A process without threads of its own that imports modules, and forks for each job."""

    def __init__(self, imports: Sequence[str], log: Path, paths: Sequence[Path], torch: bool) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = ChildProcess(
            "tvmflow.processes.children",
            _FORK,
            *imports,
            environment=_environment(paths, {}, torch),
            log=log,
            pipes=True,
            from_working_folder=True,
        )

    @property
    def is_alive(self) -> bool:
        return self._process.exit_code() is None

    def call(
        self,
        function: str,
        job: BaseModel,
        result: type[T],
        *,
        log: Path,
        timeout: float,
        emit: Emit,
        environment: Mapping[str, str],
    ) -> T:
        """Run `function` on a job in a fork and return its result.

        Raises the TvmflowError that the fork raised, StepError when it crashed or took longer than `timeout` seconds.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process.log = log
        message = {
            "function": function,
            "job": job.model_dump_json(),
            "log": str(log.absolute()),
            "environment": dict(environment),
        }
        return _exchange(self._process, _step_name(function), message, result, timeout, emit)

    def close(self) -> None:
        self._process.close()


class _ForkServers:
    """The fork servers of a `shared_imports`: each thread has its own, which the kernel ends with the thread."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: list[_ForkServer] = []

    def find(self, imports: Sequence[str], log: Path, paths: Sequence[Path], torch: bool) -> _ForkServer:
        """Return this thread's server for these imports; start one if there is none."""
        key = (tuple(imports), tuple(paths), torch)
        servers: dict[Any, _ForkServer] = self._own.__dict__
        if key not in servers or not servers[key].is_alive:
            servers[key] = _ForkServer(imports, log, paths, torch)
            self._all.append(servers[key])
        return servers[key]

    def close(self) -> None:
        for server in self._all:
            server.close()


_fork_servers: ContextVar[_ForkServers | None] = ContextVar("fork_servers", default=None)


def _exchange(
    process: ChildProcess, step: str, message: Mapping[str, Any], result: type[T], timeout: float, emit: Emit
) -> T:
    """Send a child a message, pass its progress on to `emit`, and return its result; raises as `Child.call` does."""
    deadline = time.monotonic() + timeout
    process.current_log = Path(message.get("log", process.log))
    try:
        process.send(message, deadline)
        while True:
            reply = process.receive(deadline)
            if "progress" in reply:
                emit(*reply["progress"])
                # The pipe of a child that reports without a pause is never empty.
                if time.monotonic() >= deadline:
                    raise TimeoutError
            elif "error" in reply:
                raise from_data(reply["error"])
            else:
                return result.model_validate(reply["result"])
    except LogLimitError as error:
        process.close()
        end = f"printed more than {LARGEST_LOG >> 20} MB"
        raise _make_error(
            f"{step} {end} and was ended; its log is {process.current_log}: let it print less", end
        ) from error
    except TimeoutError as error:
        process.close()
        end = f"took longer than {timeout / 60:.3g} minutes"
        advice = f"set TVMFLOW_STEP_TIMEOUT_MINUTES for more, its log is {process.log}"
        raise _make_error(f"{step} {end} and was ended; {advice}", end) from error
    except EOFError as error:
        end, description = process.name_end(), process.describe_end()
        process.close()
        raise _make_error(f"the process of {step} {description}; its log is {process.log}", end) from error


def _make_error(message: str, end: str) -> StepError:
    error = StepError(message)
    error.end = end
    return error


def _environment(paths: Sequence[Path], additions: Mapping[str, str], torch: bool) -> dict[str, str]:
    """The whole environment of a step's process."""
    return {
        **visible_environment(),
        **additions,
        CHILD_VARIABLE: "torch" if torch else "no-torch",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _step_name(function: str) -> str:
    return "step " + function.partition(":")[0].rpartition(".")[2]


def _serve(function: str) -> None:
    """Work on one job after the other until the parent sends no more; this is the child's side."""
    channel = _take_channel()
    while (message := channel.receive()) is not None:
        _work(channel, function, message["job"])


def _serve_forks(imports: Sequence[str]) -> None:
    """Fork for each job until the parent sends no more or a fork gives no reply; this is the fork server's side."""
    channel = _take_channel()
    with importing():
        for module in imports:
            # The fork that needs the module reports the error.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    own = os.getpid()
    # Shared with the forks: 1 when the job has a reply, without which also exit code 0 is a failure.
    has_reply = mmap.mmap(-1, 1)
    while (message := channel.receive()) is not None:
        has_reply[0] = 0
        pid = os.fork()
        if pid == 0:
            # Not `sys.exit`: exit handlers belong to this process, and may hang in a fork.
            os._exit(_exit_code(partial(_work_in_fork, channel, message, own, has_reply)))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            # This process ends by the signal that ended the fork, so that the parent reports that signal.
            with contextlib.suppress(OSError):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(own, -code)
        if code or not has_reply[0]:
            os._exit(code)


def _work_in_fork(channel: Channel, message: Mapping[str, Any], parent: int, has_reply: mmap.mmap) -> None:
    """Do a job as a fork of the process `parent`, and note in `has_reply` that it has a reply."""
    die_with_parent(parent)
    os.environ.update(message["environment"])
    # An import may have looked up the folder of temporary files before the environment named another.
    tempfile.tempdir = None
    with Path(message["log"]).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _work(channel, message["function"], message["job"])
    has_reply[0] = 1


def _exit_code(work: Callable[[], None]) -> int:
    """Run a function, and return the exit code of an interpreter that runs it alone; print what that would print."""
    code: object = None
    try:
        work()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


def _take_channel() -> Channel:
    """Return the child's end of the pipes; forbid torch in a process whose job does not need it."""
    if os.environ[CHILD_VARIABLE] == "no-torch":
        forbid_torch()
    # A user's code that asks a question reads the end of a file, not a job.
    return Channel()


def _work(channel: Channel, function: str, job_json: str) -> None:
    """Run a function on a job and send its result or its error."""

    def emit(done: float, total: float, message: str) -> None:
        channel.send({"progress": [done, total, message]})

    module, _, name = function.partition(":")
    try:
        work = getattr(importlib.import_module(module), name)
        job = work.__annotations__["job"].model_validate_json(job_json)
        reply: dict[str, Any] = {"result": work(job, emit).model_dump(mode="json")}
    except Exception as error:
        traceback.print_exc()
        reply = {"error": to_data(_as_step_error(error, _step_name(function)))}
    # The parent may end this process as soon as it has the reply.
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send(reply)


def _as_step_error(error: Exception, step: str) -> TvmflowError:
    """Return the error that the parent raises: a TvmflowError unchanged, any other as a StepError of one sentence."""
    if isinstance(error, TvmflowError):
        return error
    if isinstance(error, MemoryError):
        return StepError(f"{step} ran out of memory; free some, or use a smaller model")
    if isinstance(error, OSError):
        problem = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
        return StepError(f"{step}: {problem}; free space or correct the path, and run again")
    words = " ".join(str(error).split())[:500]
    return StepError(f"{step} failed ({type(error).__name__}: {words})")


if __name__ == "__main__":
    if sys.argv[1] == _FORK:
        _serve_forks(sys.argv[2:])
    else:
        _serve(sys.argv[1])
