"""The wheel, installed bare on a supported Python, is what a device needs: it verifies and runs a bundle."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support import scale
from support.models import save_dense
from support.processes import clean_environment
from support.steps import compile_by_steps

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
SUPPORTED = ("3.11", "3.12", "3.13")


def _interpreters() -> dict[str, str]:
    """The interpreters of supported versions that this machine has: this one, and with `--long` the others."""
    current = f"{sys.version_info.major}.{sys.version_info.minor}"
    interpreters = {current: sys.executable}
    if scale.is_long():
        folders = [*map(Path, os.environ["PATH"].split(os.pathsep)), *Path.home().glob(".pyenv/versions/*/bin")]
        for version in SUPPORTED:
            for folder in folders:
                program = folder / f"python{version}"
                if version not in interpreters and program.is_file() and _starts(program):
                    interpreters[version] = str(program)
    return interpreters


def _starts(program: Path) -> bool:
    return subprocess.run([program, "--version"], capture_output=True, timeout=60).returncode == 0


def _run(*command: str | Path, folder: Path) -> str:
    process = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=540, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(UV, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT, folder=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one dense layer."""
    folder = tmp_path_factory.mktemp("bundle")
    save_dense(folder / "dense.onnx")
    document = {"name": "dense", "model": {"onnx": "dense.onnx"}, "targets": ["native"]}
    return compile_by_steps(document, folder, folder / "state")


@pytest.fixture(scope="module", params=sorted(_interpreters().items()), ids=lambda item: item[0])
def device(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel and what it depends on, nothing else."""
    version, interpreter = request.param
    folder = tmp_path_factory.mktemp(f"python{version}")
    environment = folder / "environment"
    _run(UV, "venv", "--quiet", "--python", interpreter, environment, folder=folder)
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    _run(UV, "pip", "install", "--quiet", "--python", python, "--constraint", constraints, wheel, folder=folder)
    return environment / "bin"


def test_the_wheel_holds_the_files_that_are_no_modules(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, pattern in (("compiler", "*.c"), ("hardware/processors", "*.toml"), (".", "py.typed")):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tvmflow" / folder).glob(pattern)}
        assert files
        assert files <= names


def test_a_device_verifies_and_runs_a_bundle(device: Path, bundle: Path, tmp_path: Path) -> None:
    manifest = json.loads(_run(device / "tvmflow", "verify", bundle, "--json", folder=tmp_path))["manifest"]
    assert manifest["name"] == "dense"
    _run(device / "tvmflow", "run", bundle, "--output", "out.npz", folder=tmp_path)
    script = "import sys, numpy; print(sorted(numpy.load(sys.argv[1]).files))"
    assert "output_0" in _run(device / "python", "-c", script, tmp_path / "out.npz", folder=tmp_path)


def test_a_command_of_the_pipeline_names_the_extra_that_it_needs(device: Path, tmp_path: Path) -> None:
    release = subprocess.run(
        [device / "tvmflow", "release", "release.yaml"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert release.returncode == 1
    assert "pipeline" in release.stderr
    assert "Traceback" not in release.stderr
