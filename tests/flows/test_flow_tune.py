"""`tvmflow tune`: an interrupt, the run after it, the end of a run by itself, and the curve in MLflow."""

import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import helper

from support.waits import wait_until
from tvmflow.hardware.target import resolve
from tvmflow.tuning import RecordStore

# tests/tuning interrupts a tuner, and tests/flows/test_flow_retune.py tunes through the step.
pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Story:
    """A run that was interrupted after its first round, what it left behind, and the run after it."""

    machine: Any
    file: Path
    interrupted: Any
    trials: int
    leftovers: tuple[Path, ...]
    alive: tuple[psutil.Process, ...]
    second: Any


@pytest.fixture(scope="module")
def story(machine: Any, make: Any, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("tuned")
    chance = np.random.default_rng(0)
    weights = {"w": chance.normal(size=(32, 16, 3, 3)).astype(np.float32)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["y"])]
    make.onnx(folder, nodes, weights, shape=(1, 16, 12, 12))
    file = make.file(folder, name="tuned", tune={"tuner": "random", "seed": 1})
    # Other tests have such folders meanwhile, in the folder that all share.
    temporary = tmp_path_factory.mktemp("temporary")
    machine = replace(machine, settings={**machine.settings, "TMPDIR": str(temporary)})
    store, native = RecordStore(machine.home / "records"), resolve("native")

    def spent() -> int:
        return sum(effort.trials for effort in store.efforts(native) if not effort.is_on_decisions)

    process = machine.start("tune", file, "--minutes", "30", "--json")
    wait_until(lambda: spent() > 0, message="trials are measured", process=process)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    interrupted = machine.finish(process)
    _, alive = psutil.wait_procs(started, timeout=10)
    leftovers = (*(machine.home / "tmp").iterdir(), *temporary.glob("tvmflow-tune-*"))
    trials = spent()
    second = machine.run("tune", file, "--trials", str(2 * trials + 8), "--json")
    return Story(machine, file, interrupted, trials, leftovers, tuple(alive), second)


def test_an_interrupt_leaves_nothing_behind_but_what_was_measured(story: Story) -> None:
    assert story.interrupted.code == 130
    assert "Traceback" not in story.interrupted.stderr
    assert not story.leftovers
    assert not story.alive
    assert story.trials > 0


def test_the_next_run_goes_on_and_counts_what_was_measured(story: Story) -> None:
    assert story.second.code == 0, story.second.stderr
    result = story.second.document["targets"]["native"]
    assert 0 < result["trials"] <= story.trials + 8


def test_the_curve_is_a_run_of_its_own_in_mlflow(story: Story) -> None:
    result = story.second.document["targets"]["native"]
    client = story.machine.mlflow
    experiment = client.get_experiment_by_name("tvmflow").experiment_id
    runs = client.search_runs([experiment], "tags.`tvmflow.kind` = 'tune'", order_by=["attributes.start_time ASC"])
    assert [run.info.run_name for run in runs] == ["tune tuned for native"] * 2
    assert [run.info.status for run in runs] == ["KILLED", "FINISHED"]
    until_then, points = (
        sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, "tuning_latency_ms"))
        for run in runs
    )
    # An interrupted run has the curve as well, as far as it came.
    assert until_then
    # There are as many points while it runs as there are trials, and in the result a few of them.
    by_trial = dict(points)
    assert len(by_trial) == len(points)
    assert {trial: by_trial.get(trial) for trial, _ in result["curve"]} == pytest.approx(dict(result["curve"]))
    assert points[-1][0] == result["trials"]
    assert runs[1].data.metrics["estimated_latency_ms"] == pytest.approx(result["latency_ms"])
    picture = Path(client.download_artifacts(runs[1].info.run_id, "tuning.svg")).read_text()
    assert picture.startswith("<svg ")


def test_a_run_until_there_is_little_to_gain_ends_by_itself(story: Story) -> None:
    ended = story.machine.run("tune", story.file, "--until", "99%", "--json")
    assert ended.code == 0, ended.stderr
    result = ended.document["targets"]["native"]
    # Nothing else would have ended it but 256 trials in a row that were not faster.
    assert result["trials"] < 256
    assert result["latency_ms"] <= result["untuned_ms"]
