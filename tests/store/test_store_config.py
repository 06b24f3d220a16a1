"""The settings of a store and the addresses in it."""

import pickle

import pytest

from tvmflow.errors import SettingsError, StoreError
from tvmflow.store import S3Uri, StoreConfig, parse_uri


def test_secrets_are_not_in_the_repr() -> None:
    config = StoreConfig("releases", access_key="AKID-visible", secret_key="s3cr3t-value", session_token="t0ken-value")
    text = f"{config!r} {config}"
    assert "releases" in text
    assert not [each for each in ("AKID-visible", "s3cr3t-value", "t0ken-value") if each in text]


def test_a_config_survives_pickling_for_a_worker_process() -> None:
    config = StoreConfig("releases", prefix="a/b", access_key="one", secret_key="two")
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - its own pickle


@pytest.mark.parametrize("bucket", ["", "ab", "Upper", "under_score", "a/b", "-start", "a" * 64, "releases\n"])
def test_an_invalid_bucket_is_refused(bucket: str) -> None:
    with pytest.raises(SettingsError, match="bucket name"):
        StoreConfig(bucket)


@pytest.mark.parametrize("prefix", ["/a", "a/", "a//b", "../a", "a/../b", "a b"])
def test_an_invalid_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(SettingsError, match="prefix"):
        StoreConfig("releases", prefix=prefix)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("127.0.0.1:9000", "ftp://host", "http://", "http://:80", "http://host:port", "http://host:0", "http://[host"),
        *("http://host/?a=b", "http://host/#part"),
    ],
)
def test_an_endpoint_that_is_no_server_address_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="endpoint"):
        StoreConfig("releases", endpoint=endpoint)


@pytest.mark.parametrize("endpoint", ["http://host", "https://host:1", "http://127.0.0.1:65535/", "http://host/s3"])
def test_an_endpoint_is_the_address_of_a_server(endpoint: str) -> None:
    assert StoreConfig("releases", endpoint=endpoint).server == f"the S3 endpoint {endpoint}"


@pytest.mark.parametrize("credentials", ["user:hunter2", "hunter2", ":hunter2"])
def test_credentials_inside_the_endpoint_are_refused_and_not_repeated(credentials: str) -> None:
    with pytest.raises(SettingsError, match="credentials inside") as refusal:
        StoreConfig("releases", endpoint=f"http://{credentials}@host:9000")
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    "credentials",
    [{"access_key": "one"}, {"secret_key": "two"}, {"session_token": "three"}],
    ids=lambda each: next(iter(each)),
)
def test_half_of_the_credentials_is_refused(credentials: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="give"):
        StoreConfig("releases", **credentials)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("connect_timeout", 0.0), ("connect_timeout", -1.0), ("read_timeout", 0.0), ("read_timeout", -1.0)),
        *(("attempts", 0), ("part_size", 5 * 2**20 - 1)),
    ],
)
def test_limits_that_cannot_work_are_refused(field: str, value: float) -> None:
    with pytest.raises(SettingsError, match="release store's"):
        StoreConfig("releases", **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["access_key", "secret_key", "session_token"])
def test_credentials_of_several_lines_are_refused_and_not_shown(field: str) -> None:
    credentials = {"access_key": "a", "secret_key": "s", field: "hush\nhush"}
    with pytest.raises(SettingsError, match="credentials have a line break") as refusal:
        StoreConfig("releases", **credentials)  # type: ignore[arg-type]
    assert "hush" not in str(refusal.value)


def test_an_address_is_split_into_bucket_and_key() -> None:
    uri = parse_uri("s3://releases/some/prefix/blobs/sha256/00")
    assert uri == S3Uri("releases", "some/prefix/blobs/sha256/00")
    assert str(uri) == "s3://releases/some/prefix/blobs/sha256/00"


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "",
            "releases/key",
            "http://releases/key",
            "s3://releases",
            "s3://releases/",
            "s3:///key",
            "s3://releases//a",
        ),
        *("s3://releases/a/", "s3://Upper/key", "s3://releases/../a", "s3://releases/a/./b"),
    ],
)
def test_what_is_no_address_of_an_object_is_refused(uri: str) -> None:
    with pytest.raises(StoreError, match="s3://BUCKET/KEY"):
        parse_uri(uri)
