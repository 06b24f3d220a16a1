"""Logs of failed runs: they are kept in MLflow, since a worker's own folder may go with its pod."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tvmflow.errors import RegistryError, TvmflowError, VerdictError
from tvmflow.registry import Registry
from tvmflow.workspace import Workspace

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def keeping_logs(name: str, workspace: Workspace, registry: Registry, tags: Mapping[str, str]) -> Iterator[None]:
    """When the body fails, store the logs that its steps wrote in an MLflow run, which the error's sentence then names.

    `name` is the release's. The run has the `tags` and the tag `tvmflow.kind` with the value `failure`, and ends as
    FAILED. A verdict is no failure: it has a run of its own. Where MLflow fails too, the error keeps the log's path.
    """
    since = time.time()
    try:
        yield
    except VerdictError:
        raise
    except TvmflowError as error:
        logs = workspace.logs(name, since)
        if logs:
            try:
                run = _store(name, registry, tags, error, logs)
                error.args = (_with_place(str(error), logs, run),)
            except RegistryError as problem:
                _log.warning("the logs of the failed run could not be kept: %s", problem)
        raise


def _store(name: str, registry: Registry, tags: Mapping[str, str], error: TvmflowError, logs: list[Path]) -> str:
    """Store the logs; return the id of the MLflow run."""
    own = {"tvmflow.kind": "failure", "tvmflow.name": name, "tvmflow.error": type(error).__name__}
    run = registry.start_run(f"{name} failed", {}, {**tags, **own})
    try:
        registry.log_artifacts(run, {f"logs/{path.name}": path for path in logs})
    finally:
        registry.finish_run(run, "FAILED")
    return run


def _with_place(sentence: str, logs: list[Path], run: str) -> str:
    """Return the sentence with the place of a log in MLflow instead of its path."""
    for path in logs:
        sentence = sentence.replace(f"its log is {path}", f"its log is logs/{path.name} of the MLflow run {run}")
    return sentence
