"""Steps: the parts of which every step of a release consists, and how a step runs.

A step is three things: a `Job`, which holds all values that the result depends on; a `StepResult`; and a function that
makes the result from the job. `Step` does the rest: it looks the result up by the job's cache key, runs the function
where the lookup fails, reports progress, records the result, and shows up in Prefect's UI when a flow calls it. A
`ChildStep` runs its function in a child process, which can be killed and has a log file of its own.
"""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from tvmflow.errors import StepError, TvmflowError, UnavailableError
from tvmflow.hardware import cores
from tvmflow.hardware.target import Target
from tvmflow.outages import JITTER, delays
from tvmflow.processes import children
from tvmflow.processes.children import Emit
from tvmflow.progress import reporter
from tvmflow.reach import code_digest
from tvmflow.settings import Settings
from tvmflow.spec import Spec
from tvmflow.workspace import Outcome, Record, StepResult, Workspace, run_step, step_key

# The most bytes of a log that Prefect gets: its end.
_LOG_BYTES = 1 << 16
# The most letters of a slug.
_SLUG = 60
# The modules that steps with the compiler, steps with PyTorch, and other steps import.
_COMPILER = ("tvmflow.compiler", "tvmflow.tuning.model", "tasks.relax_import", "tasks.tune", "tasks.build")
_TORCH = ("torch", "tasks.train", "tasks.export", "tasks.validate")
_LIGHT = ("onnx", "onnxruntime", "tvmflow.runtime", "tasks.export", "tasks.validate")


class Job(Record):
    """The input of a step: all values that its result depends on.

    A child process gets its job as JSON. The step fills in `home`, the workspace's folder, and `folder`, the folder of
    the release file, when it runs.

    The job is also the step's cache key: all of its fields but `home` and `folder`, which differ between machines. A
    field of a job's own that does not change the result, such as `ImportJob.model_label`, which stands in messages
    alone, is named in `not_in_key`, which has the form of pydantic's `exclude`. Where the key needs other values than
    the fields have, as a digest in the place of a path, a job overrides `cache_key`, which then decides alone.
    """

    not_in_key: ClassVar[Mapping[str, Any]] = {}

    home: Path = Path()
    folder: Path = Path()

    @property
    def workspace(self) -> Workspace:
        """The local workspace in `home`, without the shared one; child processes read and keep artifacts there."""
        return Workspace(self.home)

    @property
    def label(self) -> str | None:
        """The part of a release that the step works on, for people: a target's name; None for the whole release."""
        return None

    @property
    def needs_compiler(self) -> bool:
        """Whether a child process of the step uses TVM's compiler."""
        return False

    @property
    def needs_torch(self) -> bool:
        """Whether a child process of the step may import torch."""
        return False

    def cache_key(self) -> Mapping[str, Any]:
        """Return all values that the result depends on; `tvmflow.workspace.step_key` writes them as JSON."""
        return self.model_dump(mode="json", exclude={"home": True, "folder": True, **self.not_in_key})


class TargetJob(Job):
    """The input of a step that works on one target of a release."""

    target: Target

    @property
    def label(self) -> str:
        """The target's name."""
        return self.target.name


J = TypeVar("J", bound=Job)
P = ParamSpec("P")
R = TypeVar("R", bound=StepResult)


@dataclass(frozen=True)
class StepRunner:
    """The settings with which the steps of one release run: the workspace, the release, and the time limit.

    `name` is the release's name, after which the folder of its logs is named; `folder` is the folder of the release
    file, whose modules child processes can import; `timeout` is the seconds after which a child process is killed,
    `comparison_seconds` the time in which two builds are compared. `variables` name environment variables that child
    processes see beside the usual ones; `outage` is the seconds for which a step waits for a server that does not
    answer. When `stop` is set, no step of the release begins any more. `step` and `label` name the running step, and
    `key` is its cache key; `Step` sets them in the runner that it passes to the step's function.
    """

    workspace: Workspace
    name: str
    folder: Path
    timeout: float
    comparison_seconds: float = 120.0
    step: str = ""
    label: str | None = None
    key: str = ""
    variables: tuple[str, ...] = ()
    outage: float = 0.0
    stop: Event = field(default_factory=Event)

    @classmethod
    def of(cls, spec: Spec, settings: Settings, workspace: Workspace) -> "StepRunner":
        """Return the runner of a release file's steps with this machine's settings."""
        return cls.with_settings(workspace, spec.name, spec.folder, settings)

    @classmethod
    def with_settings(cls, workspace: Workspace, name: str, folder: Path, settings: Settings) -> "StepRunner":
        """Return the runner of the steps of the release `name` with this machine's settings."""
        timeout = settings.step_timeout_minutes * 60
        return cls(
            workspace,
            name,
            folder,
            timeout,
            settings.comparison_seconds,
            variables=settings.child_variables,
            outage=settings.outage_minutes * 60,
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables that child processes see beside the usual ones."""
        return {name: os.environ[name] for name in self.variables if name in os.environ}

    def place(self, job: J) -> J:
        """Return a copy of the job with the workspace folder and the release folder of this runner."""
        return job.model_copy(update={"home": self.workspace.folder, "folder": self.folder})

    def log(self, part: str | None = None) -> Path:
        """Return the path of this step's log file; `part`, if any, tells the files of several child processes apart."""
        parts = (self.step, part, None if self.label is None else slug(self.label))
        return self.workspace.log_folder / self.name / f"{'-'.join(filter(None, parts))}.log"

    def emit(self, done: float, total: float, message: str) -> None:
        """Report that this step has done `done` of `total` units; `message` names the current one."""
        reporter().advance(self.step, self.label, done, total, message)

    def call(
        self,
        function: Callable[[J, Emit], R],
        job: J,
        result: type[R],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> R:
        """Run a module's function on a job in a child process and return its result, an instance of `result`.

        `environment` is added to the child's environment. Raises the TvmflowError that the function raised, StepError
        when the child crashed or took longer than the timeout.
        """
        return children.call(
            path_of(function),
            self.place(job),
            result,
            log=self.log(),
            timeout=self.timeout,
            emit=self.emit,
            paths=(self.folder,),
            environment={**self.environment, **(environment or {})},
            torch=job.needs_torch,
            imports=_COMPILER if job.needs_compiler else _TORCH if job.needs_torch else _LIGHT,
        )

    def start_compiler(self) -> None:
        """Begin to import the compiler for later steps of this thread, if a core is free beside the running step."""
        if cores.count() > 1:
            children.start_imports(_COMPILER, log=self.log("compiler"), paths=(self.folder,))


class Step(Generic[J, P, R]):
    """A step whose function runs in this process: `work(job, runner, *tools)`.

    Tools are objects that a result does not depend on and that JSON cannot hold, such as the release store; the caller
    of the step passes them. `is_current(result, job, *tools)` says whether a cached result still agrees with the world
    outside the job, for instance whether the release that it names exists. A step with `cached` False always does its
    work.
    """

    def __init__(
        self,
        name: str,
        result: type[R],
        work: Callable[Concatenate[J, StepRunner, P], R],
        *,
        is_current: Callable[Concatenate[R, J, P], bool] | None = None,
        cached: bool = True,
    ) -> None:
        """Declare the step; `name` is what commands, logs and Prefect show."""
        self.name = name
        self.result = result
        self.module = work.__module__
        """The module whose code does the work."""
        self._work = work
        self._is_current = is_current
        self._cached = cached

    @property
    def code(self) -> str:
        """The SHA-256, in hexadecimal, of the code that the step can reach: when it changes, the step runs again."""
        return code_digest(self.module)

    def __call__(self, runner: StepRunner, job: J, /, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Run the step on a job unless the job's result is cached; return the result as an Outcome.

        Within a Prefect flow, the step is a task run of the flow, which Prefect retries while a server does not answer.
        Raises what the step's function raises, StepError when the disk is full, a file cannot be written or the release
        has been stopped, StoreError when the shared workspace fails.
        """
        if runner.stop.is_set():
            raise StepError(f"step {self.name} did not begin, because the release has failed or was interrupted")
        job = runner.place(job)
        runner = replace(runner, step=self.name, label=job.label, key=self.key(runner, job))

        def is_valid(result: R) -> bool:
            if not self._cached:
                return False
            return self._is_current is None or self._is_current(result, job, *args, **kwargs)

        def run() -> Outcome[R]:
            return run_step(
                runner.workspace,
                self.name,
                job.cache_key(),
                self.result,
                lambda: self._work(job, runner, *args, **kwargs),
                code=self.code,
                target=job.label,
                is_valid=is_valid,
                folder=runner.folder,
            )

        return _as_task(run, runner) if _in_flow() else run()

    def key(self, runner: StepRunner, job: J) -> str:
        """Return the SHA-256, in hexadecimal, under which the workspace keeps the result of a job."""
        return step_key(self.name, runner.place(job).cache_key(), self.code)


class ChildStep(Step[J, [], R]):
    """A step whose function, `work(job, emit)`, runs in a child process."""

    def __init__(self, name: str, result: type[R], work: Callable[[J, Emit], R], *, cached: bool = True) -> None:
        """Declare the step; `work` must be a function of a module, which the child imports by its name."""

        def call(job: J, runner: StepRunner) -> R:
            return runner.call(work, job, result)

        super().__init__(name, result, call, cached=cached)
        self.module = work.__module__


def path_of(function: Callable[..., Any]) -> str:
    """Return the name of a module's function as `package.module:function`."""
    return f"{function.__module__}:{function.__qualname__}"


def slug(text: str) -> str:
    """Return a name fit for files and metrics: at most 60 letters, digits, `.`, `_` or `-`; others become `_`.

    Different texts have different names: one that differs from its text ends with 8 digits of the text's SHA-256.
    """
    name = simplify(text)
    return name if name == text else f"{name[: _SLUG - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def simplify(text: str) -> str:
    """Return the first 60 letters of a text with `_` for all but letters, digits, `.`, `_` and `-`."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text[:_SLUG])


def _send_logs(paths: list[Path], level: int) -> None:
    """Write the ends of log files to Prefect's log of the task that runs."""
    from prefect.logging import get_run_logger

    logger = get_run_logger()
    for path in paths:
        text = path.read_bytes()[-_LOG_BYTES:].decode(errors="replace").strip()
        if text:
            logger.log(level, "%s:\n%s", path.name, text)


def _in_flow() -> bool:
    """Whether the caller runs within a Prefect flow; without Prefect imported, it does not."""
    if "prefect.context" not in sys.modules:
        return False
    from prefect.context import FlowRunContext

    return FlowRunContext.get() is not None


def _as_task(run: Callable[[], Outcome[R]], runner: StepRunner) -> Outcome[R]:
    """Call `run` as a task of the flow that runs; Prefect gets its logs, and retries it while a server is away.

    Prefect caches nothing here: its cache keys see no file contents, and it never looks whether an artifact is there.
    """
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    name, label = runner.step, runner.label
    pauses, deadline = delays(runner.outage), time.monotonic() + runner.outage
    last_error: TvmflowError | None = None

    def attempt() -> Outcome[R]:
        nonlocal last_error
        since, level = time.time(), logging.ERROR
        try:
            outcome = run()
            level = logging.INFO
            return outcome
        except TvmflowError as error:
            last_error = error
            raise
        finally:
            logs = runner.workspace.logs(runner.name, since)
            _send_logs([path for path in logs if f"{path.stem}-".startswith(f"{name}-")], level)

    def is_worthwhile(*_: object) -> bool:
        # A step within this one may have waited for the same server.
        return isinstance(last_error, UnavailableError) and time.monotonic() < deadline

    # Prefect takes the name for a template; a label may be a target in JSON.
    task_run_name = name if label is None else f"{name} {label}".replace("{", "{{").replace("}", "}}")
    decorate: Any = task(
        name=name,
        task_run_name=task_run_name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=len(pauses),
        retry_delay_seconds=pauses,
        retry_jitter_factor=JITTER,
        retry_condition_fn=is_worthwhile,
    )
    outcome: Outcome[R] = decorate(attempt)()
    return outcome
