"""Runs the shell blocks of a page of the documentation, in order, in one shell and one folder.

A fenced block of the language `sh` holds commands. One of `console` holds `$ command` lines and what they print. A
comment on the line before a block says what is special about it:

    <!-- file: model.py -->              the block is the content of this file, in the shell's folder
    <!-- exit: 3 -->                     the last command of the block ends with this exit code
    <!-- background: serving -->         the command stays running; the page continues once it has printed this text
    <!-- not run: needs a cluster -->    the block is not executed, for this reason

A comment `<!-- setup ... -->` holds commands that the reader does not need to see. Printed lines are compared without
their numbers, and `...` stands for anything. An id in a later command stands for the id that an earlier command printed
in its place, or for the beginning of that id.
"""

import functools
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
    r"<!-- setup\n(?P<setup>.*?)-->|(?:<!-- (?P<key>file|exit|background|not run): (?P<value>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_SECONDS = 420.0
_MARK = "--- exit code "
# A digest, the id of a run, or the beginning of one.
_ID = re.compile(r"\b(?=[0-9a-f-]*\d)[0-9a-f]{6,}(?:-[0-9a-f]{4,})*\b")


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

    @property
    def is_run(self) -> bool:
        """Whether the commands of the block are executed, or its file is written."""
        return self.key == "file" or (self.is_shell and self.key != "not run")

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
            text_of_block = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            result.append(Block(match["language"], text_of_block, line, match["key"], match["value"] or ""))
    return result


@functools.cache
def _own_network() -> list[str]:
    """The command that gives a program a loopback of its own; empty where this machine does not permit it."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    try:
        trial = subprocess.run([*unshare, "ip", "link", "set", "lo", "up"], capture_output=True, timeout=30)
    except OSError:
        return []
    return [*unshare, "sh", "-c", 'ip link set lo up; exec "$@"', "sh"] if trial.returncode == 0 else []


class Session:
    """One shell in `folder`, which keeps its variables and its folder from block to block.

    With `is_isolated` it has a network of its own, where that is permitted: all ports of 127.0.0.1 are free there.
    """

    def __init__(self, folder: Path, environment: dict[str, str], *, is_isolated: bool = False) -> None:
        self._folder = folder
        self._output = folder.parent / f"{folder.name}.out"
        self._shell = subprocess.Popen(
            [*(_own_network() if is_isolated else []), "/bin/bash", "--noprofile", "--norc"],
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
        """Start a simple command in the background and wait until it has printed `text`. Raises TimeoutError."""
        begin = self._output.stat().st_size
        # Without braces: `kill %1` then reaches the command itself, not a shell around it.
        self._send(f"{command.rstrip()} </dev/null &\n")
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


def printed_ids(expected: list[str], printed: str) -> dict[str, str]:
    """The ids on lines of a page, each with the id that a command printed in its place."""
    result: dict[str, str] = {}
    for line in expected:
        # Every id of the line becomes a group, everything else that varies a wildcard.
        parts = _ID.split(line)
        pattern = f"({_ID.pattern})".join(_wildcards(part) for part in parts)
        matches = (re.fullmatch(pattern, other.strip()) for other in printed.splitlines())
        if match := next(filter(None, matches), None):
            result |= zip(_ID.findall(line), match.groups(), strict=True)
    return result


def with_ids(command: str, ids: dict[str, str]) -> str:
    """A command of a page with the ids that earlier commands printed, in place of the page's own."""

    def replace(match: re.Match[str]) -> str:
        own = match[0]
        return next((other[: len(own)] for page, other in ids.items() if page.startswith(own)), own)

    return _ID.sub(replace, command)


def _wildcards(text: str) -> str:
    """A pattern for a part of a line: numbers, spaces and `...` match any others."""
    parts = re.split(r"(\d+(?:[.:,]\d+)*|\.\.\.|\s+)", text.strip(" "))
    middle = "".join(re.escape(part) if index % 2 == 0 else ".*" for index, part in enumerate(parts))
    return r"\s*" * text.startswith(" ") + middle + r"\s*" * text.endswith(" ")


def _is_among(line: str, lines: set[str]) -> bool:
    if line in lines or line in ("", "..."):
        return True
    pattern = re.compile(".*".join(re.escape(part) for part in line.split("...")))
    return any(pattern.fullmatch(other) for other in lines)


def _plain(line: str) -> str:
    """A line without what differs from run to run: numbers, digests, spaces, and the note of a machine that is busy."""
    line = re.sub("; the machine was uneven: a fixed kernel took .* times as long at times", "", line)
    line = _ID.sub("#", line)
    line = re.sub(r"\d+([.:,]\d+)*(e[-+]?\d+)?", "#", line)
    line = re.sub("─+", "─", line)
    return " ".join(line.split())
