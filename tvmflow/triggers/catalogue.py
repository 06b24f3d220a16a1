"""The catalogue: the release files that an installation manages, and the run to start when an alias in MLflow moves."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmflow import spec as release_file
from tvmflow.errors import SettingsError
from tvmflow.spec import Spec
from tvmflow.spec.fields import WANTED

_SOURCE = re.compile(r"models:/(?P<model>[^/@]+)@(?P<alias>[^/@]+)")


@dataclass(frozen=True)
class Alias:
    """An alias of a registered model in MLflow, e.g. `production` of `digits`."""

    model: str
    alias: str

    def __str__(self) -> str:
        return f"{self.model}@{self.alias}"


@dataclass(frozen=True)
class RunRequest:
    """A request to run a deployment; all runs for the same purpose have the same `tag`, by which they can be found."""

    deployment: str
    parameters: dict[str, Any]
    tag: str


@dataclass(frozen=True)
class ManagedModel:
    """A release file of the catalogue: its absolute path and its content."""

    file: Path
    spec: Spec

    @property
    def name(self) -> str:
        """The name of its releases."""
        return self.spec.name

    @property
    def registered_model(self) -> str:
        """The registered model whose versions are its releases."""
        return self.spec.registered_model

    @property
    def source_alias(self) -> Alias | None:
        """The alias in MLflow that points to the version to release; None where no alias does.

        It is the alias in the release file's `model.mlflow`. For a model that is retrained it is an alias of the
        registered model to which the retraining adds versions, named after the channel of the section `retrain`.
        """
        match = _SOURCE.fullmatch(self.spec.model.mlflow or "")
        if match is not None:
            return Alias(match["model"], match["alias"])
        alias = self.spec.source_alias
        return None if alias is None else Alias(*alias)

    def has_channel(self, channel: str) -> bool:
        """Whether the release file names this channel, or names none at all."""
        return not self.spec.channels or channel in self.spec.channels

    def request_release(self, version: str) -> RunRequest:
        """Return the request to release version `version` of the source model.

        For a model that is retrained, the flow releases this version. For a model from an alias in `model.mlflow`, it
        releases the version that the alias names when the flow starts, which may be a newer one.
        """
        source = f"{self.source_alias.model if self.source_alias else ''}/{version}"
        parameters = {"file": str(self.file), **({"source": source} if self.spec.source_alias else {})}
        return RunRequest(f"release/{self.name}", parameters, f"source:{source}")

    def request_promotion(self, channel: str, version: str, *, who: str, why: str) -> RunRequest:
        """Return the request for a run that promotes a release to a channel.

        When the run begins, an alias in MLflow or a wish in the release store must still ask for the release; otherwise
        the run leaves the channel as it is. `who` asked for it, and `why`.
        """
        parameters = {
            "name": self.name,
            "version": version,
            "channel": channel,
            "who": who,
            "why": why,
            "while_wanted": True,
            "store": self.spec.store.model_dump(),
            "registry": self.spec.registry.model_dump(),
        }
        return RunRequest(f"promote/{self.name}", parameters, f"promote:{channel}/{version}")


@dataclass(frozen=True)
class Catalogue:
    """The managed release files; no two have the same name, registered model or source."""

    entries: tuple[ManagedModel, ...]

    def find_request(self, alias: Alias, version: str) -> RunRequest | None:
        """Return the request that setting the alias to that version makes; None when the alias is not managed here."""
        for entry in self.entries:
            if alias == entry.source_alias:
                return entry.request_release(version)
            channel = alias.alias.removesuffix(WANTED)
            if alias.model == entry.registered_model and entry.has_channel(channel):
                why = f"the alias {alias} was set to {version} in MLflow"
                return entry.request_promotion(channel, version, who="mlflow", why=why)
        return None


def load(files: Iterable[Path]) -> Catalogue:
    """Read the release files and return the catalogue of them.

    Raises SpecError for a file that is missing or wrong. Raises SettingsError, which names both files, when two of them
    have the same name, registered model or source, or when the source model of one is the registered model of another's
    releases.
    """
    entries = tuple(ManagedModel(file.absolute(), release_file.load(file)) for file in dict.fromkeys(files))
    owners: dict[tuple[str, str], ManagedModel] = {}
    for entry in entries:
        for kind, name in (
            ("name", entry.name),
            ("registered model", entry.registered_model),
            *((("source", str(entry.source_alias)),) if entry.source_alias else ()),
        ):
            owner = owners.setdefault((kind, name), entry)
            if owner is not entry:
                raise SettingsError(
                    f"{str(owner.file)!r} and {str(entry.file)!r} both have the {kind} {name!r}; "
                    "rename one, or leave one out of the setting models"
                )
    for entry in entries:
        owner_of_source = owners.get(("registered model", entry.source_alias.model)) if entry.source_alias else None
        if owner_of_source is not None:
            raise SettingsError(
                f"{str(entry.file)!r} releases the registered model {owner_of_source.registered_model!r}, whose "
                f"versions are the releases of {str(owner_of_source.file)!r}; name a PyTorch or ONNX model in "
                "model.mlflow"
            )
    return Catalogue(entries)
