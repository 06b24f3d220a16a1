"""The receiver's answers: signed deliveries start runs, everything else is refused or ignored."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as some
from mlflow.webhooks.delivery import _generate_hmac_signature

from support.fuzzing import examples
from tvmflow.errors import PrefectError
from tvmflow.http_server import PatientServer
from tvmflow.triggers import RunRequest, load
from tvmflow.triggers.receiver import MAX_BODY, application
from tvmflow.triggers.webhook import (
    DELIVERY_HEADER,
    MAX_AGE_SECONDS,
    PATH,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    DeliveryError,
    read_delivery,
    sign,
)

SECRET = "a secret of this test"


def event(name: str = "net", alias: str = "candidate", version: Any = "2", **other: Any) -> bytes:
    data = {"name": name, "alias": alias, "version": version}
    body = {"entity": "model_version_alias", "action": "created", "timestamp": "2026-11-21T00:00:00", "data": data}
    return json.dumps(body | other).encode()


def headers(body: bytes, *, secret: str = SECRET, age: float = 0, delivery: str = "one") -> dict[str, str]:
    timestamp = str(int(time.time() - age))
    return {
        DELIVERY_HEADER: delivery,
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: sign(secret, delivery, timestamp, body),
    }


@dataclass
class Started:
    """Records the runs that the receiver starts; fails while Prefect is away."""

    runs: dict[str, RunRequest] = field(default_factory=dict)
    away: bool = False

    def __call__(self, request: RunRequest, key: str) -> str:
        if self.away:
            raise PrefectError("Prefect does not answer; start it.")
        self.runs.setdefault(key, request)
        return f"run of {key}"


@pytest.fixture
def starts() -> Started:
    return Started()


@pytest.fixture
def client(write: Callable[..., Path], starts: Started) -> TestClient:
    file = write("digits", channels={"production": {}})
    return TestClient(application(SECRET, lambda: load([file]), starts))


def test_a_delivery_signed_by_mlflow_starts_the_run(client: TestClient, starts: Started) -> None:
    body, timestamp = event(), str(int(time.time()))
    signature = _generate_hmac_signature(SECRET, "one", timestamp, body.decode())
    signature_headers = {DELIVERY_HEADER: "one", TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: signature}
    answer = client.post(PATH, content=body, headers=signature_headers)
    assert answer.status_code == 202
    assert answer.json() == {"deployment": "release/digits", "flow_run": "run of mlflow-webhook-one"}
    assert [request.deployment for request in starts.runs.values()] == ["release/digits"]


def test_a_channel_starts_a_promotion(client: TestClient, starts: Started) -> None:
    body = event("digits", "production", "5")
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 202
    (request,) = starts.runs.values()
    assert (request.deployment, request.parameters["version"]) == ("promote/digits", "5")


def test_a_delivery_that_is_repeated_has_the_key_of_the_first(client: TestClient, starts: Started) -> None:
    body = event()
    answers = [client.post(PATH, content=body, headers=headers(body, age=age)) for age in (2, 0)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json() == answers[1].json()
    assert len(starts.runs) == 1


def test_forged_deliveries_are_refused(client: TestClient, starts: Started) -> None:
    body = event()
    good = headers(body)
    forgeries = [
        headers(body, secret="guessed"),
        good | {DELIVERY_HEADER: "another"},
        good | {TIMESTAMP_HEADER: str(int(time.time()) + 1)},
        good | {SIGNATURE_HEADER: good[SIGNATURE_HEADER].removeprefix("v1,")},
        {key: value for key, value in good.items() if key != SIGNATURE_HEADER},
        {},
    ]
    assert {client.post(PATH, content=body, headers=item).status_code for item in forgeries} == {401}
    assert client.post(PATH, content=event(version="3"), headers=good).status_code == 401
    assert not starts.runs


@pytest.mark.parametrize("age", [MAX_AGE_SECONDS + 10, -MAX_AGE_SECONDS - 10])
def test_deliveries_from_another_time_are_refused(client: TestClient, starts: Started, age: int) -> None:
    body = event()
    assert client.post(PATH, content=body, headers=headers(body, age=age)).status_code == 401
    assert not starts.runs


def test_a_body_that_is_too_large_is_refused_unread(client: TestClient, starts: Started) -> None:
    body = event(padding="x" * MAX_BODY)
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 413
    assert not starts.runs


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", event(version=2), event(version="latest"), event(name="")])
def test_a_body_that_is_no_event_of_mlflow_is_refused(client: TestClient, starts: Started, body: bytes) -> None:
    answer = client.post(PATH, content=body, headers=headers(body))
    assert answer.status_code == 422
    assert answer.json()["reason"]
    assert not starts.runs


@pytest.mark.parametrize(
    "body", [event("unknown"), event(alias="other"), event(action="deleted"), event(entity="prompt")]
)
def test_unmanaged_events_are_ignored(client: TestClient, starts: Started, body: bytes) -> None:
    answer = client.post(PATH, content=body, headers=headers(body))
    assert answer.status_code == 200
    assert answer.json()["ignored"]
    assert not starts.runs


def test_mlflow_is_told_to_try_again_while_prefect_is_away(client: TestClient, starts: Started) -> None:
    body = event()
    starts.away = True
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 503
    starts.away = False
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 202


def test_a_release_file_that_is_broken_for_a_while_loses_nothing(write: Callable[..., Path], starts: Started) -> None:
    file = write("digits")
    client = TestClient(application(SECRET, lambda: load([file]), starts))
    body, whole = event(), file.read_text()
    file.write_text("name: [")
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 503
    file.write_text(whole)
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 202


def test_a_delivery_that_does_not_come_is_not_waited_for(starts: Started) -> None:
    """Each connection takes a file descriptor, and somebody could open as many as there are."""
    config = uvicorn.Config(application(SECRET, lambda: load([]), starts, 0.2), log_config=None, lifespan="off")
    server = PatientServer(config, 0.2)
    head = f"POST {PATH} HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n".encode()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(ThreadPoolExecutor(1)).submit(server.run, [listener])
        stack.callback(setattr, server, "should_exit", True)
        answers = []
        for content in (b"", head, head + b"\r\n12345"):
            connection = stack.enter_context(socket.create_connection(listener.getsockname(), 10))
            connection.sendall(content)
            answers.append(connection.makefile("rb").read()[:12])
    assert answers == [b"", b"", b"HTTP/1.1 408"]


def test_the_receiver_says_that_it_is_there(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}


@given(some.binary(max_size=200), some.text(max_size=20), some.text(max_size=20), some.text(max_size=60))
def test_nothing_unsigned_is_ever_read(body: bytes, delivery: str, timestamp: str, signature: str) -> None:
    headers = {DELIVERY_HEADER: delivery, TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: signature}
    with pytest.raises(DeliveryError) as refusal:
        read_delivery(SECRET, headers, body, time.time())
    assert refusal.value.status == 401


_JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8),
    lambda values: some.lists(values, max_size=3) | some.dictionaries(some.text(max_size=8), values, max_size=3),
    max_leaves=8,
)
_EVENT = json.loads(event("digits", "production"))
_PLACES = [(key,) for key in _EVENT] + [("data", key) for key in _EVENT["data"]]


@examples(normal=50, long=500)
@given(some.sampled_from(_PLACES), _JSON | some.sampled_from(["digits", "production", "created"]), some.booleans())
def test_a_signed_event_that_was_changed_starts_its_run_or_is_answered_with_the_reason(
    client: TestClient, starts: Started, place: tuple[str, ...], value: object, is_removed: bool
) -> None:
    document = json.loads(event("digits", "production"))
    section = document["data"] if len(place) == 2 else document
    if is_removed:
        del section[place[-1]]
    else:
        section[place[-1]] = value
    _deliver(client, starts, json.dumps(document).encode())


@examples(normal=50, long=500)
@given(some.binary(max_size=200) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_any_signed_body_is_answered_with_the_reason(client: TestClient, starts: Started, body: bytes) -> None:
    _deliver(client, starts, body)
    assert not starts.runs


def _deliver(client: TestClient, starts: Started, body: bytes) -> None:
    """Deliver a signed body: its run starts, or the answer says why none does."""
    starts.runs.clear()
    answer = client.post(PATH, content=body, headers=headers(body))
    if starts.runs:
        (request,) = starts.runs.values()
        assert answer.status_code == 202
        assert request.deployment == "promote/digits"
        assert request.parameters["version"].isdecimal()
    else:
        assert answer.status_code in (200, 422)
        assert answer.json()["ignored" if answer.status_code == 200 else "reason"]
