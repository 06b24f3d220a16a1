"""The front door: help at once, one sentence for an error, and a quiet end when nobody reads on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from support import scale

Command = Callable[..., Any]

COMMANDS = (
    "release", "compile", "run", "verify", "keygen", "sign", "init", "list", "serve", "promote", "rollback", "history",
    "approve", "up", "down",
)  # fmt: skip
# Each command in a fork, which has imported the front door alone.
LIST_MODULES = """
import json, os, sys
from tvmflow.cli import main
for command in ["", *sys.argv[1:]]:
    if os.fork() == 0:
        sys.argv = ["tvmflow", *command.split(), "--help"]
        sys.stdout = open(os.devnull, "w") if command else sys.stdout
        try:
            main()
        finally:
            sys.stdout.flush()
            print(json.dumps([command, sorted({name.partition(".")[0] for name in sys.modules})]), file=sys.stderr)
            os._exit(0)
    os.wait()
"""


def test_help_lists_the_commands(executable: str, environment: dict[str, str]) -> None:
    process = subprocess.run([executable, "--help"], env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0
    assert all(f"\n  {name} " in process.stdout for name in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    arguments = [sys.executable, "-c", LIST_MODULES, *COMMANDS]
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    assert "Usage: tvmflow" in process.stdout
    imported = dict(map(json.loads, process.stderr.splitlines()))
    assert list(imported) == ["", *COMMANDS]
    heavy = {"tvm", "torch", "prefect", "mlflow", "onnx", "boto3", "pydantic", "numpy", "rich"}
    assert {command: heavy & set(modules) for command, modules in imported.items() if heavy & set(modules)} == {}


def test_the_version_is_reported(tvmflow: Command) -> None:
    assert tvmflow("--version").stdout.startswith("tvmflow, version ")


def test_without_a_command_the_help_is_shown(tvmflow: Command) -> None:
    result = tvmflow()
    assert result.code == 2
    assert result.stderr.startswith("Usage: tvmflow")


@pytest.mark.parametrize(
    ("arguments", "value", "command"),
    [
        (("relase",), "'release'", "tvmflow"),
        (("run",), "'BUNDLE'", "tvmflow run"),
        (("run", "b.tar.gz", "--repaet", "3"), "--repaet", "tvmflow run"),
        (("run", "b.tar.gz", "--repeat", "0"), "--repeat", "tvmflow run"),
        (("compile", "absent.onnx", "-o", "b.tar.gz"), "'absent.onnx'", "tvmflow compile"),
        (("release", "new", "old"), "old", "tvmflow release"),
        (("serve", "b.tar.gz", "--max-body-mb", "inf"), "--max-body-mb", "tvmflow serve"),
        (("gc", "--days", "nan"), "--days", "tvmflow gc"),
        (("run", "b.tar.gz", "--rpc-timeout", "1e300"), "--rpc-timeout", "tvmflow run"),
    ],
)
def test_a_wrong_command_line_exits_with_two_and_one_sentence(
    tvmflow: Command, arguments: tuple[str, ...], value: str, command: str
) -> None:
    result = tvmflow(*arguments)
    assert result.code == 2
    assert value in result.sentence
    assert f"`{command} --help`" in result.sentence
    assert result.stderr == f"tvmflow: {result.sentence}\n"


def test_every_option_that_is_a_float_is_a_number_with_bounds() -> None:
    from tvmflow.cli import cli
    from tvmflow.cli.options import NumberRange

    types = [option.type for command in cli.commands.values() for option in command.params]
    assert {type(item) for item in types if isinstance(item, click.types.FloatParamType)} == {NumberRange}


def test_a_wrong_command_line_is_json_where_a_program_reads(tvmflow: Command) -> None:
    result = tvmflow("run", "b.tar.gz", "--json", "--repeat", "0")
    assert result.code == 2
    assert json.loads(result.stdout)["error"]["type"] == "UsageError"


def test_an_error_is_json_where_a_program_reads(tvmflow: Command) -> None:
    result = tvmflow("run", "absent.tar.gz", "--json")
    assert result.code == 1
    error = json.loads(result.stdout)["error"]
    assert error == {"type": "BundleError", "message": "there is no bundle 'absent.tar.gz'"}
    assert result.sentence == "there is no bundle 'absent.tar.gz'"


def test_without_json_an_error_leaves_the_output_empty(tvmflow: Command) -> None:
    assert tvmflow("run", "absent.tar.gz").stdout == ""


def test_a_mistake_in_the_release_file_exits_with_two(tvmflow: Command) -> None:
    Path("release.yaml").write_text("name: m\nmodle: {}\n")
    result = tvmflow("release", "release.yaml")
    assert result.code == 2
    assert "unknown key 'modle'; did you mean 'model'?" in result.sentence


def test_a_mistake_in_the_settings_exits_with_two(tvmflow: Command) -> None:
    Path("tvmflow.toml").write_text("hom = 3\n")
    result = tvmflow("list")
    assert result.code == 2
    assert "setting 'hom' is unknown" in result.sentence


UNREAD = ["--help", "run BUNDLE", "run absent --json", "run BUNDLE --json", "verify BUNDLE"]


@pytest.mark.parametrize("arguments", scale.choose(normal=UNREAD[:3], long=UNREAD))
def test_a_reader_that_goes_away_is_no_error_to_tell(
    executable: str, environment: dict[str, str], bundle: Path, arguments: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    options = [str(bundle) if word == "BUNDLE" else word for word in arguments.split()]
    process = subprocess.run(
        [executable, *options], env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    assert process.returncode == 1
    assert process.stderr in ("", "tvmflow: there is no bundle 'absent'\n")


# Only the second has a handler of tvmflow's own; both raise the same exception.
@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_steps_and_says_so(
    executable: str, environment: dict[str, str], models: Path, tmp_path: Path, number: int
) -> None:
    arguments = [executable, "compile", str(models / "small.onnx"), "-o", str(tmp_path / "b.tar.gz")]
    settings = {**environment, "TVMFLOW_HOME": str(tmp_path / "state"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, env=settings, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "export" in process.stderr.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        output = process.stderr.read()
        assert process.wait(60) == 130
    (line,) = [line for line in output.splitlines() if line.startswith("tvmflow: ")]
    assert line.startswith("tvmflow: interrupted; ")
    assert "the same command continues" in line
    assert "Traceback" not in output
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert not (tmp_path / "b.tar.gz").exists()


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("release", "finished steps are kept"),
        ("tune", "measurements are kept"),
        ("promote", "completes the move"),
        ("up", "are ended again"),
        ("verify", None),
        ("init", None),
    ],
)
def test_an_interrupt_promises_no_more_than_its_command_keeps(command: str, part: str | None) -> None:
    from tvmflow.cli import _describe_interrupt

    message = _describe_interrupt(["--json", command, "name"])
    assert message.startswith("interrupted")
    assert part in message if part is not None else message == "interrupted"
