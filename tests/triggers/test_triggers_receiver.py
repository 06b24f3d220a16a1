"""The receiver's answers: signed deliveries start runs, everything else is refused or ignored."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as some
from mlflow.webhooks.delivery import _generate_hmac_signature

from tvmflow.errors import PrefectError
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
def started() -> Started:
    return Started()


@pytest.fixture
def client(write: Callable[..., Path], started: Started) -> TestClient:
    file = write("digits", channels={"production": {}})
    return TestClient(application(SECRET, lambda: load([file]), started))


def test_a_delivery_signed_by_mlflow_starts_the_run(client: TestClient, started: Started) -> None:
    body, timestamp = event(), str(int(time.time()))
    signature = _generate_hmac_signature(SECRET, "one", timestamp, body.decode())
    signed = {DELIVERY_HEADER: "one", TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: signature}
    answer = client.post(PATH, content=body, headers=signed)
    assert answer.status_code == 202
    assert answer.json() == {"deployment": "release/digits", "flow_run": "run of mlflow-webhook-one"}
    assert [request.deployment for request in started.runs.values()] == ["release/digits"]


def test_a_channel_starts_a_promotion(client: TestClient, started: Started) -> None:
    body = event("digits", "production", "5")
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 202
    (request,) = started.runs.values()
    assert (request.deployment, request.parameters["version"]) == ("promote/digits", "5")


def test_a_delivery_that_is_repeated_has_the_key_of_the_first(client: TestClient, started: Started) -> None:
    body = event()
    answers = [client.post(PATH, content=body, headers=headers(body, age=age)) for age in (2, 0)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json() == answers[1].json()
    assert len(started.runs) == 1


def test_forged_deliveries_are_refused(client: TestClient, started: Started) -> None:
    body = event()
    good = headers(body)
    forged = [
        headers(body, secret="guessed"),
        good | {DELIVERY_HEADER: "another"},
        good | {TIMESTAMP_HEADER: str(int(time.time()) + 1)},
        good | {SIGNATURE_HEADER: good[SIGNATURE_HEADER].removeprefix("v1,")},
        {key: value for key, value in good.items() if key != SIGNATURE_HEADER},
        {},
    ]
    assert {client.post(PATH, content=body, headers=item).status_code for item in forged} == {401}
    assert client.post(PATH, content=event(version="3"), headers=good).status_code == 401
    assert not started.runs


@pytest.mark.parametrize("age", [MAX_AGE_SECONDS + 10, -MAX_AGE_SECONDS - 10])
def test_deliveries_from_another_time_are_refused(client: TestClient, started: Started, age: int) -> None:
    body = event()
    assert client.post(PATH, content=body, headers=headers(body, age=age)).status_code == 401
    assert not started.runs


def test_a_body_that_is_too_large_is_refused_unread(client: TestClient, started: Started) -> None:
    body = event(padding="x" * MAX_BODY)
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 413
    assert not started.runs


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", event(version=2), event(version="latest"), event(name="")])
def test_a_body_that_is_no_event_of_mlflow_is_refused(client: TestClient, started: Started, body: bytes) -> None:
    answer = client.post(PATH, content=body, headers=headers(body))
    assert answer.status_code == 422
    assert answer.json()["reason"]
    assert not started.runs


@pytest.mark.parametrize(
    "body", [event("unknown"), event(alias="other"), event(action="deleted"), event(entity="prompt")]
)
def test_unmanaged_events_are_ignored(client: TestClient, started: Started, body: bytes) -> None:
    answer = client.post(PATH, content=body, headers=headers(body))
    assert answer.status_code == 200
    assert answer.json()["ignored"]
    assert not started.runs


def test_mlflow_is_told_to_try_again_while_prefect_is_away(client: TestClient, started: Started) -> None:
    body = event()
    started.away = True
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 503
    started.away = False
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 202


def test_a_release_file_that_is_broken_for_a_while_loses_nothing(write: Callable[..., Path], started: Started) -> None:
    file = write("digits")
    client = TestClient(application(SECRET, lambda: load([file]), started))
    body, whole = event(), file.read_text()
    file.write_text("name: [")
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 503
    file.write_text(whole)
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 202


def test_the_receiver_says_that_it_is_there(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}


@given(some.binary(max_size=200), some.text(max_size=20), some.text(max_size=20), some.text(max_size=60))
def test_nothing_unsigned_is_ever_read(body: bytes, delivery: str, timestamp: str, signature: str) -> None:
    headers = {DELIVERY_HEADER: delivery, TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: signature}
    with pytest.raises(DeliveryError) as refusal:
        read_delivery(SECRET, headers, body, time.time())
    assert refusal.value.status == 401
