"""The pipeline runs itself: from an alias set in MLflow to production, through retraining, and back."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from support import scale
from support.managed import Managed
from support.waits import wait_until

CHANNELS = ("staging", "production")


@dataclass(frozen=True)
class House:
    """The shared stack, the model that it manages, and a client of its MLflow server."""

    stack: Any
    model: Managed
    mlflow: Any

    @property
    def name(self) -> str:
        return self.model.name

    def train_and_register(self) -> str:
        """Train a source model and register it; its version."""
        self.model.train_and_register(self.stack.address("mlflow"), self.stack.commands)
        newest = self.mlflow.search_model_versions(f"name = '{self.model.source}'", order_by=["version_number DESC"])[0]
        return str(newest.version)

    def ask(self, *arguments: str) -> Any:
        """The document that a command prints with `--json`."""
        result = self.stack.run(*arguments, "--json")
        assert result.code == 0, result.stderr
        return result.document

    def held(self, channel: str) -> str | None:
        """What the channel of devices points at; objects of the stack's S3 server are files."""
        place = self.stack.state / "s3" / "tvmflow" / "channels" / self.name / f"{channel}.json"
        version = json.loads(place.read_text())["version"] if place.exists() else None
        return None if version is None else str(version)

    def alias(self, channel: str) -> str | None:
        """What the alias of the registry points at."""
        value = self.mlflow.get_registered_model(self.name).aliases.get(channel)
        return None if value is None else str(value)

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        """The flow runs of a deployment, the oldest first, without those that a schedule foresees."""
        deployment_id = self.stack.prefect(f"deployments/name/{deployment}")["id"]
        query = {"deployments": {"id": {"any_": [deployment_id]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return [run for run in self.stack.prefect("flow_runs/filter", query) if run["state_type"] != "SCHEDULED"]

    def verdicts(self, kind: str) -> list[Any]:
        """MLflow's runs of a kind, the newest first."""
        experiments = [item.experiment_id for item in self.mlflow.search_experiments()]
        return list(self.mlflow.search_runs(experiments, f"tags.`tvmflow.kind` = '{kind}'"))

    def share_right(self) -> float:
        """The share of held-out data about which what devices get of production is right."""
        folder = self.model.file.parent
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))
            patch.delitem(sys.modules, "data", raising=False)
            import data

            inputs, labels = data.held_out()
            patch.delitem(sys.modules, "data")
        np.savez(folder / "in.npz", **{name: array[:64] for name, array in inputs.items()})
        inputs_file, outputs_file = str(folder / "in.npz"), str(folder / "out.npz")
        self.ask("run", f"release://{self.name}@production", "--inputs", inputs_file, "--output", outputs_file)
        with np.load(outputs_file) as outputs:
            return float((outputs["output_0"].argmax(axis=1) == labels[:64]).mean())


@pytest.fixture
def house(stack: Any, managed: Managed) -> House:
    from mlflow import MlflowClient

    address = stack.address("mlflow")
    return House(stack, managed, MlflowClient(address, registry_uri=address))


@pytest.mark.timeout(1200)
def test_from_an_alias_to_production_through_retraining_and_back(house: House) -> None:
    # An alias is all it takes: released, judged, and moved on to both channels.
    source = house.train_and_register()
    house.mlflow.set_registered_model_alias(house.model.source, "production", source)
    wait_until(lambda: house.held("production") == "1", message="production holds the first release")
    # The alias follows what devices get.
    wait_until(lambda: house.alias("production") == "1", message="the alias follows")
    assert house.held("staging") == house.alias("staging") == "1"
    assert [item["provenance"]["source"] for item in house.ask("list", house.name)] == [
        f"{house.model.source}/{source}"
    ]
    assert {run.data.tags["tvmflow.verdict"] for run in house.verdicts("promotion")} == {"passed"}
    assert house.share_right() > house.model.right

    if not scale.is_long():
        _assert_the_worker_retrains_when_notified(house)
        return

    # The end of a retraining on better data moves production.
    house.ask("notify", house.name, "--set", house.model.better, "--why", "more data")
    wait_until(lambda: house.alias("production") == "2", message="production holds the retrained model")
    assert house.held("production") == "2"
    _assert_worse_data_are_refused(house)

    # One command brings the release before back, and nothing takes it away again.
    house.ask("rollback", house.name, "--channel", "production", "--why", "a complaint")
    assert (house.held("production"), house.alias("production")) == ("1", "1")
    house.ask("reconcile")
    assert (house.held("production"), house.alias("production")) == ("1", "1")
    _assert_reconciling_finds_what_the_receiver_misses(house)


def _assert_the_worker_retrains_when_notified(house: House) -> None:
    """The worker calls the training with what `notify` names, which this training does not take.

    What a retraining does, and a rollback, are tested without a stack, in tests/flows.
    """
    house.ask("notify", house.name, "--set", "colour=red", "--why", "a slip")
    deployment = f"retrain/{house.name}"
    states = wait_until(
        lambda: [run["state"] for run in house.runs(deployment) if run["state_type"] == "FAILED"],
        message="the retraining fails",
    )
    assert "colour" in states[0]["message"]
    assert [house.held(channel) for channel in CHANNELS] == ["1", "1"]
    house.ask("reconcile")
    assert [house.alias(channel) for channel in CHANNELS] == ["1", "1"]


def _assert_reconciling_finds_what_the_receiver_misses(house: House) -> None:
    """An alias that is set while no receiver runs is followed by the deployment that reconciles, on its schedule."""
    _, servers = house.stack.status()
    os.kill(servers["receiver"]["pid"], signal.SIGKILL)
    wait_until(lambda: house.stack.status()[1]["receiver"]["state"] != "healthy", message="the receiver is gone")
    house.mlflow.set_registered_model_alias(house.name, "production-wanted", "2")
    with house.stack.often("reconcile/all") as scheduled_runs:
        wait_until(lambda: house.held("production") == "2", message="production holds what the alias asks for")
        runs = wait_until(scheduled_runs, message="the worker completes a run of the schedule")
    assert {run["created_by"]["type"] for run in runs} == {"SCHEDULE"}
    assert {run["work_pool_name"] for run in runs} == {"tvmflow"}


def _assert_worse_data_are_refused(house: House) -> None:
    """A retraining on worse data leaves production alone and says why."""
    house.ask("notify", house.name, "--set", house.model.worse, "--why", "bad labels")
    deployment = f"retrain/{house.name}"
    wait_until(lambda: [run["state_type"] for run in house.runs(deployment)][1:] == ["FAILED"], message="it is refused")
    assert f"{house.name} is not released" in house.runs(deployment)[1]["state"]["message"]
    newest = house.verdicts("retrain")[0]
    assert newest.data.tags["tvmflow.verdict"] == "refused"
    assert newest.data.metrics["challenger"] < newest.data.metrics["champion"]
    assert [house.held(channel) for channel in CHANNELS] == [house.alias(channel) for channel in CHANNELS] == ["2", "2"]
    assert len(house.ask("list", house.name)) == 2


@pytest.mark.long
def test_a_source_that_the_receiver_missed_is_released_by_reconciling(house: House) -> None:
    _, servers = house.stack.status()
    os.kill(servers["receiver"]["pid"], signal.SIGKILL)
    wait_until(lambda: house.stack.status()[1]["receiver"]["state"] != "healthy", message="the receiver is gone")
    before = house.held("staging")
    source = house.train_and_register()
    house.mlflow.set_registered_model_alias(house.model.source, "production", source)
    with house.stack.often("reconcile/all"):
        wait_until(lambda: house.held("staging") != before, message="staging holds what the alias asked for")
    newest = house.ask("list", house.name)[-1]
    assert newest["provenance"]["source"] == f"{house.model.source}/{source}"
    assert house.alias("staging") == house.held("staging") == str(newest["version"])
