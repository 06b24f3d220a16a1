"""The check of a store whose server is down, refuses, or does not speak S3."""

import contextlib
import datetime
import http.server
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.compat import get_current_datetime

from support.releases import make_release
from tvmflow.errors import StoreError, StoreUnavailableError
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store import client as client_module


def _refusal(config: StoreConfig) -> str:
    with pytest.raises(StoreError) as refusal:
        ReleaseStore(config).check()
    sentence = str(refusal.value)
    assert config.secret_key not in sentence  # type: ignore[operator]
    assert config.access_key not in sentence  # type: ignore[operator]
    assert "\n" not in sentence
    return sentence


def test_a_check_creates_the_bucket_and_leaves_no_release(rclone: StoreConfig, rclone_data: Path) -> None:
    store = ReleaseStore(replace(rclone, bucket="fresh-bucket"))
    store.check()
    assert (rclone_data / "fresh-bucket").is_dir()
    assert store.list_names() == []


def test_a_check_can_be_repeated(config: StoreConfig) -> None:
    store = ReleaseStore(config)
    store.check()
    store.check()


def test_a_bucket_in_another_region_is_created(moto_server: StoreConfig) -> None:
    store = ReleaseStore(replace(moto_server, bucket="far-away", region="eu-west-1"))
    store.check()
    assert store.list_names() == []


def test_an_endpoint_that_is_down_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        sentence = _refusal(_somewhere(endpoint))
    assert endpoint in sentence
    assert "Cannot reach" in sentence


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        sentence = _refusal(replace(_somewhere(f"http://127.0.0.1:{silent.getsockname()[1]}"), read_timeout=0.2))
    assert "stopped answering for 0.2 seconds" in sentence


def test_a_wrong_secret_key_is_refused(rclone: StoreConfig) -> None:
    sentence = _refusal(replace(rclone, secret_key=secrets.token_hex(20)))
    assert "refuses the credentials (SignatureDoesNotMatch): check access key" in sentence


def test_a_wrong_access_key_is_refused(rclone: StoreConfig) -> None:
    sentence = _refusal(replace(rclone, access_key=secrets.token_hex(10)))
    assert "refuses the credentials (InvalidAccessKeyId): check access key" in sentence


def test_missing_credentials_are_reported(rclone: StoreConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="no credentials"):
        ReleaseStore(replace(rclone, access_key=None, secret_key=None)).check()


def test_an_unknown_profile_is_reported(rclone: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(StoreError, match=r"no-such-profile"):
        ReleaseStore(replace(rclone, access_key=None, secret_key=None))


@pytest.mark.parametrize(("minutes", "direction"), [(-60, "behind"), (90, "ahead of")])
def test_a_wrong_clock_is_distinguished_from_wrong_credentials(
    rclone: StoreConfig, monkeypatch: pytest.MonkeyPatch, minutes: int, direction: str
) -> None:
    shift = datetime.timedelta(minutes=minutes)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *args: get_current_datetime(*args) + shift)
    monkeypatch.setattr(client_module, "_now", lambda: datetime.datetime.now(datetime.UTC) + shift)
    assert f"This machine's clock is {abs(minutes)} minutes {direction} the S3 endpoint" in _refusal(rclone)


def test_a_bucket_that_may_not_be_created_is_reported() -> None:
    answers = {
        "GET": (404, "<Error><Code>NoSuchBucket</Code></Error>"),
        "PUT": (403, "<Error><Code>AccessDenied</Code></Error>"),
    }
    with _answering(answers) as endpoint:
        sentence = _refusal(_somewhere(endpoint))
    assert all(part in sentence for part in ("'releases'", "AccessDenied", "create it"))


def test_credentials_that_may_only_read_are_reported() -> None:
    listing = "<ListBucketResult><Name>releases</Name></ListBucketResult>"
    answers = {"GET": (200, listing), "PUT": (403, "<Error><Code>AccessDenied</Code></Error>")}
    with _answering(answers) as endpoint:
        sentence = _refusal(_somewhere(endpoint))
    assert "does not allow these credentials to act on the bucket 'releases' (AccessDenied while writing" in sentence


@pytest.mark.parametrize(
    ("get", "put"),
    [
        ((500, "<!doctype html><p>Oops"), (200, "")),
        ((429, ""), (200, "")),
        ((404, "<Error><Code>NoSuchBucket</Code></Error>"), (503, "<Error><Code>SlowDownWrite</Code></Error>")),
    ],
)
def test_a_server_that_is_overloaded_or_failing_is_asked_again_later(
    get: tuple[int, str], put: tuple[int, str]
) -> None:
    with (
        _answering({"GET": get, "PUT": put}) as endpoint,
        pytest.raises(StoreUnavailableError, match="is failing or overloaded"),
    ):
        ReleaseStore(_somewhere(endpoint)).check()


@pytest.mark.parametrize("status", [200, 400, 404, 500])
def test_a_server_that_is_no_s3_is_reported(status: int) -> None:
    with _answering({"GET": (status, "<!doctype html><p>Hello")}) as endpoint:
        sentence = _refusal(_somewhere(endpoint))
    assert endpoint in sentence
    assert re.search("is not an S3 server|correct the endpoint if it is no S3 server", sentence)


def test_a_servers_words_are_passed_on_without_the_secrets_in_them() -> None:
    config = _somewhere("http://127.0.0.1")
    echo = f"<Error><Code>Odd</Code><Message>who is {config.access_key} with {config.secret_key}?</Message></Error>"
    with _answering({"GET": (400, echo)}) as endpoint:
        assert "(Odd: who is *** with ***?)" in _refusal(replace(config, endpoint=endpoint))


def test_a_connection_that_breaks_off_within_a_blob_is_reported_and_leaves_no_file(tmp_path: Path) -> None:
    with _answering({"GET": (200, "half a bundle")}, promised=26) as endpoint:
        store = ReleaseStore(_somewhere(endpoint))
        with pytest.raises(StoreError, match="broke the connection off while reading blobs"):
            store.get_blob("0" * 64, tmp_path / "copy")
    assert not list(tmp_path.iterdir())


def test_a_document_whose_sending_breaks_off_is_asked_for_again_a_few_times() -> None:
    requests: list[str] = []
    with (
        _answering({"GET": (200, '{"format": 1,')}, promised=26, requests=requests) as endpoint,
        pytest.raises(StoreError, match="broke the connection off while reading a/pointer"),
    ):
        ReleaseStore(_somewhere(endpoint)).objects.read("a/pointer")
    assert len(requests) == 3
    requests.clear()
    with (
        _answering({"GET": (403, "<Error><Code>AccessDenied</Code></Error>")}, requests=requests) as endpoint,
        pytest.raises(StoreError, match="AccessDenied"),
    ):
        ReleaseStore(_somewhere(endpoint)).objects.read("a/pointer")
    assert len(requests) == 1


def test_a_server_without_conditional_writes_is_refused_unless_this_machine_alone_writes(
    rclone: StoreConfig, tmp_path: Path
) -> None:
    shared = replace(rclone, lock=None)
    assert "knows no conditional writes" in (sentence := _refusal(shared))
    assert "s3_single_writer" in sentence
    with pytest.raises(StoreError, match="s3_single_writer"):
        ReleaseStore(shared).publish(make_release(), [])
    assert ReleaseStore(shared).list_names() == []
    alone = ReleaseStore(replace(rclone, lock=tmp_path / "locks" / "lock"))
    alone.check()
    alone.publish(make_release(), [])
    with pytest.raises(StoreError, match="already published"):
        alone.publish(make_release(tvmflow="2"), [])


def test_a_proxy_in_the_environment_is_not_used_for_this_machine(
    rclone: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    ReleaseStore(rclone).check()


def _somewhere(endpoint: str) -> StoreConfig:
    return StoreConfig(
        "releases", endpoint=endpoint, access_key="AKID-of-test", secret_key="SECRET-of-test", attempts=1
    )


@contextlib.contextmanager
def _answering(
    answers: dict[str, tuple[int, str]], promised: int | None = None, requests: list[str] | None = None
) -> Iterator[str]:
    """The address of a server with one fixed answer per method, whose header announces `promised` bytes.

    It appends the path of each request to `requests`.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if requests is not None:
                requests.append(self.path)
            status, body = answers[self.command]
            self.send_response(status)
            self.send_header("Content-Length", str(promised or len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
