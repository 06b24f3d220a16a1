"""Files that commands write at their end: one that cannot be written is refused before the work."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.models import save_dense

Command = Callable[..., Any]
BUILT = ("compile", "bench", "bisect")
COMMANDS = {
    "compile": ("-o",),
    "bench": ("--seconds", "0", "--html"),
    "bisect": ("-o",),
    "run": ("-o",),
    "run --trace": ("--trace",),
    "calibrate": ("--threads", "1", "-o"),
    "status": ("--html",),
    "release": ("--trace",),
    "diff": ("1", "2", "3", "--html"),
    "records export": (),
}


# bisect makes its folder.
OUTPUTS = [(name, "absent/output") for name in COMMANDS if name != "bisect"] + [("bisect", "file/output")]


@pytest.mark.parametrize(("command", "output"), [*OUTPUTS, ("compile", "file/output")])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tvmflow: Command, bundle: Path, command: str, output: str
) -> None:
    Path("file").touch()
    Path("release.yaml").touch()
    subjects = {"run": bundle, "run --trace": bundle, "release": "release.yaml"}
    subjects |= {name: save_dense(Path("never-built.onnx")) for name in BUILT}
    words = [word for word in command.split() if not word.startswith("-")]
    given = [subjects[command]] if command in subjects else []
    result = tvmflow(*words, *given, *COMMANDS[command], output)
    reason = "Not a directory" if output.startswith("file") else "No such file or directory"
    expected = f"tvmflow: {output!r} cannot be written ({reason}); choose another place\n"
    assert (result.code, result.stdout, result.stderr) == (1, "", expected)


def test_the_default_folder_of_bisect_is_refused_before_the_work(tvmflow: Command) -> None:
    path = save_dense(Path("never-built.onnx"))
    path.with_suffix(".bisect").touch()
    result = tvmflow("bisect", path)
    assert (result.code, len(result.stderr.splitlines())) == (1, 1)
    assert "'never-built.bisect' cannot be written (Not a directory)" in result.stderr


def test_a_pipe_is_written_and_stays_a_pipe(tvmflow: Command, bundle: Path, models: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = tvmflow("compile", models / "small.onnx", "-o", pipe)
        assert result.code == 0, result.stderr
        assert os.read(reader, 2**20) == bundle.read_bytes()
        assert tvmflow("records", "export", pipe).code == 0
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_refused_command_leaves_an_older_output_as_it_is(tvmflow: Command) -> None:
    Path("old.tar.gz").write_text("an older bundle")
    assert tvmflow("compile", "absent.onnx", "-o", "old.tar.gz").code != 0
    Path("no-model.onnx").write_text("no model")
    assert tvmflow("compile", "no-model.onnx", "-o", "old.tar.gz").code != 0
    assert Path("old.tar.gz").read_text() == "an older bundle"
    assert sorted(path.name for path in Path().iterdir()) == ["no-model.onnx", "old.tar.gz"]
