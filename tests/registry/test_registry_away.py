"""An MLflow server that goes away in the midst of a release, and one that asks for a login."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.proxies import dying
from tvmflow.errors import RegistryError
from tvmflow.registry import Registry, RegistryConfig


@pytest.mark.parametrize(
    ("request_line", "call"),
    [
        (b"POST /api/2.0/mlflow/runs/log-batch", lambda registry, run: registry.log_metrics(run, {"p50": 1.0})),
        (b"POST /api/2.0/mlflow/runs/update", lambda registry, run: registry.finish_run(run, "FINISHED")),
        (b"POST /api/2.0/mlflow/runs/set-tag", lambda registry, run: registry.set_run_tag(run, "a", "b")),
    ],
    ids=["metrics", "end", "tag"],
)
def test_a_server_that_dies_in_the_midst_is_one_sentence_and_the_run_can_be_continued(
    server: str, monkeypatch: pytest.MonkeyPatch, request_line: bytes, call: Callable[[Registry, str], Any]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = Registry(RegistryConfig(server)).start_run("dying", {}, {})
    with dying(server, request_line) as address:
        registry = Registry(RegistryConfig(address))
        assert registry.run_exists(run)
        with pytest.raises(RegistryError) as error:
            call(registry, run)
    assert address in str(error.value)
    assert "\n" not in str(error.value)
    call(Registry(RegistryConfig(server)), run)


@pytest.mark.long
def test_a_server_with_users_takes_the_right_password_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.servers import mlflow_command

    example = (Path(__file__).parents[2] / "mlflow" / "basic_auth.ini.example").read_text()
    rules = tmp_path / "basic_auth.ini"
    rules.write_text(example.replace("sqlite:///.tvmflow/mlflow/users.db", f"sqlite:///{tmp_path / 'users.db'}"))
    assert str(tmp_path) in rules.read_text()
    password = "a-long-enough-password"
    settings = {
        "MLFLOW_AUTH_CONFIG_PATH": str(rules),
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "any long random text",
    }
    for name in [name for name in os.environ if name.startswith("MLFLOW_TRACKING_")]:
        monkeypatch.delenv(name)
    with mlflow_command(tmp_path, app="basic-auth", **settings) as address:
        with pytest.raises(RegistryError, match="MLFLOW_TRACKING_USERNAME"):
            Registry(RegistryConfig(address)).check()
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a-wrong-enough-password")
        with pytest.raises(RegistryError, match="MLFLOW_TRACKING_PASSWORD") as refusal:
            Registry(RegistryConfig(address)).check()
        assert "a-wrong-enough-password" not in str(refusal.value)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        registry = Registry(RegistryConfig(address))
        run = registry.start_run("guarded", {}, {})
        registry.finish_run(run, "FINISHED")
        assert registry.run_exists(run)
