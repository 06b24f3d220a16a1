"""The release store and the registry: servers where settings name them, otherwise in the state folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

from pydantic import SecretStr

from tvmflow import spec as release_file
from tvmflow.documents.encoding import Document, decode, encode
from tvmflow.errors import SettingsError, StoreError
from tvmflow.files import write_whole
from tvmflow.outages import outlast
from tvmflow.registry import Registry, RegistryConfig, embedded_registry
from tvmflow.settings import Settings, full_path, user_folder
from tvmflow.spec import RegistrySection, Spec, Store
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.keys import NAME, require_name
from tvmflow.store.records import RecordObjects
from tvmflow.store.work import WorkStore
from tvmflow.workspace import Workspace

BUCKET = "tvmflow"


@dataclass(frozen=True)
class Services:
    """The release store and the registry of a release, whether their servers are embedded or not."""

    store: ReleaseStore
    registry: Registry


class Sections(Document):
    """The sections of a release file that name the places of its releases: `store` and `registry`."""

    format: Literal[1] = 1
    store: Store = Store()
    registry: RegistrySection = RegistrySection()

    @property
    def label(self) -> str:
        """The words that name this document in messages."""
        return "record of where a model's releases are"


def record_sections(settings: Settings, spec: Spec) -> None:
    """Record a release file's sections `store` and `registry` in the state folder.

    Commands that get only the name of a release find its store and registry by them. Raises StoreError when the state
    folder cannot be written.
    """
    sections = Sections(store=spec.store, registry=spec.registry)
    place = _sections_file(settings, spec.name)
    try:
        if sections == Sections() and not place.exists():
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, encode(sections).decode())
    except OSError as error:
        raise StoreError(f"{place} cannot be written: {error.strerror or error}.") from error


def read_sections(settings: Settings, name: str) -> Sections:
    """Return the sections `store` and `registry` of the release file with the name `name`.

    They are those that were recorded when the file was released or deployed on this machine; else those of the file
    with this name among the release files of the setting `models`; else the defaults. Raises StoreError for a name that
    is not allowed, and for a record that is damaged or cannot be read. If there is no record, raises SpecError for an
    invalid release file of that setting.
    """
    place = _sections_file(settings, name)
    try:
        content = place.read_bytes()
        return decode(Sections, content, str(place), "remove it, and release or deploy the release file again")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"{place} cannot be read: {error.strerror or error}.") from error
    for file in settings.models:
        spec = release_file.load(file)
        if spec.name == name:
            return Sections(store=spec.store, registry=spec.registry)
    return Sections()


def list_sections(settings: Settings) -> list[Sections]:
    """Return sections `store` and `registry` of every release store that this machine knows, the defaults first.

    The others are those of release files that were released or deployed here, and of the files in the setting `models`.
    Raises SpecError for an invalid release file in that setting, StoreError for a damaged record and for a state folder
    that cannot be written, SettingsError for an address or credentials that no S3 server accepts.
    """
    records = sorted((settings.state / "models").glob("*.json"))
    recent = [path.stem for path in records if NAME.fullmatch(path.stem)]
    names = dict.fromkeys([*recent, *(release_file.load(file).name for file in settings.models)])
    places: dict[tuple[str, str], Sections] = {}
    for sections in (Sections(), *(read_sections(settings, name) for name in names)):
        with open_store(settings, sections.store) as store:
            places.setdefault((store.config.server, store.config.uri), sections)
    return list(places.values())


def _sections_file(settings: Settings, name: str) -> Path:
    require_name("name", name)
    return settings.state / "models" / f"{name}.json"


class _Signing(TypedDict):
    signing_key: Path | None
    statement_days: float
    memory: Path


def _memory(settings: Settings) -> Path:
    """The folder of the highest numbers of channels: in `TVMFLOW_HOME` if that is set, else in the user's state folder.

    A device has no state folder of its own, and the current folder, where that lies by default, may be any.
    """
    if "home" in settings.model_fields_set:
        return settings.state / "seen"
    return user_folder("XDG_STATE_HOME", ".local/state") / "seen"


@contextmanager
def open_store(settings: Settings, section: Store | None = None) -> Iterator[ReleaseStore]:
    """Open the release store that the settings name, else the one in the release file's `section`.

    None is an empty section. When neither names a server, the store is in the state folder. Raises StoreError when that
    cannot be written, SettingsError for an address or credentials that no S3 server accepts, and for a user without a
    home folder where TVMFLOW_HOME is not set.
    """
    section = section or Store()
    endpoint = settings.s3_endpoint or section.endpoint
    bucket = settings.s3_bucket or section.bucket or BUCKET
    prefix = (settings.s3_prefix if settings.s3_prefix is not None else section.prefix) or ""
    signing: _Signing = {
        "signing_key": settings.signing_key,
        "statement_days": settings.statement_days,
        "memory": _memory(settings),
    }
    if endpoint is None and settings.s3_bucket is None:
        folder = settings.state / "s3" / bucket
        store = ReleaseStore(StoreConfig(bucket, prefix, folder=folder, **signing))
        store.objects.prepare()
        yield store
        return
    yield ReleaseStore(
        StoreConfig(
            bucket=bucket,
            prefix=prefix,
            endpoint=endpoint,
            region=settings.s3_region,
            access_key=_secret(settings.s3_access_key),
            secret_key=_secret(settings.s3_secret_key),
            session_token=_secret(settings.s3_session_token),
            path_style=settings.s3_path_style,
            checksums=settings.s3_checksums,
            folder=None if settings.s3_folder is None else full_path(settings.s3_folder) / bucket,
            lock=settings.state / "s3.lock" if settings.s3_single_writer else None,
            **signing,
        )
    )


@contextmanager
def open_store_of(settings: Settings, name: str) -> Iterator[ReleaseStore]:
    """Open the store of the releases of a name: the one in the settings, else the one in their release file.

    When neither names a server, the store is in the state folder. Raises StoreError when that cannot be read or
    written, SpecError for a release file in the setting models that is wrong, SettingsError for an address or
    credentials that no S3 server accepts.
    """
    with open_store(settings, read_sections(settings, name).store) as store:
        yield store


def open_registry(settings: Settings, section: RegistrySection | None = None) -> Registry:
    """Return the registry that the settings name, else one in a SQLite file in the state folder.

    `section` of the release file may name the experiment; without a name, or with None, it is `tvmflow`. The registry's
    first use connects. Raises SettingsError for an address of another kind.
    """
    experiment = section.experiment if section is not None and section.experiment else "tvmflow"
    if settings.mlflow_tracking_uri is None:
        return Registry(replace(embedded_registry(settings.state / "mlflow"), experiment=experiment))
    return Registry(RegistryConfig(settings.mlflow_tracking_uri, settings.mlflow_registry_uri, None, experiment))


@contextmanager
def open_services(
    settings: Settings, store: Store, registry: RegistrySection, outage: float = 0.0
) -> Iterator[Services]:
    """Open store and registry and check both; wait up to `outage` seconds for a server that does not answer.

    Raises StoreError, RegistryError or SettingsError.
    """
    services_registry = open_registry(settings, registry)
    with open_store(settings, store) as services_store:
        outlast(services_store.check, outage)
        outlast(services_registry.check, outage)
        yield Services(services_store, services_registry)


def open_workspace(settings: Settings, store: ReleaseStore, section: Store | None = None) -> Workspace:
    """Open this machine's workspace, shared through the release store if the setting `shared_workspace` asks for it.

    `section` is the release file's section `store`, None where there is none. Raises SettingsError when a workspace is
    to be shared and neither the settings nor the section name an S3 server, because no other machine can reach a store
    in the state folder; StepError when the state folder cannot be written.
    """
    if not settings.shared_workspace:
        return Workspace(settings.state)
    if settings.s3_endpoint is None and settings.s3_bucket is None and (section is None or section.endpoint is None):
        raise SettingsError(
            "setting shared_workspace needs an S3 server that the other machines reach; set s3_endpoint and s3_bucket"
        )
    return Workspace(settings.state, WorkStore(store))


def open_records(settings: Settings, store: ReleaseStore, section: Store | None = None) -> RecordObjects | None:
    """Return the store of tuning records that machines share; None where they share none.

    The records are beside the releases on an S3 server that the settings name, or the section `store` of the release
    file (`section`, None where there is none).
    """
    servers = (settings.s3_endpoint, settings.s3_bucket, section.endpoint if section is not None else None)
    return RecordObjects(store) if settings.share_records and any(servers) else None


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()
