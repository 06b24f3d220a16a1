"""A release to real servers that settings name, and a store that dies in the middle of it."""

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from moto.server import ThreadedMotoServer

from tvmflow.store import ReleaseStore, StoreConfig


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, make: Any) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("mlflow"), make.free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination",
        f"{folder / 'files'}",
    ]
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with make.serving(command, port, "/health", folder / "log", settings) as address:
        yield address


@pytest.fixture(scope="module")
def moto() -> Iterator[ReleaseStore]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield ReleaseStore(
        StoreConfig("shipped", "models", f"http://{host}:{port}", access_key="testing", secret_key="testing-secret")
    )
    server.stop()


def _with_store(machine: Any, config: StoreConfig) -> Any:
    said = {
        "TVMFLOW_S3_ENDPOINT": config.endpoint,
        "TVMFLOW_S3_BUCKET": config.bucket,
        "TVMFLOW_S3_PREFIX": config.prefix,
        "TVMFLOW_S3_ACCESS_KEY": config.access_key,
        "TVMFLOW_S3_SECRET_KEY": config.secret_key,
    }
    return replace(machine, settings={**machine.settings, **said})


@pytest.fixture(scope="module")
def served(machine: Any, moto: ReleaseStore, mlflow_server: str) -> Any:
    """A machine whose settings name an S3 server, an MLflow server and a Prefect server."""
    named = _with_store(machine, moto.config)
    return replace(named, settings={**named.settings, "TVMFLOW_MLFLOW_TRACKING_URI": mlflow_server})


def test_a_release_goes_to_the_servers_that_settings_name(
    served: Any, moto: ReleaseStore, tmp_path: Path, make: Any, prefect_server: str
) -> None:
    make.onnx(tmp_path)
    ended = served.release(make.file(tmp_path))
    assert ended.code == 0, ended.stderr
    assert ended.document["release_uri"] == "s3://shipped/models/releases/tiny/1/release.json"
    assert moto.verify_release("tiny", "1")["mlflow_run_id"] == ended.document["mlflow_run_id"]
    assert served.mlflow.get_model_version("tiny", "1").tags["tvmflow.status"] == "published"
    assert not (served.home / "s3").exists()
    assert not (served.home / "mlflow").exists()
    answer = requests.post(f"{prefect_server}/flow_runs/filter", json={}, timeout=30)
    names = {run["name"]: run["state_type"] for run in answer.json()}
    assert names[f"release {tmp_path / 'tiny.yaml'}"] == "COMPLETED"


def test_the_registered_model_of_a_server_is_a_source(served: Any, tmp_path: Path, make: Any) -> None:
    import mlflow.onnx
    import onnx

    model = onnx.load(make.onnx(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", served.settings["TVMFLOW_MLFLOW_TRACKING_URI"])
        mlflow.onnx.log_model(model, name="graph", registered_model_name="graph", pip_requirements=["onnx"])
    ended = served.release(make.file(tmp_path, name="from-server", model={"mlflow": "models:/graph/1"}))
    assert ended.code == 0, ended.stderr
    assert ended.steps["export"] == "ran"


def test_a_store_that_dies_half_way_leaves_no_release_and_a_second_run_completes_it(
    machine: Any, s3: ReleaseStore, tmp_path: Path, make: Any
) -> None:
    make.onnx(tmp_path)
    file = make.file(tmp_path, name="dying")
    with _dying_at(b"PUT /tvmflow/blobs/", s3.config.endpoint or "") as endpoint:
        ended = _with_store(machine, replace(s3.config, endpoint=endpoint)).release(file)
    assert ended.code == 1
    assert f"the S3 endpoint {endpoint}" in ended.sentence
    assert "track" in ended.stderr
    assert s3.list_versions("dying") == []
    (version,) = machine.versions("dying")
    assert version.tags["tvmflow.status"] == "unpublished"

    again = _with_store(machine, s3.config).release(file)
    assert again.code == 0, again.stderr
    assert [name for name, status in again.steps.items() if status == "ran"] == ["publish"]
    assert s3.verify_release("dying", "1")["version"] == "1"
    (version,) = machine.versions("dying")
    assert version.tags["tvmflow.status"] == "published"


@contextmanager
def _dying_at(request: bytes, endpoint: str) -> Iterator[str]:
    """The address of a server that passes everything on to `endpoint` until it sees the request, and then is gone."""
    place = urlsplit(endpoint)
    listening = socket.create_server(("127.0.0.1", 0))
    open_sockets = [listening]

    def die() -> None:
        for each in open_sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if request in data:
                    die()
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection((place.hostname or "", place.port or 0))
                open_sockets.extend((client, server))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        die()
