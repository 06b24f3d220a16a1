"""The benchmarks' modules, and their commands run in processes of their own."""

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from support.processes import clean_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

Command = Callable[..., subprocess.CompletedProcess[str]]
Import = Callable[[str], ModuleType]


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder that the benchmarks of all tests share."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Import:
    """Import a module of the benchmarks by its name, as its neighbours do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture(scope="session")
def command(state: Path) -> Command:
    """Run `python benchmarks/NAME.py` with arguments and the session's state folder."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, "--state", str(state)],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def call(module: Import, state: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The same in this process, for what ends before it measures; it must end as a command does."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments, "--state", str(state)])
        benchmark = module(name)
        with pytest.raises(SystemExit) as ended:
            benchmark.run_main(benchmark.main)
        stdout, stderr = capfd.readouterr()
        # A text is what the interpreter prints before it exits with 1.
        code = ended.value.code
        if isinstance(code, str):
            code, stderr = 1, f"{stderr}{code}\n"
        return subprocess.CompletedProcess([name, *arguments], code or 0, stdout, stderr)

    return run
