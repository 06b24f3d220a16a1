"""Work in a process of its own, which can be killed: how steps run heavy libraries and untrusted code.

The child reads its job from standard input, writes events and the outcome as lines of JSON to a pipe, and everything
else it prints goes to a log file. It dies with its parent.
"""

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from pydantic import BaseModel

from tvmflow import errors
from tvmflow.errors import StepError, TvmflowError

CHILD_VARIABLE = "TVMFLOW_CHILD"
_EVENTS_VARIABLE = "TVMFLOW_EVENTS_FD"
_TAIL = 4000
# Seconds between looks whether a silent child still lives.
_WATCH = 1.0

T = TypeVar("T", bound=BaseModel)
Emit = Callable[[float, float, str], None]

_live: set[subprocess.Popen[bytes]] = set()
_live_lock = threading.Lock()


def in_child() -> bool:
    """Whether this process is such a child."""
    return CHILD_VARIABLE in os.environ


class Child:
    """A child process running `module:function(job, emit)`; `call` sends it more jobs of the same kind."""

    def __init__(
        self,
        function: str,
        *,
        log: Path,
        paths: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        torch: bool = False,
    ) -> None:
        """Start the child; `paths` go before its module search path, `torch=False` keeps torch from being imported."""
        self.step = _step(function)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        settings = {
            **os.environ,
            **(environment or {}),
            CHILD_VARIABLE: "torch" if torch else "no-torch",
            _EVENTS_VARIABLE: str(writing),
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tvmflow.process", function, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=settings,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        with _live_lock:
            _live.add(self._process)
        self._jobs = cast(IO[bytes], self._process.stdin)
        self._events = os.fdopen(reading, "rb", buffering=0)
        self._pending = b""

    def call(
        self,
        job: BaseModel,
        result: type[T],
        *,
        timeout: float,
        emit: Emit = lambda done, total, message: None,
    ) -> T:
        """Send one job and wait for its result.

        Raises the TvmflowError that the child raised, or StepError when it crashed or took longer than `timeout`
        seconds; the child is gone then.
        """
        with contextlib.suppress(BrokenPipeError):
            self._jobs.write(job.model_dump_json().encode() + b"\n")
            self._jobs.flush()
        deadline = time.monotonic() + timeout
        while True:
            line = self._line(deadline, timeout)
            if line is None:
                raise self._died()
            message: dict[str, Any] = json.loads(line)
            if "progress" in message:
                emit(*message["progress"])
            elif "error" in message:
                raise _rebuild(message["error"])
            else:
                return result.model_validate(message["result"])

    def _line(self, deadline: float, timeout: float) -> bytes | None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0:
                    self.close()
                    raise StepError(
                        f"{self.step} took longer than {timeout / 60:.3g} minutes and was ended; "
                        f"set TVMFLOW_STEP_TIMEOUT_MINUTES for more, its log is {self.log}"
                    )
                if not selector.select(min(left, _WATCH)):
                    if self._process.poll() is not None:
                        return None  # What it had forked may hold the pipe open after it.
                    continue
                data = os.read(self._events.fileno(), 1 << 16)
                if not data:
                    return None
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _died(self) -> StepError:
        code = self._process.wait()
        self.close()
        if code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += " (out of memory, perhaps)"
        else:
            cause = f"ended with exit code {code}"
        tail = self.log.read_bytes()[-_TAIL:].decode(errors="replace").strip().splitlines()
        last = f", last words {tail[-1][:200]!r}" if tail else ""
        return StepError(f"the process of {self.step} {cause}{last}; its log is {self.log}")

    def close(self) -> None:
        """End the child and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with _live_lock:
            _live.discard(self._process)
        with contextlib.suppress(OSError):
            self._jobs.close()
        self._events.close()

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
) -> T:
    """Run one job in a child of its own; see Child."""
    with Child(function, log=log, paths=paths, environment=environment, torch=torch) as child:
        return child.call(job, result, timeout=timeout, emit=emit)


def end_all() -> None:
    """Kill every child of this process: what an interrupt does."""
    with _live_lock:
        children = list(_live)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _step(function: str) -> str:
    return "step " + function.partition(":")[0].rpartition(".")[2]


def _rebuild(error: Mapping[str, str]) -> TvmflowError:
    kind = getattr(errors, error["type"], StepError)
    return cast(TvmflowError, kind(error["message"]))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, dies."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def _serve(function: str, parent: int) -> None:
    """The child's side: one job a line on standard input, until it ends."""
    die_with_parent(parent)
    if os.environ[CHILD_VARIABLE] == "no-torch":
        # tvm_ffi imports torch wherever it is installed, which costs seconds and a third of a gigabyte.
        sys.modules["torch"] = None  # type: ignore[assignment]
    events = os.fdopen(int(os.environ.pop(_EVENTS_VARIABLE)), "w", buffering=1)
    os.set_inheritable(events.fileno(), False)
    # A user's code that asks a question gets an end of file, not a job.
    jobs = os.fdopen(os.dup(0), "rb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def send(message: Mapping[str, object]) -> None:
        events.write(json.dumps(message) + "\n")

    def emit(done: float, total: float, message: str) -> None:
        send({"progress": [done, total, message]})

    module, _, name = function.partition(":")
    for line in jobs:
        try:
            work = getattr(importlib.import_module(module), name)
            job = work.__annotations__["job"].model_validate_json(line)
            send({"result": work(job, emit).model_dump(mode="json")})
        except TvmflowError as error:
            traceback.print_exc()
            send({"error": {"type": type(error).__name__, "message": str(error)}})
        except MemoryError:
            traceback.print_exc()
            send(
                {
                    "error": {
                        "type": "StepError",
                        "message": f"{_step(function)} ran out of memory; free some, or use a smaller model",
                    }
                }
            )
        except OSError as error:
            traceback.print_exc()
            told = f"{_step(function)}: {error.strerror or error}: {error.filename or ''}".rstrip(": ")
            send({"error": {"type": "StepError", "message": f"{told}; free space or correct the path, and run again"}})
        except Exception as error:
            traceback.print_exc()
            words = " ".join(str(error).split())[:500]
            send(
                {
                    "error": {
                        "type": "StepError",
                        "message": f"{_step(function)} failed ({type(error).__name__}: {words})",
                    }
                }
            )
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
