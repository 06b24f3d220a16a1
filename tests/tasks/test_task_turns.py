"""Turns of runners: how their runs are timed."""

import itertools
import threading
import time

import pytest

from tasks.turns import Round, Turn, time_runs


def test_the_work_of_a_turn_grows_with_its_runs_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty thousand runs of nothing, each a microsecond by the clock of this test, need few instructions."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-6)
    start = time.process_time()
    seconds, _ = time_runs(list, 1, 3, 0.06)
    assert len(seconds) == pytest.approx(60_000, rel=0.01)
    assert time.process_time() - start < 1


def test_slow_runs_are_as_many_as_a_turn_needs_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    seconds, wall_seconds = time_runs(list, 1, 3, 0.06)
    assert (seconds, wall_seconds) == ([1.0] * 3, 7.0)


def test_callers_run_at_once() -> None:
    meeting = threading.Barrier(3)

    def run() -> None:
        # It is left when all three are within the same run.
        meeting.wait(60)

    seconds, wall_seconds = time_runs(run, 1, 4, callers=3)
    assert len(seconds) == 12
    assert 0 < max(seconds) <= wall_seconds <= sum(seconds)


def test_a_caller_that_fails_ends_the_others() -> None:
    names = itertools.count()

    def run() -> None:
        if next(names) == 1:
            raise ValueError("it fails in one of them")

    with pytest.raises(ValueError, match="in one of them"):
        time_runs(run, 1, 1, callers=3)


def test_the_energy_of_a_run_is_that_of_all_turns_that_tell_it() -> None:
    first, second = (Turn(seconds=(1.0,) * runs, load_seconds=0, peak_memory=0, warmup=1) for runs in (1, 4))
    turns = [first, second.model_copy(update={"joules": 5.0}), second.model_copy(update={"joules": 3.0})]
    assert Round({(0, "tvm"): turns}, ()).joules("tvm") == 0.8
    assert Round({(0, "tvm"): [first]}, ()).joules("tvm") is None
