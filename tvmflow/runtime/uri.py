"""Addresses of bundles: a path, or a URI from which a bundle is fetched."""

import importlib
from collections.abc import Generator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tvmflow.errors import BundleError, StoreError

# The module that fetches bundles of a scheme, by name: the runtime alone needs neither a store nor its libraries.
_FETCHERS = {"s3": "tvmflow.fetch", "release": "tvmflow.fetch"}


def locate(path_or_uri: Path | str) -> Generator[Path, None, None]:
    """Yield the paths of the bundles at a path or URI.

    URIs are `file://`, `s3://BUCKET/KEY`, `release://NAME@CHANNEL` and `release://NAME/VERSION`. A release has several
    bundles: the best for this machine comes first, and each is fetched only when the caller asks for it. Bundles of a
    release, and blobs of a release store, are kept in a cache. Another object on S3 is fetched into a temporary file,
    which is removed when the generator is closed. Raises BundleError for another kind of address, StoreError when a
    bundle cannot be fetched.
    """
    text = str(path_or_uri)
    scheme, separator, _ = text.partition("://")
    if isinstance(path_or_uri, Path) or not separator:
        yield Path(path_or_uri)
    elif scheme == "file":
        yield _path_of(text)
    elif scheme in _FETCHERS:
        try:
            fetcher = importlib.import_module(_FETCHERS[scheme])
        except ImportError as error:
            raise StoreError(
                f"fetching {text!r} needs the package {error.name!r}: install tvmflow with its extra, tvmflow[store]"
            ) from error
        yield from fetcher.bundles(text)
    else:
        schemes = ", ".join(f"{name}://" for name in ("file", *_FETCHERS))
        raise BundleError(f"{text!r} is no address of a bundle; give a path, or one of {schemes}")


def _path_of(uri: str) -> Path:
    """The path of a `file://` URI. Raises BundleError for a file of another machine."""
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise BundleError(f"{uri!r} names another machine; write file:///PATH, with three slashes")
    return Path(unquote(parts.path))
