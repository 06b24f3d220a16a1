"""A Prefect server that wants a login: commands use that of their environment, and say when it is refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from support.databases import Databases
from support.servers import prefect_server

USER, PASSWORD = "ann", "a password of this test"
_ENTRY = "PREFECT_API_AUTH_STRING"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, databases: Databases) -> Iterator[str]:
    """The address of the API of a server that wants a login."""
    folder = tmp_path_factory.mktemp("guarded")
    databases.prefect(folder / "prefect.db")
    with prefect_server(folder, PREFECT_SERVER_API_AUTH_STRING=f"{USER}:{PASSWORD}") as api:
        yield api


@pytest.fixture
def file(tmp_path: Path, make: Any) -> Path:
    """A release file whose model is damaged: its flow run begins, and fails at the first step."""
    make.onnx(tmp_path).write_bytes(b"no model")
    return Path(make.file(tmp_path))


def _machine(fresh_machine: Any, api: str, login: str | None) -> Any:
    entries = {} if login is None else {_ENTRY: login}
    return replace(fresh_machine, settings={"TVMFLOW_PREFECT_API_URL": api, **entries})


@pytest.mark.long
def test_commands_log_in_with_the_login_of_their_environment(fresh_machine: Any, guarded: str, file: Path) -> None:
    assert requests.post(f"{guarded}/deployments/filter", json={}, timeout=30).status_code == 401
    machine = _machine(fresh_machine, guarded, f"{USER}:{PASSWORD}")
    result = machine.release(file)
    # What failed is the release, not its run on the server.
    assert (result.code, result.document["error"]["type"]) == (1, "ExportError")
    assert PASSWORD not in result.stdout + result.stderr
    response = requests.post(f"{guarded}/flow_runs/filter", json={}, auth=(USER, PASSWORD), timeout=30)
    assert [run["state_type"] for run in response.json()] == ["FAILED"]


@pytest.mark.parametrize(
    ("command", "login"),
    [
        ("release", None),
        pytest.param("release", f"{USER}:another word", marks=pytest.mark.long),
        pytest.param("deploy", f"{USER}:another word", marks=pytest.mark.long),
        pytest.param("notify", None, marks=pytest.mark.long),
    ],
)
def test_a_login_that_is_refused_is_one_sentence(
    fresh_machine: Any, guarded: str, file: Path, command: str, login: str | None
) -> None:
    machine = _machine(fresh_machine, guarded, login)
    result = machine.run(command, "tiny" if command == "notify" else file, "--json")
    assert (result.code, result.document["error"]["type"]) == (1, "PrefectError")
    assert _ENTRY in result.sentence
    assert "another word" not in result.stdout + result.stderr
    assert machine.nothing_is_published()
