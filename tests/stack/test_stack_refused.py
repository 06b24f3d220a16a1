"""The local stack refuses to start where it cannot, and a start that fails leaves no process."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import scale
from tvmflow.documents.encoding import encode
from tvmflow.settings import Settings
from tvmflow.stack import record
from tvmflow.stack.record import ServerProcess, StackRecord


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has nothing to do with any stack."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def test_a_port_that_somebody_else_has_is_named_with_its_user(machine: Any) -> None:
    with socket.create_server(("127.0.0.1", machine.ports["mlflow"])) as listener:
        result = machine.up()
        port = listener.getsockname()[1]
    assert result.code == 2
    user = f"process {psutil.Process().pid} ({psutil.Process().name()})"
    for part in (f"port {port} of MLflow", user, "--mlflow-port"):
        assert part in result.sentence
    assert machine.processes() == []
    # No stack is recorded.
    assert record.read(machine.state) == StackRecord()


def test_two_servers_are_not_given_one_port(machine: Any) -> None:
    result = machine.run("up", "--s3-port", "4200")
    assert result.code == 2
    assert all(part in result.sentence for part in ("S3", "Prefect", "4200"))


def test_a_mistake_in_a_release_file_is_said_before_anything_starts(machine: Any) -> None:
    (machine.folder / "bad.yaml").write_text("name: m\nmodle: {}\n")
    result = machine.up("bad.yaml")
    assert result.code == 2
    assert "did you mean 'model'?" in result.sentence
    assert not (machine.state / "stack").exists()


def test_without_a_stack_there_is_nothing_to_show_or_to_end(machine: Any) -> None:
    status = machine.run("up", "--status")
    assert status.code == 1
    assert "`tvmflow up`" in status.stdout
    assert machine.run("down", "--json").document == {"ended": []}


def _damage_database(state: Path) -> None:
    path = state / "prefect" / "prefect.db"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database" * 1000)


def _damage_secrets(state: Path) -> None:
    """Give S3 a key that rclone cannot read; Prefect and MLflow are starting when it ends."""
    secrets = record.make_secrets(state).model_copy(update={"s3_secret_key": 'a key with a " in it'})
    (state / "stack" / "secrets.json").write_bytes(encode(secrets))


@pytest.mark.long
@pytest.mark.parametrize(
    ("title", "damage"),
    scale.choose(normal=[("S3", _damage_secrets)], long=[("S3", _damage_secrets), ("Prefect", _damage_database)]),
)
def test_a_server_that_does_not_start_is_named_and_the_others_are_ended(
    machine: Any, title: str, damage: Callable[[Path], None]
) -> None:
    damage(machine.state)
    result = machine.up()
    assert result.code == 1
    log = machine.state / "stack" / f"{title.lower()}.log"
    assert result.sentence.startswith(f"{title} ended while it was starting: ")
    assert result.sentence.endswith(f"; its log is {log}")
    assert log.read_text()
    assert (machine.state / "stack" / "mlflow.log").exists()
    assert machine.processes() == []


@pytest.mark.long
def test_an_interrupt_leaves_nothing_and_two_do_not_start_one_stack(machine: Any) -> None:
    with machine.start("up", *(f"--{name}-port={port}" for name, port in machine.ports.items())) as starting:
        assert "S3" in starting.stderr.readline()
        other = machine.run("down")
        assert other.code == 2
        assert other.sentence.startswith("another tvmflow up or down is at work on the stack in ")
        assert machine.processes()
        starting.send_signal(signal.SIGINT)
        output = starting.communicate(timeout=60)[1]
    assert starting.returncode == 130
    assert "Traceback" not in output
    assert machine.processes() == []


def test_a_process_that_only_has_the_id_of_a_server_is_not_ended(machine: Any, sleeper: Any) -> None:
    born = record.birth(sleeper.pid)
    assert born is not None
    ports = dict.fromkeys(("s3", "prefect", "mlflow", "receiver"), 1)
    other = ServerProcess(pid=sleeper.pid, birth=f"{born}0", mark="mark")
    stack = StackRecord(servers={"mlflow": other}, ports=ports, settings={"work_pool": "tvmflow"})
    record.write(machine.state, stack)
    code, servers = machine.status()
    assert (code, servers["mlflow"]["state"]) == (1, "down")
    assert machine.run("down", "--json").document == {"ended": []}
    assert sleeper.poll() is None
    assert record.read(machine.state).servers == {}


def test_settings_come_from_a_stack_only_while_it_runs_and_last(
    tmp_path: Path, sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "state"))
    born = record.birth(sleeper.pid) or ""
    addresses = {
        "s3_endpoint": "http://127.0.0.1:1",
        "s3_bucket": "b",
        "s3_folder": "/b",
        "mlflow_tracking_uri": "http://127.0.0.1:2",
    }
    server = ServerProcess(pid=sleeper.pid, birth=born, mark="mark")
    running = StackRecord(servers={"s3": server}, ports={"s3": 1}, settings=addresses)
    record.write(tmp_path / "state", running)
    secrets = record.make_secrets(tmp_path / "state")

    loaded = Settings.load()
    assert (loaded.s3_endpoint, loaded.mlflow_tracking_uri) == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert loaded.s3_folder == Path("/b")
    assert loaded.s3_secret_key is not None
    assert loaded.s3_secret_key.get_secret_value() == secrets.s3_secret_key

    Path("tvmflow.toml").write_text('s3_endpoint = "http://127.0.0.1:3"\n')
    loaded = Settings.load()
    # Another server's address does not get this one's credentials.
    assert (loaded.s3_endpoint, loaded.s3_bucket, loaded.s3_secret_key) == ("http://127.0.0.1:3", None, None)
    assert loaded.s3_folder is None
    assert loaded.mlflow_tracking_uri == "http://127.0.0.1:2"

    Path("tvmflow.toml").unlink()
    sleeper.kill()
    sleeper.wait()
    loaded = Settings.load()
    assert (loaded.s3_endpoint, loaded.mlflow_tracking_uri, loaded.webhook_secret) == (None, None, None)


def test_a_damaged_record_is_one_sentence(machine: Any) -> None:
    place = machine.state / "stack"
    place.mkdir(parents=True)
    (place / "stack.json").write_text(json.dumps({"servers": {"s3": {"pid": 1}}}))
    for command in (("up", "--status"), ("down",), ("list",)):
        result = machine.run(*command)
        assert result.code == 2
        assert "stack.json is damaged" in result.sentence
