"""`tvmflow tune` and `tvmflow devices`: options that do not go together are refused before anything starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


@pytest.fixture
def release_file(tmp_path: Path) -> Path:
    (tmp_path / "m.onnx").touch()
    (tmp_path / "release.yaml").write_text("name: dense\nmodel: {onnx: m.onnx}\ntargets: [native]\n")
    return tmp_path / "release.yaml"


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ((), "--until"),
        (("--minutes", "1", "--trials", "4"), "--trials"),
        (("--trials", "4", "--tracker", "127.0.0.1:9190"), "--device"),
        (("--trials", "4", "--device", "lab", "--tracker", "nowhere"), "--tracker"),
    ],
)
def test_a_tuning_without_one_budget_or_place_is_refused(
    tvmflow: Command, release_file: Path, options: tuple[str, ...], setting: str
) -> None:
    result = tvmflow("tune", release_file, *options)
    assert result.code == 2
    assert setting in result.stderr


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (("--tracker", "10.0.0.5:9190", "--port", "9190"), "--port"),
        (("--tracker", "10.0.0.5:9190"), "--host"),
        (("--key", "two words"), "key"),
    ],
)
def test_devices_that_nobody_could_reach_are_refused(tvmflow: Command, options: tuple[str, ...], setting: str) -> None:
    result = tvmflow("devices", "up", *options)
    assert result.code == 2
    assert setting in result.stderr
