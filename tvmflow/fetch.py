"""Bundles of releases and objects on S3, fetched into a cache by digest."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from tvmflow import settings
from tvmflow.errors import StoreError
from tvmflow.services import BUCKET, open_store, read_sections
from tvmflow.settings import Settings
from tvmflow.spec import Store
from tvmflow.store import ReleaseStore, S3Uri, channels, parse_uri, resolve

_BLOB = re.compile(r"(?:(?P<prefix>.+)/)?blobs/sha256/(?P<digest>[0-9a-f]{64})")
_RELEASE = re.compile(r"release://(?P<name>[^/@]+)(?:@(?P<channel>[^/@]+)|/(?P<version>[^/@]+))")


def bundles(uri: str) -> Iterator[Path]:
    """Yield the paths of bundles, each fetched when the caller asks for it.

    A URI `release://NAME@CHANNEL` or `release://NAME/VERSION` has the bundles that this machine can run, the best
    first; `s3://BUCKET/KEY` is one bundle. The settings (`TVMFLOW_*`) name the store's server, its credentials and the
    folder of fetched bundles. Raises StoreError for a URI of another form, when no store is named, and when the store
    cannot be read or has no such bundle; raises BundleError when this machine can run none of a release's bundles, and
    SettingsError for a wrong setting.
    """
    configuration = Settings.load()
    yield from _of_release(configuration, uri) if uri.startswith("release://") else _of_object(configuration, uri)


class ReleaseAddress(NamedTuple):
    """A release by its version, or the one that a channel holds; the other of the two is None."""

    name: str
    version: str | None
    channel: str | None

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Read a `release://` URI. Raises StoreError for any other text."""
        match = _RELEASE.fullmatch(uri)
        if match is None:
            raise StoreError(f"{uri!r} names no release: expected release://NAME@CHANNEL or release://NAME/VERSION.")
        return cls(match["name"], match["version"], match["channel"])


def _of_release(configuration: Settings, uri: str) -> Iterator[Path]:
    name, version, channel = ReleaseAddress.parse(uri)
    section = read_sections(configuration, name).store
    has_server = configuration.s3_bucket is not None or (configuration.s3_endpoint or section.endpoint) is not None
    if not has_server and not (configuration.state / "s3").is_dir():
        raise _missing_store(uri)
    with open_store(configuration, section) as store:
        if version is None:
            version = channels.read_version(store, name, str(channel))
        yield from resolve.fetch_bundles(store, name, version, cache_folder(configuration))


def cache_folder(configuration: Settings) -> Path:
    """Return the folder of fetched bundles: in `TVMFLOW_HOME` if that is set, else in the user's cache folder.

    Raises SettingsError for a user without a home folder.
    """
    if "home" in configuration.model_fields_set:
        return configuration.state / "bundles"
    return settings.user_folder("XDG_CACHE_HOME", ".cache") / "bundles"


def _of_object(configuration: Settings, uri: str) -> Iterator[Path]:
    place = parse_uri(uri)
    with _store_of(configuration, place) as store:
        blob = _BLOB.fullmatch(place.key)
        if blob:
            store = ReleaseStore(replace(store.config, prefix=blob["prefix"] or ""))
            yield resolve.fetch_bundle(store, blob["digest"], cache_folder(configuration))
            return
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            path = Path(folder, "bundle.tar.gz")
            with path.open("wb") as file:
                if store.objects.stream(place.key, file.write) is None:
                    raise StoreError(f"There is no object {uri} in {store.config.server}: correct the address.")
            yield path


def _missing_store(uri: str) -> StoreError:
    return StoreError(
        f"No release store is named for {uri!r}: set TVMFLOW_S3_ENDPOINT, or TVMFLOW_S3_BUCKET for Amazon S3."
    )


@contextmanager
def _store_of(configuration: Settings, place: S3Uri) -> Iterator[ReleaseStore]:
    """The whole bucket of an object, on the server of the settings; without one, in the state folder or at Amazon.

    Raises StoreError for the state folder's own bucket where there is none.
    """
    has_server = configuration.s3_bucket is not None or configuration.s3_endpoint is not None
    is_here = not has_server and (configuration.state / "s3" / place.bucket).is_dir()
    if not has_server and not is_here and place.bucket == BUCKET:
        raise _missing_store(str(place))
    update = {"s3_prefix": ""} if is_here else {"s3_prefix": "", "s3_bucket": place.bucket}
    with open_store(configuration.model_copy(update=update), Store(bucket=place.bucket)) as store:
        yield store
