"""The source of a served model: a bundle, a release, or the release that a channel holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tvmflow import bundle, runtime
from tvmflow.errors import BundleError, UncheckedBundleError
from tvmflow.runtime import CompiledModel
from tvmflow.serving.protocol import DATATYPES
from tvmflow.store import ReleaseStore, channels, resolve
from tvmflow.verification import verify


@dataclass(frozen=True)
class Source:
    """A model to serve, by name.

    `desired_version` returns the version to serve now; it can change only if `is_channel` is true. `bundles` yields the
    paths of a version's bundles, the best for this machine first. Both raise StoreError when the store cannot be read.
    """

    name: str
    desired_version: Callable[[], str]
    bundles: Callable[[str], Iterator[Path]]
    is_channel: bool = False


@dataclass(frozen=True)
class ServedModel:
    """A version of a model that is loaded, from the bundle at `path`."""

    name: str
    version: str
    model: CompiledModel
    path: Path | None = None


def bundle_source(path: Path) -> Source:
    """Return the source of one bundle; its version is the first 12 digits of its SHA-256. Raises BundleError."""
    name = bundle.read_manifest(path).name
    version = bundle.sha256_file(path)[:12]
    return Source(name, lambda: version, lambda _: iter([path]))


def release_source(store: ReleaseStore, name: str, version: str, cache: Path) -> Source:
    """Return the source of one release; its bundles are kept in the folder `cache`."""
    return Source(name, lambda: version, lambda item: resolve.fetch_bundles(store, name, item, cache))


def channel_source(store: ReleaseStore, name: str, channel: str, cache: Path) -> Source:
    """Return the source of the release that a channel holds; its bundles are kept in the folder `cache`."""
    return Source(
        name,
        lambda: channels.read_version(store, name, channel),
        lambda version: resolve.fetch_bundles(store, name, version, cache),
        is_channel=True,
    )


def load(source: Source, version: str, threads: int | None) -> ServedModel:
    """Fetch, verify and load a version; `threads` is the number of the model's workers, None for TVM_NUM_THREADS,
    else the machine's cores, at most the bundle's `max_threads`.

    A bundle's golden sample runs in another process before its library is loaded in this one. Raises StoreError when
    the version cannot be fetched, BundleError when none of its bundles is of this model and can be served here,
    UncheckedBundleError when one of them could not be checked now, and VerdictError when a bundle's outputs differ from
    its golden sample's.
    """
    refusals: list[BundleError] = []
    for path in source.bundles(version):
        try:
            manifest = verify(path).manifest
            dtypes = {spec.dtype for spec in (*manifest.inputs, *manifest.outputs)} - DATATYPES.keys()
            if dtypes:
                raise BundleError(f"{', '.join(sorted(dtypes))} cannot be served; build it with another dtype")
            # Idle workers that look for work would take the cores from reading and writing requests.
            return ServedModel(source.name, version, runtime.load(path, threads=threads, spin=0), path)
        except BundleError as error:
            refusals.append(error)
    is_unchecked = any(isinstance(error, UncheckedBundleError) for error in refusals)
    kind = UncheckedBundleError if is_unchecked else BundleError
    raise kind(f"{source.name} {version} cannot be served: {'; '.join(map(str, refusals))}")
