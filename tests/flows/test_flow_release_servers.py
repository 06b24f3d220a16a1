"""A release to real servers that settings name, and a store that dies in the middle of it."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from support.proxies import dying
from support.servers import moto_server
from tvmflow.store import ReleaseStore, StoreConfig


@pytest.fixture(scope="module")
def moto() -> Iterator[ReleaseStore]:
    with moto_server("shipped", "models") as config:
        yield ReleaseStore(config)


def _with_store(machine: Any, config: StoreConfig, **settings: str) -> Any:
    environment = {
        "TVMFLOW_S3_ENDPOINT": config.endpoint,
        "TVMFLOW_S3_BUCKET": config.bucket,
        "TVMFLOW_S3_PREFIX": config.prefix,
        "TVMFLOW_S3_ACCESS_KEY": config.access_key,
        "TVMFLOW_S3_SECRET_KEY": config.secret_key,
        "TVMFLOW_S3_SINGLE_WRITER": "false" if config.lock is None else "true",
    }
    return replace(machine, settings={**machine.settings, **environment, **settings})


@pytest.fixture(scope="module")
def served(machine: Any, moto: ReleaseStore, mlflow_server: str) -> Any:
    """A machine whose settings name an S3 server, an MLflow server and a Prefect server."""
    other = _with_store(machine, moto.config)
    return replace(other, settings={**other.settings, "TVMFLOW_MLFLOW_TRACKING_URI": mlflow_server})


@pytest.mark.long  # Releases go to such servers in a stack, and to an S3 server that settings name below.
def test_a_release_goes_to_the_servers_that_settings_name(
    served: Any, moto: ReleaseStore, tmp_path: Path, make: Any, prefect_server: str
) -> None:
    make.onnx(tmp_path)
    shutil.rmtree(served.home / "mlflow")
    result = served.release(make.file(tmp_path))
    assert result.code == 0, result.stderr
    assert result.document["release_uri"] == "s3://shipped/models/releases/tiny/1/release.json"
    assert moto.verify_release("tiny", "1").mlflow_run_id == result.document["mlflow_run_id"]
    assert served.mlflow.get_model_version("tiny", "1").tags["tvmflow.status"] == "published"
    assert not (served.home / "s3").exists()
    assert not (served.home / "mlflow").exists()
    answer = requests.post(f"{prefect_server}/flow_runs/filter", json={}, timeout=30)
    names = {run["name"]: run["state_type"] for run in answer.json()}
    assert names[f"release {tmp_path / 'tiny.yaml'}"] == "COMPLETED"


@pytest.mark.long
def test_the_registered_model_of_a_server_is_a_source(served: Any, tmp_path: Path, make: Any) -> None:
    import mlflow.onnx
    import onnx

    model = onnx.load(make.onnx(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", served.settings["TVMFLOW_MLFLOW_TRACKING_URI"])
        mlflow.onnx.log_model(model, name="graph", registered_model_name="graph", pip_requirements=["onnx"])
    result = served.release(make.file(tmp_path, name="from-server", model={"mlflow": "models:/graph/1"}))
    assert result.code == 0, result.stderr
    assert result.steps["export"] == "ran"


def test_a_store_that_dies_half_way_leaves_no_release_and_a_second_run_completes_it(
    machine: Any, s3: ReleaseStore, tmp_path: Path, make: Any
) -> None:
    make.onnx(tmp_path)
    file = make.file(tmp_path, name="dying")
    with dying(s3.config.endpoint or "", b"PUT /tvmflow/blobs/") as endpoint:
        result = _with_store(machine, replace(s3.config, endpoint=endpoint), TVMFLOW_OUTAGE_MINUTES="0").release(file)
    assert result.code == 1
    assert endpoint in result.sentence
    assert "track" in result.stderr
    assert s3.list_versions("dying") == []
    (version,) = machine.versions("dying")
    assert version.tags["tvmflow.status"] == "unpublished"

    again = _with_store(machine, s3.config).release(file)
    assert again.code == 0, again.stderr
    assert [name for name, status in again.steps.items() if status == "ran"] == ["publish"]
    assert s3.verify_release("dying", "1").version == "1"
    (version,) = machine.versions("dying")
    assert version.tags["tvmflow.status"] == "published"
