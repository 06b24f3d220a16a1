"""The options that all benchmarks share."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tvmflow.errors import SettingsError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("blocks", []),
        ("deployment", ["digits"]),
        ("devices", []),
        ("functions", ["digits"]),
        ("operators", []),
        ("runtime", []),
        ("serving", []),
        ("speed", ["digits"]),
    ],
)
def test_a_state_folder_that_cannot_be_made_is_refused_by_name(
    module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    arguments: list[str],
) -> None:
    (tmp_path / "file").touch()
    state = tmp_path / "file" / "state"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments, "--state", str(state)])
    with pytest.raises(SettingsError, match=str(state)):
        module(name).main()


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("speed", "peers", ["onnxruntime", "openvino"]),
        ("serving", "peers", ["onnxruntime", "mlflow"]),
        ("serving", "clients", [1, 8]),
        ("zoo", "precisions", ["fp32"]),
    ],
)
def test_an_option_of_several_values_leaves_the_model_that_follows(
    module: Callable[[str], ModuleType], name: str, option: str, values: list[object]
) -> None:
    options = module(name).parse([f"--{option}", ",".join(map(str, values)), "model"])
    models = getattr(options, "models", None) or [str(options.model)]
    assert (getattr(options, option), models) == (values, ["model"])


def test_a_peer_that_does_not_exist_is_refused(
    module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module("speed").parse(["--peers", "onnxruntime,tensorrt"])
    assert "'tensorrt' is not one of onnxruntime, openvino" in capsys.readouterr().err


def test_a_refused_benchmark_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, str(BENCHMARKS / "functions.py"), "digits", "--state", str(tmp_path / "file" / "state")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_figures_that_cannot_be_written_are_refused_before_the_work(
    module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parser = module("commandline").new_parser(None)
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path / "absent" / "figures.json")])
    assert "figures.json' cannot be written (No such file or directory)" in capsys.readouterr().err
    assert parser.parse_args(["--json", str(tmp_path / "figures.json")]).json == tmp_path / "figures.json"
    assert list(tmp_path.iterdir()) == []
