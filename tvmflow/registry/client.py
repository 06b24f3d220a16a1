"""The registry as the pipeline uses it: runs, artifacts, logged models, versions and aliases, by explicit ids."""

import hashlib
import math
import os
import re
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy.typing as npt

from tvmflow.bundle import TensorSpec
from tvmflow.errors import RegistryError
from tvmflow.registry import database
from tvmflow.registry.config import RegistryConfig, sqlite_file, without_secrets

Array = npt.NDArray[Any]
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

_PARENT_RUN = "mlflow.parentRunId"
_FLOW_RUN = "tvmflow.flow_run"
_PROBE_SECONDS = 5
_PROBES = ("mlflow/experiments/search", "mlflow/registered-models/search")
_MODEL_URI = re.compile(r"models:/(?P<name>[^/:@]+)(?:/(?P<version>[1-9][0-9]*)|@(?P<alias>[^/:@]+))")
# What MLflow reads of its environment when it is imported or asks a server. A user's own value stands: no telemetry,
# no links on standard output, no bars beside ours, and half a minute of retries for a server that restarts instead of
# four.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


@dataclass(frozen=True)
class LoggedModelRef:
    """A logged model: its id, and the URI under which MLflow loads it."""

    model_id: str
    uri: str


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model; `created` is in milliseconds since 1970."""

    name: str
    version: str
    run_id: str | None
    aliases: tuple[str, ...]
    tags: dict[str, str]
    created: int


@dataclass(frozen=True)
class ModelSource:
    """A registered model that a release starts from; `identity` changes whenever the model does."""

    name: str
    version: str
    run_id: str | None
    source: str
    flavors: tuple[str, ...]
    identity: str


class Registry:
    """An MLflow server or SQLite file. Safe to share between threads: nothing depends on an active run.

    It connects with the first call. Every method raises RegistryError, in one sentence, when MLflow cannot be reached
    or refuses.
    """

    def __init__(self, config: RegistryConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._connected: Any = None
        self._experiment_id: str | None = None

    def check(self) -> None:
        """Raise RegistryError within seconds when the server is down, refuses the credentials or is no MLflow."""
        with self._reported("be opened"):
            for uri, probe in zip(self.config.uris, _PROBES, strict=False):
                self._probe(uri, probe)

    def start_run(self, name: str, params: Mapping[str, object], tags: Mapping[str, str]) -> str:
        """Open the run of a release and return its id."""
        return self._start_run(name, params, tags)

    def start_target_run(
        self, parent_run_id: str, target_name: str, params: Mapping[str, object], tags: Mapping[str, str]
    ) -> str:
        """Open the run of one target inside a release's run and return its id."""
        return self._start_run(target_name, params, {**tags, _PARENT_RUN: parent_run_id})

    def open_promotion_run(
        self, release_run: str, name: str, tags: Mapping[str, str], flow_run: str | None = None
    ) -> str:
        """Open the run of a promotion, inside that of its release if it is still there, and return its id.

        A flow run that was suspended and begins again is given the run that it opened before, with the tags set anew.
        """
        with self._reported(f"open the run {name!r}"):
            client = self._client()
            release = _or_none(client.get_run, release_run)
            experiment = self._experiment() if release is None else str(release.info.experiment_id)
            if flow_run is not None:
                query = f"tags.`{_FLOW_RUN}` = '{_plain(flow_run)}'"
                for run in client.search_runs([experiment], query, max_results=1):
                    for key, value in tags.items():
                        client.set_tag(run.info.run_id, key, value)
                    return str(run.info.run_id)
            known = dict(tags)
            if release is not None:
                known[_PARENT_RUN] = release_run
            if flow_run is not None:
                known[_FLOW_RUN] = flow_run
            return str(client.create_run(experiment, tags=known, run_name=name).info.run_id)

    def set_run_tag(self, run_id: str, key: str, value: str) -> None:
        """Set a tag of a run."""
        with self._reported(f"tag the run {run_id}"):
            self._client().set_tag(run_id, key, value)

    def finish_run(self, run_id: str, status: RunStatus) -> None:
        """Close a run."""
        with self._reported(f"close the run {run_id}"):
            self._client().set_terminated(run_id, status)

    def run_exists(self, run_id: str) -> bool:
        """Whether the run is there and not deleted."""
        with self._reported(f"read the run {run_id}"):
            run = _or_none(self._client().get_run, run_id)
        return run is not None and run.info.lifecycle_stage == "active"

    def log_metrics(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Record metrics on a run."""
        with self._reported(f"record metrics of the run {run_id}"):
            self._log_metrics(run_id, ((key, value, 0) for key, value in metrics.items()), None)

    def log_curve(self, run_id: str, key: str, curve: Sequence[tuple[int, float]]) -> None:
        """Record a metric of a run by step, at most 1000 steps at once; a value that is not finite leaves a gap."""
        points = [(key, value, step) for step, value in curve if math.isfinite(value)]
        with self._reported(f"record {key!r} of the run {run_id}"):
            self._log_metrics(run_id, points, None)

    def log_artifacts(self, run_id: str, files: Mapping[str, Path]) -> None:
        """Store files with a run, each under its artifact path (`folder/name`). Raises for a missing file first."""
        for path in files.values():
            if not path.is_file():
                raise RegistryError(f"the artifact {str(path)!r} is not a file; run the step that writes it again")
        with self._reported(f"store artifacts of the run {run_id}"), tempfile.TemporaryDirectory() as scratch:
            for artifact_path, path in files.items():
                place = PurePosixPath(artifact_path)
                local = path
                if path.name != place.name:
                    # MLflow stores a file under its own name only.
                    local = Path(scratch, place.name)
                    shutil.copyfile(path, local)
                folder = str(place.parent)
                self._client().log_artifact(run_id, str(local), None if folder == "." else folder)

    def fetch_artifact(self, run_id: str, artifact_path: str, folder: Path) -> Path | None:
        """Fetch a file of a run into `folder`; None when there is no such run, or the run holds no such file."""
        with self._reported(f"read {artifact_path!r} of the run {run_id}"):
            client = self._client()
            if _or_none(client.get_run, run_id) is None:
                return None
            above = str(PurePosixPath(artifact_path).parent)
            beside = client.list_artifacts(run_id, None if above == "." else above)
            if all(item.path != artifact_path for item in beside):
                return None
            return Path(client.download_artifacts(run_id, artifact_path, str(folder)))

    def log_model(
        self,
        run_id: str,
        name: str,
        bundles: Mapping[str, Path],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        input_example: Mapping[str, Array] | None = None,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, object] | None = None,
    ) -> LoggedModelRef:
        """Log one bundle per target as a model of flavor `tvm` made by the run.

        `metrics` are recorded on both the model and the run, `params` on the model; an `input_example` of more than
        262144 values is left out. Raises BundleError when a file is no bundle. A model that could not be stored whole
        stays behind marked as failed.
        """
        with self._reported(f"log the model {name!r}"):
            from mlflow.entities import LoggedModelOutput
            from mlflow.models import Model

            from tvmflow.registry import flavor
            from tvmflow.registry.signature import model_signature

            client = self._client()
            signature = model_signature(inputs, outputs)
            logged = client.create_logged_model(
                self._experiment(),
                name=name,
                source_run_id=run_id,
                params={key: str(value) for key, value in (params or {}).items()},
                model_type=flavor.FLAVOR_NAME,
            )
            try:
                with tempfile.TemporaryDirectory() as folder:
                    flavor.save_model(
                        bundles,
                        folder,
                        signature=signature,
                        input_example=input_example or False,
                        mlflow_model=Model(
                            artifact_path=logged.artifact_location,
                            run_id=run_id,
                            model_uuid=logged.model_id,
                            model_id=logged.model_id,
                        ),
                    )
                    client.log_model_artifacts(logged.model_id, folder)
                client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
                points = ((key, value, 0) for key, value in (metrics or {}).items())
                self._log_metrics(run_id, points, logged.model_id)
            except BaseException:
                with suppress(Exception):
                    client.finalize_logged_model(logged.model_id, "FAILED")
                raise
            client.finalize_logged_model(logged.model_id, "READY")
            return LoggedModelRef(logged.model_id, f"models:/{logged.model_id}")

    def log_saved_model(
        self, run_id: str, name: str, folder: Path, metrics: Mapping[str, float], params: Mapping[str, object]
    ) -> LoggedModelRef:
        """Log a model that one of MLflow's own flavors has saved in a folder, as made by the run.

        `metrics` are recorded on both the model and the run, `params` on the model. The folder's `MLmodel` is told run
        and model. A model that could not be stored whole stays behind marked as failed.
        """
        with self._reported(f"log the model {name!r}"):
            from mlflow.entities import LoggedModelOutput
            from mlflow.models import Model

            client = self._client()
            saved = Model.load(str(folder))
            logged = client.create_logged_model(
                self._experiment(),
                name=name,
                source_run_id=run_id,
                params={key: str(value) for key, value in params.items()},
                model_type=next((flavor for flavor in saved.flavors if flavor != "python_function"), None),
            )
            try:
                saved.run_id, saved.model_id = run_id, logged.model_id
                saved.artifact_path = logged.artifact_location
                saved.save(str(folder / "MLmodel"))
                client.log_model_artifacts(logged.model_id, str(folder))
                client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
                self._log_metrics(run_id, [(key, value, 0) for key, value in metrics.items()], logged.model_id)
            except BaseException:
                with suppress(Exception):
                    client.finalize_logged_model(logged.model_id, "FAILED")
                raise
            client.finalize_logged_model(logged.model_id, "READY")
            return LoggedModelRef(logged.model_id, f"models:/{logged.model_id}")

    def register(self, name: str, model_ref: LoggedModelRef, run_id: str, tags: Mapping[str, str]) -> str:
        """Make the logged model a version of the registered model `name` and return the version's number.

        The registered model is created when it is missing. A run has at most one version: registering it again sets
        its tags anew and returns the same number.
        """
        with self._reported(f"register the model {name!r}"):
            client = self._client()
            self._create_registered_model(name)
            found = [v for v in client.search_model_versions(f"run_id = '{_plain(run_id)}'") if v.name == name]
            if found:
                version = str(min(int(v.version) for v in found))
                for key, value in tags.items():
                    client.set_model_version_tag(name, version, key, value)
            else:
                # The location itself, not `models:/<id>`: a SQL store resolves that through MLflow's global address.
                location = client.get_logged_model(model_ref.model_id).artifact_location
                created = client.create_model_version(
                    name, location, run_id=run_id, tags=dict(tags), model_id=model_ref.model_id
                )
                version = str(created.version)
            return version

    def list_versions(self, name: str, limit: int = 100) -> list[ModelVersion]:
        """The latest `limit` versions of a registered model, newest first; none when there is no such model."""
        with self._reported(f"list the versions of {name!r}"):
            found = self._client().search_model_versions(
                f"name = '{_plain(name)}'", max_results=limit, order_by=["version_number DESC"]
            )
            # A search does not tell aliases.
            model = _or_none(self._client().get_registered_model, name) if found else None
            aliases = {} if model is None else model.aliases
        return [
            ModelVersion(
                name=name,
                version=str(v.version),
                run_id=v.run_id or None,
                aliases=tuple(sorted(alias for alias, number in aliases.items() if str(number) == str(v.version))),
                tags=dict(v.tags),
                created=v.creation_timestamp,
            )
            for v in found
        ]

    def version_exists(self, name: str, version: str) -> bool:
        """Whether the registered model has that version."""
        with self._reported(f"read version {version} of {name!r}"):
            return _or_none(self._client().get_model_version, name, version) is not None

    def set_version_tag(self, name: str, version: str, key: str, value: str) -> None:
        """Set a tag of a version."""
        with self._reported(f"tag version {version} of {name!r}"):
            self._client().set_model_version_tag(name, version, key, value)

    def get_version_tags(self, name: str, version: str) -> dict[str, str]:
        """The tags of a version; none when there is no such version."""
        with self._reported(f"read version {version} of {name!r}"):
            found = _or_none(self._client().get_model_version, name, version)
        return {} if found is None else dict(found.tags)

    def delete_version_tag(self, name: str, version: str, key: str) -> None:
        """Take a tag of a version away; it is no error when there is none."""
        with self._reported(f"tag version {version} of {name!r}"):
            self._client().delete_model_version_tag(name, version, key)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version."""
        with self._reported(f"set the alias {alias!r} of {name!r}"):
            self._client().set_registered_model_alias(name, alias, version)

    def get_alias_version(self, name: str, alias: str) -> str | None:
        """The version an alias points at; None when there is no such alias or model."""
        with self._reported(f"read the alias {alias!r} of {name!r}"):
            model = _or_none(self._client().get_registered_model, name)
        version = None if model is None else model.aliases.get(alias)
        return None if version is None else str(version)

    def list_aliases(self, name: str) -> dict[str, str]:
        """All aliases of a registered model and the versions that they point at; none when there is no such model."""
        with self._reported(f"read the aliases of {name!r}"):
            model = _or_none(self._client().get_registered_model, name)
        return {} if model is None else {alias: str(version) for alias, version in model.aliases.items()}

    def delete_alias(self, name: str, alias: str) -> None:
        """Take an alias away; it is no error when there is none."""
        with self._reported(f"delete the alias {alias!r} of {name!r}"):
            self._client().delete_registered_model_alias(name, alias)

    def connect_webhook(self, name: str, url: str, secret: str) -> bool:
        """Have the server tell `url` of every alias that is set, signed with `secret`; return whether that is new.

        The webhook of that name is changed where there is one. Raises RegistryError for a registry without a server.
        """
        uri = self.config.uris[-1]
        if sqlite_file(uri) is not None:
            raise RegistryError(
                f"the registry {uri} has no server that could tell of its aliases; use an MLflow server"
            )
        events = ["model_version_alias.created"]
        with self._reported(f"create the webhook to {url}"):
            client = self._client()
            token = None
            while True:
                page = client.list_webhooks(page_token=token)
                for found in page:
                    if found.name == name:
                        client.update_webhook(found.webhook_id, url=url, events=events, secret=secret, status="ACTIVE")
                        return False
                token = page.token
                if not token:
                    break
            client.create_webhook(name, url, events, description="tvmflow receive", secret=secret)
            return True

    def find_runs(self, tags: Mapping[str, str]) -> list[str]:
        """The finished runs of this registry's experiment that have all of these tags, newest first."""
        with self._reported("search its runs"):
            query = " and ".join(f"tags.`{key}` = '{_plain(value)}'" for key, value in tags.items())
            found = self._client().search_runs([self._experiment()], f"attributes.status = 'FINISHED' and {query}")
            return [str(run.info.run_id) for run in found]

    def resolve_source(self, uri: str) -> ModelSource:
        """What is registered under `models:/NAME/VERSION` or `models:/NAME@ALIAS`."""
        with self._reported(f"read {uri!r}"), tempfile.TemporaryDirectory() as folder:
            import yaml

            version, location = self._find(uri)
            mlmodel = self._download(f"{location.rstrip('/')}/MLmodel", Path(folder)).read_bytes()
            flavors = yaml.safe_load(mlmodel)["flavors"]
        return ModelSource(
            name=version.name,
            version=str(version.version),
            run_id=version.run_id or None,
            source=without_secrets(str(version.source)),
            flavors=tuple(sorted(flavors)),
            identity=f"{version.name}/{version.version}@sha256:{hashlib.sha256(mlmodel).hexdigest()}",
        )

    def download_source(self, uri: str, destination: Path) -> Path:
        """Download the registered model into the folder `destination` and return the folder that holds it."""
        with self._reported(f"download {uri!r}"):
            return self._download(self._find(uri)[1], destination)

    def _start_run(self, name: str, params: Mapping[str, object], tags: Mapping[str, str]) -> str:
        with self._reported(f"open the run {name!r}"):
            from mlflow.entities import Param

            client = self._client()
            run_id = str(client.create_run(self._experiment(), tags=dict(tags), run_name=name).info.run_id)
            client.log_batch(run_id, params=[Param(key, str(value)) for key, value in params.items()])
            return run_id

    def _log_metrics(self, run_id: str, points: "Iterator[_Point] | Sequence[_Point]", model_id: str | None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(key, float(value), now, step, model_id=model_id, run_id=run_id) for key, value, step in points
        ]
        self._client().log_batch(run_id, metrics=metrics)

    def _create_registered_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        if _or_none(self._client().get_registered_model, name) is not None:
            return
        try:
            self._client().create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _find(self, uri: str) -> tuple[Any, str]:
        match = _MODEL_URI.fullmatch(uri)
        if match is None:
            raise RegistryError(f"{uri!r} names no registered model; write models:/NAME/VERSION or models:/NAME@ALIAS")
        client = self._client()
        if match["alias"]:
            version = client.get_model_version_by_alias(match["name"], match["alias"])
        else:
            version = client.get_model_version(match["name"], match["version"])
        return version, client.get_model_version_download_uri(version.name, version.version)

    def _download(self, uri: str, destination: Path) -> Path:
        from mlflow.artifacts import download_artifacts

        uris = self.config.uris
        return Path(download_artifacts(uri, dst_path=str(destination), tracking_uri=uris[0], registry_uri=uris[-1]))

    def _client(self) -> Any:
        with self._lock:
            if self._connected is None:
                self.check()
                from mlflow import MlflowClient

                uris = self.config.uris
                self._connected = MlflowClient(uris[0], registry_uri=uris[-1])
            return self._connected

    def _experiment(self) -> str:
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
        _prepare_environment()
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
        if response.status_code != 200 or not response.headers.get("Content-Type", "").startswith("application/json"):
            raise RegistryError(
                f"what answers at {address} is not MLflow (HTTP {response.status_code}); check the tracking address"
            )

    @contextmanager
    def _reported(self, action: str) -> Iterator[None]:
        """Turn what MLflow and the libraries below it raise into a RegistryError of one sentence."""
        _prepare_environment()
        try:
            yield
        except RegistryError:
            raise
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            # The error itself may quote the address with its password.
            cause = None if any("@" in uri for uri in self.config.uris) else error
            if _unreachable(reason):
                message = f"MLflow at {self.config.address} does not answer; start it or correct the tracking address"
            else:
                message = f"MLflow at {self.config.address} could not {action}: {reason}"
            raise RegistryError(message) from cause


_Point = tuple[str, float, int]


def _prepare_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _reason(error: Exception) -> str | None:
    """The error in words that fit into a sentence; None when it is none of MLflow's, HTTP's or a database's."""
    import requests
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    known = (MlflowException, requests.RequestException, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, OSError)
    if not isinstance(error, known):
        return None
    text = without_secrets(" ".join(str(error).split()))
    text = re.sub(r"^[A-Z_]+: ", "", text)
    first = re.split(r"(?<=[^.\s])\. (?=[A-Z])", text, maxsplit=1)[0]
    return first.rstrip(". ")[:300] or type(error).__name__


def _unreachable(reason: str) -> bool:
    return reason.startswith("API request to") and ("HTTPConnectionPool" in reason or "HTTPSConnectionPool" in reason)


def _or_none(read: Any, *args: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return read(*args)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _plain(name: str) -> str:
    # MLflow's filters have no way to write a quote inside a name.
    if "'" in name:
        raise RegistryError(f"{name!r} cannot be searched for; take a name without quotes")
    return name
