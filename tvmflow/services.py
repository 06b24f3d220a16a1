"""The release store and the registry: servers where settings name them, otherwise in the state folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pydantic import SecretStr

from tvmflow.errors import SettingsError
from tvmflow.registry import Registry, RegistryConfig, embedded_registry
from tvmflow.settings import Settings
from tvmflow.spec import RegistrySection, Store
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.records import RecordObjects
from tvmflow.store.work import WorkStore
from tvmflow.workspace import Workspace

BUCKET = "tvmflow"


@dataclass(frozen=True)
class Services:
    """The release store and the registry of a release, whether their servers are embedded or not."""

    store: ReleaseStore
    registry: Registry


@contextmanager
def open_store(settings: Settings, section: Store | None = None) -> Iterator[ReleaseStore]:
    """Open the release store that the settings name, else the one in the release file's `section`.

    When neither names a server, the store is in the state folder. Raises StoreError when that cannot be written,
    SettingsError for an address or credentials that no S3 server accepts.
    """
    section = section or Store()
    endpoint = settings.s3_endpoint or section.endpoint
    bucket = settings.s3_bucket or section.bucket or BUCKET
    prefix = (settings.s3_prefix if settings.s3_prefix is not None else section.prefix) or ""
    if endpoint is None and settings.s3_bucket is None:
        store = ReleaseStore(StoreConfig(bucket, prefix, folder=settings.state / "s3" / bucket))
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
            folder=None if settings.s3_folder is None else settings.s3_folder.expanduser().absolute() / bucket,
            lock=settings.state / "s3.lock" if settings.s3_single_writer else None,
        )
    )


def open_registry(settings: Settings, section: RegistrySection | None = None) -> Registry:
    """Return the registry that the settings name, else one in a SQLite file in the state folder.

    Its first use connects. Raises SettingsError for an address of another kind.
    """
    experiment = section.experiment if section is not None and section.experiment else "tvmflow"
    if settings.mlflow_tracking_uri is None:
        return Registry(replace(embedded_registry(settings.state / "mlflow"), experiment=experiment))
    return Registry(RegistryConfig(settings.mlflow_tracking_uri, settings.mlflow_registry_uri, None, experiment))


@contextmanager
def open_services(settings: Settings, store: Store, registry: RegistrySection) -> Iterator[Services]:
    """Open store and registry, and check both before any work begins.

    Raises StoreError, RegistryError or SettingsError.
    """
    services_registry = open_registry(settings, registry)
    with open_store(settings, store) as services_store:
        services_store.check()
        services_registry.check()
        yield Services(services_store, services_registry)


def open_workspace(settings: Settings, store: ReleaseStore, section: Store | None = None) -> Workspace:
    """Open this machine's workspace, shared through the release store where the settings ask for that.

    Raises SettingsError when the store is embedded, because no other machine can reach it, and StepError when the state
    folder cannot be written.
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

    The records are beside the releases on an S3 server that the settings or the release file name.
    """
    servers = (settings.s3_endpoint, settings.s3_bucket, section.endpoint if section is not None else None)
    return RecordObjects(store) if settings.share_records and any(servers) else None


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()
