"""The real steps of a release without their processes, and a bundle by these steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest

from support.torchlib import share_table

T = TypeVar("T")


def compile_by_steps(document: Mapping[str, Any], folder: Path, state: Path) -> Path:
    """Build the bundle of a release file's one target and return its path.

    `folder` is where the release file would stand; `state` is the state folder. Steps whose inputs `state` has seen
    before are cached. The steps do their work in this process: five children would import TVM five times.
    """
    from tasks.build import BuildJob, build
    from tasks.export import ExportJob, export
    from tasks.original import find_original
    from tasks.package import PackageJob, package
    from tasks.relax_import import ImportJob, relax_import
    from tasks.step import StepRunner
    from tasks.tune import TuneJob, tune
    from tvmflow.settings import Settings
    from tvmflow.spec import parse
    from tvmflow.workspace import Workspace

    spec, workspace = parse(dict(document), folder), Workspace(state)
    runner = StepRunner.of(spec, Settings(), workspace)
    (target,) = spec.resolve_targets()
    with steps_in_this_process():
        exported = export(runner, ExportJob.of(spec, find_original(spec, workspace))).result
        imported = relax_import(runner, ImportJob.of(spec, exported)).result
        tuned = tune(runner, TuneJob.of(spec, imported, target)).result
        model = build(runner, BuildJob.of(spec, imported, tuned, target)).result
        job = PackageJob.of(spec, workspace, exported, imported, tuned, model, target, signer=None)
        return workspace.path(package(runner, job, None).result.bundle)


@contextmanager
def steps_in_this_process() -> Iterator[None]:
    """Let steps do their work in this process while the body runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvmflow.processes.children.call", _call_here)
        yield


def _call_here(function: str, job: Any, result: Callable[..., T], **_options: Any) -> T:
    """Do what `tvmflow.processes.children.call` does, without a child."""
    if function == "tasks.export:work" and job.original.source.framework == "pytorch":
        share_table()
    module, _, name = function.partition(":")
    value: T = getattr(import_module(module), name)(job, lambda done, total, message: None)
    return value
