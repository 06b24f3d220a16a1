"""Supervised child processes: messages, deadlines, exits, and the processes that an exit leaves behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tvmflow.processes.launch import program_command
from tvmflow.processes.supervisor import ChildProcess, describe_exit

MODULE = """
import os, signal, subprocess, sys, time
from tvmflow.processes.supervisor import Channel

kind = sys.argv[1]
if kind == "deaf":
    signal.pause()
channel = Channel()
print("no message")
os.write(1, b"{}\\n")
if kind == "dies before its fork":
    os.fork() or signal.pause()
    os._exit(9)
if kind == "starts another":
    channel.send({"pid": subprocess.Popen(["sleep", "600"]).pid})
    sys.exit(5)
while (message := channel.receive()) is not None:
    channel.send({"echo": message, "environment": dict(os.environ), "argv": sys.argv, "input": sys.stdin.read()})
"""
Start = Callable[[str], ChildProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a child of the module above."""
    (tmp_path / "module.py").write_text(MODULE)
    children: list[ChildProcess] = []

    def run(kind: str) -> ChildProcess:
        environment = {"PYTHONPATH": str(tmp_path), "COLOUR": "green"}
        child = ChildProcess("module", kind, environment=environment, log=tmp_path / "log", pipes=True)
        children.append(child)
        return child

    yield run
    for child in children:
        child.close()


def soon() -> float:
    return time.monotonic() + 30


def test_messages_of_any_size_go_both_ways_and_nothing_else_is_one(start: Start) -> None:
    child, message = start("echoes"), {"text": "größe\n" * 100_000, "number": float("inf")}
    for _ in range(2):
        child.send(message, soon())
        reply = child.receive(soon())
        assert reply["echo"] == message
        assert reply["input"] == ""
    assert "{}" in child.log.read_text()


def test_a_child_has_the_environment_and_the_arguments_that_it_is_given(start: Start) -> None:
    child = start("echoes")
    child.send({}, soon())
    reply = child.receive(soon())
    assert reply["environment"]["COLOUR"] == "green"
    assert "HOME" not in reply["environment"]
    assert reply["argv"][1:] == ["echoes"]


def test_a_deadline_ends_each_wait(start: Start) -> None:
    child = start("deaf")
    for wait in (child.receive, child.wait, lambda deadline: child.send({"text": "x" * 2**20}, deadline)):
        with pytest.raises(TimeoutError):
            wait(time.monotonic() + 0.1)
    assert child.exit_code() is None


def test_the_end_of_a_child_is_noticed_though_its_fork_holds_the_pipes(start: Start) -> None:
    child = start("dies before its fork")
    with pytest.raises(EOFError):
        child.receive(soon())
    assert child.exit_code() == 9
    assert "exit code 9" in child.describe_end()


def test_what_an_ended_child_has_started_is_killed_when_it_is_closed(start: Start) -> None:
    child = start("starts another")
    grandchild = psutil.Process(child.receive(soon())["pid"])
    assert child.wait(soon()) == 5
    assert grandchild.is_running()
    child.close()
    _, alive = psutil.wait_procs([grandchild], timeout=30)
    assert not alive
    child.kill()
    assert child.exit_code() == 5


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (7, "exit code 7"), (-11, "SIGSEGV"), (-9, "out of memory"), (-40, "signal 40")],
)
def test_an_exit_is_described(code: int, words: str) -> None:
    assert words in describe_exit(code)


def test_a_program_dies_with_its_parent() -> None:
    code = (
        "import subprocess, sys; from tvmflow.processes.launch import program_command;"
        "child = subprocess.Popen(program_command(['/bin/sleep', '600']));"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive


def test_a_program_whose_parent_is_gone_does_not_start() -> None:
    command = program_command(["/bin/true"])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1
