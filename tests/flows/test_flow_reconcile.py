"""Reconciling without a deployment or a webhook: what the aliases ask for is done in the command itself."""

import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import reconcile
from tvmflow.bundle import keygen
from tvmflow.services import open_services, open_store
from tvmflow.settings import Settings
from tvmflow.store import channels
from tvmflow.store.channel_statements import check_statement
from tvmflow.triggers import load

Findings = list[tuple[str, str, str]]


@dataclass(frozen=True)
class House:
    """A machine that manages one release file, of a registered model with an alias.

    Its name is of this file alone: others register deployments on the Prefect server that they share.
    """

    machine: Any
    file: Path

    def reconcile(self) -> Findings:
        """What it finds: alias, version and what was done."""
        result = self.machine.run("reconcile", "--json")
        assert result.code == 0, result.stderr
        return [(item["alias"], item["version"], item["done"]) for item in result.document["findings"]]

    def channel(self, name: str = "staging") -> str | None:
        """The version that a channel of its releases holds."""
        with open_store(Settings(home=self.machine.home)) as store:
            pointer = channels.find(store, "reconciled", name)
        return pointer.version


@pytest.fixture(scope="module")
def house(machine: Any, make: Any, tmp_path_factory: pytest.TempPathFactory) -> House:
    import mlflow.onnx
    import onnx

    folder = tmp_path_factory.mktemp("reconciled")
    model = make.onnx(folder)
    file = make.file(folder, name="reconciled", model={"mlflow": "models:/net@candidate"}, channels={"staging": {}})
    own = replace(machine, settings={**machine.settings, "TVMFLOW_MODELS": json.dumps([str(file)])})
    assert own.versions("net") == []  # which makes the registry's file as tvmflow does
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{machine.home}/mlflow/mlflow.db")
        patch.chdir(folder)
        mlflow.set_experiment("training")
        for _ in range(2):
            mlflow.onnx.log_model(
                onnx.load(model), name="graph", registered_model_name="net", pip_requirements=["onnx"]
            )
    return House(own, file)


def test_an_installation_without_release_files_is_reported(machine: Any) -> None:
    result = machine.run("reconcile")
    assert result.code == 2
    assert "TVMFLOW_MODELS" in result.sentence


@pytest.fixture(scope="module")
def findings(house: House) -> list[Findings]:
    """What is found before and after wishes: two source versions to release, then a release to promote."""
    client, findings = house.machine.mlflow, [house.reconcile()]
    client.set_registered_model_alias("net", "candidate", "1")
    findings.append(house.reconcile())
    # The same weights under another version are another wish.
    client.set_registered_model_alias("net", "candidate", "2")
    client.set_registered_model_alias("reconciled", "staging", "1")
    findings.append(house.reconcile())
    return [*findings, house.reconcile()]


def test_what_aliases_ask_for_is_done_once(house: House, findings: list[Findings]) -> None:
    assert findings == [
        [],
        [("net@candidate", "1", "ran")],
        [("reconciled@staging", "1", "ran"), ("net@candidate", "2", "ran")],
        [],
    ]
    assert house.channel() is not None


def test_a_release_says_which_source_version_it_is_of(house: House, findings: list[Findings]) -> None:
    assert [item["provenance"]["source"] for item in house.machine.releases("reconciled")] == ["net/1", "net/2"]
    client = house.machine.mlflow
    experiment = client.get_experiment_by_name("tvmflow").experiment_id
    runs = client.search_runs([experiment], "tags.`tvmflow.source` = 'net/2'")
    assert [run.data.tags["tvmflow.verdict"] for run in runs] == ["passed"]


def test_of_a_file_without_channels_aliases_that_no_channel_can_have_are_left_alone(
    house: House, findings: list[Findings]
) -> None:
    file = house.file.with_name("without-channels.yaml")
    file.write_text(yaml.safe_dump({**yaml.safe_load(house.file.read_text()), "channels": {}}))
    client = house.machine.mlflow
    client.set_registered_model_alias("reconciled", "größe", "1")
    client.set_registered_model_alias("reconciled", "next-wanted", "1")
    (entry,) = load((file,)).entries
    try:
        with open_services(Settings(home=house.machine.home), entry.spec.store, entry.spec.registry) as services:
            assert reconcile._channels(services, entry) == ["next", "staging"]
    finally:
        for alias in ("größe", "next-wanted"):
            client.delete_registered_model_alias("reconciled", alias)


@pytest.mark.long
def test_aliases_that_cannot_be_followed_are_put_back(house: House, findings: list[Findings]) -> None:
    client = house.machine.mlflow
    client.delete_registered_model_alias("reconciled", "staging")
    assert house.reconcile() == [("reconciled@staging", "1", "alias set")]
    assert str(client.get_model_version_by_alias("reconciled", "staging").version) == "1"
    # Refused on this channel before.
    client.set_model_version_tag("reconciled", "2", "tvmflow.refused.staging", "too slow")
    client.set_registered_model_alias("reconciled", "staging", "2")
    assert house.reconcile() == [("reconciled@staging", "2", "alias put back")]
    assert str(client.get_model_version_by_alias("reconciled", "staging").version) == "1"
    assert house.channel() == "1"
    client.set_registered_model_alias("reconciled", "staging-wanted", "2")
    assert house.reconcile() == [("reconciled@staging-wanted", "2", "alias deleted")]
    client.set_registered_model_alias("reconciled", "staging-wanted", "1")
    assert house.reconcile() == [("reconciled@staging-wanted", "1", "alias deleted")]


def test_a_wish_that_nobody_works_on_is_taken_up(house: House, findings: list[Findings]) -> None:
    client = house.machine.mlflow
    client.delete_model_version_tag("reconciled", "2", "tvmflow.refused.staging")
    with open_store(Settings(home=house.machine.home)) as store:
        channels.wish(store, "reconciled", "staging", "2", who="ann", why="and died")
    assert house.reconcile() == [("reconciled@staging", "2", "ran")]
    assert house.channel() == "2"
    # A rollback is no wish for what the channel held before.
    assert house.machine.run("rollback", "reconciled", "--channel", "staging").code == 0
    assert house.reconcile() == []
    assert house.channel() == "1"


@pytest.mark.long
def test_an_asking_alias_is_granted_without_the_channels_own_moving_before(
    house: House, findings: list[Findings]
) -> None:
    client = house.machine.mlflow
    client.set_registered_model_alias("reconciled", "staging-wanted", "2")
    assert house.reconcile() == [("reconciled@staging-wanted", "2", "ran")]
    assert house.channel() == "2"
    aliases = {alias: str(version) for alias, version in client.get_registered_model("reconciled").aliases.items()}
    assert aliases == {"staging": "2"}


def test_the_statement_on_a_channel_is_renewed_in_time(house: House, findings: list[Findings], tmp_path: Path) -> None:
    keygen(tmp_path / "key")
    signing = Settings(home=house.machine.home, signing_key=tmp_path / "key", statement_days=10)
    with open_store(signing) as store:
        before = channels.sign_channel(store, "reconciled", "staging")
    key = {"TVMFLOW_SIGNING_KEY": str(tmp_path / "key")}
    renewing = replace(house, machine=replace(house.machine, settings={**house.machine.settings, **key}))
    assert renewing.reconcile() == []
    with open_store(signing) as store:
        after = channels.find(store, "reconciled", "staging")
        assert (after.number, after.version) == (before.number + 1, before.version)
        claim = check_statement(store, after, [tmp_path / "key.pub"])
    assert claim is not None
    assert datetime.datetime.fromisoformat(claim.expires) > datetime.datetime.now(datetime.UTC) + datetime.timedelta(29)
