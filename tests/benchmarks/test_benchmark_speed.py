"""`benchmarks/speed.py`: its table, its JSON document and its errors."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support.models import save_dense
from support.processes import refusal

Command = Callable[..., subprocess.CompletedProcess[str]]
Import = Callable[[str], ModuleType]


@pytest.mark.long
def test_a_model_is_measured_beside_its_peers(command: Command, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ("--rounds", "2", "--seconds", "0.01", "--threads", "1", "--cpu-time", "--json", str(figures))
    process = command("speed", "digits", *options)
    assert process.returncode == 0, process.stderr
    document = json.loads(figures.read_text())
    row = document["models"]["digits"]
    tvmflow_times, peer_times = row["runners"]["tvmflow"], row["runners"]["onnxruntime"]
    assert (document["batch"], document["threads"], document["rounds"]) == (1, 1, 2)
    assert tvmflow_times["runs"] >= 6
    assert 0 < tvmflow_times["min"] <= tvmflow_times["p50"]
    assert 0 < tvmflow_times["error"] < 1e-4
    rounds = [ours / theirs for ours, theirs in zip(tvmflow_times["medians"], peer_times["medians"], strict=True)]
    assert row["ratios"]["onnxruntime"]["p50"] == pytest.approx(sum(rounds) / 2)
    assert row["ratios"]["onnxruntime"]["goal"] == 0.8
    assert row["ratios"]["pytorch"]["min"] == pytest.approx(tvmflow_times["min"] / row["runners"]["pytorch"]["min"])
    # A peer that is not installed is named in the output, and the command succeeds.
    openvino = row["runners"]["openvino"]
    assert (openvino["p50"] is None) == ("OpenVINO is not installed" in process.stdout)
    assert "digits" in process.stdout


@pytest.mark.long
def test_a_file_is_measured_at_sizes_at_which_it_runs(call: Command, tmp_path: Path) -> None:
    file, figures = save_dense(tmp_path / "dense.onnx"), tmp_path / "figures.json"
    options = ("--rounds", "1", "--seconds", "0.01", "--threads", "1", "--json", str(figures), "--state", str(tmp_path))
    process = call("speed", str(file), *options, "--peers", "onnxruntime,pytorch")
    assert process.returncode == 0, process.stderr
    row = json.loads(figures.read_text())["models"]["dense"]
    assert row["runners"].keys() == {"tvmflow", "onnxruntime"}
    assert row["ratios"]["onnxruntime"]["p50"] > 0
    assert row["ratios"]["onnxruntime"]["goal"] is None


def test_a_batch_of_a_file_is_refused(call: Command) -> None:
    sentence = refusal(call("speed", "some.onnx", "--batch", "8"))
    assert "--batch" in sentence
    assert "some.onnx" in sentence


def test_a_model_that_does_not_exist_is_one_sentence(call: Command) -> None:
    process = call("speed", "digts")
    sentence = refusal(process)
    assert "'digts'" in sentence
    assert "'digits'" in sentence


def test_computing_time_of_several_threads_is_refused_in_one_sentence(call: Command) -> None:
    process = call("speed", "digits", "--cpu-time", "--threads", "2")
    sentence = refusal(process)
    assert "--cpu-time" in sentence
    assert "--threads 1" in sentence


def test_a_goal_is_that_of_the_precision(module: Import) -> None:
    speed, figures = module("speed"), module("runners").Figures
    goals = module("catalogue").MODELS["resnet18"].goals
    latencies = {name: figures(min=0.9, medians=(0.9,) * 8) for name in ("tvmflow", "onnxruntime", "openvino_default")}
    outcomes = {
        precision: {peer: (ratio.goal, ratio.outcome) for peer, ratio in speed._ratios(by_peer, latencies).items()}
        for precision, by_peer in goals.items()
    }
    assert outcomes == {
        "fp32": {"onnxruntime": (0.6, "missed"), "openvino_default": (None, "kept")},
        "bf16": {"onnxruntime": (None, "kept"), "openvino_default": (1.0, "kept")},
    }


def test_a_goal_within_the_interval_of_the_ratio_is_unclear(module: Import) -> None:
    speed, figures = module("speed"), module("runners").Figures
    latencies = {
        "tvmflow": figures(min=0.5, medians=(0.55, *(0.65,) * 7)),
        "onnxruntime": figures(min=1.0, medians=(1.0,) * 8),
    }
    ratio = speed._ratios({"onnxruntime": 0.6}, latencies)
    assert (ratio["onnxruntime"].outcome, ratio["onnxruntime"].p50) == ("unclear", 0.65)
    assert str(ratio["onnxruntime"].interval) == "0.550 to 0.650"


def test_outputs_without_a_number_in_the_same_places_do_not_differ(module: Import, tmp_path: Path) -> None:
    runners = module("runners")
    job = runners.RunnerJob(
        runner="onnxruntime",
        onnx=tmp_path / "model.onnx",
        sample=tmp_path / "sample.npz",
        expected=tmp_path / "expected.npz",
        bundle=None,
        source=None,
        threads=1,
        seconds=0.01,
    )
    values, numbers = np.array([np.nan, 4.0, np.inf], "float32"), np.array([3, 200], "uint8")
    runners._error({"y": values, "n": numbers}, job)
    ours = job.model_copy(update={"runner": "tvmflow"})
    assert runners._error({"y": values, "n": numbers}, ours) == 0.0
    assert runners._error({"y": values, "n": np.array([4, 199], "uint8")}, ours) == pytest.approx(1 / 200)
    assert runners._error({"y": np.array([1.0, 4.0, np.inf], "float32"), "n": numbers}, ours) == float("inf")


@pytest.mark.long
def test_a_runner_that_fails_leaves_the_others_measured(module: Import, state: Path, tmp_path: Path) -> None:
    prepare, runners = module("prepare"), module("runners")
    model = module("catalogue").MODELS["digits"]
    job = runners.RunnerJob(
        runner="tvmflow",
        onnx=prepare.export(model, 1, state),
        sample=prepare.sample(model, 1, state),
        expected=tmp_path / "expected.npz",
        bundle=tmp_path / "missing.tar.gz",
        source=None,
        threads=1,
        seconds=0.01,
    )
    with runners.Contest(tmp_path) as contest:
        measured = contest.measure(job, ("onnxruntime", "tvmflow"), 2, lambda step: None)
    assert "missing.tar.gz" in measured["tvmflow"].failure
    assert measured["tvmflow"].p50 is None
    assert measured["onnxruntime"].runs >= 6


@pytest.mark.long
def test_a_process_is_stopped_while_it_is_not_its_turn(module: Import, state: Path, tmp_path: Path) -> None:
    prepare, runners = module("prepare"), module("runners")
    model = module("catalogue").MODELS["digits"]
    job = runners.RunnerJob(
        runner="onnxruntime",
        onnx=prepare.export(model, 1, state),
        sample=prepare.sample(model, 1, state),
        expected=tmp_path / "expected.npz",
        bundle=None,
        source=None,
        threads=2,
        seconds=0.01,
    )
    with runners.Turns("runners:work", tmp_path / "log") as turns:
        first = turns.call(job, runners.Round)
        threads = list(Path(f"/proc/{first.process}/task").iterdir())
        # A stop reaches threads that are in the kernel a moment later than those that compute.
        for _ in range(1000):
            states = {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads}
            if states == {"T"}:
                break
        assert states == {"T"}
        assert turns.call(job, runners.Round).process == first.process
