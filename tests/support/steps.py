"""A bundle by the real steps of a release: export, import, tune, build, package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def compile_by_steps(document: Mapping[str, Any], folder: Path, state: Path) -> Path:
    """Build the bundle of a release file's one target and return its path.

    `folder` is where the release file would stand; `state` is the state folder. Steps whose inputs `state` has seen
    before are cached.
    """
    from tasks import build, export, package, relax_import, tune
    from tasks.step import Context
    from tvmflow import spec
    from tvmflow.settings import Settings
    from tvmflow.workspace import Workspace

    context = Context(spec.parse(dict(document), folder), Settings(), Workspace(state))
    (target,) = context.spec.resolve_targets()
    exported = export.export.fn(context)
    imported = relax_import.relax_import.fn(context, exported)
    tuned = tune.tune.fn(context, imported, target)
    built = build.build.fn(context, imported, tuned, target)
    return context.file(package.package.fn(context, exported, imported, tuned, built, target).result.bundle)
