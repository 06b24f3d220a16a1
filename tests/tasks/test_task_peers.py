"""Turns of the runners of `tvmflow bench`."""

import time
from pathlib import Path

import pytest

from tasks import peers


def test_a_turn_of_many_short_runs_computes_little_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty thousand runs of nothing: the turn's own work grows with their number, not with its square."""
    monkeypatch.setattr(peers, "_loaded", (list, 0.0, 0.0, 0.0))
    monkeypatch.setattr(peers, "_TURN_SECONDS", 0.01)
    nothing = Path("/dev/null")
    job = peers.TurnJob(runner="onnxruntime", onnx=nothing, bundle=nothing, sample=nothing, threads=1)
    start = time.process_time()
    turn = peers.work(job, lambda done, total, message: None)
    assert len(turn.seconds) > 5_000
    assert time.process_time() - start < 1
