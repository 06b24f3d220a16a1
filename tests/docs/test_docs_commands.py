"""The command lines of the documentation are ones that `tvmflow` has, and README names no command that no page runs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from support.pages import blocks
from tvmflow.cli import cli

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# A row of the table of commands: what they are called, and what they do.
_ROW = re.compile(r"^\| (`tvmflow .*?) \| (.*) \|$", re.MULTILINE)


def _spans(text: str) -> list[str]:
    """The code spans of a paragraph."""
    return re.findall(r"`([^`]+)`", text)


def _command_lines(page: Path) -> Iterator[str]:
    """The lines of a page's shell blocks that begin with `tvmflow`, without their comments."""
    for block in blocks(page):
        for command, _ in block.commands() if block.is_shell else ():
            for line in command.replace("\\\n", " ").splitlines():
                if line.strip().startswith("tvmflow "):
                    yield line.strip()


def _find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words after `tvmflow` name, and the words after its name. Raises KeyError for an unknown one."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def _parse(line: str) -> click.Command:
    """The command of a line. Raises KeyError or click.UsageError for one that `tvmflow` does not have."""
    words = shlex.split(line, comments=True)
    for end in ("&", "&&", "||", "|", ">", "2>", ";"):
        words = words[: words.index(end)] if end in words else words
    command, words = _find(words[1:])
    if isinstance(command, click.Group):
        return command
    values, rest, _ = command.make_parser(click.Context(command)).parse_args(words)
    options = [item for item in command.params if isinstance(item, click.Option) and item.required]
    if lacking := [item.name for item in options if item.name not in values]:
        raise click.UsageError(f"{line}: without {lacking}")
    if rest:
        raise click.UsageError(f"{line}: too many arguments {rest}")
    return command


def _options(command: click.Command) -> set[str]:
    """The names of a command's options, and of those of its subcommands."""
    own = {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
    return own.union(*map(_options, _subcommands(command).values()))


def _subcommands(command: click.Command) -> dict[str, click.Command]:
    return dict(command.commands) if isinstance(command, click.Group) else {}


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_command_lines_of_a_page_are_understood(page: Path) -> None:
    for line in _command_lines(page):
        _parse(line)


@pytest.mark.parametrize(
    "line",
    ["tvmflow relese a.yaml", "tvmflow release a.yaml --trails 3", "tvmflow devices upp", "tvmflow verify a b",
     "tvmflow promote m 1"],
)  # fmt: skip
def test_a_command_line_that_tvmflow_does_not_have_is_noticed(line: str) -> None:
    with pytest.raises((KeyError, click.UsageError)):
        _parse(line)


def test_the_table_of_readme_has_every_command_and_only_options_that_exist() -> None:
    names = set()
    for title, description in _ROW.findall(README.read_text()):
        commands = []
        for span in _spans(title):
            if span.startswith("tvmflow "):
                _parse(span)
                commands.append(_find(span.split()[1:2])[0])
            else:
                assert span in _subcommands(commands[-1]), span
        options = {name for command in commands for name in _options(command)}
        subcommands = {name for command in commands for name in _subcommands(command)}
        for span in _spans(description):
            if span.startswith("tvmflow "):
                commands.append(_parse(span))
            elif span.startswith("--"):
                assert span.split()[0] in options, span
            elif subcommands:
                assert span in subcommands, span
        names |= {command.name for command in commands}
    assert names == set(cli.commands)


def test_a_page_runs_each_command_of_readme() -> None:
    run = {_find(line.split()[1:2])[0].name for page in PAGES for line in _run_lines(page)}
    assert set(cli.commands) - run == set()


def _run_lines(page: Path) -> Iterator[str]:
    """The command lines that tests/docs/test_docs_blocks.py runs: of the tutorial and the how-to guides."""
    if page.parent.name not in ("tutorial", "how-to"):
        return
    for block in blocks(page):
        if block.is_run and block.is_shell:
            for command, _ in block.commands():
                yield from re.findall(r"\btvmflow \w.*", command)
