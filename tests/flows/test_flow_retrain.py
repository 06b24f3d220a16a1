"""Retraining: what is at least as good as production is released, what is worse leaves it alone and says why."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import scale
from tvmflow import runtime
from tvmflow.documents.encoding import decode
from tvmflow.documents.verdict import RetrainVerdict
from tvmflow.registry import RegistryConfig
from tvmflow.registry.client import Registry
from tvmflow.source import Source, load_module
from tvmflow.spec import Model

# Three classes of points, told apart by a small network; the held-out points are no training points.
_NETWORK = """
import numpy as np
import torch
from torch import nn


def _points(seed, count=330):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    centres = np.random.default_rng(7).normal(size=(3, 6))
    return (centres[labels] + generator.normal(size=(count, 6))).astype(np.float32), labels


def create():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def train(output, *, steps=100, noise=0.0):
    points, labels = _points(1)
    generator = np.random.default_rng(3)
    labels = np.where(generator.random(len(labels)) < noise, generator.integers(0, 3, len(labels)), labels)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = create()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.from_numpy(points)), torch.from_numpy(labels))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    torch.save(model.state_dict(), output)


def held_out():
    points, labels = _points(2)
    return {"x": points}, labels
"""


@dataclass(frozen=True)
class Story:
    """A model trained badly, then well, then on noise; each time by `tvmflow retrain`."""

    machine: Any
    file: Path
    first: Any
    better: Any
    worse: Any
    before_worse: tuple[Any, ...]

    @property
    def bundles(self) -> Path:
        return Path(self.machine.home) / "bundles"


def _state(machine: Any) -> tuple[Any, ...]:
    """What is released, registered and in production."""
    client = machine.mlflow
    return (
        [release["version"] for release in machine.releases("points")],
        [version.version for version in machine.versions("points-source")],
        str(client.get_model_version_by_alias("points", "production").version),
        (machine.home / "s3" / "tvmflow" / "channels" / "points" / "production.json").read_bytes(),
    )


@pytest.fixture(scope="module")
def story(machine: Any, make: Any, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("points")
    (folder / "network.py").write_text(_NETWORK)
    file = make.file(
        folder,
        name="points",
        model={"factory": "network:create"},
        train={"function": "network:train"},
        inputs=[{"name": "x", "shape": [16, 6]}],
        outputs=["y"],
        tune={"trials": scale.count(normal=0, long=2)},
        validate={"task": {"dataset": "network:held_out", "metric": "accuracy"}},
        channels={"production": {"automatic": True}},
        retrain={"channel": "production"},
    )
    runs = [
        machine.run("retrain", file, "--json", "--set", "steps=1"),
        machine.run("retrain", file, "--json", "--set", "steps=200", "--why", "more steps"),
    ]
    assert [result.code for result in runs] == [0, 0], [result.stderr for result in runs]
    before = _state(machine)
    worse = machine.run("retrain", file, "--json", "--set", "steps=200", "--set", "noise=1.0", "--why", "bad labels")
    return Story(machine, file, runs[0], runs[1], worse, before)


def test_without_a_champion_what_was_trained_is_released(story: Story) -> None:
    evaluation = story.first.document["evaluation"]
    assert (evaluation["passed"], evaluation["champion"], evaluation["champion_metric"]) == (True, None, None)
    assert story.first.document["release"]["version"] == "1"


def test_a_better_model_is_released_and_moves_production(story: Story) -> None:
    evaluation, release = story.better.document["evaluation"], story.better.document["release"]
    first = story.first.document["evaluation"]
    assert evaluation["champion"] == "1"
    # The champion is measured as a bundle, on the very data that the challenger is.
    assert evaluation["champion_metric"] == first["challenger"] < evaluation["challenger"]
    assert evaluation["held_out"] == first["held_out"]
    assert (evaluation["samples"], release["version"]) == (330, "2")
    assert story.before_worse[2] == "2"
    assert json.loads(story.before_worse[3])["version"] == "2"
    # What was evaluated is what was released.
    assert release["targets"][0]["metric"]["original"] == evaluation["challenger"]


def test_the_trained_model_is_registered_and_loads_without_its_code(story: Story, tmp_path: Path) -> None:
    assert story.better.document["source"] == "points-source/2"
    newest, first = story.machine.versions("points-source")
    assert (newest.tags["tvmflow.release"], first.tags["tvmflow.release"]) == ("points/2", "points/1")
    assert newest.run_id == story.better.document["mlflow_run_id"]
    (release,) = [item for item in story.machine.releases("points") if item["version"] == "2"]
    assert release["provenance"]["source"] == "points-source/2"
    held_out = story.better.document["evaluation"]["held_out"]
    assert held_out == release["provenance"]["held_out"] == newest.tags["tvmflow.held_out"]
    registry = Registry(RegistryConfig(f"sqlite:///{story.machine.home}/mlflow/mlflow.db"))
    uri = "models:/points-source/2"
    assert "pytorch" in registry.resolve_source(uri).flavors
    folder = registry.download_source(uri, tmp_path)
    module = load_module(Source(kind="mlflow-pytorch", model=Model(mlflow=uri), path=folder))
    import torch

    with runtime.load(story.bundles / "points-2-native.tar.gz") as model:
        inputs, expected = model.sample
    np.testing.assert_allclose(module(torch.from_numpy(inputs["x"])).detach().numpy(), expected["y"], rtol=1e-5)
    assert (folder / "requirements.txt").read_text().count("==") == 3


def test_a_retrained_model_costs_no_new_trials(story: Story) -> None:
    first, second = (release["targets"][0]["tuning"] for release in story.machine.releases("points"))
    assert (first["trials"] > 0) == scale.is_long()
    assert second == {**first, "trials": 0}


def test_a_worse_model_leaves_production_alone_and_says_why(story: Story) -> None:
    assert story.worse.code == 3
    assert story.worse.document["error"]["type"] == "VerdictError"
    assert _state(story.machine) == story.before_worse
    client = story.machine.mlflow
    experiment = client.get_experiment_by_name("tvmflow").experiment_id
    (run,) = client.search_runs([experiment], "tags.`tvmflow.kind` = 'retrain' and tags.`tvmflow.verdict` = 'refused'")
    content = Path(client.download_artifacts(run.info.run_id, "verdict.json")).read_bytes()
    verdict = decode(RetrainVerdict, content, "verdict.json")
    champion, challenger = run.data.metrics["champion"], run.data.metrics["challenger"]
    assert champion == story.better.document["evaluation"]["challenger"] > challenger
    assert (verdict.champion, verdict.champion_metric, verdict.challenger) == ("2", champion, challenger)
    assert (verdict.why, verdict.arguments) == ("bad labels", {"steps": 200, "noise": 1.0})
    for part in (f"{champion:.4f}", f"{challenger:.4f}", "points 2", "production", run.info.run_id):
        assert part in story.worse.sentence
    assert run.data.tags["tvmflow.reason"] in story.worse.sentence


@pytest.mark.long
def test_what_was_retrained_can_be_retuned(story: Story) -> None:
    # The release file would train with other steps: the weights are those of production.
    result = story.machine.run("retune", story.file, "--minutes", "0.001", "--json")
    assert result.code == 0, result.stderr
    assert (result.document["version"], result.document["verdict"]) == ("2", "no gain")


@pytest.mark.parametrize("missing", ["train", "validate"])
def test_a_file_that_cannot_be_retrained_is_one_sentence(machine: Any, make: Any, tmp_path: Path, missing: str) -> None:
    sections: dict[str, Any] = {
        "train": {"function": "network:train"},
        "validate": {"task": {"dataset": "network:held_out"}},
    }
    del sections[missing]
    file = make.file(
        tmp_path,
        name=f"without-{missing}",
        model={"factory": "network:create"},
        inputs=[{"name": "x", "shape": [16, 6]}],
        **sections,
    )
    result = machine.run("retrain", file, "--json")
    assert result.code == 2
    assert "retrain" in result.sentence
    assert "validate.task" in result.sentence


@pytest.mark.parametrize("argument", ["epochs", "=3", "a b=1"])
def test_an_argument_that_is_no_pair_is_refused(machine: Any, argument: str) -> None:
    result = machine.run("retrain", "release.yaml", "--set", argument)
    assert result.code == 2
    assert "KEY=VALUE" in result.stderr
