"""Where a served model comes from: a bundle, a release, or the release that a channel points at."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tvmflow import bundle, runtime
from tvmflow.errors import BundleError
from tvmflow.runtime import CompiledModel
from tvmflow.serving.protocol import DATATYPES
from tvmflow.store import ReleaseStore, channels, resolve
from tvmflow.verification import verify


@dataclass(frozen=True)
class Source:
    """What to serve: `wanted` says which version now, `bundles` gives its files, the best for this machine first.

    `moves` is whether `wanted` may change its answer.
    """

    name: str
    wanted: Callable[[], str]
    bundles: Callable[[str], Iterator[Path]]
    moves: bool = False


@dataclass(frozen=True)
class Served:
    """A version of a model, loaded."""

    name: str
    version: str
    model: CompiledModel


def bundle_source(path: Path) -> Source:
    """One bundle; its version is the beginning of its digest. Raises BundleError."""
    name = bundle.read_manifest(path).name
    version = bundle.sha256_file(path)[:12]
    return Source(name, lambda: version, lambda _: iter([path]))


def release_source(store: ReleaseStore, name: str, version: str, cache: Path) -> Source:
    """One release; its bundles are kept in the folder `cache`."""
    return Source(name, lambda: version, lambda wanted: resolve.fetch_bundles(store, name, wanted, cache))


def channel_source(store: ReleaseStore, name: str, channel: str, cache: Path) -> Source:
    """The release that a channel points at; bundles are kept in the folder `cache`."""
    return Source(
        name,
        lambda: channels.read(store, name, channel).version,
        lambda wanted: resolve.fetch_bundles(store, name, wanted, cache),
        moves=True,
    )


def load(source: Source, version: str, threads: int | None) -> Served:
    """Fetch, verify and load a version.

    The golden sample has run in another process before anything of a bundle is loaded in this one. Raises StoreError,
    BundleError when no bundle of the version runs here, VerdictError when one computes something else.
    """
    refusals = []
    for path in source.bundles(version):
        try:
            manifest = verify(path).manifest
            unknown = {spec.dtype for spec in (*manifest.inputs, *manifest.outputs)} - DATATYPES.keys()
            if unknown:
                raise BundleError(f"{', '.join(sorted(unknown))} cannot be served; build it with another dtype")
            # Workers that look for work while they have none would take the cores from reading and writing requests.
            return Served(source.name, version, runtime.load(path, threads=threads, spin=0))
        except BundleError as error:
            refusals.append(str(error))
    raise BundleError(f"{source.name} {version} cannot be served: {'; '.join(refusals)}")
