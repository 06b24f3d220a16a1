"""`benchmarks/devices.py`: killed devices lose no records and leave no processes."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
def test_nothing_is_lost_with_a_device(command: Command, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    process = command("devices", "--kills", "2", "--json", str(figures))
    assert process.returncode == 0, process.stderr
    outcome = json.loads(figures.read_text())
    assert outcome["servers_killed"] == 2
    assert outcome["records_reported"] > 0
    assert (outcome["records_lost"], outcome["processes_left"]) == (0, 0)
