"""The tuner's side of measuring: worker processes that are started, asked, timed out and restarted."""

import contextlib
import itertools
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Self, cast

import tvmflow
from tvmflow.errors import TuneError

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

_START_SECONDS = 120.0
_START_ATTEMPTS = 2


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message from a pipe, or None where the other side has closed it."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    return cast(dict[str, Any], json.loads(stream.read(int.from_bytes(header, "big"))))


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Send `message` at once: a JSON text behind its length in eight bytes."""
    text = json.dumps(message).encode()
    stream.write(len(text).to_bytes(8, "big") + text)
    stream.flush()


class TrialError(Exception):
    """One build or run failed, crashed or ran out of time; the next one is not affected."""


@dataclass(frozen=True)
class Argument:
    """Shape and dtype of one tensor that a function takes."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Library:
    """A function built into a shared library, and what to call it with."""

    path: Path
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Candidate:
    """A function (`tvm.ir.save_json`) and the trace that schedules it, None where it is scheduled or needs not be."""

    func: str
    arguments: tuple[Argument, ...]
    trace: str | None = None


def arguments_of(func: "PrimFunc") -> tuple[Argument, ...] | None:
    """The tensors `func` takes, or None if it takes anything else or a dimension is symbolic."""
    from tvm.tirx import IntImm

    arguments = []
    for parameter in func.params:
        shape = getattr(parameter, "shape", None)
        if shape is None or not all(isinstance(extent, IntImm) for extent in shape):
            return None
        arguments.append(Argument(tuple(int(extent) for extent in shape), str(parameter.dtype)))
    return tuple(arguments)


class MeasurePool:
    """Workers that build candidates side by side, and one that runs them one at a time.

    `target` is the canonical TVM target as JSON; `builders` their number; `threads` those a candidate runs with;
    `timeout` the seconds that a single build or run may take before its worker is killed. No request outlives
    `deadline` (of `time.monotonic`) by more than it takes to kill a process.
    """

    def __init__(self, target: str, *, builders: int, threads: int, timeout: float, deadline: float) -> None:
        self._target = target
        self._timeout = timeout
        self._deadline = deadline
        self._scratch = Path(tempfile.mkdtemp(prefix="tvmflow-tune-"))
        self._names = itertools.count()
        self._runner = _Worker(self._scratch / "runner.log", threads)
        self._builders = [_Worker(self._scratch / f"builder{index}.log", threads) for index in range(builders)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for builder in self._builders:
            self._idle.put(builder)
        for worker in (self._runner, *self._builders):
            worker.start()
        self._executor = ThreadPoolExecutor(builders, "tvmflow-builder")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and remove what they built."""
        workers = (self._runner, *self._builders)
        for worker in workers:
            worker.stop()
        self._executor.shutdown(cancel_futures=True)
        for worker in workers:
            worker.end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def build(self, candidates: Sequence[Candidate]) -> list[Library | TrialError]:
        """Build all `candidates`; in the place of one that cannot be built stands the reason."""
        return list(self._executor.map(self._build, candidates))

    def time(self, library: Library, limit: float = 1e9) -> float:
        """Median seconds of a call; above `limit` it is measured roughly. Raises TrialError."""
        arguments = _plain(library.arguments)
        return float(self._run("time", library=str(library.path), arguments=arguments, limit=limit))

    def compare(self, *libraries: Library) -> list[float]:
        """Median seconds of a call of each, measured in turn. Raises TrialError."""
        arguments = [_plain(library.arguments) for library in libraries]
        seconds = self._run("compare", libraries=[str(library.path) for library in libraries], arguments=arguments)
        return [float(value) for value in seconds]

    def expect(self, reference: Library) -> None:
        """Run `reference`, for `check` to compare with. Raises TrialError."""
        self._run("expect", reference=str(reference.path), arguments=_plain(reference.arguments))

    def check(self, library: Library, reference: Library) -> None:
        """Raise TrialError unless `library` computes what `reference` does, from the same arguments."""
        arguments = _plain(library.arguments)
        difference = self._run("check", library=str(library.path), reference=str(reference.path), arguments=arguments)
        if difference is not None:
            raise TrialError(f"wrong result: {difference}")

    def _build(self, candidate: Candidate) -> Library | TrialError:
        path = self._scratch / f"{next(self._names)}.so"
        builder = self._idle.get()
        try:
            builder.request(
                "build",
                self._allowed(),
                func=candidate.func,
                trace=candidate.trace,
                target=self._target,
                library=str(path),
            )
        except TrialError as error:
            return error
        finally:
            self._idle.put(builder)
        return Library(path, candidate.arguments)

    def _run(self, operation: str, **arguments: object) -> Any:
        return self._runner.request(operation, self._allowed(), **arguments)

    def _allowed(self) -> float:
        return min(self._timeout, self._deadline - time.monotonic())


def _plain(arguments: Sequence[Argument]) -> list[tuple[tuple[int, ...], str]]:
    return [(argument.shape, argument.dtype) for argument in arguments]


class _Worker:
    """One worker process, started again when a request finds it dead."""

    def __init__(self, log: Path, threads: int) -> None:
        self._log = log
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._failed_starts = 0
        self._stopped = False

    def request(self, operation: str, timeout: float, **arguments: object) -> Any:
        """Ask for `operation`. Raises TrialError if it fails, crashes the worker or takes over `timeout` seconds.

        A worker that dies is asked once more, in a new process: it may have been killed from outside.
        """
        if timeout <= 0:
            raise TrialError("the budget's time is over")
        try:
            try:
                reply = self._exchange({"operation": operation, **arguments}, timeout)
            except (BrokenPipeError, EOFError):
                reply = self._exchange({"operation": operation, **arguments}, timeout)
        except (BrokenPipeError, EOFError) as error:
            raise TrialError(f"{operation} crashed") from error
        except TimeoutError as error:
            raise TrialError(f"{operation} took more than {timeout:.0f} s") from error
        if "error" in reply:
            raise TrialError(str(reply["error"]))
        return reply["value"]

    def stop(self) -> None:
        """Kill the process, from any thread; it is not started again."""
        self._stopped = True
        _kill(self._process)

    def end(self) -> None:
        """Kill the process and forget it; the next request starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _open(pipe).close()

    def _exchange(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        process = self._running()
        try:
            write_frame(_open(process.stdin), request)
            return _reply(process, time.monotonic() + timeout)
        except BaseException:
            self.end()  # Also after Ctrl-C: a late reply must not answer the next request.
            raise

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        root = str(Path(tvmflow.__file__).resolve().parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "TVM_NUM_THREADS": str(self._threads),
            "OMP_NUM_THREADS": str(self._threads),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tvmflow.tuning.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is the tuner's to handle, and linkers end with their worker.
            )
        self._ready = False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self.start()
        if self._stopped:
            self.end()
        if self._process is None:
            raise TrialError("tuning has ended")
        if not self._ready:
            try:
                _reply(self._process, time.monotonic() + _START_SECONDS)
            except (EOFError, TimeoutError) as error:
                self.end()
                self._failed_starts += 1
                if self._failed_starts < _START_ATTEMPTS:
                    raise EOFError from error
                lines = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise TuneError(
                    f"The tuner's worker process does not start ({lines[-1]}); check that TVM imports in this Python."
                ) from error
            self._ready, self._failed_starts = True, 0
        return self._process


def _reply(process: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
    pipe = _open(process.stdout)
    size = int.from_bytes(_read(pipe, 8, deadline), "big")
    return cast(dict[str, Any], json.loads(_read(pipe, size, deadline)))


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _open(pipe: IO[bytes] | None) -> BinaryIO:
    assert pipe is not None  # noqa: S101 -- the process was started with pipes
    return cast(BinaryIO, pipe)


def _read(pipe: BinaryIO, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes. Raises EOFError if the other side closed, TimeoutError after `deadline`."""
    data = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while len(data) < size:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        chunk = os.read(pipe.fileno(), size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data
