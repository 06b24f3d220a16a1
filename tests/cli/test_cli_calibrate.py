"""`tvmflow calibrate`: measures this machine and writes a profile that `native` takes."""

import json
from pathlib import Path

import pytest

from tvmflow.hardware import profiles
from tvmflow.hardware.target import resolve

from .conftest import Command


@pytest.mark.long
def test_the_measured_profile_is_read_by_native(
    tvmflow: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.toml"
    result = tvmflow("calibrate", "-o", path, "--threads", "1", "--json")
    assert result.code == 0, result.stderr
    document = json.loads(result.stdout)
    item = profiles.read("mine", path.read_text())
    assert item.profile.digest == document["digest"]
    assert document["clock"] > 1e8
    assert item.sources_of["memory.read"] == "calibrate"
    assert item.sources_of["first.size"] == "nearest"
    assert item.profile.cores.count == 1
    assert all(vectors.multiply_adds >= 0.5 for vectors in item.profile.vectors)
    monkeypatch.setenv("TVMFLOW_PROFILE", str(path))
    native = resolve("native").profile
    assert native == item.profile
