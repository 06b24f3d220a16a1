"""Stores for the tests: a folder, rclone's server, which is real, and moto's, which enforces conditional writes."""

import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support import servers
from support.rclone import rclone_s3
from tvmflow.store import ReleaseStore, StoreConfig


@pytest.fixture(scope="session")
def rclone_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rclone")


@pytest.fixture(scope="session")
def rclone_server(rclone_data: Path) -> Iterator[StoreConfig]:
    with rclone_s3(rclone_data, bucket="releases") as config:
        yield config


@pytest.fixture(scope="session")
def moto_server() -> Iterator[StoreConfig]:
    with servers.moto_server("releases") as config:
        yield config


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[StoreConfig]:
    with servers.seaweedfs_server("releases") as config:
        yield config


def _prefix_of(request: pytest.FixtureRequest) -> str:
    """A prefix of its own for each test, so that all share one server."""
    return re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")


@pytest.fixture
def rclone(rclone_server: StoreConfig, request: pytest.FixtureRequest) -> StoreConfig:
    return replace(rclone_server, prefix=_prefix_of(request))


@pytest.fixture
def local(tmp_path: Path) -> StoreConfig:
    """A store in a folder of this machine."""
    return StoreConfig("releases", "local", folder=tmp_path / "store" / "releases")


@pytest.fixture
def local_folder(local: StoreConfig) -> Path:
    """The folder in which that store keeps its objects."""
    return (local.folder or Path()) / local.prefix


@pytest.fixture(params=["local", "moto", pytest.param("seaweedfs", marks=pytest.mark.long)])
def config(request: pytest.FixtureRequest) -> StoreConfig:
    if request.param == "local":
        folder_store: StoreConfig = request.getfixturevalue("local")
        return folder_store
    server: StoreConfig = request.getfixturevalue(f"{request.param}_server")
    return replace(server, prefix=_prefix_of(request))


@pytest.fixture(params=["rclone", "moto"])
def server(request: pytest.FixtureRequest) -> StoreConfig:
    """A store on each of the servers."""
    config: StoreConfig = request.getfixturevalue(f"{request.param}_server")
    return replace(config, prefix=_prefix_of(request))


@pytest.fixture
def store(config: StoreConfig) -> ReleaseStore:
    return ReleaseStore(config)


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[[bytes], tuple[Path, str]]:
    """Writes a file with the given content, returns it with its SHA-256."""

    def write(content: bytes) -> tuple[Path, str]:
        digest = hashlib.sha256(content).hexdigest()
        path = tmp_path / f"{digest[:8]}.bin"
        path.write_bytes(content)
        return path, digest

    return write


@pytest.fixture
def damage(local_folder: Path) -> Callable[[str, bytes | None], None]:
    """Replaces the content of an object of the folder `local`, or removes it."""

    def change(key: str, content: bytes | None) -> None:
        path = local_folder / key
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)

    return change


@pytest.fixture
def server_process() -> Callable[[StoreConfig], psutil.Process]:
    """Finds the child process that listens where a configuration points."""

    def find(config: StoreConfig) -> psutil.Process:
        for child in psutil.Process().children():
            for connection in child.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and (config.endpoint or "").endswith(
                    f":{connection.laddr.port}"
                ):
                    return child
        raise AssertionError(f"no child listens at {config.endpoint}")

    return find


@pytest.fixture
def kill_server(server_process: Callable[[StoreConfig], psutil.Process]) -> Callable[[StoreConfig], None]:
    """Kills the server as a power cut would, and waits until it is gone."""

    def kill(config: StoreConfig) -> None:
        process = server_process(config)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)

    return kill
