"""A worker process of the tuner, from the tuner's side: requests, timeouts, and a new process after a death."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvmflow.errors import TuneError
from tvmflow.processes.supervisor import ChildProcess, last_line, visible_environment
from tvmflow.tuning import worker

_START_SECONDS = 120.0
_START_ATTEMPTS = 2


class TrialError(Exception):
    """A build or run failed, crashed or took too long; other trials are not affected."""


class LateError(TrialError):
    """A build or run took longer than its timeout, and its process was killed."""


class CrashError(TrialError):
    """The process of a build or run died, perhaps through no fault of the candidate."""


class LostError(TrialError):
    """The device of a run is gone, perhaps through no fault of the candidate."""


class WorkerProcess:
    """One process of `tvmflow.tuning.worker`; a request starts a new one if the last one is dead.

    The process logs to the file `log`; `environment` is added to this process's visible variables.
    """

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self._environment = {**visible_environment(), **environment}
        self._process: ChildProcess | None = None
        self._is_ready = False
        self._failed_starts = 0
        self._is_stopped = False

    def request(self, operation: str, arguments: Mapping[str, object], timeout: float, *, attempts: int = 2) -> Any:
        """Run `operation` in the worker and return its value.

        A worker that dies may have been killed from outside. So a new one gets the same request, up to `attempts` times
        in all. Raises CrashError when all of them died, LateError after `timeout` seconds, LostError when the worker's
        device is gone, and TrialError when the operation failed; TuneError when no worker starts.
        """
        if timeout <= 0:
            raise TrialError("the budget's time is over")
        for attempt in range(1, attempts + 1):
            try:
                reply = self._exchange({"operation": operation, "arguments": dict(arguments)}, timeout)
                break
            except EOFError as error:
                if attempt == attempts:
                    raise CrashError(f"{operation} crashed") from error
            except TimeoutError as error:
                raise LateError(f"{operation} took more than {timeout:.0f} s") from error
        if "error" in reply:
            raise (LostError if reply["is_lost"] else TrialError)(str(reply["error"]))
        return reply["value"]

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        self._process = ChildProcess(
            worker.__name__, environment=self._environment, log=self._log, append=True, pipes=True
        )
        self._is_ready = False

    def stop(self) -> None:
        """Kill the process for good; may be called from any thread."""
        self._is_stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """Kill the process; the next request starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _exchange(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        process = self._ready_process()
        deadline = time.monotonic() + timeout
        try:
            process.send(request, deadline)
            return process.receive(deadline)
        except BaseException:
            self.end()  # Also after an interrupt: a late reply must not answer the next request.
            raise

    def _ready_process(self) -> ChildProcess:
        """The process once it takes requests. Raises EOFError when it died as it started."""
        if self._process is None and not self._is_stopped:
            self.start()
        if self._is_stopped:
            self.end()
        if self._process is None:
            raise TrialError("tuning has ended")
        if not self._is_ready:
            try:
                self._process.receive(time.monotonic() + _START_SECONDS)
            except (EOFError, TimeoutError) as error:
                self.end()
                if self._is_stopped:
                    raise TrialError("tuning has ended") from error
                self._failed_starts += 1
                if self._failed_starts < _START_ATTEMPTS:
                    raise EOFError from error
                raise TuneError(
                    f"the tuner's worker process does not start ({last_line(self._log) or 'its log is empty'}); "
                    "check that TVM imports in this Python"
                ) from error
            self._is_ready, self._failed_starts = True, 0
        return self._process
