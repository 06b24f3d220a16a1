"""PostgreSQL that asks for a password: the stack's databases are created with it, and it is repeated nowhere."""

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from tvmflow.errors import SettingsError
from tvmflow.stack.servers import databases

PASSWORD = "hush-hush"


@pytest.fixture(scope="module")
def guarded(postgres: Callable[[str], str]) -> Iterator[str]:
    """The address, without a password, of a user who must give one."""
    import psycopg

    url = postgres("guarded")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE guarded LOGIN CREATEDB PASSWORD '{PASSWORD}'")  # type: ignore[arg-type]
        rules = connection.execute("SHOW hba_file").fetchone()
        assert rules is not None
        lines = [("host all guarded 127.0.0.1/32 scram-sha-256",), ("host all all 127.0.0.1/32 trust",)]
        with connection.cursor() as cursor:
            cursor.execute("CREATE TEMPORARY TABLE rules (line text)")
            cursor.executemany("INSERT INTO rules VALUES (%s)", lines)
            cursor.execute(f"COPY rules TO '{rules[0]}'")  # type: ignore[arg-type]
        connection.execute("SELECT pg_reload_conf()")
        for name in ("prefect", "mlflow"):
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")  # type: ignore[arg-type]
    yield url.replace("tvmflow@", "guarded@")
    with psycopg.connect(url, autocommit=True) as connection:
        for name in ("prefect", "mlflow"):
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")  # type: ignore[arg-type]
        connection.execute("DROP ROLE guarded")


def test_the_databases_are_created_with_the_password(guarded: str) -> None:
    import psycopg

    url = guarded.replace("guarded@", f"guarded:{PASSWORD}@")
    prefect, mlflow, place = databases(url)
    assert place == urlsplit(url).netloc.rpartition("@")[2]
    assert (urlsplit(prefect).path, urlsplit(mlflow).path) == ("/prefect", "/mlflow")
    for address in (prefect, mlflow):
        plain = address.replace("postgresql+asyncpg", "postgresql").replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(plain) as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("guarded",)
    # A second start uses the databases that exist.
    assert databases(url) == (prefect, mlflow, place)


@pytest.mark.parametrize("login", ["guarded", "guarded:wrong-one"])
def test_a_missing_or_wrong_password_is_one_sentence_that_does_not_repeat_it(guarded: str, login: str) -> None:
    with pytest.raises(SettingsError, match="database_url") as refusal:
        databases(guarded.replace("guarded@", f"{login}@"))
    assert urlsplit(guarded).netloc.rpartition("@")[2] in str(refusal.value)
    assert "wrong-one" not in str(refusal.value)
    assert "\n" not in str(refusal.value)
