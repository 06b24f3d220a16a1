"""Which tests share a process when `make test` runs them on two, and the PostgreSQL server that some of them need."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# A shell starts what runs in the background with SIGINT ignored, and every process of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


class _ByFile(LoadFileScheduling):
    """Gives a process whole files of tests, which share fixtures; those of releases together, as they share more."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        releases = Path(file).name.startswith(("test_flow_release", "test_flow_bad"))
        return "releases" if releases else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Distribute the tests as `_ByFile` does."""
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run those first that wait for servers: at the end one process would wait for them alone."""
    items.sort(key=lambda item: item.path.parent.name not in ("flows", "stack"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[str], str]]:
    """A real PostgreSQL server on 127.0.0.1: makes an empty database and returns its address, `postgresql://...`."""
    missing = [name for name in ("initdb", "postgres", "createdb") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"PostgreSQL's {missing[0]} is not on PATH")
    # The server refuses to run as root, and the folders of pytest are closed to everybody else.
    as_other = ["setpriv", "--reuid=nobody", "--clear-groups", "--regid=nogroup"] if os.geteuid() == 0 else []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        if as_other:
            shutil.chown(folder, "nobody", "nogroup")
        data = Path(folder) / "data"

        def run(*command: str) -> None:
            subprocess.run([*as_other, *command], cwd=folder, check=True, capture_output=True, text=True, timeout=120)

        run("initdb", "--pgdata", str(data), "--username", "tvmflow", "--auth", "trust", "--no-sync")
        said = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "start", "--wait", "--pgdata", str(data), "--log", f"{folder}/log", "--options", said)

        def database(name: str) -> str:
            run("createdb", "--host", "127.0.0.1", "--port", port, "--username", "tvmflow", name)
            return f"postgresql://tvmflow@127.0.0.1:{port}/{name}"

        try:
            yield database
        finally:
            run("pg_ctl", "stop", "--mode", "immediate", "--pgdata", str(data))
