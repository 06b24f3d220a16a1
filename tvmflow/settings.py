"""Settings that belong to a machine and not to a model: endpoints, credentials, the state folder."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import (
    SettingsError as SourceError,
)

from tvmflow.bundle.signature import TRUSTED_KEYS_VARIABLE
from tvmflow.errors import SettingsError
from tvmflow.hardware.target import PROFILE_VARIABLE
from tvmflow.stack import record

_PREFIX = "TVMFLOW_"
# An address and its credentials come from the same source: a mixture would fit no server.
_STORE = {"s3_endpoint", "s3_bucket", "s3_folder", "s3_access_key", "s3_secret_key", "s3_session_token"}
_FILE_VARIABLE = "TVMFLOW_SETTINGS"
# Variables by which the processes of one run talk to each other.
_INTERNAL = {"TVMFLOW_CHILD"}
# Settings that devices must honour. A device reads no settings file, so they come from the environment alone.
_DEVICE = {TRUSTED_KEYS_VARIABLE, PROFILE_VARIABLE}


def settings_file() -> Path:
    """Return the path of the settings file: `$TVMFLOW_SETTINGS`, else `tvmflow.toml` in the current folder."""
    return Path(os.environ.get(_FILE_VARIABLE, "tvmflow.toml"))


def full_path(path: Path) -> Path:
    """Return a path as an absolute one, with the home folder in the place of `~` or `~USER`.

    Raises SettingsError when this machine knows no home folder of that user.
    """
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise SettingsError(
            f"the folder {str(path)!r} is not known, because this machine has no home folder for that user; set "
            "TVMFLOW_HOME, and write paths in settings without ~"
        ) from error


def user_folder(variable: str, default: str) -> Path:
    """Return tvmflow's folder among a user's: in the one that the environment's `variable` names, else in `~/default`.

    Raises SettingsError when this user has no home folder.
    """
    return Path(os.environ.get(variable) or full_path(Path("~", default))) / "tvmflow"


def _unset(values: dict[str, Any], others: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """The values of settings that `others`, the sources before, do not have under any of the settings' names."""

    def has_value(name: str) -> bool:
        alias = fields[name].validation_alias if name in fields else None
        names = {name, *map(str, alias.choices)} if isinstance(alias, AliasChoices) else {name}
        return not names.isdisjoint(others)

    return {name: value for name, value in values.items() if not has_value(name)}


class _SettingsFile(TomlConfigSettingsSource):
    """The settings file. A setting with several names counts once: the environment may use another one."""

    def __call__(self) -> dict[str, Any]:
        return _unset(super().__call__(), self.current_state, self.settings_cls.model_fields)


class _RunningStack(PydanticBaseSettingsSource):
    """Addresses and credentials of the local stack of the state folder, for as long as it runs."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Not used: the stack gives all of its values at once."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """Return the stack's values; those of its S3 server only when no other source names a part of an S3 server."""
        others = self.current_state
        home = others.get("home", self.settings_cls.model_fields["home"].default)
        values = record.settings(full_path(Path(str(home))))
        values = {name: value for name, value in values.items() if name not in _STORE or _STORE.isdisjoint(others)}
        return _unset(values, others, self.settings_cls.model_fields)


class Settings(BaseSettings):
    """The settings of a machine: from the environment (`TVMFLOW_...`), the settings file, a running local stack.

    The first source that has a value wins; a setting that no source has keeps its default.
    """

    # Texts and secrets that a file holds, as those of Kubernetes do, often end in a line break.
    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        str_strip_whitespace=True,
        use_attribute_docstrings=True,
    )

    home: Path = Path(".tvmflow")
    """The state folder: artifacts, records, fetched bundles; releases and registry where no server is set."""
    s3_endpoint: str | None = None
    """The S3 endpoint, as `https://HOST`; the state folder keeps releases unless given."""
    s3_bucket: str | None = None
    """The bucket, `tvmflow` unless given. A bucket without an endpoint means Amazon S3."""
    s3_prefix: str | None = None
    """A prefix of all keys."""
    s3_region: str = "us-east-1"
    """The region."""
    s3_access_key: SecretStr | None = None
    """The access key; boto3's own chain unless given."""
    s3_secret_key: SecretStr | None = None
    """The secret key."""
    s3_session_token: SecretStr | None = None
    """The session token of temporary credentials."""
    s3_single_writer: bool = False
    """Whether this state folder's processes alone write to the store: needed for an S3 server that knows no conditional
    writes."""
    s3_folder: Path | None = None
    """The folder in which the S3 server keeps its buckets as plain files, where it runs on this machine as the local
    stack's does: the store is read and written there, and the server serves other machines."""
    s3_path_style: bool = True
    """Whether the bucket stands in the path rather than in the host name."""
    s3_checksums: Literal["when_supported", "when_required"] = "when_required"
    """When requests carry checksums."""
    mlflow_tracking_uri: str | None = Field(
        default=None,
        validation_alias=AliasChoices("TVMFLOW_MLFLOW_TRACKING_URI", "mlflow_tracking_uri", "MLFLOW_TRACKING_URI"),
    )
    """The MLflow server, or `sqlite:///FILE`; also `MLFLOW_TRACKING_URI`. Embedded unless given."""
    mlflow_registry_uri: str | None = None
    """The model registry, where it is not the tracking server."""
    prefect_api_url: str | None = Field(
        default=None, validation_alias=AliasChoices("TVMFLOW_PREFECT_API_URL", "prefect_api_url", "PREFECT_API_URL")
    )
    """The Prefect server's API; also `PREFECT_API_URL`. Embedded unless given."""
    models: tuple[Path, ...] = ()
    """The release files that this installation manages, in the environment as a JSON list: those that aliases may
    start and `tvmflow deploy` registers."""
    webhook_secret: SecretStr | None = None
    """The secret with which MLflow signs its webhooks."""
    database_url: SecretStr | None = None
    """A PostgreSQL server in which `tvmflow up` keeps the state of Prefect and MLflow:
    `postgresql://USER:PASSWORD@HOST:PORT`. SQLite unless given."""
    work_pool: str = "tvmflow"
    """The Prefect work pool on which deployments run."""
    target_pools: dict[str, str] = {}
    """Targets that workers of a Prefect work pool build, as `{"TARGET": "POOL"}`; needs a shared workspace
    ([how to](../how-to/spread-over-workers.md))."""
    shared_workspace: bool = False
    """Whether the release store also keeps the results of steps, below `work/`, for every machine that shares it."""
    share_records: bool = True
    """Whether tuning records are kept in the release store too, below `records/`, where that is a named S3 server."""
    parallel_targets: Annotated[int, Field(ge=1)] | None = None
    """Targets that are built at a time; half of the cores unless given."""
    signing_key: Path | None = None
    """The private key with which bundles, releases, verdicts and channels are signed."""
    statement_days: Annotated[float, Field(gt=0)] = 30.0
    """Days for which the signed statement on a channel is valid; `tvmflow reconcile` renews it when half are over."""
    advisories: Path | None = None
    """Advisories on vulnerabilities of Python packages in OSV's format, which the gate `max_vulnerabilities` reads: a
    JSON file, a ZIP archive as OSV publishes one, or a folder."""
    advisories_days: Annotated[float, Field(gt=0)] = 30.0
    """Days that the newest of the advisories may be old; with older ones the gate refuses."""
    notification_block: str | None = None
    """The notification block, as `TYPE/NAME`, through which Prefect reports failed runs, e.g. `slack-webhook/oncall`;
    `tvmflow deploy` sets this up. None unless given."""
    retention_days: Annotated[float, Field(ge=0, le=36500)] = 90.0
    """Days for which every release stays, and every result in the shared workspace that is used;
    [what `tvmflow gc --releases` removes](../reference/release-store.md#what-is-removed)."""
    retention_releases: Annotated[int, Field(ge=1)] = 10
    """How many of the newest releases of a model stay, however old they are."""
    outage_minutes: Annotated[float, Field(ge=0, le=20)] = 5.0
    """Minutes for which a running release waits for S3, MLflow or Prefect to answer again before it fails."""
    worker_timeout_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Seconds without a heartbeat after which a target on a work pool is given up; only those count in which Prefect's
    server answered."""
    child_variables: tuple[str, ...] = ()
    """Environment variables that model code sees beside
    [the usual ones](../explanation/how-a-release-works.md#steps-run-in-child-processes), in the environment as a JSON
    list: `["HF_TOKEN"]`."""
    trust: Literal["pickle"] | None = None
    """`pickle`: PyTorch models that are registered in MLflow as a pickle, which can run any code, may be released,
    whatever the release file says."""
    step_timeout_minutes: Annotated[float, Field(gt=0)] = 120.0
    """Minutes after which a step's process is ended."""
    comparison_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Seconds in which two builds are compared, at most 150 and at least 12 pairs of measurements."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order: explicit arguments, the environment, the settings file, a running stack."""
        file = _SettingsFile(settings_cls, settings_file())
        return init_settings, env_settings, file, _RunningStack(settings_cls)

    @cached_property
    def state(self) -> Path:
        """The state folder as an absolute path. Raises SettingsError for the home folder of an unknown user."""
        return full_path(self.home)

    @classmethod
    def load(cls) -> Self:
        """Read the settings of this machine. Raises SettingsError, which names the setting, for a wrong one."""
        path = settings_file()
        if _FILE_VARIABLE in os.environ and not path.is_file():
            raise SettingsError(f"settings file {str(path)!r}, named by {_FILE_VARIABLE}, does not exist")
        known_variables = {_PREFIX + name.upper() for name in cls.model_fields} | {_FILE_VARIABLE} | _INTERNAL | _DEVICE
        for variable in sorted(os.environ):
            if variable.startswith(_PREFIX) and variable not in known_variables:
                close = get_close_matches(variable, known_variables, n=1)
                hint = f"did you mean {close[0]}?" if close else "docs/reference/settings.md lists all"
                raise SettingsError(f"environment variable {variable} is no setting; {hint}")
        try:
            return cls()
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"])
            names = ", ".join(sorted(cls.model_fields))
            is_unknown = problem["type"] == "extra_forbidden"
            fault = f"is unknown; known are {names}" if is_unknown else f"is wrong: {problem['msg']}"
            raise SettingsError(f"setting {name!r} {fault} (from TVMFLOW_{name.upper()} or {str(path)!r})") from error
        except SourceError as error:
            # It names the field in the words of pydantic-settings, and the file only where the file is at fault.
            name = next((field for field in cls.model_fields if f'"{field}"' in str(error)), "")
            variable = _PREFIX + name.upper()
            if variable in os.environ:
                raise SettingsError(
                    f"environment variable {variable} is {os.environ[variable]!r}, which is not written as JSON: "
                    """a list is '["a", "b"]', a mapping '{"a": "b"}'"""
                ) from error
            raise SettingsError(f"settings file {str(path)!r} is not valid TOML: {error}") from error
        except ValueError as error:
            raise SettingsError(f"settings file {str(path)!r} is not valid TOML: {error}") from error
