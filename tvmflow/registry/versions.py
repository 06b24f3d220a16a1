"""Versions of registered models, with their tags and aliases, and the webhook that reports aliases."""

from collections.abc import Mapping
from dataclasses import dataclass

from tvmflow.errors import RegistryError
from tvmflow.registry.config import sqlite_file
from tvmflow.registry.connection import Connection, get_or_none, quote
from tvmflow.registry.models import LoggedModelRef


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model; `run_id` is its run, `created` is in milliseconds since 1970 (UTC)."""

    name: str
    version: str
    run_id: str | None
    aliases: tuple[str, ...]
    tags: dict[str, str]
    created: int


class Versions(Connection):
    """Registered models by name, their versions by number. Every method raises RegistryError when MLflow fails."""

    def register(self, name: str, model_ref: LoggedModelRef, run_id: str, tags: Mapping[str, str]) -> str:
        """Make the logged model a version of the registered model `name` and return the version's number.

        The registered model is created when it is missing. A run has at most one version of a model: a second call sets
        its tags again and returns the same number. Raises RegistryError.
        """
        with self._explain_errors(f"register the model {name!r}"):
            client = self._client()
            self._create_registered_model(name)
            number = self.find_version(name, run_id)
            if number is not None:
                for key, value in tags.items():
                    client.set_model_version_tag(name, number, key, value)
                return number
            # The location itself, not `models:/<id>`: a SQL store resolves that through MLflow's global address.
            location = client.get_logged_model(model_ref.model_id).artifact_location
            version = client.create_model_version(
                name, location, run_id=run_id, tags=dict(tags), model_id=model_ref.model_id
            )
            return str(version.version)

    def find_version(self, name: str, run_id: str) -> str | None:
        """Return the version of a registered model that a run made, None if it made none. Raises RegistryError."""
        with self._explain_errors(f"look for the version of {name!r} that the run {run_id} made"):
            versions = [
                int(version.version)
                for version in self._client().search_model_versions(f"run_id = {quote(run_id)}")
                if version.name == name
            ]
        return str(min(versions)) if versions else None

    def find_tagged_version(self, name: str, key: str, value: str) -> str | None:
        """Return the oldest version of a registered model whose tag `key` is `value`, None if there is none.

        Only the latest hundred versions are searched. Raises RegistryError.
        """
        tagged = [version.version for version in self.list_versions(name) if version.tags.get(key) == value]
        return tagged[-1] if tagged else None

    def list_versions(self, name: str, limit: int = 100) -> list[ModelVersion]:
        """Return the latest `limit` versions of a registered model, newest first; empty when the model does not exist.

        Raises RegistryError.
        """
        with self._explain_errors(f"list the versions of {name!r}"):
            versions = self._client().search_model_versions(
                f"name = {quote(name)}", max_results=limit, order_by=["version_number DESC"]
            )
            # The results of a search have no aliases.
            model = get_or_none(self._client().get_registered_model, name) if versions else None
            aliases = {} if model is None else model.aliases
        return [
            ModelVersion(
                name=name,
                version=str(version.version),
                run_id=version.run_id or None,
                aliases=tuple(
                    sorted(alias for alias, number in aliases.items() if str(number) == str(version.version))
                ),
                tags=dict(version.tags),
                created=version.creation_timestamp,
            )
            for version in versions
        ]

    def version_exists(self, name: str, version: str) -> bool:
        """Whether the registered model has that version. Raises RegistryError."""
        with self._explain_errors(f"read version {version} of {name!r}"):
            return get_or_none(self._client().get_model_version, name, version) is not None

    def get_version_tags(self, name: str, version: str) -> dict[str, str]:
        """Return the tags of a version; empty when the version does not exist. Raises RegistryError."""
        with self._explain_errors(f"read version {version} of {name!r}"):
            model_version = get_or_none(self._client().get_model_version, name, version)
        return {} if model_version is None else dict(model_version.tags)

    def set_version_tag(self, name: str, version: str, key: str, value: str) -> None:
        """Set a tag of a version. Raises RegistryError."""
        with self._explain_errors(f"tag version {version} of {name!r}"):
            self._client().set_model_version_tag(name, version, key, value)

    def delete_version_tag(self, name: str, version: str, key: str) -> None:
        """Delete a tag of a version, if it has it. Raises RegistryError."""
        with self._explain_errors(f"tag version {version} of {name!r}"):
            self._client().delete_model_version_tag(name, version, key)

    def get_alias_version(self, name: str, alias: str) -> str | None:
        """Return the version that an alias names; None when the alias or the model does not exist.

        Raises RegistryError.
        """
        with self._explain_errors(f"read the alias {alias!r} of {name!r}"):
            model = get_or_none(self._client().get_registered_model, name)
        version = None if model is None else model.aliases.get(alias)
        return None if version is None else str(version)

    def list_aliases(self, name: str) -> dict[str, str]:
        """Return a registered model's versions by alias; empty when the model does not exist. Raises RegistryError."""
        with self._explain_errors(f"read the aliases of {name!r}"):
            model = get_or_none(self._client().get_registered_model, name)
        return {} if model is None else {alias: str(version) for alias, version in model.aliases.items()}

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version. Raises RegistryError."""
        with self._explain_errors(f"set the alias {alias!r} of {name!r}"):
            self._client().set_registered_model_alias(name, alias, version)

    def delete_alias(self, name: str, alias: str) -> None:
        """Delete an alias, if it exists. Raises RegistryError."""
        with self._explain_errors(f"delete the alias {alias!r} of {name!r}"):
            self._client().delete_registered_model_alias(name, alias)

    def connect_webhook(self, name: str, url: str, secret: str) -> bool:
        """Create the webhook `name`: whenever an alias is set, the server calls `url` and signs the call with `secret`.

        An existing webhook of that name is changed and switched on. Returns whether the webhook is new. Raises
        RegistryError when MLflow fails, or the registry is a SQLite file.
        """
        uri = self.config.uris[-1]
        if sqlite_file(uri) is not None:
            raise RegistryError(f"the registry {uri} has no server that could send webhooks; use an MLflow server")
        events = ["model_version_alias.created"]
        with self._explain_errors(f"create the webhook to {url}"):
            client = self._client()
            token = None
            while True:
                page = client.list_webhooks(page_token=token)
                for webhook in page:
                    if webhook.name == name:
                        client.update_webhook(
                            webhook.webhook_id, url=url, events=events, secret=secret, status="ACTIVE"
                        )
                        return False
                token = page.token
                if not token:
                    break
            client.create_webhook(name, url, events, description="tvmflow receive", secret=secret)
            return True

    def _create_registered_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        if get_or_none(self._client().get_registered_model, name) is not None:
            return
        try:
            self._client().create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
