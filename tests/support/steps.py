"""A bundle by the real steps of a release: export, import, tune, build, package."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def compile_by_steps(document: Mapping[str, Any], folder: Path, state: Path) -> Path:
    """Build the bundle of a release file's one target and return its path.

    `folder` is where the release file would stand; `state` is the state folder. Steps whose inputs `state` has seen
    before are cached. The steps do their work in this process: five children would import TVM five times.
    """
    from tasks import build, export, package, relax_import, tune
    from tasks.step import Context
    from tvmflow import spec
    from tvmflow.settings import Settings
    from tvmflow.workspace import Workspace

    context = Context(spec.parse(dict(document), folder), Settings(), Workspace(state))
    (target,) = context.spec.resolve_targets()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvmflow.process.call", _call_here)
        exported = export.export.fn(context)
        imported = relax_import.relax_import.fn(context, exported)
        tuned = tune.tune.fn(context, imported, target)
        built = build.build.fn(context, imported, tuned, target)
        return context.file(package.package.fn(context, exported, imported, tuned, built, target).result.bundle)


def _call_here(function: str, job: Any, result: Callable[..., T], **_options: Any) -> T:
    """Do what `tvmflow.process.call` does, without a child."""
    module, _, name = function.partition(":")
    value: T = getattr(import_module(module), name)(job, lambda done, total, message: None)
    return value
