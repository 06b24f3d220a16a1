"""Garbage of a state folder: what was used stays, what was not goes, and nothing goes while a run is at work."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from support.command_server import CommandServer
from support.processes import clean_environment
from tvmflow.errors import StepError
from tvmflow.garbage import alone_in, find_garbage, remove
from tvmflow.workspace import Artifact, StepResult, Workspace, run_step

DAY = 86400.0


class Made(StepResult):
    file: Artifact


def make(workspace: Workspace, name: str) -> str:
    """Run a step that keeps one file, or find its result; return whether it ran."""

    def work() -> Made:
        with workspace.scratch() as folder:
            (folder / name).write_text(name)
            return Made(file=workspace.keep(folder / name))

    return run_step(workspace, "make", {"name": name}, Made, work).status


def age(state: Path, days: float) -> None:
    """Make every file and folder so many days older."""
    for path in state.rglob("*"):
        then = path.lstat().st_mtime - days * DAY
        os.utime(path, (then, then), follow_symlinks=False)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def garbage(state: Path, days: float = 30) -> dict[str, int]:
    """The number of pieces of each kind."""
    pieces = find_garbage(state, state / "bundles", days)
    return {kind: sum(piece.kind == kind for piece in pieces) for kind in {piece.kind for piece in pieces}}


def test_what_was_not_used_goes_and_what_was_used_stays(state: Path) -> None:
    workspace = Workspace(state)
    make(workspace, "used")
    make(workspace, "unused")
    age(state, 40)
    assert make(workspace, "used") == "cached"
    pieces = find_garbage(state, state / "bundles", 30)
    assert [piece.kind for piece in pieces] == ["results of steps", "artifacts"]
    assert pieces[1].size == len("unused")
    remove(pieces)
    assert (make(workspace, "used"), make(workspace, "unused")) == ("cached", "ran")


def test_an_old_artifact_stays_that_a_result_in_use_names(state: Path) -> None:
    workspace = Workspace(state)
    make(workspace, "kept")
    (artifact,) = (state / "artifacts").glob("*/*")
    old = time.time() - 40 * DAY
    os.utime(artifact, (old, old))
    assert garbage(state) == {}


def test_downloads_logs_and_files_of_killed_runs_go(state: Path) -> None:
    Workspace(state)
    for path in (
        "sources/net/1@sha256:ab/MLmodel",
        "code/ab.so",
        "logs/net/a.log",
        "bundles/ab.tar.gz",
        "records/r.jsonl",
    ):
        (state / path).parent.mkdir(parents=True, exist_ok=True)
        (state / path).write_text("old")
    (state / "s3" / "tvmflow").mkdir(parents=True)
    (state / "s3" / "tvmflow" / "release.json").write_text("{}")
    age(state, 40)
    (state / "s3" / ".partial-killed").write_text("half a bund")
    age(state / "s3", 2)
    (state / "s3" / ".partial-written-now").write_text("half a doc")
    (state / "tmp" / "killed").mkdir()
    (state / "bundles" / "digits-1-native.tar.gz").symlink_to("../artifacts/gone")
    assert garbage(state) == {
        "downloaded models": 1,
        "compiled code": 1,
        "logs": 1,
        "files of killed runs": 2,
        "fetched bundles": 1,
        "links to bundles": 1,
    }
    remove(find_garbage(state, state / "bundles", 30))
    assert garbage(state) == {}
    rest = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert rest == {"records/r.jsonl", "s3/tvmflow/release.json", "s3/.partial-written-now"}


def test_nothing_is_removed_while_a_run_has_the_folder(state: Path) -> None:
    workspace = Workspace(state)
    with pytest.raises(StepError, match="at work"), alone_in(state):
        pass
    del workspace
    with alone_in(state):
        pass


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_removal_that_is_killed_leaves_a_folder_that_runs_can_use(state: Path, count: int) -> None:
    workspace = Workspace(state)
    for name in ("one", "two"):
        make(workspace, name)
    age(state, 40)
    remove(find_garbage(state, state / "bundles", 30)[:count])
    for name in ("one", "two"):
        make(workspace, name)
        assert make(workspace, name) == "cached"


def test_the_command_shows_sizes_and_removes_only_without_dry_run(state: Path, commands: CommandServer) -> None:
    make(Workspace(state), "unused")
    age(state, 40)

    def gc(*options: str) -> dict[str, object]:
        environment = clean_environment(TVMFLOW_HOME=str(state))
        process = commands.run(["gc", "--json", *options], environment, state.parent, timeout=120)
        assert process.returncode == 0, process.stderr
        return dict(json.loads(process.stdout))

    assert gc("--days", "50")["bytes"] == 0
    planned, removed = gc("--dry-run"), gc()
    assert (planned["removed"], removed["removed"]) == (False, True)
    assert planned["kinds"] == removed["kinds"]
    assert removed["bytes"] == planned["bytes"] != 0
    assert gc()["bytes"] == 0
    assert not list((state / "artifacts").glob("*/*"))


def test_make_clean_keeps_what_cannot_be_made_again(state: Path) -> None:
    paths = {"s3/tvmflow/releases/net/1/release.json", "mlflow/mlflow.db", "records/run.jsonl", "models/net.json"}
    cached = {"artifacts/ab/ab", "steps/build/1.json", "sources/net/1", "code/ab.so", "bundles/ab.tar.gz", "logs/a.log"}
    for path in paths | cached:
        place = state.parent / ".tvmflow" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("content")
    command = ["make", "-f", Path(__file__).parents[2] / "Makefile", "clean"]
    subprocess.run(command, cwd=state.parent, capture_output=True, check=True, timeout=60)
    home = state.parent / ".tvmflow"
    assert {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()} == paths
