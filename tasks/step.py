"""What every step shares: its place in a run, and how its function becomes a Prefect task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from tvmflow import process
from tvmflow.bundle import TensorSpec
from tvmflow.errors import SettingsError
from tvmflow.progress import reporter
from tvmflow.registry import Registry
from tvmflow.services import Services
from tvmflow.settings import Settings
from tvmflow.spec import Build, Spec
from tvmflow.store import ReleaseStore
from tvmflow.workspace import Artifact, Record, StepResult, Workspace

if TYPE_CHECKING:
    from prefect import Task

    from tvmflow.compiler import BuildOptions

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=StepResult)


class Job(Record):
    """What a step's child process is told; `home` is the workspace's folder."""

    home: Path

    @property
    def workspace(self) -> Workspace:
        """The workspace, as the child sees it."""
        return Workspace(self.home)


@dataclass(frozen=True)
class Context:
    """One run: the release file, this machine's settings, the workspace, and where releases go."""

    spec: Spec
    settings: Settings
    workspace: Workspace
    services: Services | None = None

    @property
    def store(self) -> ReleaseStore:
        """The release store. Raises SettingsError in a run that has none, as `tvmflow compile`."""
        return self._services().store

    @property
    def registry(self) -> Registry:
        """The registry. Raises SettingsError in a run that has none, as `tvmflow compile`."""
        return self._services().registry

    def _services(self) -> Services:
        if self.services is None:
            raise SettingsError("this run has no release store and no registry; use `tvmflow release`")
        return self.services

    @property
    def timeout(self) -> float:
        """Seconds after which a step's process is ended."""
        return self.settings.step_timeout_minutes * 60

    def log(self, step: str, target: str | None = None) -> Path:
        """The file that takes what a step's process prints."""
        parts = [self.spec.name, step, *([slug(target)] if target else [])]
        return self.workspace.folder / "logs" / f"{'-'.join(parts)}.log"

    def call(
        self,
        function: str,
        job: Job,
        kind: type[T],
        *,
        target: str | None = None,
        torch: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> T:
        """Run `module:function` in a process of its own that can import what stands beside the release file."""
        name = function.partition(":")[0].rpartition(".")[2]
        return process.call(
            function,
            job,
            kind,
            log=self.log(name, target),
            timeout=self.timeout,
            emit=lambda done, total, message: reporter().progressed(name, target, done, total, message),
            paths=(self.spec.folder,),
            environment=environment,
            torch=torch,
        )

    def file(self, artifact: Artifact) -> Path:
        """Where an artifact's file is."""
        return self.workspace.path(artifact)


def step(function: Callable[P, R]) -> "Task[P, R]":
    """Make a step's function a Prefect task.

    Prefect caches nothing here: its keys do not see file contents and never look whether an artifact is still there;
    `tvmflow.workspace.run_step` does both. A child process runs a step's work only and never imports Prefect.
    """
    if process.in_child():
        return cast("Task[P, R]", function)
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    decorate: Any = task(
        name=function.__name__, cache_policy=NO_CACHE, persist_result=False, task_run_name=_run_name(function.__name__)
    )
    return cast("Task[P, R]", decorate(function))


def _run_name(name: str) -> Callable[[], str]:
    def run_name() -> str:
        from prefect.runtime import task_run

        target = task_run.parameters.get("target")
        return f"{name} {target.name}" if target is not None else name

    return run_name


def slug(text: str) -> str:
    """A name fit for files and metrics."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text)[:60]


def as_options(section: Build, variants: tuple[dict[str, int], ...]) -> "BuildOptions":
    """The compiler's options, as the release file says them."""
    from tvmflow.compiler import BuildOptions

    options = {**section.model_dump(), "fast_algorithms": section.fast_algorithms == "allow"}
    return BuildOptions(**options, variants=variants)


def variants(spec: Spec, inputs: tuple[TensorSpec, ...]) -> tuple[dict[str, int], ...]:
    """The sizes that the bundle has functions of their own for: those that the release file says to tune at."""
    used = {dim for item in inputs for dim in item.shape if isinstance(dim, str)}
    sizes = {name: size for name in sorted(used) if (size := spec.dimension(name).tune) is not None}
    return (sizes,) if sizes else ()
