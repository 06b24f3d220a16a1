"""The bundles of a release that a machine can run, kept in a folder under their digests."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tvmflow.bundle import missing_weights, read_manifest, sha256_file
from tvmflow.bundle.manifest import check_machine
from tvmflow.bundle.signature import trusted_keys
from tvmflow.documents.release import Release
from tvmflow.errors import BundleError
from tvmflow.runtime.selection import select_runnable
from tvmflow.store.releases import ReleaseStore


def fetch_bundles(store: ReleaseStore, name: str, version: str, cache: Path) -> Iterator[Path]:
    """Fetch the bundles of a release that this machine can run; yield their paths, the most demanding bundle first.

    Each is fetched into the folder `cache` when the iterator reaches it. If TVMFLOW_TRUSTED_KEYS names keys, one of
    them must have signed the release. Raises StoreError when the store cannot be read, or the release is not signed by
    such a key; BundleError when this machine can run none of the bundles, or a bundle names another model than the
    release.
    """
    entries = TargetEntry.read_all(store.get_release(name, version, trusted=trusted_keys()))
    fitting, refusals = select_runnable((entry, entry) for entry in entries)
    if not fitting:
        reasons = "; ".join(refusals) or "it holds none"
        raise BundleError(f"no bundle of release {name} {version} runs on this machine: {reasons}")
    for entry in fitting:
        yield fetch_target(store, entry, cache)


def fetch_target(store: ReleaseStore, entry: "TargetEntry", cache: Path) -> Path:
    """Fetch the bundle of a release's target, and the weights that it lacks, into the folder `cache`; return its path.

    Files that the folder has undamaged are not fetched again. Raises StoreError when a file cannot be fetched, and
    BundleError when the bundle names another model than the release: a signature covers the name in the bundle, but not
    where the bundle is stored.
    """
    path = fetch_bundle(store, entry.sha256, cache)
    owner = read_manifest(path).name
    if owner != entry.name:
        raise BundleError(f"the release of {entry.name!r} holds a bundle of {owner!r}; publish the release again")
    return path


def fetch_bundle(store: ReleaseStore, sha256: str, cache: Path) -> Path:
    """Fetch a bundle by its digest into the folder `cache` and return its path.

    Weights that the store keeps apart are fetched beside it. The digests of files in the folder are checked again; a
    file that is missing or damaged is fetched. Raises StoreError when that fails.
    """
    path = _fetch_file(store, sha256, cache / f"{sha256}.tar.gz")
    weights = missing_weights(path)
    if weights is not None:
        _fetch_file(store, weights.sha256, cache / weights.sha256)
    return path


def _fetch_file(store: ReleaseStore, sha256: str, path: Path) -> Path:
    with suppress(OSError):
        if sha256_file(path) == sha256:
            return path
    store.get_blob(sha256, path)
    return path


@dataclass(frozen=True)
class TargetEntry:
    """A target of a release: the requirements of its bundle, and the bundle's digest."""

    name: str
    target: str
    arch: str
    tvm_target: Mapping[str, Any]
    cpu_features: tuple[str, ...]
    sha256: str

    @classmethod
    def read_all(cls, release: Release) -> list[Self]:
        """Return the targets of a release."""
        return [
            cls(release.name, item.target, item.arch, item.tvm_target, item.cpu_features, item.bundle.sha256)
            for item in release.targets
        ]

    def check_host(self) -> None:
        """Raise BundleError, in one sentence, if this machine's processor cannot run the bundle."""
        check_machine(self.name, self.target, self.arch, self.tvm_target, self.cpu_features)
