"""Retuning: a faster build of the model in production becomes a release; otherwise there is a verdict alone."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tvmflow.documents.encoding import decode
from tvmflow.documents.verdict import RetuneVerdict

# tests/flows/test_flow_release_tuned.py compares builds, and tests/tuning tunes.
pytestmark = pytest.mark.long

_NETWORK = """
import torch
from torch import nn


def create(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 12 * 12, 10)).eval()
"""


@dataclass(frozen=True)
class Story:
    """A model in production, built without the layout in which convolutions are fast, then retuned with it, twice."""

    machine: Any
    folder: Path
    first: Any
    second: Any


@pytest.fixture(scope="module")
def story(machine: Any, make: Any, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("convolutions")
    (folder / "network.py").write_text(_NETWORK)
    sections = {
        "name": "convolutions",
        "model": {"factory": "network:create"},
        "inputs": [{"name": "x", "shape": [1, 32, 12, 12]}],
        "channels": {"production": {"automatic": True}},
    }
    # On one thread: where other tests use all processors, two threads wait for each other longer than they compute.
    slow = {"threads": 1, "disabled_passes": ["ChannelsLast"]}
    released = machine.release(make.file(folder, **sections, build=slow))
    assert released.code == 0, released.stderr
    file = make.file(folder, **sections, build={"threads": 1})
    # So little time that nothing is tuned: the gain is in the layout alone.
    runs = [machine.run("retune", file, "--minutes", "0.001", "--json") for _ in range(2)]
    assert [result.code for result in runs] == [0, 0], [result.stderr for result in runs]
    return Story(machine, folder, *runs)


def _verdict(story: Story, ended: Any) -> tuple[Any, RetuneVerdict]:
    client = story.machine.mlflow
    run = client.get_run(ended.document["mlflow_run_id"])
    content = Path(client.download_artifacts(run.info.run_id, "verdict.json")).read_bytes()
    return run.data, decode(RetuneVerdict, content, "verdict.json")


def test_a_build_that_is_measured_faster_becomes_a_release(story: Story) -> None:
    document = story.first.document
    assert (document["version"], document["verdict"], document["release"]["version"]) == ("1", "better", "2")
    gain = document["targets"][0]["gain"]
    assert gain["interval"]["high"] < 0.98
    assert gain["ratio"] == pytest.approx(statistics.median(gain["ratios"]))
    pointer = json.loads((story.machine.home / "s3/tvmflow/channels/convolutions/production.json").read_text())
    assert [move["to"] for move in pointer["history"]] == ["1", "2"]
    data, verdict = _verdict(story, story.first)
    assert (data.tags["tvmflow.kind"], data.tags["tvmflow.verdict"]) == ("retune", "better")
    assert data.metrics["native.ratio"] == gain["ratio"]
    assert list(verdict.targets[0].gain.ratios) == gain["ratios"]
    again = story.machine.run("verdict", "convolutions", "1", "--about", "retuning", "--replay", "--json")
    assert again.code == 0, again.stderr
    (check,) = again.document["checks"]
    assert (check["passed"], check["value"]) == (True, pytest.approx(gain["ratio"]))
    assert again.document["mlflow_run_id"] == document["mlflow_run_id"]
    files = story.machine.mlflow.list_artifacts(document["mlflow_run_id"], "samples")
    assert [file.path for file in files] == [f"samples/{check['name']}.npz"]


def test_a_build_that_is_no_faster_is_no_release(story: Story) -> None:
    document = story.second.document
    assert (document["version"], document["verdict"], document["release"]) == ("2", "no gain", None)
    assert [release["version"] for release in story.machine.releases("convolutions")] == ["1", "2"]
    data, verdict = _verdict(story, story.second)
    assert (data.tags["tvmflow.kind"], data.tags["tvmflow.verdict"]) == ("retune", "no gain")
    assert "no gain" in verdict.reason


def test_the_time_goes_to_what_costs_most_in_production(story: Story) -> None:
    costliest = story.second.document["targets"][0]["functions"]
    assert "conv2d" in costliest[0]
    records = [json.loads(path.read_text()) for path in (story.machine.home / "steps" / "retune").glob("*.json")]
    tuned = [{item["name"] for item in record["result"]["workloads"]} for record in records]
    assert set(costliest) in tuned


def test_another_model_than_that_in_production_is_not_retuned(story: Story, make: Any) -> None:
    file = make.file(
        story.folder,
        name="convolutions",
        model={"factory": "network:create", "arguments": {"seed": 1}},
        inputs=[{"name": "x", "shape": [1, 32, 12, 12]}],
    )
    result = story.machine.run("retune", file, "--minutes", "0.001", "--json")
    assert result.code == 1
    assert "convolutions 2" in result.sentence


def test_a_channel_without_a_release_is_refused(machine: Any, make: Any, tmp_path: Path) -> None:
    make.onnx(tmp_path)
    result = machine.run("retune", make.file(tmp_path), "--json")
    assert result.code == 1
    assert [name for name in ("'production'", "tiny") if name not in result.sentence] == []
