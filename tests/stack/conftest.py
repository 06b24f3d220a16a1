"""Local stacks as a user starts them: the command in a process of its own, a state folder each, free ports."""

import json
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.databases import Databases
from support.processes import TVMFLOW, CommandResult, clean_environment
from support.waits import wait_until

LIMIT_SECONDS = 240.0
SERVERS = ("s3", "prefect", "mlflow", "receiver", "worker")

Document = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """A machine with a state folder, and the ports that its stack is to have."""

    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.folder / "state"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its commands."""
        return clean_environment(TVMFLOW_HOME=str(self.state), **self.settings)

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start `tvmflow` with these arguments."""
        return subprocess.Popen(
            [TVMFLOW, *arguments],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str | Path) -> CommandResult:
        """Run `tvmflow` with these arguments to its end."""
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=LIMIT_SECONDS)
            except BaseException:
                process.kill()
                raise
        return CommandResult(process.returncode, out, err)

    def up(self, *arguments: str | Path) -> CommandResult:
        """Run `tvmflow up --json` with this machine's ports."""
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        return self.run("up", *ports, *arguments, "--json")

    def status(self) -> tuple[int, dict[str, Document]]:
        """The exit code of `tvmflow up --status`, and what it says of each server."""
        result = self.run("up", "--status", "--json")
        return result.code, {server["name"]: server for server in result.document}

    def processes(self) -> list[psutil.Process]:
        """All processes, of whatever server, that have this machine's state folder or ports in their environment."""
        processes = []
        for process in psutil.process_iter():
            try:
                words = " ".join([*process.cmdline(), *process.environ().values()])
                if str(self.folder) in words and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except psutil.Error:
                continue
        return processes

    def prefect(self, path: str, body: Document | None = None, method: str | None = None) -> Any:
        """What the API of the stack's Prefect answers; None for an empty answer."""
        data = None if body is None else json.dumps(body).encode()
        address = f"http://127.0.0.1:{self.ports['prefect']}/api/{path}"
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            content = answer.read()
            return json.loads(content) if content else None

    def state_of(self, run: str) -> str:
        """The state of a flow run, e.g. `RUNNING`."""
        return str(self.prefect(f"flow_runs/{run}")["state_type"])

    def start_endless_run(self) -> str:
        """Have the worker begin a flow run that never ends by itself; return its id once it runs."""
        (self.folder / "endless.py").write_text(ENDLESS)
        flow = self.prefect("flows/", {"name": "endless"})["id"]
        deployment = {
            "name": "endless",
            "flow_id": flow,
            "work_pool_name": "tvmflow",
            "path": str(self.folder),
            "entrypoint": "endless.py:endless",
        }
        deployment_id = self.prefect("deployments/", deployment)["id"]
        run = self.prefect(f"deployments/{deployment_id}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
        wait_until(lambda: self.state_of(run) == "RUNNING", message=lambda: f"the run is {self.state_of(run)}")
        return str(run)


ENDLESS = """
import signal
from prefect import flow

@flow
def endless():
    signal.pause()
"""


def free_ports() -> dict[str, int]:
    """A free port of 127.0.0.1 for each server that has one."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return dict(zip(("s3", "prefect", "mlflow", "receiver"), ports, strict=True))


def kill_all(machine: Machine) -> None:
    """End what a failed test may have left."""
    machine.run("down")
    for process in machine.processes():
        process.send_signal(signal.SIGKILL)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine without a stack yet."""
    new_machine = Machine(tmp_path, ports=free_ports())
    yield new_machine
    kill_all(new_machine)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, databases: Databases) -> Iterator[Machine]:
    """A machine whose stack was started with the release file of a tiny model."""
    new_machine = Machine(tmp_path_factory.mktemp("stack"), ports=free_ports())
    databases.prepare(new_machine.state)
    result = new_machine.up(make_release_file(new_machine.folder))
    try:
        assert result.code == 0, result.stderr
        assert [server["state"] for server in result.document] == ["healthy"] * 5, result.stdout
        yield new_machine
    finally:
        kill_all(new_machine)


@pytest.fixture(scope="session")
def new_machine() -> Callable[[Path], Machine]:
    """What makes a machine in a folder, with ports of its own."""
    return lambda folder: Machine(folder, ports=free_ports())


@pytest.fixture(scope="session")
def end_all() -> Callable[[Machine], None]:
    """What ends whatever a machine has running."""
    return kill_all


@pytest.fixture(scope="session")
def release_file() -> Callable[[Path], Path]:
    """What writes a release file into a folder."""
    return make_release_file


def make_release_file(folder: Path) -> Path:
    """The release file of a dense layer of 4 x 3 weights, measured hardly at all."""
    import onnx
    from onnx import parser

    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        tiny (float[batch, 4] x) => (float[batch, 3] y)
        <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> { y = MatMul(x, w) }
    """)
    onnx.save(model, folder / "tiny.onnx")
    path = folder / "tiny.yaml"
    path.write_text("""
name: tiny
model: {onnx: tiny.onnx}
benchmark: {repeats: 2, rounds: 1, warmup: 0, peers: []}
""")
    return path
