"""The local stack: its servers run, commands use it, dead servers are restarted, and its state survives a restart."""

import json
import os
import stat
from typing import Any

import psutil
import pytest

from support import scale
from support.managed import Managed
from tvmflow.settings import Settings

Document = dict[str, Any]


def test_all_is_well_and_listens_on_loopback_only(stack: Any) -> None:
    code, servers = stack.status()
    assert code == 0
    assert list(servers) == ["s3", "prefect", "mlflow", "receiver", "worker"]
    assert {server["state"] for server in servers.values()} == {"healthy"}
    listening = [
        connection.laddr
        for process in stack.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert set(stack.ports.values()) <= {address.port for address in listening}


def test_secrets_are_in_a_file_of_the_users_own_and_on_no_command_line(stack: Any) -> None:
    place = stack.state / "stack"
    secrets = json.loads((place / "secrets.json").read_text())
    assert stat.S_IMODE((place / "secrets.json").stat().st_mode) == 0o600
    texts = [" ".join(process.cmdline()) for process in stack.processes()]
    texts += [path.read_text(errors="replace") for path in place.glob("*.log")]
    texts += [(place / "stack.json").read_text(), stack.run("up", "--status").stdout]
    del secrets["format"]
    assert len(secrets) == 4
    assert not [name for name, secret in secrets.items() for text in texts if secret in text]


@pytest.fixture(scope="session")
def released(shared_stack: Any) -> Document:
    """What the release of the tiny model says."""
    result = shared_stack.run("release", shared_stack.folder / "tiny.yaml", "--json")
    assert result.code == 0, result.stderr
    return dict(result.document)


def test_a_release_goes_to_the_stack_without_any_setting(stack: Any, released: Document) -> None:
    version = released["version"]
    from mlflow import MlflowClient

    address = stack.address("mlflow")
    registered = MlflowClient(address, registry_uri=address).get_model_version("tiny", version)
    assert registered.tags["tvmflow.status"] == "published"
    runs = stack.prefect("flow_runs/filter", {"flows": {"name": {"any_": ["release"]}}})
    assert "COMPLETED" in {run["state_type"] for run in runs}
    # The S3 server serves the very folder that commands use without a stack.
    assert (stack.state / "s3" / "tvmflow" / "releases" / "tiny" / version / "release.json").is_file()


def test_the_deployments_of_the_release_files_and_mlflows_webhook_are_registered(stack: Any, managed: Managed) -> None:
    deployments = {item["name"]: item for item in stack.prefect("deployments/filter", {})}
    assert {"tiny", managed.name, "all"} <= set(deployments)
    assert {item["work_pool_name"] for item in deployments.values()} == {"tvmflow"}

    from mlflow import MlflowClient

    address = stack.address("mlflow")
    (webhook,) = MlflowClient(address, registry_uri=address).list_webhooks()
    assert webhook.url == f"{stack.address('receiver')}/webhooks/mlflow"


@pytest.mark.long
def test_what_died_is_started_again_and_what_runs_is_left_alone(stack: Any) -> None:
    run = stack.start_endless_run()
    before = stack.status()[1]
    killed = scale.choose(normal={"s3", "worker"}, long={"s3", "mlflow", "worker"})
    for name in killed:
        psutil.Process(before[name]["pid"]).kill()
    code, now = stack.status()
    assert code == 1
    assert {name for name, server in now.items() if server["state"] == "down"} == killed

    mended = stack.up()
    assert mended.code == 0, mended.stderr
    after = {server["name"]: server for server in mended.document}
    assert {server["state"] for server in after.values()} == {"healthy"}
    same = {name for name in after if after[name]["pid"] == before[name]["pid"]}
    assert same == set(before) - killed
    # The run lost its worker: it neither runs on nor holds up those behind it.
    assert stack.state_of(run) == "CRASHED"
    assert not [process for process in stack.processes() if "prefect.engine" in process.cmdline()]


def test_a_port_that_moves_while_its_server_runs_is_refused(stack: Any) -> None:
    result = stack.run("up", "--mlflow-port", "1")
    assert result.code == 2
    port = stack.ports["mlflow"]
    assert f"MLflow of this stack runs on port {port}; end the stack with `tvmflow down`" in result.sentence
    assert stack.status()[0] == 0


@pytest.mark.long
@pytest.mark.usefixtures("released")
def test_after_down_nothing_runs_and_after_up_everything_is_there_again(stack: Any) -> None:
    run = stack.start_endless_run()
    before = _persistent_state(stack)

    result = stack.run("down", "--json")
    assert result.code == 0
    assert result.document == {"ended": ["s3", "prefect", "mlflow", "receiver", "worker"]}
    assert stack.processes() == []
    assert stack.run("down").stdout == "no stack was running\n"
    assert stack.status()[0] == 1
    # Commands are embedded again, on the same state.
    assert "tiny" in [release["name"] for release in stack.run("list", "--json").document]

    again = stack.run("up", "--json")
    assert again.code == 0, again.stderr
    assert {server["state"] for server in again.document} == {"healthy"}
    assert _persistent_state(stack) == before
    assert stack.state_of(run) == "CRASHED"


def _persistent_state(stack: Any) -> dict[str, Any]:
    """Everything that survives a restart: secrets, ports, deployments, releases and model versions."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("TVMFLOW_", "MLFLOW_", "PREFECT_"))]:
            patch.delenv(name)
        settings = Settings(home=stack.state)

    from tvmflow.services import open_registry

    return {
        "secrets": (stack.state / "stack" / "secrets.json").read_text(),
        "settings": settings.model_dump_json(),
        "deployments": sorted(item["id"] for item in stack.prefect("deployments/filter", {})),
        "releases": stack.run("list", "tiny", "--json").document,
        "versions": [item.version for item in open_registry(settings).list_versions("tiny")],
    }
