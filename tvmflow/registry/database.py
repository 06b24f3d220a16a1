"""The SQLite file of an embedded registry: created in one step, and probed before MLflow opens it."""

import logging
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

# Alembic, which runs the migrations, keeps its state in the module.
_MIGRATING = threading.Lock()


def prepare(path: Path) -> None:
    """Create the MLflow database `path` if it is missing, else check that SQLite can read it.

    Raises OSError or sqlite3.Error: MLflow itself would retry for minutes on a file that is no database.
    """
    if not path.exists():
        _create(path)
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=5)) as connection:
        connection.execute("PRAGMA schema_version").fetchone()


def _create(path: Path) -> None:
    # MLflow's migrations are neither atomic nor guarded against a second process. They run on a private file, which
    # then appears under its name in one step; the second of two processes keeps the first one's file.
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with _MIGRATING, _quiet_migrations():
            _migrate(partial)
        os.fchmod(descriptor, 0o644)
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        os.close(descriptor)
        Path(partial).unlink()


def _migrate(file: str) -> None:
    import sqlalchemy
    from mlflow.store.db.utils import _initialize_tables

    engine = sqlalchemy.create_engine(f"sqlite:///{file}")

    # Nobody sees the file before it is complete and synced, so the many small transactions need no sync of their own.
    @sqlalchemy.event.listens_for(engine, "connect")
    def _turn_syncing_off(connection: sqlite3.Connection, _record: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    try:
        _initialize_tables(engine)
    finally:
        engine.dispose()


@contextmanager
def _quiet_migrations() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("mlflow.store.db.utils", "alembic")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
