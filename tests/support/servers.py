"""Real servers on 127.0.0.1, each ended by its process id."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from support.processes import clean_environment
from support.skips import require
from support.waits import wait_until
from tvmflow.errors import StoreUnavailableError
from tvmflow.store import ReleaseStore, StoreConfig

_START_SECONDS = 120.0


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int, health: str, log: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Run a server in a process of its own and yield its address, once a GET of the path `health` succeeds."""
    import requests

    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=clean_environment(**settings), stdout=output, stderr=output, text=True, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"

    def is_healthy() -> bool:
        try:
            return requests.get(f"{address}{health}", timeout=5).ok
        except requests.ConnectionError:
            return False

    try:
        wait_until(is_healthy, _START_SECONDS, lambda: f"{command}: {log.read_text()[-2000:]}", process=process)
        yield address
    finally:
        # A server's own children may outlive it: the whole group ends.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            # SeaweedFS was once seen to go on after the signal.
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def prefect_server(
    folder: Path,
    *,
    services: bool = False,
    port: int | None = None,
    python: Sequence[str] = (sys.executable,),
    **settings: str,
) -> Iterator[str]:
    """Run a Prefect server and yield the address of its API.

    Its state is in `folder` unless `settings`, environment variables, name a database. With `services` it has its
    background services, as a stack has: schedules, triggers and late runs. Without `port` it listens at a free one.
    `python` is the interpreter's command line.
    """
    port = port or free_port()
    command = [*python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    fixed = {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    command += ["--no-ui", *([] if services else ["--no-services"])]
    with serving(command, port, "/api/health", folder / "log", {**settings, **fixed}) as address:
        yield f"{address}/api"


@contextmanager
def mlflow_server(folder: Path, *, port: int | None = None, **settings: str) -> Iterator[str]:
    """Run an MLflow server on a SQLite file and yield its address; without `port` it listens at a free one.

    It is what `mlflow server` starts, without that command, which imports as much again. `settings` are further
    environment variables.
    """
    port = port or free_port()
    fixed = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder / 'mlflow.db'}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "mlflow.server.fastapi_app:app",
    ]
    with serving(command, port, "/health", folder / "server.log", {**settings, **fixed}) as address:
        yield address


@contextmanager
def mlflow_command(folder: Path, *, app: str | None = None, **settings: str) -> Iterator[str]:
    """Run `mlflow server` on a SQLite file with one worker, at a free port, and yield its address.

    `settings` are further environment variables. `app` is the name of an application of MLflow's, `basic-auth` for a
    server with users.
    """
    port = free_port()
    fixed = {
        "MLFLOW_HOST": "127.0.0.1",
        "MLFLOW_PORT": str(port),
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "artifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_WORKERS": "1",
    }
    command = [sys.executable, "-m", "mlflow", "server", *([] if app is None else ["--app-name", app])]
    with serving(command, port, "/health", folder / "server.log", {**settings, **fixed}) as address:
        yield address


@contextmanager
def moto_server(bucket: str, prefix: str = "") -> Iterator[StoreConfig]:
    """Run moto's S3, which enforces conditional writes, in this process; yield a store on it."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    app = _with_one_writer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.port}"
    config = StoreConfig(bucket, prefix, endpoint, access_key="testing", secret_key="testing-secret")
    try:
        ReleaseStore(config).check()
        yield config
    finally:
        server.shutdown()
        thread.join()


def _with_one_writer(app: Callable[..., Any]) -> Callable[..., Any]:
    """An application that serves one writing request at a time.

    moto compares the tag of a conditional write and writes in two steps, between which another request may write: S3
    does both in one.
    """
    lock = threading.Lock()

    def serve(environment: dict[str, Any], respond: Callable[..., Any]) -> Any:
        with nullcontext() if environment["REQUEST_METHOD"] in ("GET", "HEAD") else lock:
            return app(environment, respond)

    return serve


@contextmanager
def seaweedfs_server(bucket: str) -> Iterator[StoreConfig]:
    """Run SeaweedFS's S3, a real server that decides between conditional writes; yield a store on it."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        pytest.skip("SeaweedFS is not installed: run `make setup`")
    names = ("s3", "master", "volume", "filer", "admin")
    ports = {f"-{name}.port{kind}": free_port() for name in names for kind in ("", ".grpc")}
    with tempfile.TemporaryDirectory(prefix="seaweedfs-") as folder:
        command = [str(weed), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [*(f"{option}={port}" for option, port in ports.items()), "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-admin.ui=false", "-webdav=false", "-master.telemetry=false"]
        keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing-secret"}
        with serving(command, ports["-s3.port"], "/healthz", Path(folder) / "log", keys) as address:
            config = StoreConfig(bucket, endpoint=address, access_key="testing", secret_key="testing-secret")
            # It is healthy before it writes: its parts have yet to join each other.
            wait_until(lambda: _takes_writes(config), 60, "the store takes no object: is the disk full?")
            yield config


def _takes_writes(config: StoreConfig) -> bool:
    """Whether a store takes and gives objects; False where its server does not answer in time."""
    with suppress(StoreUnavailableError):
        ReleaseStore(config).check()
        return True
    return False


@contextmanager
def postgres_server() -> Iterator[Callable[[str], str]]:
    """Run PostgreSQL; yield a function that creates an empty database and returns its address, `postgresql://...`."""
    require("initdb", "postgres", "createdb", "pg_ctl")
    # The server refuses to run as root, and the folders of pytest are closed to everybody else.
    as_other = ["setpriv", "--reuid=nobody", "--clear-groups", "--regid=nogroup"] if os.geteuid() == 0 else []
    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        if as_other:
            shutil.chown(folder, "nobody", "nogroup")
        data = Path(folder) / "data"

        def run(*command: str) -> None:
            subprocess.run([*as_other, *command], cwd=folder, check=True, capture_output=True, text=True, timeout=120)

        run("initdb", "--pgdata", str(data), "--username", "tvmflow", "--auth", "trust", "--no-sync")
        options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "start", "--wait", "--pgdata", str(data), "--log", f"{folder}/log", "--options", options)

        def create_database(name: str) -> str:
            run("createdb", "--host", "127.0.0.1", "--port", port, "--username", "tvmflow", name)
            return f"postgresql://tvmflow@127.0.0.1:{port}/{name}"

        try:
            yield create_database
        finally:
            run("pg_ctl", "stop", "--mode", "immediate", "--pgdata", str(data))
