"""`benchmarks/deployment.py`: the table of the ways to run a model."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cpp import build_runner
from support.processes import refusal
from tvmflow.hardware.target import host

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
def test_every_way_is_measured_or_says_why_not(
    command: Command, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The runner that the tests share saves another build. It has the sanitisers.
    runner = build_runner()
    (state / "cpp").symlink_to(Path(runner.command[0]).parent)
    monkeypatch.setenv("ASAN_OPTIONS", runner.environment["ASAN_OPTIONS"])
    figures = tmp_path / "figures.json"
    options = ("--rounds", "2", "--seconds", "0.01", "--threads", "1", "--runs", "40", "--json", str(figures))
    process = command("deployment", "digits", *options)
    assert process.returncode == 0, process.stderr
    document = json.loads(figures.read_text())
    rows = document["rows"]
    assert (document["runs"], document["rounds"], list(rows)[:3]) == (40, 2, ["onnxruntime", "pytorch", "tvmflow"])
    for way in ("onnxruntime", "pytorch", "tvmflow", "cpp"):
        assert 0 < rows[way]["min"] <= rows[way]["p50"]
        assert rows[way]["error"] < 1e-4
    # The same library on the same inputs.
    assert rows["cpp"]["error"] == pytest.approx(rows["tvmflow"]["error"])
    for way in ("gpu", "arm"):
        assert (rows[way]["p50"] is None) == (rows[way]["reason"] is not None)
    if host().arch != "aarch64":
        assert rows["arm"]["reason"].startswith(f"this machine is {host().arch}; run the same command there")
    assert f"{40 * rows['cpp']['p50'] / 1e3:.3f}" in process.stdout


def test_a_model_that_does_not_exist_is_one_sentence(call: Command) -> None:
    process = call("deployment", "digts")
    sentence = refusal(process)
    assert "'digts'" in sentence
    assert "'digits'" in sentence
