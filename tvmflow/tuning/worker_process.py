"""A worker process: started, asked, timed out, killed and started again."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import tvmflow
from tvmflow.errors import TuneError

_START_SECONDS = 120.0
_START_ATTEMPTS = 2


class TrialError(Exception):
    """One build or run failed, crashed or ran out of time; the next one is not affected."""


class LateError(TrialError):
    """It ran out of time, and its process was killed."""


class CrashError(TrialError):
    """The process that did it died, perhaps through no fault of the candidate."""


class LostError(TrialError):
    """The device that did it is gone, perhaps through no fault of the candidate."""


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


class WorkerProcess:
    """One process of `tvmflow.tuning.worker`, started again when a request finds it dead.

    What it prints goes to `log`; `environment` is added to this process's own.
    """

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._failed_starts = 0
        self._stopped = False

    def request(self, operation: str, arguments: Mapping[str, object], timeout: float, *, attempts: int = 2) -> Any:
        """Ask for `operation`. Raises TrialError if it fails; LateError, its process killed, after `timeout` seconds.

        A process that dies is replaced, and asked again up to `attempts` times in all, for it may have been killed from
        outside; then CrashError is raised. LostError tells that the device is gone.
        """
        if timeout <= 0:
            raise TrialError("the budget's time is over")
        for attempt in range(1, attempts + 1):
            try:
                reply = self._exchange({**arguments, "operation": operation}, timeout)
                break
            except (BrokenPipeError, EOFError) as error:
                if attempt == attempts:
                    raise CrashError(f"{operation} crashed") from error
            except TimeoutError as error:
                raise LateError(f"{operation} took more than {timeout:.0f} s") from error
        if "error" in reply:
            raise (LostError if reply.get("lost") else TrialError)(str(reply["error"]))
        return reply["value"]

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        root = str(Path(tvmflow.__file__).resolve().parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            **self._environment,
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

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None and not self._stopped:
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
                if self._stopped:
                    raise TrialError("tuning has ended") from error
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
