"""The Dockerfile: hadolint reports nothing, images run without rights, the build context has only copied files."""

import re
import subprocess
import tomllib
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
FILE = ROOT / "Dockerfile"
IMAGES = ("runtime", "serve", "mlflow", "worker")


def _stages() -> dict[str, str]:
    """The text of each stage by its name, preceded by the text of the stage that it starts from."""
    stages: dict[str, str] = {}
    for part in re.split(r"^(?=FROM )", FILE.read_text(), flags=re.MULTILINE)[1:]:
        header = re.match(r"FROM (\S+) AS (\S+)\n", part)
        assert header is not None, part.splitlines()[0]
        stages[header[2]] = stages.get(header[1], "") + part
    return stages


def _lint(path: Path) -> "subprocess.CompletedProcess[str]":
    program = which("hadolint")
    assert program is not None, "the extra `dev` brings hadolint"
    return subprocess.run([program, "--no-color", str(path)], capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing() -> None:
    process = _lint(FILE)

    assert process.returncode == 0, process.stdout


def test_hadolint_finds_an_unpinned_base_image(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(re.sub(r"^FROM \S+", "FROM python:latest", FILE.read_text(), count=1, flags=re.MULTILINE))

    assert "DL3007" in _lint(wrong).stdout


def test_the_base_image_is_pinned_to_a_patch_release_of_a_python_that_the_package_supports() -> None:
    versions = re.findall(r"\bpython:([\w.]+)", FILE.read_text())

    assert len(versions) == 1
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions[0])
    assert versions[0] in SpecifierSet(_project()["requires-python"])


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_user_without_rights(image: str) -> None:
    (user,) = re.findall(r"^USER (\S+)$", _stages()[image], re.MULTILINE)

    # Kubernetes' `runAsNonRoot` reads numbers only.
    assert all(int(number) >= 1000 for number in user.split(":")), user


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_starts_its_program_without_a_shell_and_has_labels(image: str) -> None:
    """Exec form: the program gets the signals."""
    text = _stages()[image]

    for words in re.findall(r"^(?:ENTRYPOINT|CMD|    CMD) (.*)$", text, re.MULTILINE):
        assert re.fullmatch(r"\[.*\]", words), words
    for label in ("title", "description", "licenses"):
        assert f"org.opencontainers.image.{label}=" in text


def test_servers_have_health_checks() -> None:
    stages = _stages()

    assert [image for image in IMAGES if "HEALTHCHECK" in stages[image]] == ["serve", "mlflow", "worker"]


def test_the_runtime_has_neither_compiler_nor_training() -> None:
    text = _stages()["install-runtime"] + _stages()["runtime"]

    assert re.search(r"\brm [^&]*\blibtvm_compiler\.so\b", text)
    assert "pipeline" not in text
    assert "apt-get" not in text


def test_variables_of_images_are_ones_that_programs_read(known_variables: set[str]) -> None:
    joined = FILE.read_text().replace("\\\n", " ")
    names = {
        name for line in re.findall(r"^ENV (.*)$", joined, re.MULTILINE) for name in re.findall(r"([A-Z_0-9]+)=", line)
    }

    assert names
    assert names <= known_variables, names - known_variables


def test_the_build_sees_exactly_what_it_copies() -> None:
    sources = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", FILE.read_text(), re.MULTILINE)
        for source in line.split()[:-1]
    }
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    exceptions = {line[1:] for line in patterns if line.startswith("!")}

    assert "*" in patterns
    assert exceptions == sources
    assert all((ROOT / source).exists() for source in sources)


def test_extras_are_those_of_the_package() -> None:
    names = set(re.findall(r"--extra (\w+)", FILE.read_text()))

    assert names
    assert names <= set(_project()["optional-dependencies"])


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project
