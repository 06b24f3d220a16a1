"""Child processes under supervision: a session and a log for each, deadlines, and a clean end.

A child dies with its parent. The processes that it started end with it, because all are one process group. The steps of
a run (`tvmflow.processes.children`), the tuner's workers, devices and the verification of bundles use this module.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from tvmflow.processes.launch import module_command

# Seconds between checks that a silent child still runs, and between checks for the end of a child.
_LOOK_SECONDS = 0.5
_WAIT_SECONDS = 0.02
# A child whose pipes are closed is about to end.
_END_SECONDS = 10.0
_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 4096
# A function that prints without an end would fill the disk long before its deadline.
LARGEST_LOG = 1 << 28

# The variables that foreign code may see: those of any program, of compilers and linkers, of numerical libraries, of
# downloads, and the public keys of signers.
_VISIBLE = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG(UAGE)?|LC_\w+|TMPDIR|TEMP|TMP|VIRTUAL_ENV|XDG_\w+|PYTHON\w*"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|CC|CXX|MALLOC_\w+|[A-Z]+SAN_OPTIONS"
    r"|(TVM|OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH|CUDA|NVIDIA)_\w+|MPLBACKEND"
    r"|(HTTP|HTTPS|NO)_PROXY|(http|https|no)_proxy|SSL_CERT_FILE|SSL_CERT_DIR|(REQUESTS|CURL)_CA_BUNDLE"
    r"|HF_HOME|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|TVMFLOW_PROFILE|TVMFLOW_TRUSTED_KEYS"
)

_live: "set[ChildProcess]" = set()
_live_lock = threading.Lock()


class LogLimitError(Exception):
    """A child has printed more than LARGEST_LOG bytes."""


class ChildProcess:
    """A Python module that runs in a process and a session of its own, and dies with the thread that starts it.

    With `pipes` it exchanges JSON messages with this process: `send` and `receive` here, a `Channel` there. Everything
    that it prints goes to the file `log`. `environment` is its whole environment.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        log: Path,
        append: bool = False,
        pipes: bool = False,
        folder: Path | None = None,
        from_working_folder: bool = False,
    ) -> None:
        """Start `python -m module arguments`.

        `append` keeps the log's content, `folder` is the child's working folder, and `from_working_folder` lets it
        import modules from there. Raises OSError when the process or its log cannot be created.
        """
        self.log = log
        self.current_log = log
        self._lock = threading.RLock()
        self._exit_code: int | None = None
        self._pending = b""
        with log.open("ab" if append else "wb") as output:
            self._process = subprocess.Popen(
                module_command(module, *arguments, from_working_folder=from_working_folder),
                cwd=folder,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                env=dict(environment),
                # An interrupt at the terminal is the parent's to handle.
                start_new_session=True,
            )
        if pipes:
            os.set_blocking(_open(self._process.stdin).fileno(), False)
        with _live_lock:
            _live.add(self)

    @property
    def pid(self) -> int:
        """The process's number, which is its group's as well."""
        return self._process.pid

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Write a message to the child; `deadline` is a time of `time.monotonic`.

        Raises EOFError when the child has ended, TimeoutError at the deadline.
        """
        descriptor, data = _open(self._process.stdin).fileno(), _encode(message)
        while data:
            if not _ready(descriptor, select.POLLOUT, deadline, self):
                raise EOFError
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise EOFError from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the child's next message; `deadline` is a time of `time.monotonic`.

        Raises EOFError when the child has ended, TimeoutError at the deadline, and LogLimitError when it has printed
        too much to `current_log`, the file of what it does now.
        """
        self.check_log()
        descriptor = _open(self._process.stdout).fileno()
        while b"\n" not in self._pending:
            if not _ready(descriptor, select.POLLIN, deadline, self):
                raise EOFError
            data = os.read(descriptor, _CHUNK_BYTES)
            if not data:
                raise EOFError
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return cast(dict[str, Any], json.loads(line))

    def check_log(self) -> None:
        """Raise LogLimitError when the child has printed more than LARGEST_LOG bytes."""
        with contextlib.suppress(OSError):
            if self.current_log.stat().st_size > LARGEST_LOG:
                raise LogLimitError

    def exit_code(self) -> int | None:
        """Return the exit code, minus the signal's number where a signal ended the child, None while it runs."""
        with self._lock:
            if self._exit_code is not None:
                return self._exit_code
            # The process is not reaped before `close`: until then no other process and no other group has its number.
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def wait(self, deadline: float) -> int:
        """Wait for the child's end and return its exit code; `deadline` is a time of `time.monotonic`.

        Raises TimeoutError at the deadline. A signal that ended the child gives minus its number.
        """
        while (code := self.exit_code()) is None:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            time.sleep(min(_WAIT_SECONDS, seconds))
        return code

    def name_end(self) -> str:
        """Return how the child ended, as "was killed by SIGSEGV".

        Call this after the child has closed its pipes. If it still runs 10 seconds later, the text says so.
        """
        try:
            return describe_exit(self.wait(time.monotonic() + _END_SECONDS))
        except TimeoutError:
            return "closed its pipes and went on"

    def describe_end(self) -> str:
        """Return how the child ended, as "ended with exit code 7, last output 'no model'", where it has output.

        Call this after the child has closed its pipes. If it still runs 10 seconds later, the text says so.
        """
        end, line = self.name_end(), last_line(self.log)
        return f"{end}, last output {line!r}" if line else end

    def kill(self) -> None:
        """Kill the child and all processes that it started, from any thread; do nothing after `close`."""
        with self._lock:
            if self._exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the child and all processes that it started, and close its pipes."""
        with self._lock:
            code = self.exit_code()
            self.kill()
            killed = self._process.wait()
            # A child that had ended before keeps its own code, for the kill was meant for those that it started.
            self._exit_code = killed if code is None else code
        with _live_lock:
            _live.discard(self)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> "ChildProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Channel:
    """The child's end of the pipes: messages from the parent and to it.

    After its construction, standard input is empty and standard output goes to the log, so that text that a library
    prints is not read as a message.
    """

    def __init__(self) -> None:
        """Take over standard input and output for messages."""
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.fdopen(os.dup(1), "wb")
        self._lock = threading.Lock()
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """Return the parent's next message, None when the parent has closed the pipe."""
        line = self._requests.readline()
        return cast(dict[str, Any], json.loads(line)) if line.endswith(b"\n") else None

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a message to the parent at once, from any thread. Raises BrokenPipeError when the parent has ended."""
        with self._lock:
            self._replies.write(_encode(message))
            self._replies.flush()


def visible_environment() -> dict[str, str]:
    """Return the variables of this process that foreign code may see.

    Foreign code is a user's model, a candidate of the tuner, an unsigned bundle. The list has what programs, compilers
    and numerical libraries need, and no credentials of this machine for S3, MLflow, Prefect or anything else.
    """
    return {name: value for name, value in os.environ.items() if _VISIBLE.fullmatch(name)}


def kill_all() -> None:
    """Kill every child of this process that is under supervision."""
    with _live_lock:
        children = list(_live)
    for child in children:
        child.kill()


def describe_exit(code: int) -> str:
    """Return in words how a process ended; a negative `code` is minus the number of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {item.value: item.name for item in signal.Signals}
    hint = " (out of memory, perhaps)" if -code == signal.SIGKILL else ""
    return f"was killed by {names.get(-code, f'signal {-code}')}{hint}"


def last_line(log: Path) -> str:
    """Return the last line of a log, at most 200 characters; "" for an empty or missing log."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip()[:200] if lines else ""


def forbid_torch() -> None:
    """Prevent this process from importing torch: tvm_ffi would, which takes seconds and a third of a gigabyte.

    To the user's code torch is not installed. A None in `sys.modules` would break libraries that look there for torch,
    as SciPy does.
    """
    sys.meta_path[:] = [cast(Any, _FinderWithoutTorch(finder)) for finder in sys.meta_path]


class _FinderWithoutTorch:
    """A finder of modules that finds no torch, and all other modules with another finder."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name == "torch" else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def _ready(descriptor: int, event: int, deadline: float, child: ChildProcess) -> bool:
    """Wait until a pipe is ready; return False when the child ends first.

    Raises TimeoutError at `deadline`, and LogLimitError when the child has printed too much.
    """
    poll = select.poll()
    poll.register(descriptor, event)
    while True:
        seconds = deadline - time.monotonic()
        if poll.poll(1000 * max(0.0, min(seconds, _LOOK_SECONDS))):
            return True
        if seconds <= 0:
            raise TimeoutError
        child.check_log()
        # A process that the child has forked may hold the pipe open after the child's end.
        if child.exit_code() is not None:
            return bool(poll.poll(0))


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _open(pipe: IO[bytes] | None) -> BinaryIO:
    if pipe is None:
        raise ValueError("this child was started without pipes")
    return cast(BinaryIO, pipe)
