"""Retention: the release stores that a machine knows, with MLflow's aliases, by the command and by the function."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from support.command_server import CommandServer
from support.databases import Databases
from support.processes import clean_environment
from support.releases import make_release
from tvmflow.errors import StoreError
from tvmflow.registry import Registry
from tvmflow.retention import collect
from tvmflow.services import list_sections, open_registry, open_store, record_sections
from tvmflow.settings import Settings
from tvmflow.spec import Spec, parse
from tvmflow.store import ReleaseStore
from tvmflow.store.garbage import Retention

NEWEST = Retention(days=1, releases=1)


@pytest.fixture
def settings(tmp_path: Path, databases: Databases) -> Settings:
    databases.mlflow(tmp_path / "state" / "mlflow" / "mlflow.db")
    return Settings(home=tmp_path / "state")


def spec_of(name: str, prefix: str | None = None) -> Spec:
    document: dict[str, Any] = {
        "name": name,
        "model": {"mlflow": "models:/net/1"},
        "inputs": [{"name": "x", "shape": [1]}],
    }
    return parse(document if prefix is None else {**document, "store": {"prefix": prefix}}, Path())


def publish(store: ReleaseStore, registry: Registry, name: str, count: int) -> None:
    """Publish so many releases, forty days ago, each with its version in the registry."""
    from mlflow import MlflowClient

    client = MlflowClient(registry.config.tracking_uri, registry_uri=registry.config.tracking_uri)
    client.create_registered_model(name)
    for version in map(str, range(1, count + 1)):
        assert str(client.create_model_version(name, "file:///nowhere").version) == version
        store.publish(make_release(name, version, model=f"models:/{name}/{version}"), [])
    for path in (store.config.folder or Path()).rglob("release.json"):
        os.utime(path, (time.time() - 40 * 86400,) * 2)


def test_every_store_is_collected_once_and_an_alias_keeps_its_release(settings: Settings) -> None:
    registry = open_registry(settings)
    for name, prefix in (("one", None), ("two", "elsewhere"), ("three", "elsewhere")):
        spec = spec_of(name, prefix)
        record_sections(settings, spec)
        with open_store(settings, spec.store) as store:
            publish(store, registry, name, 3)
    registry.set_alias("two", "favourite", "1")
    (settings.state / "models" / "two copy.json").write_text("made by hand")
    assert len(list_sections(settings)) == 2
    planned = collect(settings, NEWEST, dry_run=True)
    assert collect(settings, NEWEST) == planned
    assert len(planned) == 5
    left = {}
    for name, prefix in (("one", None), ("two", "elsewhere"), ("three", "elsewhere")):
        with open_store(settings, spec_of(name, prefix).store) as store:
            left[name] = store.list_versions(name)
    assert left == {"one": ["3"], "two": ["1", "3"], "three": ["3"]}


def test_the_command_counts_and_removes_only_without_dry_run(settings: Settings, commands: CommandServer) -> None:
    with open_store(settings) as store:
        publish(store, open_registry(settings), "net", 4)

        def gc(*options: str) -> subprocess.CompletedProcess[str]:
            environment = clean_environment(TVMFLOW_HOME=str(settings.state), TVMFLOW_RETENTION_RELEASES="2")
            return commands.run(["gc", *options], environment, settings.home, timeout=120)

        assert json.loads(gc("--releases", "--json").stdout) == {"removed": True, "bytes": 0, "kinds": {}}
        planned = json.loads(gc("--releases", "--days", "30", "--dry-run", "--json").stdout)
        assert (planned["removed"], planned["kinds"]["releases"]["count"]) == (False, 2)
        assert store.list_versions("net") == [*"1234"]
        removed = gc("--releases", "--days", "30", "--keep", "3")
        assert "releases" in removed.stdout
        assert "freed" in removed.stdout
        assert store.list_versions("net") == [*"234"]
        refused = gc("--keep", "3")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "give --releases with it" in refused.stderr


def test_nothing_goes_while_the_registry_cannot_say_what_it_names(settings: Settings) -> None:
    with open_store(settings) as store:
        publish(store, open_registry(settings), "net", 2)
        store.objects.put("releases/net/1/release.json", b'{"name": "net", "version": "1"}', "damaging a document")
        os.utime((store.config.folder or Path()) / "releases/net/1/release.json", (0, 0))
        with pytest.raises(StoreError, match=r"net/1/release\.json is damaged \("):
            collect(settings, NEWEST)
        assert store.list_versions("net") == ["1", "2"]
