"""The S3 client of a release store, and sentences in the place of botocore's errors."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import functools
import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from tvmflow.errors import StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.loaders import Loader
    from mypy_boto3_s3 import S3Client

    from tvmflow.store.config import StoreConfig

_REFUSED_KEYS = {
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_FORBIDDEN = {"403", "AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden"}
_SKEWED = {"RequestExpired", "RequestTimeTooSkewed"}
# Servers of other makers have their own names for being overloaded or failing, or none: the HTTP status tells.
_BUSY_STATUSES = {429, 500, 502, 503, 504}
_BUSY = {"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
# S3 allows 15 minutes. From here on a server that only says "denied" is taken to complain about the clock.
_SUSPICIOUS_SKEW_SECONDS = 300
_FEW_LETTERS = 3


def connect(config: StoreConfig) -> S3Client:
    """Create a client for the store's server. Raises StoreError when boto3 is missing or finds no usable profile."""
    try:
        from botocore.config import Config
        from botocore.session import Session
    except ImportError as error:
        raise StoreError("The release store needs boto3: install tvmflow with its extra, tvmflow[pipeline].") from error
    settings = Config(
        connect_timeout=config.connect_timeout,
        read_timeout=config.read_timeout,
        retries={"total_max_attempts": config.attempts, "mode": "standard"},
        s3={"addressing_style": "path" if config.path_style else "virtual"},
        request_checksum_calculation=config.checksums,
        response_checksum_validation=config.checksums,
        # A proxy from the environment cannot reach this machine's own loopback address.
        proxies={} if _is_loopback(config.endpoint) else None,
    )
    with explain_errors(config, "preparing the connection"):
        session = Session()
        session.register_component("data_loader", _service_models())
        client = session.create_client(
            "s3",
            endpoint_url=config.endpoint,
            region_name=config.region,
            aws_access_key_id=config.access_key,
            aws_secret_access_key=config.secret_key,
            aws_session_token=config.session_token,
            config=settings,
        )
        return cast("S3Client", client)


@functools.cache
def _service_models() -> Loader:
    """The loader of S3's description, shared by all clients: parsing that costs more than the rest of a client."""
    from botocore.loaders import Loader

    return Loader()


@contextlib.contextmanager
def explain_errors(config: StoreConfig, action: str) -> Iterator[None]:
    """Turn an error that botocore raises in the body into one StoreError; `action` completes "while ..."."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        kind = StoreUnavailableError if is_busy(error) else StoreError
        raise kind(_without_secrets(config, _explain_answer(config, action, error))) from error
    except BotoCoreError as error:
        kind = StoreUnavailableError if isinstance(error, _silences()) else StoreError
        raise kind(_without_secrets(config, _explain_silence(config, action, error))) from error
    except ResponseParserError as error:
        raise StoreError(f"The server at {config.server} is not an S3 server: correct the endpoint.") from error


def _silences() -> tuple[type[Exception], ...]:
    """The errors of a server that is away for now."""
    from botocore import exceptions

    return (
        exceptions.ConnectTimeoutError,
        exceptions.EndpointConnectionError,
        exceptions.ReadTimeoutError,
        exceptions.ConnectionClosedError,
        exceptions.IncompleteReadError,
        exceptions.ResponseStreamingError,
    )


def code_of(error: ClientError) -> str:
    """Return the server's name for an error, e.g. `NoSuchKey`, or the HTTP status where it has no name."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def is_busy(error: ClientError) -> bool:
    """Return whether a server says that it is failing or overloaded for now."""
    return status_of(error) in _BUSY_STATUSES or code_of(error) in _BUSY


def status_of(error: ClientError) -> int | None:
    """Return the HTTP status of an error, None if it has none."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")


def _explain_answer(config: StoreConfig, action: str, error: ClientError) -> str:
    code = code_of(error)
    server = config.server
    skew = _clock_skew(error)
    if code in _SKEWED or (code in _FORBIDDEN and abs(skew) > _SUSPICIOUS_SKEW_SECONDS):
        by = f"{abs(skew) / 60:.0f} minutes {'ahead of' if skew > 0 else 'behind'}" if skew else "apart from"
        return f"This machine's clock is {by} {server}, which therefore refuses its requests: set the clock."
    if code in _REFUSED_KEYS:
        return f"{_capital(server)} refuses the credentials ({code}): check access key, secret key and region."
    if code in _FORBIDDEN:
        return (
            f"{_capital(server)} does not allow these credentials to act on the bucket {config.bucket!r} ({code} while "
            f"{action}): check access key and secret key, and grant them listing, reading and writing there."
        )
    if code == "NoSuchBucket":
        return f"The bucket {config.bucket!r} does not exist at {server}: create it or correct its name."
    if code in ("PermanentRedirect", "IllegalLocationConstraintException", "301"):
        return f"The bucket {config.bucket!r} is in another region than {config.region!r}: correct the region."
    # S3's errors have names; a bare HTTP status comes from another kind of server, or from one in trouble. botocore
    # gives the status 500 to an answer that is no XML, too.
    if is_busy(error):
        also = ", or correct the endpoint if it is no S3 server" if code.isdigit() else ""
        return f"{_capital(server)} is failing or overloaded ({code} while {action}): try again later{also}."
    if code.isdigit():
        return (
            f"The server at {server} is not an S3 server, or it is failing (HTTP status {code} while {action}): "
            "correct the endpoint, or see the server's log."
        )
    message = str(error.response.get("Error", {}).get("Message", "")).rstrip(". ") or "no explanation"
    return f"{_capital(server)} refused a request while {action} ({code}: {message}): check the server's log."


def _explain_silence(config: StoreConfig, action: str, error: BotoCoreError) -> str:
    from botocore import exceptions

    server = config.server
    match error:
        case (
            exceptions.NoCredentialsError()
            | exceptions.PartialCredentialsError()
            | exceptions.CredentialRetrievalError()
        ):
            return f"There are no credentials for {server}: set an access key and a secret key."
        case exceptions.SSLError():
            return (
                f"No secure connection to {server} can be made: check that it speaks https and that its certificate "
                "is trusted here."
            )
        case (
            exceptions.ConnectTimeoutError() | exceptions.EndpointConnectionError() | exceptions.ProxyConnectionError()
        ):
            return f"Cannot reach {server}: start the server, or correct the endpoint or the network."
        case exceptions.ReadTimeoutError():
            return (
                f"{_capital(server)} stopped answering for {config.read_timeout:g} seconds while {action}: check "
                "the server and try again."
            )
        case exceptions.HTTPClientError() | exceptions.IncompleteReadError() | exceptions.ResponseStreamingError():
            return (
                f"{_capital(server)} broke the connection off while {action}: check that it still runs and try again."
            )
        case _:
            return f"The release store at {server} cannot be used while {action}: {str(error).rstrip('. ')}."


def _clock_skew(error: ClientError) -> float:
    """Seconds by which this clock is ahead of the server's, 0 when the answer has no date."""
    header = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        server_time = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    if server_time.tzinfo is None:
        server_time = server_time.replace(tzinfo=datetime.UTC)
    return (_now() - server_time).total_seconds()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _without_secrets(config: StoreConfig, sentence: str) -> str:
    for secret in (config.secret_key, config.session_token, config.access_key):
        # A few letters stand in any sentence, and are no secret.
        if secret and len(secret) > _FEW_LETTERS:
            sentence = sentence.replace(secret, "***")
    return sentence


def _is_loopback(endpoint: str | None) -> bool:
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
