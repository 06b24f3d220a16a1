"""The SQLite files of MLflow and Prefect, migrated once and copied from then on.

Their migrations take two seconds of a processor and more than ten; a test that is not about them starts from a copy.
MLflow's file serves all processes of a run, Prefect's also later runs: it depends on nothing but Prefect's version.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from support.cpp import BUILDS
from support.processes import clean_environment

_CREATE_PREFECT = """
import asyncio
from prefect.server.database import provide_database_interface
asyncio.run(provide_database_interface().create_db())
"""


class Databases:
    """Empty databases with their tables, kept in folders that all processes of a run share."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        base = factory.getbasetemp()
        self.folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "databases"
        self.lasting = BUILDS / f"prefect-{version('prefect')}"

    def mlflow(self, path: Path) -> None:
        """Write an empty database of MLflow to `path`."""
        _copy(self.folder / "mlflow.db", _create_mlflow, path)

    def prefect(self, path: Path) -> None:
        """Write an empty database of Prefect to `path`."""
        _copy(self.lasting / "prefect.db", _create_prefect, path)

    def prepare(self, home: Path) -> Path:
        """Give a new state folder both databases where commands without servers keep them; return it."""
        self.mlflow(home / "mlflow" / "mlflow.db")
        self.prefect(home / "prefect" / "prefect.db")
        return home


def _copy(original: Path, create: Callable[[Path], None], path: Path) -> None:
    """Copy a database to `path`; `create` writes the original if there is none."""
    original.parent.mkdir(parents=True, exist_ok=True)
    with original.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not original.exists():
            with tempfile.TemporaryDirectory(dir=original.parent) as folder:
                partial = Path(folder) / original.name
                create(partial)
                partial.rename(original)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(original, path)


def _create_mlflow(path: Path) -> None:
    from tvmflow.registry import database

    database.prepare(path)


def _create_prefect(path: Path) -> None:
    settings = {"PREFECT_HOME": str(path.parent), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    subprocess.run([sys.executable, "-c", _CREATE_PREFECT], env=clean_environment(**settings), check=True, timeout=240)
