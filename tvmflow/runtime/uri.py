"""Where a bundle is: a path, or a URI from which it is fetched."""

import importlib
from collections.abc import Generator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tvmflow.errors import BundleError, StoreError

# Who fetches what. Named, not imported: the runtime alone needs neither a store nor its libraries.
_FETCHERS = {"s3": "tvmflow.fetch", "release": "tvmflow.fetch"}


def files(place: Path | str) -> Generator[Path, None, None]:
    """The bundles at a path, `file://`, `s3://BUCKET/KEY` or `release://NAME@CHANNEL` (or `/VERSION`).

    A release has several: the one that asks most of this machine comes first, and the next is fetched only when it is
    asked for. A file that is not kept in the cache is gone when the iterator is. Raises BundleError for another kind of
    address, StoreError when it cannot be fetched.
    """
    text = str(place)
    scheme, separator, _ = text.partition("://")
    if isinstance(place, Path) or not separator:
        yield Path(place)
    elif scheme == "file":
        yield _local(text)
    elif scheme in _FETCHERS:
        try:
            fetcher = importlib.import_module(_FETCHERS[scheme])
        except ImportError as error:
            raise StoreError(
                f"fetching {text!r} needs the package {error.name!r}: install tvmflow with its extra, tvmflow[store]"
            ) from error
        yield from fetcher.bundles(text)
    else:
        known = ", ".join(f"{name}://" for name in ("file", *_FETCHERS))
        raise BundleError(f"{text!r} is no address of a bundle; give a path, or one of {known}")


def _local(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise BundleError(f"{uri!r} names another machine; write file:///PATH, with three slashes")
    return Path(unquote(parts.path))
