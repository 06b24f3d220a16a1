"""Fetch bundles from S3 and from releases, into a cache by digest."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from tvmflow import settings
from tvmflow.bundle import sha256_file
from tvmflow.bundle.manifest import check_machine
from tvmflow.errors import BundleError, StoreError
from tvmflow.runtime.choose import best_first
from tvmflow.services import BUCKET, open_store
from tvmflow.settings import Settings
from tvmflow.store import ReleaseStore, StoreConfig, channels, parse_uri
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


@dataclass(frozen=True)
class Entry:
    """A target of a release: what its bundle asks of a machine, and the bundle's digest."""

    name: str
    target: str
    arch: str
    tvm_target: Mapping[str, Any]
    cpu_features: tuple[str, ...]
    sha256: str

    @classmethod
    def of(cls, release: Mapping[str, Any]) -> list[Self]:
        """The targets of a release's document. Raises StoreError for a document that is damaged."""
        try:
            return [
                cls(
                    release["name"],
                    item["target"],
                    item["arch"],
                    item["tvm_target"],
                    tuple(item["cpu_features"]),
                    item["bundle"]["sha256"],
                )
                for item in release["targets"]
            ]
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"The release {release.get('name')} {release.get('version')} is damaged, its document lacks {error}: "
                "publish it again."
            ) from error

    def check_host(self) -> None:
        """Raise BundleError, in one sentence, if this machine's processor cannot run the bundle."""
        check_machine(self.name, self.target, self.arch, self.tvm_target, self.cpu_features)


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
        fitting, refusals = best_first(Entry.of(store.get_release(name, version)))
        if not fitting:
            reasons = "; ".join(refusals) or "it holds none"
            raise BundleError(f"no bundle of release {name} {version} runs on this machine: {reasons}")
        for entry in fitting:
            yield cached(store, entry.sha256, known)


def cached(store: ReleaseStore, sha256: str, known: Settings) -> Path:
    """The blob of a digest in the cache: its digest is checked again, and it is fetched if it is missing or damaged."""
    return _cached(sha256, lambda path: store.get_blob(sha256, path), known)


def _cached(sha256: str, fetch: Callable[[Path], None], known: Settings) -> Path:
    path = cache_folder(known) / f"{sha256}.tar.gz"
    with suppress(OSError):
        if sha256_file(path) == sha256:
            return path
    fetch(path)
    return path


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
            yield cached(store, blob["digest"], known)
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
