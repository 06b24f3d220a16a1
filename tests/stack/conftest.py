"""Local stacks as a user starts them: commands in processes of their own, a state folder each, free ports.

One stack serves all tests that do not need their own. A test may break it: `stack` mends it for the next one. Commands
are forks of a process that has imported what they import, but for `start`, which begins as a shell does.
"""

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from support import scale
from support.command_server import CommandServer
from support.databases import Databases
from support.managed import Managed, digits, sides
from support.processes import TVMFLOW, CommandResult, clean_environment
from support.waits import wait_until

LIMIT_SECONDS = 240.0
SERVERS = ("s3", "prefect", "mlflow", "receiver", "worker")

Document = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """A machine with a state folder, and the ports that its stack is to have."""

    folder: Path
    commands: CommandServer
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
        words = list(map(str, arguments))
        process = self.commands.run(words, self.environment, self.folder, LIMIT_SECONDS)
        return CommandResult(process.returncode, process.stdout, process.stderr)

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

    def address(self, server: str) -> str:
        """The address of a server."""
        return f"http://127.0.0.1:{self.ports[server]}"

    def prefect(self, path: str, body: Document | None = None, method: str | None = None) -> Any:
        """What the API of the stack's Prefect answers; None for an empty answer."""
        address = f"http://127.0.0.1:{self.ports['prefect']}/api/{path}"
        # Prefect answers 503 while its database is busy.
        again = Retry(total=8, status_forcelist=[503], backoff_factor=0.2, allowed_methods=None)
        with requests.Session() as session:
            session.mount("http://", HTTPAdapter(max_retries=again))
            method = method or ("GET" if body is None else "POST")
            answer = session.request(method, address, json=body, timeout=30)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def state_of(self, run: str) -> str:
        """The state of a flow run, e.g. `RUNNING`."""
        return str(self.prefect(f"flow_runs/{run}")["state_type"])

    @contextmanager
    def often(self, deployment: str) -> Iterator[Callable[[], list[Document]]]:
        """Have a deployment's only schedule start runs every ten seconds; yield what lists the completed ones."""
        response = self.prefect(f"deployments/name/{deployment}")
        (schedule,) = response["schedules"]
        place = f"deployments/{response['id']}/schedules/{schedule['id']}"
        query = {
            "deployments": {"id": {"any_": [response["id"]]}},
            "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        }

        def scheduled_runs() -> list[Document]:
            return [run for run in self.prefect("flow_runs/filter", query) if run["auto_scheduled"]]

        before = len(scheduled_runs())
        # The sixth field is that of seconds. Of a frequent schedule, one run at a time is planned.
        often = {"schedule": {"cron": "* * * * * */10", "timezone": "UTC"}, "max_scheduled_runs": 1}
        self.prefect(place, often, "PATCH")
        try:
            yield lambda: scheduled_runs()[before:]
        finally:
            self.prefect(place, {"schedule": schedule["schedule"]}, "PATCH")

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
def machine(tmp_path: Path, commands: CommandServer) -> Iterator[Machine]:
    """A machine without a stack yet."""
    new_machine = Machine(tmp_path, commands, ports=free_ports())
    yield new_machine
    kill_all(new_machine)


@pytest.fixture(scope="session")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Managed:
    """The model that the shared stack retrains and promotes."""
    return scale.choose(normal=sides, long=digits)(tmp_path_factory.mktemp("managed"))


@pytest.fixture(scope="session")
def shared_stack(
    tmp_path_factory: pytest.TempPathFactory, databases: Databases, commands: CommandServer, managed: Managed
) -> Iterator[Machine]:
    """A machine whose stack was started with the release files of a tiny model and of `managed`."""
    new_machine = Machine(tmp_path_factory.mktemp("stack"), commands, ports=free_ports())
    databases.prepare(new_machine.state)
    result = new_machine.up(make_release_file(new_machine.folder), managed.file)
    try:
        assert result.code == 0, result.stderr
        assert [server["state"] for server in result.document] == ["healthy"] * 5, result.stdout
        yield new_machine
    finally:
        kill_all(new_machine)


@pytest.fixture
def stack(shared_stack: Machine) -> Machine:
    """The shared stack, up, whatever the test before did to it."""
    code, _ = shared_stack.status()
    if code != 0:
        assert shared_stack.up().code == 0
    return shared_stack


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
