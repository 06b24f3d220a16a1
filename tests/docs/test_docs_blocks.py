"""The shell blocks of the documentation run, in order, and print what the page says."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import Session, blocks, missing_lines

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# The tutorial runs always, the how-to guides with `--long`. Blocks of a guide that nobody can run here say why.
GUIDES = [
    *sorted(DOCS.glob("tutorial/*.md")),
    *(pytest.param(page, marks=pytest.mark.long) for page in sorted(DOCS.glob("how-to/*.md"))),
]
LANGUAGES = {"sh", "console", "text", "python", "yaml", "toml", "cpp", "json"}


def _name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A shell in a folder of its own, with the repository's examples beside it."""
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TVMFLOW_", "PREFECT_", "MLFLOW_"))
    }
    environment |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]]),
        "REPOSITORY": str(ROOT),
        "COLUMNS": "200",
    }
    shell = Session(folder, environment)
    yield shell
    shell.close()


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=_name)
def test_every_block_says_its_language(page: Path) -> None:
    languages = {block.language for block in blocks(page)} - {"setup"}
    assert languages <= LANGUAGES


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_the_commands_of_a_page_run_and_print_what_it_says(page: Path, session: Session, tmp_path: Path) -> None:
    for block in blocks(page):
        place = f"{_name(page)}:{block.line}"
        if block.key == "file":
            path = tmp_path / "work" / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif not block.is_shell or block.key == "not run":
            continue
        elif block.key == "background":
            ((command, _),) = block.commands()
            session.start(command, block.value)
        else:
            commands = list(block.commands())
            for index, (command, expected) in enumerate(commands):
                code, printed = session.run(command)
                last = index == len(commands) - 1
                assert code == (int(block.value) if last and block.key == "exit" else 0), f"{place}: {printed[-3000:]}"
                assert missing_lines(expected, printed) == [], f"{place}: {printed[-3000:]}"
