"""The address and connection settings of a release store, and the `s3://` addresses of its objects."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from tvmflow.errors import SettingsError, StoreError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SMALLEST_PART = 5 * 2**20


@dataclass(frozen=True)
class StoreConfig:
    """The bucket of a release store, its endpoint and credentials, and the timeouts of requests.

    Without `access_key` boto3 looks for credentials by itself (environment, profile, instance role). Without `endpoint`
    the server is Amazon S3 in `region`. With the defaults an unreachable endpoint is an error within ten seconds.
    Raises SettingsError for values that no S3 server accepts.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    path_style: bool = True
    # Servers other than Amazon's often refuse the checksums that boto3 adds by default. Every blob is compared with its
    # SHA-256 in any case.
    checksums: Literal["when_supported", "when_required"] = "when_required"
    connect_timeout: float = 2.0
    """Seconds."""
    read_timeout: float = 30.0
    """Seconds without a byte from the server."""
    attempts: int = 3
    """Tries of one request, the first included."""
    part_size: int = 16 * 2**20
    """Bytes: larger files are sent in parts of this size, at least 5 MiB."""
    folder: Path | None = None
    """The folder of this machine that is the bucket; there is no server then, or it is not asked."""
    lock: Path | None = None
    """A file that all writers lock, for a server without conditional writes that this machine alone writes to."""
    signing_key: Path | None = None
    """The private key that signs statements on releases and channels; they are not signed without one."""
    statement_days: float = 30.0
    """Days for which a statement on a channel is valid."""
    memory: Path | None = None
    """The folder in which this host keeps the highest number that it has seen of each channel."""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise SettingsError(
                f"The bucket name {self.bucket!r} is not valid on S3: use 3 to 63 lower-case letters, "
                "digits, '-' or '.'."
            )
        if self.prefix and not all(_PREFIX_SEGMENT.fullmatch(segment) for segment in self.prefix.split("/")):
            raise SettingsError(
                f"The store prefix {self.prefix!r} is not valid: use names of letters, digits, '.', '_' and '-' "
                "joined by single slashes, none at either end."
            )
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
        if (self.access_key is None) != (self.secret_key is None):
            raise SettingsError(
                "The release store has one half of its credentials: give access key and secret key both."
            )
        if self.session_token is not None and self.access_key is None:
            raise SettingsError("The release store has a session token alone: give its access key and secret key too.")
        if not all((text or "").isprintable() for text in (self.access_key, self.secret_key, self.session_token)):
            raise SettingsError(
                "The release store's credentials have a line break or another control character: give each in one line."
            )
        if self.connect_timeout <= 0 or self.read_timeout <= 0 or self.attempts < 1:
            raise SettingsError("The release store's timeouts must be above 0 seconds and its attempts at least 1.")
        if self.part_size < _SMALLEST_PART:
            raise SettingsError(f"The release store's part size is {self.part_size} bytes: S3 wants at least 5 MiB.")

    @property
    def server(self) -> str:
        """The server of the bucket, for messages: `the S3 endpoint URL`, `Amazon S3 in REGION` or `the folder PATH`."""
        if self.folder is not None:
            return f"the folder {self.folder}"
        return f"the S3 endpoint {self.endpoint}" if self.endpoint else f"Amazon S3 in {self.region}"

    @property
    def uri(self) -> str:
        """The address of the store itself, without a slash at its end."""
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


def _check_endpoint(endpoint: str) -> None:
    expected = "give it as http://HOST:PORT or https://HOST, without credentials"
    try:
        parts = urlsplit(endpoint)
        port_is_valid = parts.port != 0
    except ValueError as error:
        raise SettingsError(f"The S3 endpoint cannot be read as an address: {expected}.") from error
    if parts.username is not None or parts.password is not None:
        # The address is left out: it would carry the password into logs.
        raise SettingsError(f"The S3 endpoint has credentials inside its address: {expected}.")
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port_is_valid
        or parts.query
        or parts.fragment
    ):
        raise SettingsError(f"The S3 endpoint {endpoint!r} is not the address of a server: {expected}.")


@dataclass(frozen=True)
class S3Uri:
    """The bucket and the key of one object."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def parse_uri(uri: str) -> S3Uri:
    """Split `s3://BUCKET/KEY` into bucket and key. Raises StoreError for any other text."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not _BUCKET.fullmatch(bucket) or not key or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise StoreError(f"{uri!r} is not the address of an object on S3: expected s3://BUCKET/KEY.")
    return S3Uri(bucket, key)
