"""The import contract: a circle of imports fails `make check`, wherever its import statements stand."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGURATION = """
[tool.importlinter]
root_packages = ["tree"]
include_external_packages = true
contract_types = ["no_circles: infra.import_contracts.NoCirclesContract"]

[[tool.importlinter.contracts]]
name = "no circle"
type = "no_circles"
"""
AT_THE_TOP = "import tree.{}\n"
IN_A_FUNCTION = "def work():\n    from tree import {}\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tree import {}\n"


def lint(folder: Path, modules: dict[str, str]) -> subprocess.CompletedProcess[str]:
    package = folder / "tree"
    package.mkdir()
    for name, text in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(text)
    (folder / "imports.toml").write_text(CONFIGURATION)
    command = [Path(sys.executable).parent / "lint-imports", "--config", folder / "imports.toml", "--no-cache"]
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("back", [AT_THE_TOP, IN_A_FUNCTION, FOR_TYPES])
def test_a_circle_of_modules_is_refused_and_named(tmp_path: Path, back: str) -> None:
    result = lint(
        tmp_path, {"a": AT_THE_TOP.format("b"), "b": IN_A_FUNCTION.format("c"), "c": back.format("a"), "d": "import os"}
    )
    assert result.returncode == 1
    assert "tree.a imports tree.b (line 1)" in result.stdout
    assert "tree.b imports tree.c (line 2)" in result.stdout
    assert "tree.c imports tree.a" in result.stdout
    assert "tree.d" not in result.stdout


def test_a_module_that_imports_its_own_package_is_refused(tmp_path: Path) -> None:
    assert lint(tmp_path, {"__init__": "from tree.a import f\n", "a": "import tree\n"}).returncode == 1


def test_modules_that_import_one_way_pass(tmp_path: Path) -> None:
    modules = {"__init__": "from tree.a import f\n", "a": AT_THE_TOP.format("b") + IN_A_FUNCTION.format("c"), "b": ""}
    result = lint(tmp_path, {**modules, "c": AT_THE_TOP.format("b")})
    assert result.returncode == 0, result.stdout


def test_the_contract_holds_for_the_whole_project() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    assert 'type = "no_circles"' in settings
    assert "lint-imports" in (ROOT / "Makefile").read_text()
