"""Deployments and triggers on real servers: aliases set in MLflow become flow runs, at once or by reconciling."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from prefect.flows import load_flow_from_entrypoint

from flows.automations import DEAD
from support import scale
from support.proxies import watching
from support.servers import free_port, mlflow_server, serving
from support.waits import wait_until
from tvmflow.store import ReleaseStore
from tvmflow.triggers.webhook import DELIVERY_HEADER, PATH, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign

SECRET = "a secret of this test"
WAIT_SECONDS = 60.0
_ON_A_SCHEDULE = Path(__file__).parents[2] / "docs" / "how-to" / "on-a-schedule.md"


@dataclass(frozen=True)
class House:
    """A machine with a Prefect, an MLflow and an S3 server, and the receiver's address."""

    machine: Any
    api: str
    client: Any
    receiver: str
    receiving: Callable[[], AbstractContextManager[str]]

    def runs(self, deployment: str, tag: str) -> list[dict[str, Any]]:
        """The flow runs of a deployment with a tag."""
        runs = self.ask("flow_runs/filter", {"flow_runs": {"tags": {"all_": [tag]}}})
        document = requests.get(f"{self.api}/deployments/name/{deployment}", timeout=30).json()
        return [run for run in runs if run["deployment_id"] == document["id"]]

    def awaited(self, deployment: str, tag: str) -> list[dict[str, Any]]:
        """The same, once there is one."""
        return wait_until(lambda: self.runs(deployment, tag), WAIT_SECONDS, f"no run of {deployment} with {tag}")

    def ask(self, what: str, body: dict[str, Any]) -> Any:
        """Post to Prefect's API."""
        answer = requests.post(f"{self.api}/{what}", json=body, timeout=30)
        assert answer.ok, answer.text
        return answer.json() if answer.content else None

    def reconcile(self) -> list[dict[str, Any]]:
        """What `tvmflow reconcile` finds and does."""
        result = self.machine.run("reconcile", "--json")
        assert result.code == 0, result.stderr
        return list(result.document["findings"])


@pytest.fixture(scope="module")
def house(
    machine: Any, make: Any, prefect_server: str, s3: ReleaseStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    make.onnx(folder)
    channels = {"staging": {}, "production": {"after": "staging"}}
    file = make.file(folder, name="house", model={"mlflow": "models:/graph@candidate"}, channels=channels)
    mlflow_port, port = free_port(), free_port()
    settings = {
        **machine.settings,
        "TVMFLOW_S3_ENDPOINT": s3.config.endpoint,
        "TVMFLOW_S3_BUCKET": s3.config.bucket,
        "TVMFLOW_S3_ACCESS_KEY": s3.config.access_key,
        "TVMFLOW_S3_SECRET_KEY": s3.config.secret_key,
        "TVMFLOW_S3_SINGLE_WRITER": "true",
        "TVMFLOW_MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow_port}",
        "TVMFLOW_MODELS": json.dumps([str(file)]),
        "TVMFLOW_WEBHOOK_SECRET": SECRET,
        "PREFECT_HOME": str(folder / "prefect"),
    }
    own = replace(machine, settings=settings)
    webhooks = {
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        # A server looks for webhooks anew after a minute.
        "MLFLOW_WEBHOOK_CACHE_TTL": "1",
    }

    def receiving() -> AbstractContextManager[str]:
        return serving(_receive(own, port), port, "/health", folder / "receiver.log", settings)

    with mlflow_server(folder, port=mlflow_port, **webhooks):
        client = own.mlflow
        for name in ("graph", "house"):
            client.create_registered_model(name)
            for _ in range(3):
                client.create_model_version(name, "s3://nothing/there")
        yield House(own, prefect_server, client, f"http://127.0.0.1:{port}", receiving)


def _receive(machine: Any, port: int) -> list[str]:
    """The command line of a receiver: `tvmflow receive` in a process that has imported what commands import."""
    return [*machine.commands.stand_in, str(os.getpid()), "receive", "--port", str(port)]


@pytest.fixture(scope="module")
def deployed(house: House) -> dict[str, Any]:
    """What `tvmflow deploy` says it registered."""
    result = house.machine.run("deploy", "--receiver", house.receiver, "--json")
    assert result.code == 0, result.stderr
    return dict(result.document)


def test_data_that_no_retraining_waits_for_are_an_error(house: House) -> None:
    """The file of the house has no section `retrain`."""
    for name in ("house", "hous"):
        result = house.machine.run("notify", name)
        assert result.code == 1
        assert f"has no deployment 'retrain/{name}', so that nothing would start" in result.sentence


def test_deploying_registers_what_a_release_file_needs(house: House, deployed: dict[str, Any]) -> None:
    names = {item["name"] for item in deployed["deployments"]}
    assert names == {"release/house", "promote/house", "retune/house", "reconcile/all", "gc/all"}
    assert deployed["pool"] == {"name": "tvmflow", "created": True}
    # Without a block of Prefect's there is nothing by which to report a failure.
    assert deployed["automations"] == [DEAD]
    assert deployed["webhook"] == {"url": house.receiver + PATH, "status": "created"}
    release = requests.get(f"{house.api}/deployments/name/release/house", timeout=30).json()
    assert release["parameters"] == {"file": json.loads(house.machine.settings["TVMFLOW_MODELS"])[0]}
    assert release["schedules"][0]["schedule"]["cron"]
    limit = release["global_concurrency_limit"]["limit"], release["concurrency_options"]["collision_strategy"]
    assert limit == (1, "ENQUEUE")
    # With the path of a file, Prefect would copy the folder in which the worker runs, for every run.
    assert release["entrypoint"] == "flows.release.release"


def test_deploying_again_changes_nothing_and_leaves_what_is_paused(house: House, deployed: dict[str, Any]) -> None:
    release = requests.get(f"{house.api}/deployments/name/release/house", timeout=30).json()
    schedule = f"{house.api}/deployments/{release['id']}/schedules/{release['schedules'][0]['id']}"
    assert requests.patch(schedule, json={"active": False}, timeout=30).ok
    result = house.machine.run("deploy", "--receiver", house.receiver, "--json")
    assert result.code == 0, result.stderr
    again = result.document
    assert again["pool"]["created"] is False
    assert again["webhook"]["status"] == "updated"
    assert len(house.client.list_webhooks()) == 1
    assert [item["name"] for item in again["deployments"]] == [item["name"] for item in deployed["deployments"]]
    after = requests.get(f"{house.api}/deployments/name/release/house", timeout=30).json()
    assert after["id"] == release["id"]
    assert [item["active"] for item in after["schedules"]] == [False]


@pytest.mark.long
def test_two_runs_of_one_model_take_turns(house: House, deployed: dict[str, Any], tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "os.environ['PREFECT_API_URL'] = os.environ['TVMFLOW_PREFECT_API_URL']\n"
        "from flows.runs import one_at_a_time\n"
        "mine, go = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "with one_at_a_time(sys.argv[3]):\n"
        "    mine.touch()\n"
        "    import time\n"
        "    while not go.exists():\n"
        "        time.sleep(0.05)\n"
    )

    def start(name: str, model: str, api: str = house.api) -> "subprocess.Popen[bytes]":
        arguments = [str(tmp_path / name), str(tmp_path / "go"), model]
        environment = {**house.machine.environment, "TVMFLOW_PREFECT_API_URL": api}
        return subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment)

    def has_begun(name: str) -> bool:
        return (tmp_path / name).exists()

    locked = b"HTTP/1.1 423 "
    with watching(house.api, locked) as (address, denied), start("first", "house") as first:
        wait_until(lambda: has_begun("first"), message="the first has its turn", process=first)
        with start("second", "house", f"{address}/api") as second, start("other", "another") as other:
            wait_until(lambda: has_begun("other"), message="a run of another model has its turn", process=other)
            wait_until(denied.is_set, message="Prefect denies the second its turn", process=second)
            begun_too_early = has_begun("second")
            (tmp_path / "go").touch()
            wait_until(lambda: has_begun("second"), message="the second has its turn", process=second)
    assert not begun_too_early
    assert [process.returncode for process in (first, second, other)] == [0, 0, 0]


def test_a_pool_of_another_type_is_not_taken(house: House, deployed: dict[str, Any]) -> None:
    result = house.machine.run("deploy", "--pool-type", "docker", "--image", "tvmflow:1")
    assert result.code == 2
    assert [name for name in ("'tvmflow'", "process", "docker") if name not in result.sentence] == []


@pytest.mark.parametrize("kind", scale.choose(normal=["kubernetes"], long=["docker", "kubernetes"]))
def test_pools_of_containers_run_the_image_that_is_named(
    house: House, deployed: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    result = house.machine.run("deploy", "--pool", kind, "--pool-type", kind)
    assert result.code == 2
    assert "--image" in result.sentence
    script = f"from flows.pools import ensure_pool\nassert ensure_pool('{kind}', '{kind}', 'tvmflow:1')\n"
    (tmp_path / "pooling.py").write_text(script)
    machine = replace(house.machine, settings={**house.machine.settings, "PYTHONPATH": str(tmp_path)})
    ended = machine.run("-m", "pooling")
    assert ended.code == 0, ended.stderr
    pool = requests.get(f"{house.api}/work_pools/{kind}", timeout=30).json()
    assert pool["type"] == kind
    assert pool["base_job_template"]["variables"]["properties"]["image"]["default"] == "tvmflow:1"


def test_an_alias_that_is_set_in_mlflow_starts_the_release_once(house: House, deployed: dict[str, Any]) -> None:
    with house.receiving():
        house.client.set_registered_model_alias("graph", "candidate", "1")
        (run,) = house.awaited("release/house", "source:graph/1")
        assert run["parameters"] == {"file": json.loads(house.machine.settings["TVMFLOW_MODELS"])[0]}
        house.client.set_registered_model_alias("graph", "other", "1")
        house.client.set_registered_model_alias("house", "production", "2")
        (run,) = house.awaited("promote/house", "promote:production/2")
    parameters = {"name": "house", "version": "2", "channel": "production"}
    assert {key: run["parameters"][key] for key in parameters} == parameters
    assert len(house.runs("release/house", "source:graph/1")) == 1


def test_a_delivery_counts_once_also_when_the_receiver_restarts(house: House, deployed: dict[str, Any]) -> None:
    data = {"name": "graph", "alias": "candidate", "version": "2"}
    body = json.dumps({"entity": "model_version_alias", "action": "created", "timestamp": "", "data": data}).encode()
    now = str(int(time.time()))
    headers = {DELIVERY_HEADER: "d1", TIMESTAMP_HEADER: now, SIGNATURE_HEADER: sign(SECRET, "d1", now, body)}
    answers = []
    for _ in range(2):
        with house.receiving() as address:
            answers.append(requests.post(address + PATH, data=body, headers=headers, timeout=60))
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json() == answers[1].json()
    assert len(house.runs("release/house", "source:graph/2")) == 1


def test_without_prefect_the_receiver_asks_mlflow_to_try_again(house: House, make: Any, tmp_path: Path) -> None:
    port, dead = free_port(), free_port()
    settings = {**house.machine.settings, "TVMFLOW_PREFECT_API_URL": f"http://127.0.0.1:{dead}/api"}
    data = {"name": "graph", "alias": "candidate", "version": "1"}
    body = json.dumps({"entity": "model_version_alias", "action": "created", "timestamp": "", "data": data}).encode()
    now = str(int(time.time()))
    headers = {DELIVERY_HEADER: "d2", TIMESTAMP_HEADER: now, SIGNATURE_HEADER: sign(SECRET, "d2", now, body)}
    with serving(_receive(house.machine, port), port, "/health", tmp_path / "log", settings) as address:
        answer = requests.post(address + PATH, data=body, headers=headers, timeout=60)
    assert answer.status_code == 503
    assert "prefect_api_url" in answer.json()["reason"]


def test_what_the_receiver_missed_is_started_by_reconciling_and_given_up_after_three_failures(
    house: House, deployed: dict[str, Any]
) -> None:
    house.client.set_registered_model_alias("graph", "candidate", "3")

    def found() -> dict[str, Any]:
        (finding,) = [item for item in house.reconcile() if item["alias"] == "graph@candidate"]
        return dict(finding)

    def crash(run: str) -> None:
        house.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CRASHED", "name": "Crashed"}, "force": True})

    release = requests.get(f"{house.api}/deployments/name/release/house", timeout=30).json()
    for _ in range(2):
        crash(house.ask(f"deployments/{release['id']}/create_flow_run", {"tags": ["source:graph/3"]})["id"])
    started = found()
    assert started["done"] == "started"
    assert started["flow_run"] in [run["id"] for run in house.runs("release/house", "source:graph/3")]
    assert found()["done"] == "waiting"
    crash(started["flow_run"])
    assert found()["done"] == "given up"


def test_a_project_file_as_the_documentation_has_it_names_flows_and_their_parameters() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", _ON_A_SCHEDULE.read_text(), re.DOTALL)
    for item in yaml.safe_load(text)["deployments"]:
        flow = load_flow_from_entrypoint(item["entrypoint"], use_placeholder_flow=False)
        assert set(item["parameters"]) <= set(flow.parameters.properties)


@pytest.mark.long
def test_prefect_takes_a_project_file_as_the_documentation_has_it(
    house: House, deployed: dict[str, Any], tmp_path: Path
) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", _ON_A_SCHEDULE.read_text(), re.DOTALL)
    (tmp_path / "prefect.yaml").write_text(text)
    environment = {**house.machine.environment, "PREFECT_API_URL": house.api}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    process = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr
    retune = requests.get(f"{house.api}/deployments/name/retune/digits-at-noon", timeout=30).json()
    assert retune["parameters"] == {"file": "/srv/models/digits/release.yaml", "minutes": 5}
