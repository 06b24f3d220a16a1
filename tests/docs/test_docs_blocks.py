"""The shell blocks of the documentation run, in order, and print what the page says."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import scale
from support.command_server import CommandServer
from support.databases import Databases
from support.pages import Session, blocks, missing_lines, printed_ids, with_ids
from support.processes import clean_environment

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted([*DOCS.glob("tutorial/*.md"), *DOCS.glob("how-to/*.md")])
# This page needs compilers and packages of Debian: tests/cpp/test_cpp_page.py runs it.
ELSEWHERE = {DOCS / "how-to" / "run-from-cpp.md"}
# The tutorial runs always, the how-to guides with `--long`.
RUN_HERE = [
    pytest.param(page, marks=[pytest.mark.timeout(1800), *([pytest.mark.long] if page.parent.name == "how-to" else [])])
    for page in GUIDES
    if page not in ELSEWHERE
]
LANGUAGES = {"sh", "console", "text", "python", "yaml", "toml", "cpp", "json"}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Variables by which `tvmflow` is a fork and Prefect's server shared; with `--long` all starts as for a reader."""
    if scale.is_long():
        return {}
    commands: CommandServer = request.getfixturevalue("commands")
    command = tmp_path / "bin" / "tvmflow"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.join(commands.stand_in)} "$PPID" "$@"\n')
    command.chmod(0o755)
    return {"PATH": str(command.parent), "TVMFLOW_PREFECT_API_URL": request.getfixturevalue("prefect_server")}


@pytest.fixture
def session(tmp_path: Path, databases: Databases, settings: dict[str, str]) -> Iterator[Session]:
    """A shell in a folder of its own, with the repository's examples and a state folder that holds empty databases."""
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    databases.prepare(folder / ".tvmflow")
    places = (settings.pop("PATH", None), str(Path(sys.executable).parent), os.environ["PATH"])
    path = os.pathsep.join(filter(None, places))
    environment = clean_environment(PATH=path, REPOSITORY=str(ROOT), COLUMNS="200", **settings)
    shell = Session(folder, environment, is_isolated=True)
    yield shell
    # A page that fails half-way leaves a stack and devices behind.
    if (folder / ".tvmflow" / "stack").exists():
        shell.run("tvmflow down")
    if (folder / ".tvmflow" / "devices").exists():
        shell.run("tvmflow devices down")
    shell.close()


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=_name)
def test_every_block_says_its_language(page: Path) -> None:
    languages = {block.language for block in blocks(page)} - {"setup"}
    assert languages <= LANGUAGES


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=_name)
def test_every_shell_block_runs_or_says_why_not(page: Path) -> None:
    own = [block for block in blocks(page) if block.is_shell and block.language != "setup"]
    assert len(own) == len(re.findall(r"^ *```(?:sh|console)$", page.read_text(), re.MULTILINE))
    reasons = {block.line: block.value.strip() for block in own if block.key == "not run"}
    assert all(reasons.values()), reasons
    if page.name == "README.md":  # no test runs this page
        assert [block.line for block in own if block.line not in reasons] == []
    else:
        assert all(block.is_run for block in own if block.line not in reasons)
        assert page in ELSEWHERE or page in [parameter.values[0] for parameter in RUN_HERE]


@pytest.mark.parametrize("page", RUN_HERE, ids=_name)
def test_the_commands_of_a_page_run_and_print_what_it_says(page: Path, session: Session, tmp_path: Path) -> None:
    ids: dict[str, str] = {}
    for block in blocks(page):
        place = f"{_name(page)}:{block.line}"
        if not block.is_run:
            continue
        if block.key == "file":
            path = tmp_path / "work" / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.key == "background":
            ((command, _),) = block.commands()
            session.start(command, block.value)
        else:
            commands = list(block.commands())
            for index, (command, expected) in enumerate(commands):
                code, printed = session.run(with_ids(command, ids))
                last = index == len(commands) - 1
                assert code == (int(block.value) if last and block.key == "exit" else 0), f"{place}: {printed[-3000:]}"
                assert missing_lines(expected, printed) == [], f"{place}: {printed[-3000:]}"
                ids |= printed_ids(expected, printed)
