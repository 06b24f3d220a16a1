"""`benchmarks/serving.py`: our server compared with others."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
def test_the_servers_take_turns_and_are_compared(command: Command, tmp_path: Path) -> None:
    figures = tmp_path / "ratios.json"
    arguments = ["--threads", "1", "--clients", "2", "--rounds", "1", "--seconds", "0.2", "--peers", "onnxruntime"]
    process = command("serving", *arguments, "--json", str(figures))
    assert process.returncode == 0, process.stderr
    ratios = json.loads(figures.read_text())
    assert ratios.keys() == {"onnxruntime"}
    assert all(value > 0 for value in ratios["onnxruntime"]["2"].values())
    assert "ONNX Runtime" in process.stdout
