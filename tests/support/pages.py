"""Runs the shell blocks of a page of the documentation, in order, in one shell and one folder.

A fenced block of the language `sh` holds commands. One of `console` holds `$ command` lines and what they print. A
comment on the line before a block says what is special about it:

    <!-- file: model.py -->              the block is the content of this file, in the shell's folder
    <!-- exit: 3 -->                     the last command of the block ends with this exit code
    <!-- background: serving -->         the command stays running; the page continues once it has printed this text
    <!-- not run: needs a cluster -->    the block is not executed, for this reason

A comment `<!-- setup ... -->` holds commands that the reader does not need to see. Printed lines are compared without
their numbers, and `...` stands for anything.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_BLOCK = re.compile(
    r"<!-- setup\n(?P<setup>.*?)-->|(?:<!-- (?P<key>file|exit|background|not run): (?P<value>.*?) -->\n+)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_SECONDS = 420.0
_MARK = "--- exit code "


@dataclass(frozen=True)
class Block:
    """A fenced block or a hidden setup: its language, its text, its line in the page, and the comment before it."""

    language: str
    text: str
    line: int
    key: str | None = None
    value: str = ""

    @property
    def is_shell(self) -> bool:
        """Whether the block holds commands."""
        return self.language in ("sh", "console", "setup")

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Each command with the lines that the page says it prints."""
        if self.language != "console":
            yield self.text, []
            return
        command, printed = "", []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                if command:
                    yield command, printed
                command, printed = line[2:], []
            elif command.endswith("\\"):
                command += "\n" + line
            else:
                printed.append(line)
        if command:
            yield command, printed


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    result = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["setup"] is not None:
            result.append(Block("setup", match["setup"], line))
        else:
            result.append(Block(match["language"], match["text"], line, match["key"], match["value"] or ""))
    return result


class Session:
    """One shell in `folder`, which keeps its variables and its folder from block to block."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._output = folder.parent / f"{folder.name}.out"
        self._shell = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=self._output.open("wb"),
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
            text=True,
        )
        assert self._shell.stdin is not None
        self._input: IO[str] = self._shell.stdin

    def run(self, command: str) -> tuple[int, str]:
        """Run a command; its exit code and what it printed. Raises TimeoutError after seven minutes."""
        begin = self._output.stat().st_size
        self._send(f"{{ {command}\n}} </dev/null\nprintf '\\n{_MARK}%s\\n' $?\n")
        printed = self._wait(begin, _MARK, command)
        text, _, code = printed.rpartition(_MARK)
        return int(code), text

    def start(self, command: str, text: str) -> None:
        """Start a command in the background and wait until it has printed `text`. Raises TimeoutError."""
        begin = self._output.stat().st_size
        self._send(f"{{ {command.rstrip()}\n}} </dev/null &\n")
        self._wait(begin, text, command)

    def close(self) -> None:
        """End the shell and all that it started."""
        os.killpg(self._shell.pid, signal.SIGTERM)
        try:
            self._shell.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._shell.pid, signal.SIGKILL)
            self._shell.wait()
        self._input.close()

    def _send(self, text: str) -> None:
        self._input.write(text)
        self._input.flush()

    def _wait(self, begin: int, text: str, command: str) -> str:
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            with self._output.open("rb") as stream:
                stream.seek(begin)
                printed = stream.read().decode(errors="replace")
            if text in printed and printed.endswith("\n"):
                return printed
            if self._shell.poll() is not None:
                raise AssertionError(f"the shell ended within {command!r}: {printed}")
            time.sleep(0.05)
        raise TimeoutError(f"{command!r} took longer than {_SECONDS:.0f} seconds; it printed {printed[-2000:]}")


def missing_lines(expected: list[str], printed: str) -> list[str]:
    """The lines of a page that a command did not print, numbers and spaces aside."""
    lines = {_plain(line) for line in printed.splitlines()}
    return [line for line in expected if not _is_among(_plain(line), lines)]


def _is_among(line: str, lines: set[str]) -> bool:
    if line in lines or line in ("", "..."):
        return True
    pattern = re.compile(".*".join(re.escape(part) for part in line.split("...")))
    return any(pattern.fullmatch(other) for other in lines)


def _plain(line: str) -> str:
    """A line without what differs from run to run: numbers, digests and spaces."""
    line = re.sub(r"\b(?=[0-9a-f-]*\d)[0-9a-f]{6,}(-[0-9a-f]{4,})*\b", "#", line)
    line = re.sub(r"\d+([.:,]\d+)*(e[-+]?\d+)?", "#", line)
    line = re.sub("─+", "─", line)
    return " ".join(line.split())
