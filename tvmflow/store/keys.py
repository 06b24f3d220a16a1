"""Keys of the release store: the names, versions and digests that are allowed, and the place of each object."""

import re

from tvmflow.errors import StoreError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def blob_key(sha256: str) -> str:
    """Return the key of a blob. Raises StoreError when `sha256` is not a digest."""
    require_sha256(sha256)
    return f"blobs/sha256/{sha256}"


def release_key(name: str, version: str) -> str:
    """Return the key of a release's document. Raises StoreError for a name or version that is not allowed."""
    require_name("name", name)
    require_name("version", version)
    return f"releases/{name}/{version}/release.json"


def statement_key(name: str, version: str) -> str:
    """Return the key of the signed statement on a release. Raises StoreError for a name or version not allowed."""
    return release_key(name, version).removesuffix("release.json") + "statement.json"


def channel_key(name: str, channel: str) -> str:
    """Return the key of a channel's document. Raises StoreError for a name or channel that is not allowed."""
    require_name("name", name)
    require_name("channel", channel)
    return f"channels/{name}/{channel}.json"


def require_name(role: str, text: str) -> None:
    """Raise StoreError unless `text` may be a name, version or channel; `role` is that word in the message."""
    if not NAME.fullmatch(text):
        raise StoreError(
            f"The release {role} {text!r} is not valid: use up to 128 letters, digits, '.', '_' and '-', the first of "
            "them a letter, a digit or '_'."
        )


def require_sha256(text: str) -> None:
    """Raise StoreError unless `text` is a SHA-256 digest in lower-case hexadecimal digits."""
    if not _SHA256.fullmatch(text):
        raise StoreError(f"{text!r} is not a SHA-256 digest: expected 64 lower-case hexadecimal digits.")


def numeric_order(version: str) -> list[tuple[int, str]]:
    """Return a key to sort versions by: runs of digits compare as numbers, the rest as text (9 before 10)."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", version)]
