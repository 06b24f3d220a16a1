"""The sentence for each error that an S3 server or boto3 may answer with, and the settings of the connection."""

import datetime
import sys
from dataclasses import replace
from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from tvmflow.errors import StoreError, StoreUnavailableError
from tvmflow.store import StoreConfig
from tvmflow.store import client as client_module
from tvmflow.store.client import code_of, connect, explain_errors

CONFIG = StoreConfig(
    "models", endpoint="http://127.0.0.1:9", access_key="AKID-x", secret_key="SECRET-x", session_token="TOKEN-x"
)
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def _sentence(error: Exception, config: StoreConfig = CONFIG) -> str:
    with pytest.raises(StoreError) as refusal, explain_errors(config, "trying it"):
        raise error
    assert refusal.value.__cause__ is error
    return str(refusal.value)


def _answer(code: str, message: str = "", date: str | None = None, status: int = 400) -> boto.ClientError:
    headers = {} if date is None else {"date": date}
    answer: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    return boto.ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("InvalidAccessKeyId", "refuses the credentials (InvalidAccessKeyId)"),
        ("SignatureDoesNotMatch", "check access key, secret key and region"),
        ("ExpiredToken", "refuses the credentials"),
        ("AccessDenied", "'models' (AccessDenied while trying it)"),
        ("403", "grant them listing, reading and writing"),
        ("NoSuchBucket", "The bucket 'models' does not exist"),
        ("PermanentRedirect", "another region than 'us-east-1'"),
        ("IllegalLocationConstraintException", "correct the region"),
        ("301", "correct the region"),
        ("SlowDown", "overloaded (SlowDown while trying it)"),
        ("RequestTimeTooSkewed", "set the clock"),
        ("404", "is not an S3 server"),
        ("Odd", "(Odd: no explanation)"),
    ],
)
def test_an_error_of_the_server_is_one_sentence(code: str, part: str) -> None:
    assert part in _sentence(_answer(code))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *((503, "SlowDown"), (503, "SlowDownWrite"), (503, "XMinioServerNotInitialized")),
        *((503, "RequestLimitExceeded"), (429, "TooManyRequests"), (429, "429"), (500, "500"), (502, "502")),
        *((504, "504"), (400, "RequestTimeout")),
    ],
)
def test_releases_wait_for_a_server_that_is_overloaded_or_failing(status: int, code: str) -> None:
    words = rf"overloaded \({code} while trying it\): try again later"
    with pytest.raises(StoreUnavailableError, match=words), explain_errors(CONFIG, "trying it"):
        raise _answer(code, status=status)


@pytest.mark.parametrize(
    ("status", "code"), [(403, "403"), (404, "404"), (501, "NotImplemented"), (507, "StorageFull")]
)
def test_nobody_waits_for_a_server_that_refuses(status: int, code: str) -> None:
    with pytest.raises(StoreError) as refusal, explain_errors(CONFIG, "trying it"):
        raise _answer(code, status=status)
    assert not isinstance(refusal.value, StoreUnavailableError)


def test_the_servers_explanation_is_quoted_without_secrets() -> None:
    sentence = _sentence(_answer("Odd", "AKID-x used SECRET-x and TOKEN-x. "))
    assert "(Odd: *** used *** and ***)" in sentence
    assert code_of(boto.ClientError({}, "PutObject")) == "unknown"


def test_letters_of_a_sentence_are_no_secret() -> None:
    config = replace(CONFIG, access_key="a", secret_key="in", session_token=None)
    assert "(Odd: a name in a sentence)" in _sentence(_answer("Odd", "a name in a sentence"), config)


@pytest.mark.parametrize(
    ("seconds", "part"),
    [
        *((301, "is 5 minutes ahead of"), (-301, "is 5 minutes behind"), (7200, "120 minutes ahead of")),
        *((300, "grant them"), (-300, "grant them"), (0, "grant")),
    ],
)
def test_a_denial_is_the_clocks_fault_beyond_five_minutes(
    seconds: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_now", lambda: NOW + datetime.timedelta(seconds=seconds))
    assert part in _sentence(_answer("AccessDenied", date="Thu, 01 Jan 2026 00:00:00 GMT"))
    assert part in _sentence(_answer("AccessDenied", date="Thu, 01 Jan 2026 00:00:00 -0000"))


@pytest.mark.parametrize("date", [None, "yesterday"])
def test_a_server_without_a_clock_is_believed(date: str | None) -> None:
    assert "grant them" in _sentence(_answer("AccessDenied", date=date))
    assert "apart from" in _sentence(_answer("RequestExpired", date=date))


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (boto.NoCredentialsError(), "no credentials"),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), "no credentials"),
        (boto.SSLError(endpoint_url="x", error="y"), "certificate"),
        (boto.ConnectTimeoutError(endpoint_url="x"), "Cannot reach"),
        (boto.EndpointConnectionError(endpoint_url="x"), "Cannot reach"),
        (boto.ProxyConnectionError(proxy_url="x"), "Cannot reach"),
        (boto.ReadTimeoutError(endpoint_url="x"), "stopped answering for 30 seconds"),
        (boto.ConnectionClosedError(endpoint_url="x"), "broke the connection off"),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), "broke the connection off"),
        (boto.ProfileNotFound(profile="SECRET-x"), "cannot be used while trying it"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_server_that_does_not_answer_is_one_sentence(error: Exception, part: str) -> None:
    sentence = _sentence(error)
    assert part in sentence
    assert "\n" not in sentence
    assert "SECRET-x" not in sentence


def test_an_answer_that_is_no_xml_is_one_sentence() -> None:
    assert "is not an S3 server" in _sentence(ResponseParserError("no XML"))


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.config", None)
    with pytest.raises(StoreError, match=r"needs boto3: install .*tvmflow\[pipeline\]"):
        connect(CONFIG)


def test_amazon_is_named_by_its_region() -> None:
    config = replace(CONFIG, endpoint=None, region="eu-west-1")
    assert "Amazon S3 in eu-west-1" in _sentence(_answer("NoSuchBucket"), config)
    assert _sentence(_answer("InvalidAccessKeyId"), config).startswith("Amazon S3")
    assert _sentence(_answer("InvalidAccessKeyId")).startswith("The S3 endpoint")


def test_a_connection_has_the_settings_of_the_store() -> None:
    settings: Any = connect(replace(CONFIG, region="eu-west-1")).meta.config
    assert (settings.connect_timeout, settings.read_timeout) == (2.0, 30.0)
    assert settings.retries["total_max_attempts"] == 3
    assert settings.retries["mode"] == "standard"
    assert settings.s3 == {"addressing_style": "path"}
    assert settings.request_checksum_calculation == settings.response_checksum_validation == "when_required"
    assert settings.region_name == "eu-west-1"
    hosted: Any = connect(replace(CONFIG, path_style=False, checksums="when_supported")).meta.config
    assert hosted.s3 == {"addressing_style": "virtual"}
    assert hosted.request_checksum_calculation == "when_supported"


@pytest.mark.parametrize(
    ("endpoint", "is_loopback"),
    [
        ("http://127.0.0.1:9", True),
        ("http://localhost", True),
        ("http://[::1]:9", True),
        ("http://10.0.0.1", False),
        ("http://s3.example.org", False),
        (None, False),
    ],
)
def test_a_proxy_is_passed_by_for_this_machine_only(endpoint: str | None, is_loopback: bool) -> None:
    settings: Any = connect(replace(CONFIG, endpoint=endpoint)).meta.config
    assert settings.proxies == ({} if is_loopback else None)


def test_the_smallest_and_largest_values_are_taken() -> None:
    for bucket in ("abc", "a" * 63):
        assert StoreConfig(bucket).bucket == bucket
    config = StoreConfig("abc", connect_timeout=0.001, read_timeout=0.001, attempts=1, part_size=5 * 2**20)
    assert (config.prefix, config.region, config.uri) == ("", "us-east-1", "s3://abc")
    assert replace(config, prefix="a/b.c-d_e").uri == "s3://abc/a/b.c-d_e"
    assert StoreConfig("abc").part_size == 16 * 2**20
