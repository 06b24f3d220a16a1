"""S3 servers for the store's tests: rclone's, which is real, and moto's, which enforces conditional writes."""

import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from botocore.exceptions import ClientError

from support import servers
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.embedded import embedded_s3


@pytest.fixture(scope="session")
def rclone_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rclone")


@pytest.fixture(scope="session")
def rclone_server(rclone_data: Path) -> Iterator[StoreConfig]:
    with embedded_s3(rclone_data, bucket="releases") as config:
        yield config


@pytest.fixture(scope="session")
def moto_server() -> Iterator[StoreConfig]:
    with servers.moto_server("releases") as config:
        yield config


def _prefix_of(request: pytest.FixtureRequest) -> str:
    """A prefix of its own for each test, so that all share one server."""
    return re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")


@pytest.fixture
def rclone(rclone_server: StoreConfig, request: pytest.FixtureRequest) -> StoreConfig:
    return replace(rclone_server, prefix=_prefix_of(request))


@pytest.fixture
def rclone_folder(rclone: StoreConfig, rclone_data: Path) -> Path:
    """The folder in which rclone keeps the objects of this test's store."""
    return rclone_data / rclone.bucket / rclone.prefix


@pytest.fixture(params=["rclone", "moto"])
def config(request: pytest.FixtureRequest) -> StoreConfig:
    server: StoreConfig = request.getfixturevalue(f"{request.param}_server")
    return replace(server, prefix=_prefix_of(request))


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
def damage(rclone: StoreConfig, rclone_folder: Path) -> Callable[[str, bytes | None], None]:
    """Replaces an object's content behind the server's back, or removes it, and waits until the server has noticed."""
    s3 = ReleaseStore(rclone).objects.s3

    def size_of(key: str) -> int | None:
        try:
            return s3.head_object(Bucket=rclone.bucket, Key=f"{rclone.prefix}/{key}")["ContentLength"]
        except ClientError:
            return None

    def change(key: str, content: bytes | None) -> None:
        path = rclone_folder / key
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        for _ in range(1000):
            if size_of(key) == (None if content is None else len(content)):
                return
        pytest.fail(f"rclone does not notice the change of {path}")

    return change


@pytest.fixture
def embedded_process() -> Callable[[StoreConfig], psutil.Process]:
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
def kill_server(embedded_process: Callable[[StoreConfig], psutil.Process]) -> Callable[[StoreConfig], None]:
    """Kills the embedded server as a power cut would, and waits until it is gone."""

    def kill(config: StoreConfig) -> None:
        process = embedded_process(config)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)

    return kill
