"""Outages: work goes on when a server answers again in time."""

from threading import Event

import pytest

from tvmflow.errors import StoreError, StoreUnavailableError, UnavailableError
from tvmflow.outages import delays, outlast


@pytest.mark.parametrize("outage", [0.0, 1.0, 120.0, 1200.0])
def test_pauses_grow_and_last_as_long_as_the_outage(outage: float) -> None:
    pauses = delays(outage)
    assert outage <= sum(pauses) <= outage + 30
    assert pauses == sorted(pauses)
    assert len(pauses) <= 50  # the most that Prefect takes


class Server:
    """Refuses as many requests as it is told, each with the same error."""

    def __init__(self, refusals: int, error: type[StoreError]) -> None:
        self.refusals, self.error, self.requests = refusals, error, 0

    def ask(self) -> str:
        self.requests += 1
        if self.requests <= self.refusals:
            raise self.error("S3 does not answer: start it.")
        return "an answer"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvmflow.outages.delays", lambda outage: [0.0] * 3)


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_comes_back_is_asked_until_it_does() -> None:
    server = Server(3, StoreUnavailableError)
    assert outlast(server.ask, 60, Event()) == "an answer"


@pytest.mark.usefixtures("no_pauses")
def test_the_last_error_is_raised_after_the_outage() -> None:
    server = Server(4, StoreUnavailableError)
    with pytest.raises(StoreUnavailableError):
        outlast(server.ask, 60, Event())
    assert server.requests == 4


def test_a_refusal_is_raised_at_once() -> None:
    server = Server(1, StoreError)
    with pytest.raises(StoreError):
        outlast(server.ask, 60, Event())
    assert server.requests == 1


def test_nothing_is_asked_again_once_the_work_is_stopped() -> None:
    server, stop = Server(9, StoreUnavailableError), Event()
    stop.set()
    with pytest.raises(UnavailableError):
        outlast(server.ask, 60, stop)
    assert server.requests == 1
