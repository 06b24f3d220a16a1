"""Logged models: bundles or saved models that belong to a run, and registered models from which a release starts."""

import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmflow.arrays import Array
from tvmflow.bundle import TensorSpec
from tvmflow.errors import RegistryError
from tvmflow.registry.config import without_secrets
from tvmflow.registry.runs import Runs

_MODEL_URI = re.compile(r"models:/(?P<name>[^/:@]+)(?:/(?P<version>[1-9][0-9]*)|@(?P<alias>[^/:@]+))")


@dataclass(frozen=True)
class LoggedModelRef:
    """A logged model: its id, and the URI under which MLflow loads it."""

    model_id: str
    uri: str


@dataclass(frozen=True)
class ModelSource:
    """A version of a registered model from which a release starts; `identity` changes whenever the model changes.

    `source` is the address of its files without a password, `flavors` are MLflow's names of its formats, sorted.
    """

    name: str
    version: str
    run_id: str | None
    source: str
    flavors: tuple[str, ...]
    identity: str


class Models(Runs):
    """Logged models of runs, and the files of registered models."""

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
        """Log a model of flavor `tvm` as an output of the run; `bundles` holds a bundle for each target's name.

        `metrics` are recorded on both the model and the run, `params` on the model; None means none. Without
        `input_example`, or with one of more than 262144 values, the model has no example. Returns the model's id and
        URI. Raises BundleError for a file that is not a bundle, RegistryError when MLflow fails; a model that could not
        be stored completely stays in MLflow, marked as failed.
        """
        with self._explain_errors(f"log the model {name!r}"):
            from mlflow.models import Model

            from tvmflow.registry import flavor
            from tvmflow.registry.signature import model_signature

            signature = model_signature(inputs, outputs)
            new_model = self._new_logged_model(run_id, name, flavor.FLAVOR_NAME, metrics or {}, params or {})
            with new_model as logged_model, tempfile.TemporaryDirectory() as folder:
                flavor.save_model(
                    bundles,
                    folder,
                    signature=signature,
                    input_example=input_example or False,
                    mlflow_model=Model(
                        artifact_path=logged_model.artifact_location,
                        run_id=run_id,
                        model_uuid=logged_model.model_id,
                        model_id=logged_model.model_id,
                    ),
                )
                self._client().log_model_artifacts(logged_model.model_id, folder)
            return LoggedModelRef(logged_model.model_id, f"models:/{logged_model.model_id}")

    def log_saved_model(
        self, run_id: str, name: str, folder: Path, metrics: Mapping[str, float], params: Mapping[str, object]
    ) -> LoggedModelRef:
        """Log a model that one of MLflow's own flavors has saved in a folder, as an output of the run.

        `metrics` are recorded on both the model and the run, `params` on the model. The ids of run and model are
        written into the folder's `MLmodel`. Returns the model's id and URI. Raises RegistryError when MLflow fails; a
        model that could not be stored completely stays in MLflow, marked as failed.
        """
        with self._explain_errors(f"log the model {name!r}"):
            from mlflow.models import Model

            saved_model = Model.load(str(folder))
            flavor = next((flavor for flavor in saved_model.flavors if flavor != "python_function"), None)
            with self._new_logged_model(run_id, name, flavor, metrics, params) as logged_model:
                saved_model.run_id, saved_model.model_id = run_id, logged_model.model_id
                saved_model.artifact_path = logged_model.artifact_location
                saved_model.save(str(folder / "MLmodel"))
                self._client().log_model_artifacts(logged_model.model_id, str(folder))
            return LoggedModelRef(logged_model.model_id, f"models:/{logged_model.model_id}")

    def resolve_source(self, uri: str) -> ModelSource:
        """Read the version of a registered model that `models:/NAME/VERSION` or `models:/NAME@ALIAS` names.

        Raises RegistryError for another URI, and for a version that does not exist or names no flavors.
        """
        with self._explain_errors(f"read {uri!r}"), tempfile.TemporaryDirectory() as folder:
            import yaml

            version, location = self._find_version(uri)
            mlmodel = self._download(f"{location.rstrip('/')}/MLmodel", Path(folder)).read_bytes()
            try:
                flavors = tuple(sorted(yaml.safe_load(mlmodel)["flavors"]))
            except (yaml.YAMLError, KeyError, TypeError) as error:
                raise RegistryError(f"the MLmodel file of {uri!r} names no flavors; log the model again") from error
        return ModelSource(
            name=version.name,
            version=str(version.version),
            run_id=version.run_id or None,
            source=without_secrets(str(version.source)),
            flavors=flavors,
            identity=f"{version.name}/{version.version}@sha256:{hashlib.sha256(mlmodel).hexdigest()}",
        )

    def download_source(self, uri: str, destination: Path) -> Path:
        """Download a registered model into the folder `destination` and return the folder that holds it.

        `uri` is `models:/NAME/VERSION` or `models:/NAME@ALIAS`. Raises RegistryError for another URI, for a version
        that does not exist, and when MLflow fails.
        """
        with self._explain_errors(f"download {uri!r}"):
            return self._download(self._find_version(uri)[1], destination)

    @contextmanager
    def _new_logged_model(
        self,
        run_id: str,
        name: str,
        flavor: str | None,
        metrics: Mapping[str, float],
        params: Mapping[str, object],
    ) -> Iterator[Any]:
        """Create a logged model, whose files the body stores; mark it as ready, or as failed when anything raises."""
        from mlflow.entities import LoggedModelOutput

        client = self._client()
        logged_model = client.create_logged_model(
            self._experiment(),
            name=name,
            source_run_id=run_id,
            params={key: str(value) for key, value in params.items()},
            model_type=flavor,
        )
        try:
            yield logged_model
            client.log_outputs(run_id, [LoggedModelOutput(logged_model.model_id, step=0)])
            self._log_points(run_id, [(key, value, 0) for key, value in metrics.items()], logged_model.model_id)
        except BaseException:
            with suppress(Exception):
                client.finalize_logged_model(logged_model.model_id, "FAILED")
            raise
        client.finalize_logged_model(logged_model.model_id, "READY")

    def _find_version(self, uri: str) -> tuple[Any, str]:
        """A version of a registered model, and the address of its files."""
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
