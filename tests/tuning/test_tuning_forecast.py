"""The forecast of what another round and another minute of tuning will save."""

from dataclasses import replace

import pytest

from tvmflow.tuning import Record
from tvmflow.tuning.forecast import ROUND, Forecast, forecast_from_records, saving_of_next_minute
from tvmflow.tuning.records import Effort

_EFFORT = Effort("k", "t", "1", "2", trials=ROUND, baseline_seconds=1.0, created_at="", seconds=4.0)
_RECORD = Record("k", "", "", 0.5, 1.0, "t", "1", "2", "xgb", 1, "")


def forecast_after(*savings: float, seconds: float = 4.0) -> Forecast:
    """The forecast after rounds that saved these parts and took so long each."""
    forecast = Forecast()
    for saved in savings:
        forecast.update(ROUND, saved, seconds)
    return forecast


def at(minute: int) -> str:
    return f"2026-01-01T00:{minute:02}:00+00:00"


def test_each_round_in_vain_halves_what_the_next_is_expected_to_save() -> None:
    assert [forecast_after(*[0.0] * rounds).gain for rounds in range(4)] == [0.5, 0.25, 0.125, 0.0625]
    assert forecast_after(0.0, 0.0).stale == 2 * ROUND


def test_a_round_that_saved_something_counts_as_much_as_all_before_it() -> None:
    forecast = forecast_after(0.0, 0.3)
    assert forecast.gain == pytest.approx((0.25 + 0.3) / 2)
    assert forecast.stale == 0


def test_the_next_minute_cannot_save_more_than_there_is() -> None:
    assert 0.99 < saving_of_next_minute([(1.0, Forecast())]) < 1.0
    assert saving_of_next_minute([]) == 0.0


def test_the_next_minute_counts_shares_of_the_model() -> None:
    exhausted = forecast_after(*[0.0] * 6)
    small, large = saving_of_next_minute([(0.1, exhausted)]), saving_of_next_minute([(1.0, exhausted)])
    assert large == pytest.approx(10 * small)
    assert large < saving_of_next_minute([(1.0, exhausted), (1.0, exhausted)]) < 2 * large


def test_slow_trials_bring_less_in_a_minute() -> None:
    slow, quick = forecast_after(0.0, 0.0, seconds=30.0), forecast_after(0.0, 0.0, seconds=3.0)
    assert saving_of_next_minute([(1.0, slow)]) < saving_of_next_minute([(1.0, quick)])


def test_the_next_minute_goes_where_it_saves_most() -> None:
    promising, exhausted = forecast_after(0.0), forecast_after(*[0.0] * 12)
    alone, both = [(1.0, promising)], [(1.0, promising), (1.0, exhausted)]
    assert saving_of_next_minute(both) < saving_of_next_minute(alone) * 1.01


def test_a_later_run_expects_what_the_earlier_one_would_have() -> None:
    efforts = [replace(_EFFORT, created_at=at(minute)) for minute in (1, 3, 5)]
    records = [
        replace(_RECORD, seconds=0.8, created_at=at(2)),
        replace(_RECORD, seconds=0.6, created_at=at(3)),
    ]
    later = forecast_from_records(reversed(efforts), reversed(records))
    earlier = forecast_after(0.0, 0.4, 0.0)
    assert (later.gain, later.stale) == (pytest.approx(earlier.gain), earlier.stale)
    assert saving_of_next_minute([(1.0, later)]) == pytest.approx(saving_of_next_minute([(1.0, earlier)]))


def test_a_workload_without_trials_is_as_good_as_new() -> None:
    assert forecast_from_records([replace(_EFFORT, trials=0)], []) == Forecast()
