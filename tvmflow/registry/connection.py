"""The connection to MLflow: the first call opens it, a check takes seconds, and an error is one sentence."""

import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvmflow.errors import RegistryError, RegistryUnavailableError
from tvmflow.registry import database
from tvmflow.registry.config import RegistryConfig, sqlite_file, without_secrets

_PROBE_SECONDS = 5
# Of the tracking server, and of the registry server where it is another one.
_PROBE_ENDPOINTS = ("mlflow/experiments/search", "mlflow/registered-models/search")
# Variables that MLflow reads when it is imported or asks a server. A user's own value stands: no telemetry, no links on
# standard output, no bars beside ours, and half a minute of retries for a server that restarts instead of four.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_LONGEST_REASON = 300
# The answers of a proxy whose server is away for now.
_AWAY = (502, 503, 504)


class Connection:
    """A connection to an MLflow server or SQLite file, which threads may share."""

    def __init__(self, config: RegistryConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._mlflow_client: Any = None
        self._experiment_id: str | None = None

    def check(self) -> None:
        """Raise RegistryError within seconds when the server is down, refuses the credentials or is not MLflow."""
        with self._explain_errors("be opened"):
            for uri, endpoint in zip(self.config.uris, _PROBE_ENDPOINTS, strict=False):
                self._probe(uri, endpoint)

    def _client(self) -> Any:
        """MLflow's own client; the first call checks the connection."""
        with self._lock:
            if self._mlflow_client is None:
                self.check()
                from mlflow import MlflowClient

                uris = self.config.uris
                self._mlflow_client = MlflowClient(uris[0], registry_uri=uris[-1])
            return self._mlflow_client

    def _experiment(self) -> str:
        """The id of the configured experiment, which is created when it is missing."""
        client = self._client()
        with self._lock:
            if self._experiment_id is None:
                self._experiment_id = self._find_or_create_experiment(client)
            return self._experiment_id

    def _find_or_create_experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        name = self.config.experiment
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(client.create_experiment(name, artifact_location=self.config.artifact_location))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = client.get_experiment_by_name(name)
        if experiment.lifecycle_stage != "active":
            raise RegistryError(
                f"the experiment {name!r} at {self.config.address} is deleted; restore it or name another one"
            )
        return str(experiment.experiment_id)

    def _probe(self, uri: str, endpoint: str) -> None:
        """Raise RegistryError, or an error of MLflow's or SQLite's, unless MLflow answers at the address."""
        prepare_environment()
        file = sqlite_file(uri)
        if file is not None:
            database.prepare(file)
            return
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        response = http_request(
            get_default_host_creds(uri),
            f"/api/2.0/{endpoint}",
            "GET",
            params={"max_results": 1},
            max_retries=0,
            timeout=_PROBE_SECONDS,
            raise_on_status=False,
        )
        address = without_secrets(uri)
        if response.status_code == 401:
            raise RegistryError(
                f"MLflow at {address} refuses the credentials (HTTP 401); "
                f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if response.status_code == 403:
            raise RegistryError(
                f"MLflow at {address} forbids the access (HTTP 403); ask for permission, "
                f"or name this host in the server's MLFLOW_SERVER_ALLOWED_HOSTS"
            )
        if response.status_code in _AWAY:
            raise RegistryUnavailableError(
                f"MLflow at {address} is failing or being started (HTTP {response.status_code}); try again later, or "
                "see the server's log"
            )
        if response.status_code != 200 or not response.headers.get("Content-Type", "").startswith("application/json"):
            raise RegistryError(
                f"the server at {address} is not MLflow (HTTP {response.status_code}); check the tracking address"
            )

    @contextmanager
    def _explain_errors(self, action: str) -> Iterator[None]:
        """Turn errors of MLflow and of the libraries below it into one RegistryError; `action` follows "could not"."""
        prepare_environment()
        try:
            yield
        except RegistryError:
            raise
        except Exception as error:
            reason = _describe(error)
            if reason is None:
                raise
            # The error itself may quote the address with its password.
            cause = None if any("@" in uri for uri in self.config.uris) else error
            if _is_unreachable(reason):
                raise RegistryUnavailableError(
                    f"MLflow at {self.config.address} does not answer; start it or correct the tracking address"
                ) from cause
            raise RegistryError(f"MLflow at {self.config.address} could not {action}: {reason}") from cause


def prepare_environment() -> None:
    """Set the variables that MLflow reads at its import, except those that the user has set."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def get_or_none(read: Any, *args: str) -> Any:
    """Call a reading method of MLflow's client with `args` and return its result; None if the object does not exist.

    An argument that MLflow calls invalid gives None, too. Any other error of the method is raised unchanged:
    MlflowException, or one of the libraries below MLflow.
    """
    from mlflow.exceptions import MlflowException

    try:
        return read(*args)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def quote(value: str) -> str:
    """Return a value in quotes, for a filter of MLflow's searches. Raises RegistryError if it holds a quote."""
    # MLflow's filters have no way to write a quote inside a value.
    if "'" in value:
        raise RegistryError(f"{value!r} cannot be searched for; choose a name without quotes")
    return f"'{value}'"


def _describe(error: Exception) -> str | None:
    """The first sentence of an error, without secrets; None for one not of MLflow, HTTP, a database or the system."""
    import requests
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    kinds = (MlflowException, requests.RequestException, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, OSError)
    if not isinstance(error, kinds):
        return None
    text = without_secrets(" ".join(str(error).split()))
    text = re.sub(r"^[A-Z_]+: ", "", text)
    first = re.split(r"(?<=[^.\s])\. (?=[A-Z])", text, maxsplit=1)[0]
    return first.rstrip(". ")[:_LONGEST_REASON] or type(error).__name__


def _is_unreachable(reason: str) -> bool:
    pattern = r"HTTPS?ConnectionPool|Connection (aborted|refused|reset)|error code (502|503|504)\b"
    return re.search(pattern, reason) is not None
