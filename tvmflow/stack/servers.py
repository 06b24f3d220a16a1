"""The servers of the local stack: the command, the address and the health check of each."""

import json
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tvmflow.errors import SettingsError, StoreError
from tvmflow.services import BUCKET
from tvmflow.stack.record import Secrets, ServerProcess, folder

HOST = "127.0.0.1"
DEFAULT_PORTS = {"s3": 9000, "prefect": 4200, "mlflow": 5000, "receiver": 8085}
# In the order in which they are started; the worker is ended first.
TITLES = {"s3": "S3", "prefect": "Prefect", "mlflow": "MLflow", "receiver": "receiver", "worker": "worker"}
_WORKER = "tvmflow up"
_ANSWER_SECONDS = 10.0
# Variables by which a user's shell names other servers: the stack's servers must not read them.
_FOREIGN = ("PREFECT_", "MLFLOW_", "TVMFLOW_")
_PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_COLORS": "false",
}
# Seconds. SQLite has one writer at a time; on a busy machine the others wait many seconds.
_PREFECT_SQLITE = {
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
}
# A requested run should start within seconds; Prefect's default is ten.
_WORKER_QUERY_SECONDS = "3"


@dataclass(frozen=True)
class Server:
    """The command of a server of the stack; `environment` is its whole environment, `folder` its working folder."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path


@dataclass(frozen=True)
class Plan:
    """A stack: its state folder, the port of each server, the work pool, and the addresses of its PostgreSQL databases.

    The addresses of databases are None with SQLite.
    """

    state: Path
    ports: Mapping[str, int]
    secrets: Secrets
    pool: str
    prefect_database: str | None = None
    mlflow_database: str | None = None
    database: str | None = None
    """The address of the PostgreSQL server without user and password, None with SQLite."""

    @property
    def prefect_api(self) -> str:
        """The address of Prefect's API."""
        return f"{self._url('prefect')}/api"

    def settings(self) -> dict[str, str]:
        """Return the settings for commands that use this stack, by name, without its secrets."""
        return {
            "s3_endpoint": self._url("s3"),
            "s3_bucket": BUCKET,
            "s3_folder": str(self.state / "s3"),
            "mlflow_tracking_uri": self._url("mlflow"),
            "prefect_api_url": self.prefect_api,
            "work_pool": self.pool,
        }

    def address(self, name: str) -> str:
        """Return the address of a server; for the receiver its webhook's URL, for the worker its pool in words."""
        match name:
            case "worker":
                return f"work pool {self.pool}"
            case "receiver":
                return f"{self._url('receiver')}/webhooks/mlflow"
            case _:
                return self._url(name)

    def server(self, name: str) -> Server:
        """Return how the server `name` is started: "s3", "prefect", "mlflow" or "receiver"; other names are the worker.

        Raises StoreError for "s3" where rclone is not installed, and RegistryError for "mlflow" where the database of
        the embedded registry is damaged.
        """
        match name:
            case "s3":
                return self._s3()
            case "prefect":
                return self._prefect()
            case "mlflow":
                return self._mlflow()
            case "receiver":
                port = self.ports[name]
                command = tvmflow_command("receive", "--host", HOST, "--port", str(port))
                return Server(name, command, self.command_environment(), Path.cwd())
        command = _module(
            *("prefect", "worker", "start", "--pool", self.pool, "--type", "process", "--name", _WORKER),
            *("--install-policy", "never"),
        )
        environment = {**self.command_environment(), "PREFECT_WORKER_QUERY_SECONDS": _WORKER_QUERY_SECONDS}
        return Server("worker", command, environment, Path.cwd())

    def is_healthy(self, name: str, process: ServerProcess) -> bool:
        """Whether the server `name` is ready to work; an error, or no answer within ten seconds, means that it is not.

        S3 must list its bucket; Prefect, MLflow and the receiver must answer at `/health`; the worker must have sent
        Prefect a heartbeat since its process, `process`, began.
        """
        match name:
            case "s3":
                return self._s3_answers()
            case "prefect":
                return _get(f"{self.prefect_api}/health") == b"true"
            case "worker":
                return self._worker_polls(process)
            case _:
                return _get(f"{self._url(name)}/health") is not None

    def _url(self, name: str) -> str:
        return f"http://{HOST}:{self.ports[name]}"

    def _s3(self) -> Server:
        from tvmflow.store.rclone import server_command, server_environment

        data, port = self.state / "s3", self.ports["s3"]
        (data / BUCKET).mkdir(parents=True, exist_ok=True)
        environment = server_environment(self.secrets.s3_access_key, self.secrets.s3_secret_key)
        return Server("s3", server_command(data, f"{HOST}:{port}"), environment, folder(self.state))

    def _prefect(self) -> Server:
        home, port = self.state / "prefect", self.ports["prefect"]
        home.mkdir(parents=True, exist_ok=True)
        if self.prefect_database is not None:
            database = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": self.prefect_database}
        else:
            database = _PREFECT_SQLITE
        command = _module("prefect", "server", "start", "--host", HOST, "--port", str(port))
        environment = _environment({**_PREFECT, "PREFECT_HOME": str(home), **database})
        return Server("prefect", command, environment, folder(self.state))

    def _mlflow(self) -> Server:
        from tvmflow.registry import Registry, embedded_registry

        # The same file and folder as without a stack: releases are there in either case.
        registry, port = embedded_registry(self.state / "mlflow"), self.ports["mlflow"]
        artifacts = str(registry.artifact_root)
        if self.mlflow_database is None:
            # Creates a missing file in one step; MLflow's server would migrate it while others read it.
            Registry(registry).check()
        settings = {
            "MLFLOW_BACKEND_STORE_URI": self.mlflow_database or f"{registry.tracking_uri}?timeout=60",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": self.secrets.mlflow_webhook_key,
            "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
            "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        }
        command = _module(
            *("mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
            *("--default-artifact-root", artifacts, "--artifacts-destination", artifacts),
        )
        return Server("mlflow", command, _environment(settings), folder(self.state))

    def command_environment(self) -> dict[str, str]:
        """Return the environment of tvmflow's own commands that use the stack: the user's, with absolute paths."""
        from tvmflow.settings import settings_file

        fixed = {**_PREFECT, "PREFECT_HOME": str(self.state / "prefect"), "PREFECT_API_URL": self.prefect_api}
        fixed["TVMFLOW_HOME"] = str(self.state)
        if (file := settings_file()).is_file():
            fixed["TVMFLOW_SETTINGS"] = str(file.absolute())
        # Only the servers talk to PostgreSQL, and runs belong to this stack's Prefect.
        others = ("TVMFLOW_DATABASE_URL", "TVMFLOW_PREFECT_API_URL")
        own = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("TVMFLOW_", "MLFLOW_")) and name not in others
        }
        return _environment({**own, **fixed})

    def _s3_answers(self) -> bool:
        from tvmflow.store import StoreConfig
        from tvmflow.store.client import connect, explain_errors

        config = StoreConfig(
            BUCKET,
            endpoint=self._url("s3"),
            access_key=self.secrets.s3_access_key,
            secret_key=self.secrets.s3_secret_key,
            read_timeout=_ANSWER_SECONDS,
            attempts=1,
        )
        try:
            with explain_errors(config, "checking its health"):
                connect(config).list_objects_v2(Bucket=BUCKET, MaxKeys=1)
        except StoreError:
            return False
        return True

    def _worker_polls(self, process: ServerProcess) -> bool:
        """Whether the worker has sent Prefect a heartbeat since its process began."""
        import psutil

        answer = _get(f"{self.prefect_api}/work_pools/{quote(self.pool)}/workers/filter", {})
        try:
            start_time = psutil.Process(process.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        for worker in json.loads(answer or b"[]"):
            heartbeat = datetime.fromisoformat(worker["last_heartbeat_time"].replace("Z", "+00:00")).timestamp()
            if worker["name"] == _WORKER and worker["status"] == "ONLINE" and heartbeat >= start_time:
                return True
        return False


def tvmflow_command(*arguments: str) -> list[str]:
    """Return the command line that runs `tvmflow` with these arguments from this installation."""
    return [sys.executable, "-P", "-c", "from tvmflow.cli import main; main()", *arguments]


def is_deployed(plan: Plan) -> bool:
    """Whether the stack's Prefect server has the deployment `reconcile/all`, which `tvmflow deploy` always registers.

    No other deployment counts. False as well when the server does not answer.
    """
    return _get(f"{plan.prefect_api}/deployments/name/reconcile/all") is not None


def crash_left_runs(plan: Plan) -> int:
    """Mark the unfinished runs of a killed worker as crashed; return their number.

    Otherwise they would stay `Running` for ever and block the runs behind them. Call this only for a pool without a
    worker.
    """
    query = {
        "work_pools": {"name": {"any_": [plan.pool]}},
        "flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}},
    }
    runs = json.loads(_get(f"{plan.prefect_api}/flow_runs/filter", query) or b"[]")
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "The worker of the local stack was ended."}
    for run in runs:
        _get(f"{plan.prefect_api}/flow_runs/{run['id']}/set_state", {"state": crashed})
    return len(runs)


def databases(url: str) -> tuple[str, str, str]:
    """Create the databases `prefect` and `mlflow` on a PostgreSQL server where they are missing.

    Returns the address of Prefect's database, the one of MLflow's, both with the password, and the server's HOST:PORT.
    Raises SettingsError when the address is wrong, the server does not answer, or the user may not create a database.
    """
    import psycopg
    import sqlalchemy.exc
    from psycopg import sql
    from sqlalchemy.engine import make_url

    fault = "setting database_url is not the address of a PostgreSQL server: give it as postgresql://USER:PASSWORD@HOST:PORT"
    try:
        server = make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise SettingsError(fault) from error
    if server.get_backend_name() not in ("postgresql", "postgres"):
        raise SettingsError(fault)
    server = server.set(drivername="postgresql")
    place = f"{server.host or server.query.get('host') or 'localhost'}:{server.port or 5432}"
    try:
        address = server.set(database=server.database or "postgres").render_as_string(hide_password=False)
        with psycopg.connect(address, autocommit=True, connect_timeout=10) as connection:
            for name in ("prefect", "mlflow"):
                if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone() is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except psycopg.errors.InsufficientPrivilege as error:
        raise SettingsError(
            f"the user {server.username!r} of PostgreSQL at {place} may not create the databases prefect and mlflow; "
            "create them with this user as their owner, or give the user the right CREATEDB"
        ) from error
    except psycopg.Error as error:
        # Its words may repeat the address, but never the password.
        reason = " ".join(str(error).split()).rpartition(": ")[2]
        raise SettingsError(
            f"PostgreSQL at {place} cannot be used ({reason}); start it, or correct the setting database_url"
        ) from error
    prefect = server.set(drivername="postgresql+asyncpg", database="prefect")
    if "sslmode" in prefect.query:
        # asyncpg calls it `ssl`.
        prefect = prefect.difference_update_query(["sslmode"]).update_query_dict({"ssl": prefect.query["sslmode"]})
    mlflow = server.set(drivername="postgresql+psycopg", database="mlflow")
    return prefect.render_as_string(hide_password=False), mlflow.render_as_string(hide_password=False), place


def _module(*words: str) -> list[str]:
    # -P: no module of the current folder comes before an installed one.
    return [sys.executable, "-P", "-m", *words]


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The user's environment without the addresses of other servers, and these settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    proxies = {}
    for name in ("no_proxy", "NO_PROXY"):
        # No proxy reaches this machine's own loopback address.
        proxies[name] = ",".join([*filter(None, [inherited.get(name)]), HOST, "localhost"])
    return {**inherited, **proxies, "PYTHONUNBUFFERED": "1", **settings}


def _get(url: str, body: Mapping[str, Any] | None = None) -> bytes | None:
    """Return the answer of a server to a GET, or to a POST of a JSON document; None for an error or no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_SECONDS) as response:
            return bytes(response.read())
    except (OSError, ValueError):
        return None
