"""The page of the fleet: what stands first, and that its document has every figure."""

from pathlib import Path

import pytest

from support.reports import data_of, figures_of, measure_overflow, unexplained_figures
from support.skips import needs
from tvmflow.report.fleet import (
    ChannelStatus,
    Fleet,
    FleetDrift,
    FleetStep,
    LastVerdict,
    Signature,
    WaitingApproval,
    Wish,
    write_fleet,
)

_QUIET = ChannelStatus(
    name="net",
    channel="staging",
    version="3",
    days=3.25,
    p50_ms=1.0625,
    verdict=LastVerdict(version="3", verdict="passed", reasons=()),
    signature=Signature(key="ab" * 32, days=29.5, fault=None, is_late=False),
)
_BUSY = ChannelStatus(
    name="net",
    channel="production",
    version="2",
    days=40.5,
    newer=("3", "4"),
    is_gone=True,
    lags=True,
    wish=Wish(version="3", who="ann@desk", why="<b>now</b>", days=1.5),
    verdict=LastVerdict(version="4", verdict="refused", reasons=("it is <slow>", "it is large")),
    signature=Signature(key="cd" * 32, days=-2.5, fault="The channel expired </script>", is_late=True),
)

_STEP = FleetStep(
    name="net",
    target="native",
    figure="bundle, bytes",
    version="4",
    when="2026-11-09T10:00:00+00:00",
    releases=2,
    before=1000.5,
    since=1200.25,
    chance=0.0125,
)


def _fleet(*channels: ChannelStatus, **fields: object) -> Fleet:
    empty = Fleet(when="2026-11-22T10:00:00+00:00", channels=channels, approvals=(), drifts=(), steps=(), faults=())
    return empty.model_copy(update=fields)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    """A fleet in which everything happens at once."""
    drift = FleetDrift(
        name="net", target="native", figure="p50 latency, ms", releases=6, first=1.0, last=1.05, chance=0.001
    )
    steps = (
        _STEP,
        _STEP.model_copy(update={"figure": "load, s", "releases": 7}),
        _STEP.model_copy(update={"name": "other", "figure": "p50 latency, ms", "version": "9"}),
    )
    run = WaitingApproval(run="999b923a-3914", name="net", version="4", channel="fleet", who="bob@desk", days=0.25)
    fault = "MLflow at http://mlflow:5000 does not answer"
    return _fleet(_QUIET, _BUSY, approvals=(run,), drifts=(drift,), steps=steps, faults=(fault,))


def test_the_most_urgent_stands_first_with_its_command(fleet: Fleet) -> None:
    assert [(task.sentence.split(" ")[0], task.command) for task in fleet.list_tasks()] == [
        ("MLflow", "tvmflow status"),
        ("net@production", "tvmflow history net --channel production"),
        ("The", "tvmflow verify release://net@production"),
        ("MLflow's", "tvmflow reconcile"),
        ("net", "tvmflow approve 999b923a"),
        ("ann@desk", "tvmflow history net --channel production"),
        ("net@production", "tvmflow verdict net 4 --channel production"),
        ("net,", "tvmflow history net --figures"),
        ("other,", "tvmflow history other --figures"),
        ("net,", "tvmflow history net --figures"),
    ]
    step, _, drift = fleet.list_tasks()[-3:]
    assert "bundle, bytes stepped from 1000 to 1200 at release 4 of 2026-11-09" in step.sentence
    assert "p50 latency, ms rises over the last 6 releases" in drift.sentence


def test_a_figure_that_stepped_and_drifts_is_named_once() -> None:
    drift = FleetDrift(
        name="net", target="native", figure=_STEP.figure, releases=12, first=1000.0, last=1200.0, chance=0.001
    )
    (task,) = _fleet(_QUIET, drifts=(drift,), steps=(_STEP,)).list_tasks()
    assert "at release 4" in task.sentence


def test_a_wish_that_waits_for_approval_is_named_once() -> None:
    run = WaitingApproval(run="1", name="net", version="3", channel="production", who="ann@desk", days=1.0)
    quiet = _BUSY.model_copy(update={"is_gone": False, "lags": False, "verdict": None, "signature": None})
    (task,) = _fleet(quiet, approvals=(run,)).list_tasks()
    assert task.command == "tvmflow approve 1"


def test_a_statement_that_was_not_renewed_is_named_before_it_expires() -> None:
    late = Signature(key="ab" * 32, days=4.0, fault=None, is_late=True)
    (task,) = _fleet(_QUIET.model_copy(update={"signature": late})).list_tasks()
    assert (task.command, "expires in 4.0 days" in task.sentence) == ("tvmflow reconcile", True)


def test_a_refusal_of_what_is_not_newer_needs_nobody() -> None:
    old = LastVerdict(version="1", verdict="refused", reasons=("it is slow",))
    assert _fleet(_QUIET.model_copy(update={"verdict": old})).list_tasks() == []
    assert "Nothing waits" in write_fleet(_fleet(_QUIET))


def test_every_figure_of_the_page_is_in_its_data(fleet: Fleet) -> None:
    text = write_fleet(fleet)
    assert len(figures_of(text)) == 19
    assert unexplained_figures(text) == []
    assert data_of(text)["tasks"][0] == {"sentence": fleet.faults[0], "command": "tvmflow status"}


def test_texts_of_people_are_escaped_and_cannot_end_the_data(fleet: Fleet) -> None:
    text = write_fleet(fleet)
    assert text.count("</script>") == 1
    assert "it is &lt;slow&gt;; it is large" in text
    assert "<b>" not in text
    assert data_of(text)["channels"][1]["wish"]["why"] == "<b>now</b>"


@needs("chromium")
def test_nothing_overflows_a_phone_or_a_desk(fleet: Fleet, tmp_path: Path) -> None:
    assert measure_overflow(write_fleet(fleet), tmp_path) == [0, 0]
