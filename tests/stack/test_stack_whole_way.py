"""The pipeline runs itself: from an alias set in MLflow to production, through retraining, and back."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from support.databases import Databases
from support.waits import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
CHANNELS = ("staging", "production")

# What somebody who trains models does, with nothing of tvmflow: train, and register the model in MLflow.
_TRAIN_AND_REGISTER = """
import sys
from pathlib import Path
import mlflow, torch
from data import held_out
from model import create
from train import train
train(Path("weights.pt"), epochs=int(sys.argv[1]))
net = create()
net.load_state_dict(torch.load("weights.pt", weights_only=True))
example = held_out()[0]["image"][:2]
mlflow.pytorch.log_model(net.eval(), name="model", registered_model_name="digits-source", input_example=example)
"""


@dataclass(frozen=True)
class House:
    """A machine with a running stack that manages the digits example, and clients of its servers."""

    stack: Any
    file: Path
    mlflow: Any

    def train_and_register(self, epochs: int) -> str:
        """Train a source model and register it; its version."""
        subprocess.run(
            [sys.executable, "-c", _TRAIN_AND_REGISTER, str(epochs)],
            cwd=self.file.parent,
            env={**self.stack.environment, "MLFLOW_TRACKING_URI": self.address("mlflow")},
            check=True,
            timeout=240,
            capture_output=True,
        )
        newest = self.mlflow.search_model_versions("name = 'digits-source'", order_by=["version_number DESC"])[0]
        return str(newest.version)

    def address(self, server: str) -> str:
        return f"http://127.0.0.1:{self.stack.ports[server]}"

    def held(self, channel: str) -> str | None:
        """What the channel of devices points at; objects of the stack's S3 server are files."""
        place = self.stack.state / "s3" / "tvmflow" / "channels" / "digits" / f"{channel}.json"
        return str(json.loads(place.read_text())["version"]) if place.exists() else None

    def alias(self, channel: str) -> str | None:
        """What the alias of the registry points at."""
        value = self.mlflow.get_registered_model("digits").aliases.get(channel)
        return None if value is None else str(value)

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        """The flow runs of a deployment, the oldest first, without those that a schedule foresees."""
        query = {"deployments": {"name": {"any_": ["digits", "all"]}}, "sort": "EXPECTED_START_TIME_ASC"}
        deployment_id = self.stack.prefect(f"deployments/name/{deployment}")["id"]
        runs = [run for run in self.stack.prefect("flow_runs/filter", query) if run["deployment_id"] == deployment_id]
        return [run for run in runs if run["state_type"] != "SCHEDULED"]

    def verdicts(self, kind: str) -> list[Any]:
        """MLflow's runs of a kind, the newest first."""
        experiments = [item.experiment_id for item in self.mlflow.search_experiments()]
        return list(self.mlflow.search_runs(experiments, f"tags.`tvmflow.kind` = '{kind}'"))


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory,
    new_machine: Callable[[Path], Any],
    end_all: Callable[[Any], None],
    databases: Databases,
) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    example = Path(shutil.copytree(EXAMPLE, folder / "digits", ignore=shutil.ignore_patterns("__pycache__")))
    file = example / "release.yaml"
    document = yaml.safe_load(file.read_text())
    document["benchmark"] = {"repeats": 5, "rounds": 2, "peers": []}
    file.write_text(yaml.safe_dump(document))
    stack = new_machine(folder)
    databases.prepare(stack.state)
    try:
        result = stack.up(file)
        assert result.code == 0, result.stderr
        from mlflow import MlflowClient

        address = f"http://127.0.0.1:{stack.ports['mlflow']}"
        yield House(stack, file, MlflowClient(address, registry_uri=address))
    finally:
        end_all(stack)


def test_from_an_alias_to_production_through_retraining_and_back(house: House) -> None:
    # An alias is all it takes: released, judged, and moved on to both channels.
    source = house.train_and_register(2)
    house.mlflow.set_registered_model_alias("digits-source", "production", source)
    wait_until(lambda: house.held("production") == "1", message="production holds the first release")
    assert house.held("staging") == house.alias("staging") == house.alias("production") == "1"
    listing = house.stack.run("list", "digits", "--json").document
    assert [item["provenance"]["source"] for item in listing] == [f"digits-source/{source}"]
    assert {run.data.tags["tvmflow.verdict"] for run in house.verdicts("promotion")} == {"passed"}
    assert _reads_digits(house)

    # The end of a retraining on better data moves production.
    result = house.stack.run("notify", "digits", "--set", "epochs=8", "--why", "more data", "--json")
    assert result.code == 0, result.stderr
    wait_until(lambda: house.held("production") == "2", message="production holds the retrained model")
    assert house.alias("production") == "2"

    # That of one on worse data does not, and says why.
    result = house.stack.run("notify", "digits", "--set", "label_noise=0.9", "--why", "bad labels", "--json")
    assert result.code == 0, result.stderr
    wait_until(
        lambda: [run["state_type"] for run in house.runs("retrain/digits")][1:] == ["FAILED"], message="it is refused"
    )
    refusal = house.runs("retrain/digits")[1]
    assert "digits is not released" in refusal["state"]["message"]
    newest = house.verdicts("retrain")[0]
    assert newest.data.tags["tvmflow.verdict"] == "refused"
    assert newest.data.metrics["challenger"] < newest.data.metrics["champion"]
    assert [house.held(channel) for channel in CHANNELS] == [house.alias(channel) for channel in CHANNELS] == ["2", "2"]
    assert len(house.stack.run("list", "digits", "--json").document) == 2

    # One command brings the release before back, and nothing takes it away again.
    result = house.stack.run("rollback", "digits", "--channel", "production", "--why", "a complaint", "--json")
    assert result.code == 0, result.stderr
    assert (house.held("production"), house.alias("production")) == ("1", "1")
    result = house.stack.run("reconcile", "--json")
    assert result.code == 0, result.stderr
    assert (house.held("production"), house.alias("production")) == ("1", "1")


def test_what_the_receiver_missed_is_found_by_reconciling(house: House) -> None:
    _, servers = house.stack.status()
    os.kill(servers["receiver"]["pid"], signal.SIGKILL)
    wait_until(lambda: house.stack.status()[1]["receiver"]["state"] != "healthy", message="the receiver is gone")
    before = house.held("staging")
    source = house.train_and_register(3)
    house.mlflow.set_registered_model_alias("digits-source", "production", source)

    # The deployment runs on its own schedule, every five minutes; here it does not wait for that.
    deployment_id = house.stack.prefect("deployments/name/reconcile/all")["id"]
    house.stack.prefect(f"deployments/{deployment_id}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    wait_until(lambda: house.held("staging") != before, message="staging holds what the alias asked for")
    newest = house.stack.run("list", "digits", "--json").document[-1]
    assert newest["provenance"]["source"] == f"digits-source/{source}"
    assert house.alias("staging") == house.held("staging") == str(newest["version"])


def _reads_digits(house: House) -> bool:
    """Whether what devices get of production reads most of the held-out digits."""
    sys.path.insert(0, str(house.file.parent))
    try:
        import data

        inputs, labels = data.held_out()
    finally:
        sys.path.remove(str(house.file.parent))
    inputs_file, outputs_file = house.file.parent / "in.npz", house.file.parent / "out.npz"
    np.savez(inputs_file, image=inputs["image"][:64])
    result = house.stack.run("run", "release://digits@production", "--inputs", inputs_file, "--output", outputs_file)
    assert result.code == 0, result.stderr
    with np.load(outputs_file) as outputs:
        return bool((outputs["logits"].argmax(axis=1) == labels[:64]).mean() > 0.8)
