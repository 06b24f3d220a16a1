"""A release that is interrupted in the middle of a step: nothing stays behind, and it goes on from there."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.databases import Databases
from support.machines import other_preset
from support.waits import wait_until

# Held-out data that takes for ever, until somebody says go: what a step in the middle of the release waits for.
_DATA = """
import time
from pathlib import Path

import numpy as np


def held_out(case):
    here = Path(__file__).parent
    (here / f"{case}.reached").touch()
    while not (here / f"{case}.go").exists():
        time.sleep(0.01)
    return {"x": np.eye(4, dtype=np.float32)}, np.zeros(4, np.int64)


def prompt():
    return {"x": np.eye(4, dtype=np.float32)}, np.zeros(4, np.int64)


def slow(outputs, labels):
    # The original is scored before the targets part, every bundle after that.
    here = Path(__file__).parent
    if (here / "scored").exists():
        held_out("target")
    (here / "scored").touch()
    return 1.0
"""


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, machine: Any, databases: Databases) -> Any:
    """A machine with nothing but embedded servers, which have to end with the command as well."""
    folder = tmp_path_factory.mktemp("interrupted")
    # The commands run in this folder, whose modules are not those of the embedded servers.
    (folder / "uvicorn.py").write_text("raise ImportError('a module of the working folder')\n")
    return type(machine)(databases.prepare(folder / "state"))


@pytest.fixture(scope="module")
def served(embedded: Any, machine: Any) -> Any:
    """The same machine with a Prefect server."""
    return replace(machine, home=embedded.home)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("held-out")
    (folder / "waiting.py").write_text(_DATA)
    yield folder
    assert not [process.pid for process in psutil.process_iter() if _works_in(process, folder)]


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in process.environ().get("PYTHONPATH", "")
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 130, id="terminated", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="killed"),
    ],
)
def test_an_interrupted_release_leaves_nothing_behind_and_goes_on(
    embedded: Any, served: Any, folder: Path, make: Any, number: signal.Signals, code: int
) -> None:
    case = number.name.lower()
    make.onnx(folder)
    task = {"dataset": "waiting:held_out", "arguments": {"case": case}}
    file = make.file(folder, name=case, validate={"task": task})
    process = embedded.start("release", file, "--json")
    wait_until((folder / f"{case}.reached").exists, message="the held-out data is asked for", process=process)
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    os.kill(process.pid, number)
    result = embedded.finish(process)
    assert result.code == code, result.stderr
    if number != signal.SIGKILL:
        assert "interrupted" in result.sentence
        assert result.document["error"]["type"] == "Interrupted"
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not [child.cmdline() for child in alive]
    assert embedded.releases(case) == []

    (folder / f"{case}.go").touch()
    again = served.release(file)
    assert again.code == 0, again.stderr
    assert (again.steps["export"], again.steps["relax_import"]) == ("cached", "cached")
    assert (again.steps["reference"], again.steps["publish"]) == ("ran", "ran")
    assert [release["version"] for release in embedded.releases(case)] == ["1"]


@pytest.mark.long
def test_an_interrupt_ends_targets_that_are_made_side_by_side(served: Any, folder: Path, make: Any) -> None:
    side_by_side = {**served.settings, "TVMFLOW_PARALLEL_TARGETS": "2"}
    make.onnx(folder)
    task = {"dataset": "waiting:prompt", "metric": "waiting:slow"}
    file = make.file(folder, name="parallel", targets=[other_preset(), "native"], validate={"task": task})
    process = replace(served, settings=side_by_side).start("release", file, "--json")
    wait_until((folder / "target.reached").exists, message="a bundle is scored", process=process)
    started = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    result = served.finish(process)
    assert result.code == 130, result.stderr
    assert "interrupted" in result.sentence
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not [child.cmdline() for child in alive]


@pytest.mark.long
def test_a_release_that_died_before_it_noted_its_version_goes_on_with_that(
    served: Any, make: Any, tmp_path: Path
) -> None:
    """A predecessor was killed after the version was registered: its runs are open, and no step remembers them."""
    make.onnx(tmp_path)
    file = make.file(tmp_path, name="forgetful")
    first = served.release(file)
    assert first.code == 0, first.stderr
    run = first.document["mlflow_run_id"]
    for step in ("track", "publish"):
        for path in (served.home / "steps" / step).glob("*.json"):
            if run in path.read_text() or "/forgetful/" in path.read_text():
                path.unlink()
    client = served.mlflow
    experiment = client.get_run(run).info.experiment_id
    names = "tags.`tvmflow.name` = 'forgetful'"
    other = client.create_run(experiment, tags={"tvmflow.name": "forgetful", "tvmflow.key": "of another file"})
    client.update_run(run, status="RUNNING")

    again = served.release(file)
    assert again.code == 0, again.stderr
    assert (again.steps["track"], again.steps["publish"]) == ("ran", "ran")
    assert (again.document["mlflow_run_id"], again.document["version"]) == (run, "1")
    assert [version.version for version in served.versions("forgetful")] == ["1"]
    statuses = {item.info.run_id: item.info.status for item in client.search_runs([experiment], names)}
    assert statuses == {run: "FINISHED", other.info.run_id: "KILLED"}
    nested = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run}'")
    assert [item.info.status for item in nested] == ["FINISHED"]
