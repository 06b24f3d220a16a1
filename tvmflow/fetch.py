"""Fetch bundles from S3 and from releases, into a cache by digest."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tvmflow import settings
from tvmflow.errors import StoreError
from tvmflow.services import BUCKET, open_store
from tvmflow.settings import Settings
from tvmflow.store import ReleaseStore, StoreConfig, channels, parse_uri, resolve
from tvmflow.store.client import code_of, connect, explained

_BLOB = re.compile(r"(?:(?P<prefix>.+)/)?blobs/sha256/(?P<digest>[0-9a-f]{64})")
_RELEASE = re.compile(r"release://(?P<name>[^/@]+)(?:@(?P<channel>[^/@]+)|/(?P<version>[^/@]+))")


def bundles(uri: str) -> Iterator[Path]:
    """The bundles of a `release://` URI, the best for this machine first, or the one of an `s3://` URI.

    Each is fetched when it is asked for. Raises StoreError when the store cannot be read, BundleError when none of a
    release's bundles is for this machine.
    """
    known = settings.load()
    yield from _of_release(known, uri) if uri.startswith("release://") else _of_object(known, uri)


def _of_release(known: Settings, uri: str) -> Iterator[Path]:
    found = _RELEASE.fullmatch(uri)
    if found is None:
        raise StoreError(f"{uri!r} names no release: expected release://NAME@CHANNEL or release://NAME/VERSION.")
    name, version = found["name"], found["version"]
    if known.s3_endpoint is None and known.s3_bucket is None and not (known.state / "s3").is_dir():
        raise StoreError(
            f"No release store is named for {uri!r}: set TVMFLOW_S3_ENDPOINT, or TVMFLOW_S3_BUCKET for Amazon S3."
        )
    with open_store(known) as store:
        if version is None:
            version = channels.read(store, name, found["channel"]).version
        yield from resolve.fetch_bundles(store, name, version, cache_folder(known))


def cache_folder(known: Settings) -> Path:
    """Where fetched bundles are kept: in `TVMFLOW_HOME` where that is set, else with the user's caches."""
    if "home" in known.model_fields_set:
        return known.state / "bundles"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmflow" / "bundles"


def _of_object(known: Settings, uri: str) -> Iterator[Path]:
    place = parse_uri(uri)
    with _store_of(known, place.bucket) as config:
        blob = _BLOB.fullmatch(place.key)
        if blob:
            store = ReleaseStore(replace(config, prefix=blob["prefix"] or ""))
            yield resolve.fetch_bundle(store, blob["digest"], cache_folder(known))
            return
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            path = Path(folder, "bundle.tar.gz")
            _download(config, place.key, path)
            yield path


@contextmanager
def _store_of(known: Settings, bucket: str) -> Iterator[StoreConfig]:
    """The server that the settings name; without any, Amazon, but for the bucket of the embedded server."""
    if known.s3_endpoint is None and known.s3_bucket is None and bucket != BUCKET:
        known = known.model_copy(update={"s3_bucket": bucket})
    with open_store(known) as store:
        yield replace(store.config, bucket=bucket, prefix="")


def _download(config: StoreConfig, key: str, destination: Path) -> None:
    from botocore.exceptions import ClientError

    client = connect(config)
    with explained(config, f"reading {key}"):
        try:
            body = client.get_object(Bucket=config.bucket, Key=key)["Body"]
        except ClientError as error:
            if code_of(error) == "NoSuchKey":
                raise StoreError(f"There is no object {config.uri}/{key}: correct the address.") from error
            raise
        with body, destination.open("wb") as file:
            shutil.copyfileobj(body, file, 1 << 20)
