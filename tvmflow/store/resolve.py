"""The bundles of a release that a machine can run, kept in a folder by their digests."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tvmflow.bundle import missing_weights, sha256_file
from tvmflow.bundle.manifest import check_machine
from tvmflow.errors import BundleError, StoreError
from tvmflow.runtime.choose import best_first
from tvmflow.store.releases import ReleaseStore


def fetch_bundles(store: ReleaseStore, name: str, version: str, cache: Path) -> Iterator[Path]:
    """The bundles of a release that this machine can run, the one that asks most of it first.

    Each is fetched into `cache` when it is asked for. Raises StoreError when the store cannot be read, BundleError when
    none of them is for this machine.
    """
    fitting, refusals = best_first((entry, entry) for entry in TargetEntry.read_all(store.get_release(name, version)))
    if not fitting:
        reasons = "; ".join(refusals) or "it holds none"
        raise BundleError(f"no bundle of release {name} {version} runs on this machine: {reasons}")
    for entry in fitting:
        yield fetch_bundle(store, entry.sha256, cache)


def fetch_bundle(store: ReleaseStore, sha256: str, cache: Path) -> Path:
    """The bundle of a digest in the folder, and beside it the weights that it is without.

    The digests are checked anew, and what is missing or damaged is fetched.
    """
    path = _fetched(store, sha256, cache / f"{sha256}.tar.gz")
    weights = missing_weights(path)
    if weights is not None:
        _fetched(store, weights.sha256, cache / weights.sha256)
    return path


def _fetched(store: ReleaseStore, sha256: str, path: Path) -> Path:
    with suppress(OSError):
        if sha256_file(path) == sha256:
            return path
    store.get_blob(sha256, path)
    return path


@dataclass(frozen=True)
class TargetEntry:
    """A target of a release: what its bundle asks of a machine, and the bundle's digest."""

    name: str
    target: str
    arch: str
    tvm_target: Mapping[str, Any]
    cpu_features: tuple[str, ...]
    sha256: str

    @classmethod
    def read_all(cls, release: Mapping[str, Any]) -> list[Self]:
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
