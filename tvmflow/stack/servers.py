"""The servers of the local stack: how each is started, where it answers, and how it is asked whether it is well."""

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
from tvmflow.stack.record import Secrets, Started, folder

HOST = "127.0.0.1"
DEFAULT_PORTS = {"s3": 9000, "prefect": 4200, "mlflow": 5000, "receiver": 8085}
# In the order in which they are started; ended in the other, the worker first.
TITLES = {"s3": "S3", "prefect": "Prefect", "mlflow": "MLflow", "receiver": "receiver", "worker": "worker"}
_WORKER = "tvmflow up"
_ANSWER_SECONDS = 10.0
# What a user's own shell says about other servers; the stack's would obey it.
_FOREIGN = ("PREFECT_", "MLFLOW_", "TVMFLOW_")
_PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_COLORS": "false",
}
# SQLite has one writer at a time: those who wait are given the time that a busy machine takes.
_PREFECT_SQLITE = {
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
}
# A run that was asked for should begin within seconds, not after Prefect's ten.
_WORKER_QUERY_SECONDS = "3"


@dataclass(frozen=True)
class Server:
    """A server of the stack as a command; `environment` is all it gets."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path


@dataclass(frozen=True)
class Plan:
    """A stack: its state folder, the port of each server, the work pool, and PostgreSQL's addresses if it is used."""

    state: Path
    ports: Mapping[str, int]
    secrets: Secrets
    pool: str
    prefect_database: str | None = None
    mlflow_database: str | None = None
    database: str | None = None
    """Where PostgreSQL is, without user and password."""

    @property
    def prefect_api(self) -> str:
        """The address of Prefect's API."""
        return f"{self._url('prefect')}/api"

    def settings(self) -> dict[str, str]:
        """What commands beside this stack take for settings, secrets apart."""
        return {
            "s3_endpoint": self._url("s3"),
            "s3_bucket": BUCKET,
            "mlflow_tracking_uri": self._url("mlflow"),
            "prefect_api_url": self.prefect_api,
            "work_pool": self.pool,
        }

    def address(self, name: str) -> str:
        """Where a server is found: its address, where MLflow's webhooks go, or the pool that the worker serves."""
        match name:
            case "worker":
                return f"work pool {self.pool}"
            case "receiver":
                return f"{self._url('receiver')}/webhooks/mlflow"
            case _:
                return self._url(name)

    def server(self, name: str) -> Server:
        """The server of that name. Raises StoreError without rclone, RegistryError for a damaged registry."""
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

    def healthy(self, name: str, started: Started) -> bool:
        """Whether a server that was started answers as it should."""
        match name:
            case "s3":
                return self._s3_answers()
            case "prefect":
                return _get(f"{self.prefect_api}/health") == b"true"
            case "worker":
                return self._worker_polls(started)
            case _:
                return _get(f"{self._url(name)}/health") is not None

    def _url(self, name: str) -> str:
        return f"http://{HOST}:{self.ports[name]}"

    def _s3(self) -> Server:
        from tvmflow.store.embedded import server_command, server_environment

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

        # The same file and folder as without a stack, and artifacts where both find them: what was released is there
        # in either case.
        registry, port = embedded_registry(self.state / "mlflow"), self.ports["mlflow"]
        artifacts = str(registry.artifact_root)
        if self.mlflow_database is None:
            # Makes the file whole where there is none; MLflow's server would be seen half-way.
            Registry(registry).check()
        said = {
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
        return Server("mlflow", command, _environment(said), folder(self.state))

    def command_environment(self) -> dict[str, str]:
        """The environment of this project's own commands beside the stack: the user's, with absolute paths."""
        from tvmflow.settings import settings_file

        said = {**_PREFECT, "PREFECT_HOME": str(self.state / "prefect"), "PREFECT_API_URL": self.prefect_api}
        said["TVMFLOW_HOME"] = str(self.state)
        if (file := settings_file()).is_file():
            said["TVMFLOW_SETTINGS"] = str(file.absolute())
        # Only the servers talk to PostgreSQL, and runs belong to this stack's Prefect.
        others = ("TVMFLOW_DATABASE_URL", "TVMFLOW_PREFECT_API_URL")
        own = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("TVMFLOW_", "MLFLOW_")) and name not in others
        }
        return _environment({**own, **said})

    def _s3_answers(self) -> bool:
        from tvmflow.store import StoreConfig
        from tvmflow.store.client import connect, explained

        config = StoreConfig(
            BUCKET,
            endpoint=self._url("s3"),
            access_key=self.secrets.s3_access_key,
            secret_key=self.secrets.s3_secret_key,
            read_timeout=_ANSWER_SECONDS,
            attempts=1,
        )
        try:
            with explained(config, "asking whether it is well"):
                connect(config).list_objects_v2(Bucket=BUCKET, MaxKeys=1)
        except StoreError:
            return False
        return True

    def _worker_polls(self, started: Started) -> bool:
        """Whether the worker has told Prefect that it is there since its process began."""
        import psutil

        answer = _get(f"{self.prefect_api}/work_pools/{quote(self.pool)}/workers/filter", {})
        try:
            began = psutil.Process(started.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        for worker in json.loads(answer or b"[]"):
            seen = datetime.fromisoformat(worker["last_heartbeat_time"].replace("Z", "+00:00")).timestamp()
            if worker["name"] == _WORKER and worker["status"] == "ONLINE" and seen >= began:
                return True
        return False


def tvmflow_command(*arguments: str) -> list[str]:
    """The command `tvmflow` of this very installation."""
    return [sys.executable, "-P", "-c", "from tvmflow.cli import main; main()", *arguments]


def is_deployed(plan: Plan) -> bool:
    """Whether Prefect has the one deployment that every registration makes."""
    return _get(f"{plan.prefect_api}/deployments/name/reconcile/all") is not None


def crash_left_runs(plan: Plan) -> int:
    """Mark the runs as crashed that a worker left unfinished when it was killed; return how many.

    They would stay `Running` for ever, and hold up the runs behind them. Only for a pool that no worker serves.
    """
    wanted = {
        "work_pools": {"name": {"any_": [plan.pool]}},
        "flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}},
    }
    runs = json.loads(_get(f"{plan.prefect_api}/flow_runs/filter", wanted) or b"[]")
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "The worker of the local stack was ended."}
    for run in runs:
        _get(f"{plan.prefect_api}/flow_runs/{run['id']}/set_state", {"state": crashed})
    return len(runs)


def databases(url: str) -> tuple[str, str, str]:
    """The databases `prefect` and `mlflow` of a PostgreSQL server, made where they are missing.

    Returns Prefect's address of its own, MLflow's of its own, and the server without user and password. Raises
    SettingsError when the address is wrong, the server does not answer, or the user may not create a database.
    """
    import psycopg
    import sqlalchemy.exc
    from psycopg import sql
    from sqlalchemy.engine import make_url

    wrong = "setting database_url is no address of a PostgreSQL server: give it as postgresql://USER:PASSWORD@HOST:PORT"
    try:
        given = make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise SettingsError(wrong) from error
    if given.get_backend_name() not in ("postgresql", "postgres"):
        raise SettingsError(wrong)
    given = given.set(drivername="postgresql")
    place = f"{given.host or given.query.get('host') or 'localhost'}:{given.port or 5432}"
    try:
        address = given.set(database=given.database or "postgres").render_as_string(hide_password=False)
        with psycopg.connect(address, autocommit=True, connect_timeout=10) as connection:
            for name in ("prefect", "mlflow"):
                if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone() is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except psycopg.errors.InsufficientPrivilege as error:
        raise SettingsError(
            f"the user {given.username!r} of PostgreSQL at {place} may not create the databases prefect and mlflow; "
            "create them with this user as their owner, or give the user the right CREATEDB"
        ) from error
    except psycopg.Error as error:
        # Its words may repeat the address, but never the password.
        said = " ".join(str(error).split()).rpartition(": ")[2]
        raise SettingsError(
            f"PostgreSQL at {place} cannot be used ({said}); start it, or correct the setting database_url"
        ) from error
    prefect = given.set(drivername="postgresql+asyncpg", database="prefect")
    if "sslmode" in prefect.query:
        # asyncpg's word for it.
        prefect = prefect.difference_update_query(["sslmode"]).update_query_dict({"ssl": prefect.query["sslmode"]})
    mlflow = given.set(drivername="postgresql+psycopg", database="mlflow")
    return prefect.render_as_string(hide_password=False), mlflow.render_as_string(hide_password=False), place


def _module(*words: str) -> list[str]:
    # -P: no module of the current folder comes before an installed one.
    return [sys.executable, "-P", "-m", *words]


def _environment(said: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    direct = {}
    for name in ("no_proxy", "NO_PROXY"):
        # No proxy reaches this machine's own loopback address.
        direct[name] = ",".join([*filter(None, [kept.get(name)]), HOST, "localhost"])
    return {**kept, **direct, "PYTHONUNBUFFERED": "1", **said}


def _get(url: str, body: Mapping[str, Any] | None = None) -> bytes | None:
    """What the server answers to a GET, or to a POST of a JSON document; None when it does not, or with an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_SECONDS) as response:
            return bytes(response.read())
    except (OSError, ValueError):
        return None
