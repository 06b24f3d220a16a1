"""The flow of the deployment gc/all: it removes by the settings of its machine."""

import os
import time
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.gc import gc
from support.databases import Databases
from support.releases import make_release
from tvmflow.services import open_store
from tvmflow.settings import Settings


def test_releases_that_the_settings_do_not_keep_go(
    prefect_server: str, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TVMFLOW_RETENTION_RELEASES", "2")
    databases.mlflow(tmp_path / "state" / "mlflow" / "mlflow.db")
    with open_store(Settings()) as store:
        for version in "1234":
            store.publish(make_release("net", version), [])
            days = 100 if version < "4" else 80
            document = (store.config.folder or Path()) / f"releases/net/{version}/release.json"
            os.utime(document, (time.time() - days * 86400,) * 2)
        with temporary_settings({PREFECT_API_URL: prefect_server}):
            removed = gc()
        assert removed["objects"] == 2
        assert store.list_versions("net") == ["3", "4"]
