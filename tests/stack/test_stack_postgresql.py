"""The local stack with its state in PostgreSQL."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from support import scale


@pytest.mark.long
def test_prefect_and_mlflow_keep_their_state_in_postgresql(machine: Any, postgres: Callable[[str], str]) -> None:
    # This server does not ask for the password; it must appear nowhere.
    url = postgres("stack").replace("tvmflow@", "tvmflow:hush-hush@")
    stack = replace(machine, settings={"TVMFLOW_DATABASE_URL": url})
    started = stack.up()
    assert started.code == 0, started.stderr
    assert {item["name"] for item in started.document if item["state"] == "healthy"} == {
        "s3",
        "prefect",
        "mlflow",
        "worker",
    }
    assert not (stack.state / "prefect" / "prefect.db").exists()
    assert not (stack.state / "mlflow" / "mlflow.db").exists()
    texts = [" ".join(process.cmdline()) for process in stack.processes()]
    texts += [path.read_text(errors="replace") for path in (stack.state / "stack").iterdir()]
    assert not [text for text in texts if "hush-hush" in text]

    from mlflow import MlflowClient

    address = stack.address("mlflow")
    MlflowClient(address, registry_uri=address).create_registered_model("kept")
    pool = stack.prefect("work_pools/tvmflow")["id"]

    assert stack.run("down").code == 0
    assert stack.processes() == []
    assert _select(url, "mlflow", "SELECT name FROM registered_models") == ["kept"]
    assert [str(key) for key in _select(url, "prefect", "SELECT id FROM work_pool WHERE name = 'tvmflow'")] == [pool]
    # Without the setting the stack would start with empty databases, and nobody would see why.
    forgetful = machine.up()
    assert forgetful.code == 2
    place = url.rpartition("@")[2].rpartition("/")[0]
    assert f"keeps its state in PostgreSQL at {place}; set database_url" in forgetful.sentence

    if scale.is_long():
        again = stack.up()
        assert again.code == 0, again.stderr
        assert [model.name for model in MlflowClient(address, registry_uri=address).search_registered_models()] == [
            "kept"
        ]
        assert stack.prefect("work_pools/tvmflow")["id"] == pool


def _select(url: str, database: str, query: str) -> list[Any]:
    """The first column of what a query of another database of the server gives."""
    import psycopg

    with psycopg.connect(url, dbname=database) as connection:
        return [row[0] for row in connection.execute(query)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:hush-hush@127.0.0.1/x", "setting database_url is not the address of a PostgreSQL server"),
        ("postgresql://u:hush-hush@127.0.0.1:1/x", "PostgreSQL at 127.0.0.1:1 cannot be used ("),
    ],
)
def test_a_wrong_address_is_one_sentence_without_its_password(machine: Any, url: str, message: str) -> None:
    result = replace(machine, settings={"TVMFLOW_DATABASE_URL": url}).up()
    assert result.code == 2
    assert result.sentence.startswith(message)
    assert "hush-hush" not in result.stdout + result.stderr
    assert machine.processes() == []


def test_a_user_who_may_not_create_databases_is_told_what_to_do(machine: Any, postgres: Callable[[str], str]) -> None:
    import psycopg

    url = postgres("limited")
    with psycopg.connect(url, autocommit=True) as connection:
        for name in ("prefect", "mlflow"):
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")  # type: ignore[arg-type]
        connection.execute("CREATE ROLE limited LOGIN")
    result = replace(machine, settings={"TVMFLOW_DATABASE_URL": url.replace("tvmflow@", "limited@")}).up()
    assert result.code == 2
    assert (
        "may not create the databases prefect and mlflow; create them with this user as their owner" in result.sentence
    )
