"""Turns of the runners of `tvmflow bench`."""

import itertools
import time
from pathlib import Path

import pytest

from tasks import peers


def test_the_work_of_a_turn_grows_with_its_runs_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty thousand runs of nothing, each a microsecond by the clock of this test, need few instructions."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-6)
    monkeypatch.setattr(peers, "_loaded", (list, 0.0, 0.0, 0.0))
    nothing = Path("/dev/null")
    job = peers.TurnJob(runner="onnxruntime", onnx=nothing, bundle=nothing, sample=nothing, threads=1)
    start = time.process_time()
    turn = peers.work(job, lambda done, total, message: None)
    assert len(turn.seconds) == pytest.approx(60_000, rel=0.01)
    assert time.process_time() - start < 1
