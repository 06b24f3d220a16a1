"""The context of a flow run: the services that its functions share; a step gets only the parts that it needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Event
from typing import TypeVar

from flows.logs import keeping_logs
from flows.runs import is_deployed, one_at_a_time
from tasks.original import Original, find_original
from tasks.step import StepRunner
from tvmflow.outages import outlast
from tvmflow.processes.children import shared_imports
from tvmflow.registry import Registry
from tvmflow.services import Services, open_records, open_services, open_workspace, record_sections
from tvmflow.settings import Settings
from tvmflow.spec import Spec
from tvmflow.store import ReleaseStore
from tvmflow.store.records import RecordObjects
from tvmflow.workspace import Artifact, Workspace

T = TypeVar("T")


def outage_seconds(settings: Settings) -> float:
    """Return the seconds for which a flow run waits for its servers to answer before its work begins.

    These are 0 for a run that a command starts, so that its user learns at once of a wrong address. A run of a
    deployment waits for the setting `outage_minutes`.
    """
    return settings.outage_minutes * 60 if is_deployed() else 0.0


@contextmanager
def open_context(spec: Spec) -> Iterator["RunContext"]:
    """Open the context in which a flow run works on the model of a release file; one run of a model works at a time.

    The sections `store` and `registry` of the file are recorded for later commands. When the body fails, the logs of
    its steps are kept in MLflow. Raises PrefectError, SettingsError, StoreError and RegistryError.
    """
    settings = Settings.load()
    with (
        one_at_a_time(spec.name),
        open_services(settings, spec.store, spec.registry, outage_seconds(settings)) as services,
        shared_imports(),
    ):
        record_sections(settings, spec)
        workspace = open_workspace(settings, services.store, spec.store)
        with keeping_logs(spec.name, workspace, services.registry, spec.registry.tags):
            yield RunContext(spec, settings, workspace, services)


@dataclass(frozen=True)
class RunContext:
    """A release file, this machine's settings and workspace, and the release store and registry.

    When `stop` is set, no step begins any more, and targets on work pools are cancelled.
    """

    spec: Spec
    settings: Settings
    workspace: Workspace
    services: Services
    stop: Event = field(default_factory=Event)

    @property
    def store(self) -> ReleaseStore:
        """The release store that the settings or the release file name."""
        return self.services.store

    @property
    def registry(self) -> Registry:
        """The MLflow registry that the settings name, or the embedded one."""
        return self.services.registry

    @property
    def runner(self) -> StepRunner:
        """The runner of the release file's steps, with this machine's settings and workspace."""
        return replace(StepRunner.of(self.spec, self.settings, self.workspace), stop=self.stop)

    @cached_property
    def shared_records(self) -> RecordObjects | None:
        """The store through which machines exchange tuning records; None where they exchange none."""
        return open_records(self.settings, self.store, self.spec.store)

    def find_original(self, weights: Artifact | None = None) -> Original:
        """Find the original of the release file; wait for a registry that does not answer.

        `weights` are the weights that its training made, or None. Raises ExportError when the file names a registered
        model that is neither PyTorch nor ONNX or is a pickle without trust, RegistryError when the registry cannot be
        read.
        """
        trusts_pickle = self.settings.trust == "pickle"
        return self.outlast(
            lambda: find_original(self.spec, self.workspace, weights, self.registry, trusts_pickle=trusts_pickle)
        )

    def outlast(self, function: Callable[[], T]) -> T:
        """Call a function that needs a server, again while the server does not answer, and return its result.

        The function must be safe to repeat. Raises the last UnavailableError when the time of the setting
        `outage_minutes` is over or the release is stopped, and any other error of the function at once.
        """
        return outlast(function, self.settings.outage_minutes * 60, self.stop)
