"""Release documents as bytes: their canonical JSON, the format number, and the blobs that they refer to."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tvmflow.errors import StoreError
from tvmflow.store.keys import require_sha256

RELEASE_FORMAT = 1
"""Raised whenever a reader of the previous number could misread a document of the new number."""
_BLOB_ADDRESS = re.compile(r"(?:^|/)blobs/sha256/([0-9a-f]{64})$")


def encode(name: str, version: str, release: Mapping[str, Any]) -> bytes:
    """Return a document as canonical JSON: equal documents give equal bytes.

    `name` and `version` name the release in the message. Raises StoreError for a value that JSON cannot hold.
    """
    try:
        text = json.dumps(dict(release), sort_keys=True, ensure_ascii=False, indent=2, allow_nan=False)
        return f"{text}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"The release {name} {version} cannot be written as JSON: {error}.") from error


def decode(content: bytes, uri: str) -> dict[str, Any]:
    """Read a release document and return it; `uri` names it in errors.

    Raises StoreError for content that is not a JSON object, and for a document whose `format` is newer than this
    version reads. A document without a format is one of the first format.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{uri} is damaged: it is not a JSON document; restore it from a backup.") from error
    if not isinstance(document, dict):
        raise StoreError(f"{uri} is damaged: it is not a JSON object; restore it from a backup.")
    number = document.get("format", RELEASE_FORMAT)
    if type(number) is not int or number < 1:
        raise StoreError(f"{uri} is damaged: its format {number!r} is not a number; restore it from a backup.")
    if number > RELEASE_FORMAT:
        raise StoreError(f"{uri} has format {number}, this tvmflow reads up to {RELEASE_FORMAT}; upgrade tvmflow.")
    return document


def list_references(document: Mapping[str, Any]) -> dict[str, set[int]]:
    """Return the digests of the blobs that a document refers to, each with its sizes in bytes in the document.

    A reference is `"sha256": DIGEST`, with an optional `"size"` beside it, or an address that ends in
    `blobs/sha256/DIGEST`, at any depth. Raises StoreError for a `sha256` that is not a digest.
    """
    references: dict[str, set[int]] = {}
    pending: list[Any] = [document]
    while pending:
        match pending.pop():
            case str() as text:
                if address := _BLOB_ADDRESS.search(text):
                    references.setdefault(address[1], set())
            case Mapping() as section:
                digest, size = section.get("sha256"), section.get("size")
                if isinstance(digest, str):
                    require_sha256(digest)
                    references.setdefault(digest, set()).update([size] if isinstance(size, int) else [])
                pending.extend(reversed(list(section.values())))
            case list() | tuple() as items:
                pending.extend(reversed(items))
    return references
