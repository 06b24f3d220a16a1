"""The steps of a run as child processes: heavy libraries and a user's code run there, and can be ended at any time.

A child takes jobs as JSON from this process and sends back its progress and, for each job, a result or an error.
"""

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from tvmflow.errors import StepError, TvmflowError, from_data, to_data
from tvmflow.supervisor import Channel, ChildProcess, forbid_torch

CHILD_VARIABLE = "TVMFLOW_CHILD"

T = TypeVar("T", bound=BaseModel)
Emit = Callable[[float, float, str], None]


def in_child() -> bool:
    """Whether this process is the child process of a step."""
    return CHILD_VARIABLE in os.environ


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
        """Start the child.

        `paths` come first in its module search path, `environment` is added to the variables of this process, and
        `torch=False` keeps it from importing torch.
        """
        self.step = _step_name(function)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = ChildProcess(
            "tvmflow.process",
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

        Raises the TvmflowError that the child raised. Raises StepError when the child crashed or took longer than
        `timeout` seconds; it is gone then.
        """
        deadline = time.monotonic() + timeout
        try:
            self._process.send({"job": job.model_dump_json()}, deadline)
            while True:
                message = self._process.receive(deadline)
                if "progress" in message:
                    emit(*message["progress"])
                elif "error" in message:
                    raise from_data(message["error"])
                else:
                    return result.model_validate(message["result"])
        except TimeoutError as error:
            self.close()
            raise StepError(
                f"{self.step} took longer than {timeout / 60:.3g} minutes and was ended; "
                f"set TVMFLOW_STEP_TIMEOUT_MINUTES for more, its log is {self.log}"
            ) from error
        except EOFError as error:
            end = self._process.describe_end()
            self.close()
            raise StepError(f"the process of {self.step} {end}; its log is {self.log}") from error

    def close(self) -> None:
        """End the child and all that it started."""
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
) -> T:
    """Run one job in a child process of its own; the arguments are those of `Child` and of its `call`."""
    with Child(function, log=log, paths=paths, environment=environment, torch=torch) as child:
        return child.call(job, result, timeout=timeout, emit=emit)


def _environment(paths: Sequence[Path], additions: Mapping[str, str], torch: bool) -> dict[str, str]:
    """The whole environment of a step's process."""
    return {
        **os.environ,
        **additions,
        CHILD_VARIABLE: "torch" if torch else "no-torch",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _step_name(function: str) -> str:
    return "step " + function.partition(":")[0].rpartition(".")[2]


def _serve(function: str) -> None:
    """The child's side: work on one job after the other, until there are no more."""
    if os.environ[CHILD_VARIABLE] == "no-torch":
        forbid_torch()
    # A user's code that asks a question reads the end of a file, not a job.
    channel = Channel()

    def emit(done: float, total: float, message: str) -> None:
        channel.send({"progress": [done, total, message]})

    module, _, name = function.partition(":")
    while (message := channel.receive()) is not None:
        try:
            work = getattr(importlib.import_module(module), name)
            job = work.__annotations__["job"].model_validate_json(message["job"])
            reply: dict[str, Any] = {"result": work(job, emit).model_dump(mode="json")}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": to_data(_as_step_error(error, _step_name(function)))}
        channel.send(reply)
        sys.stdout.flush()


def _as_step_error(error: Exception, step: str) -> TvmflowError:
    """The error as the parent raises it: one of ours as it is, any other as a StepError of one sentence."""
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
    _serve(sys.argv[1])
