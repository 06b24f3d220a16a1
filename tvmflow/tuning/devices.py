"""Starts, queries and ends the devices of this machine: RPC servers for measurements, and their tracker.

A supervisor process (`tvmflow.tuning.devicesupervisor`) keeps them running. It outlives the command that starts it, and
nothing that it started outlives the supervisor.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tvmflow
from tvmflow.errors import SettingsError, StackError
from tvmflow.files import exclusive
from tvmflow.processes.supervisor import last_line, visible_environment
from tvmflow.runtime.tracker import Address, Tracker
from tvmflow.stack.record import birth

LOOPBACK = "127.0.0.1"
START_SECONDS = 120.0
LOOK_SECONDS = 0.1
_STOP_SECONDS = 10.0

State = Literal["starting", "up", "dropped"]


@dataclass(frozen=True)
class DeviceConfig:
    """The devices of a state folder: `count` servers with `key` that listen at `host`, of `threads` threads each.

    They belong to `tracker` (HOST:PORT). Where that is None they get a tracker of their own at `host` and `port`, and
    where `port` is None as well, at the first free port from 9190 on.
    """

    key: str
    count: int
    threads: int
    host: str = LOOPBACK
    port: int | None = None
    tracker: str | None = None


@dataclass(frozen=True)
class Server:
    """The state of a server or the tracker: starting, up, or dropped after too many early deaths.

    `port` and `pid` are None until they are known. `deaths` counts its deaths, and `message` describes the last one.
    """

    state: State = "starting"
    port: int | None = None
    pid: int | None = None
    deaths: int = 0
    message: str = ""


@dataclass(frozen=True)
class Status:
    """The devices that run in a state folder; `own_tracker` is None where they belong to a tracker that runs elsewhere.

    `pid` and `birth` identify the supervisor process; `tracker` is the tracker's address (HOST:PORT), None until it is
    known.
    """

    pid: int
    birth: str
    config: DeviceConfig
    tracker: str | None
    own_tracker: Server | None
    servers: tuple[Server, ...]

    @property
    def is_alive(self) -> bool:
        """Whether the supervisor runs."""
        return birth(self.pid) == self.birth

    @property
    def is_settled(self) -> bool:
        """Whether the tracker lists every server that was not dropped."""
        return self.tracker is not None and all(server.state != "starting" for server in self.servers)


def device_folder(state: Path) -> Path:
    """Return the folder, below the state folder `state`, for the status and the logs of all devices.

    The folder may not exist yet.
    """
    return state / "devices"


def status_file(state: Path) -> Path:
    """Return the file in which the supervisor of a state folder writes the status of its devices."""
    return device_folder(state) / "devices.json"


def work_folder(state: Path) -> Path:
    """Return the folder in which the servers of a state folder keep the files that they receive."""
    return device_folder(state) / "work"


def log_file(state: Path, name: str) -> Path:
    """Return the path of the log of the server, the tracker or the supervisor called `name`."""
    return device_folder(state) / f"{name}.log"


def status(state: Path) -> Status | None:
    """Return the status of the tuning devices that were started with this state folder and run; None without any.

    Raises SettingsError when the status file is damaged.
    """
    file = status_file(state)
    try:
        document = json.loads(file.read_text())
        current = Status(
            pid=document["pid"],
            birth=document["birth"],
            config=DeviceConfig(**document["config"]),
            tracker=document["tracker"],
            own_tracker=Server(**document["own_tracker"]) if document["own_tracker"] else None,
            servers=tuple(Server(**server) for server in document["servers"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SettingsError(
            f"the status of devices {str(file)!r} cannot be read; end the processes that it names and remove it"
        ) from error
    return current if current.is_alive else None


def up(state: Path, config: DeviceConfig) -> Status:
    """Start devices, wait until their tracker lists them, and return their status.

    If devices with the same `config` run already in the state folder `state`, only returns their status. Raises
    SettingsError when other devices run there or another command is at work there, RemoteError when there is no tracker
    at `config.tracker`, and StackError when the devices do not start, after it has ended them.
    """
    with _hold_lock(state):
        running = status(state)
        if running is not None:
            if running.config != config:
                raise SettingsError(
                    f"other devices run in this state folder ({running.config.count} with key "
                    f"{running.config.key!r}); end them first with `tvmflow devices down`"
                )
            return running
        if config.tracker is not None:
            Tracker(Address.parse(config.tracker)).summary()
        _remove_status(state)
        with log_file(state, "supervisor").open("wb") as log:
            # Not a `tvmflow.processes.supervisor.ChildProcess`: it goes on when this process has ended.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tvmflow.tuning.devicesupervisor", str(state), json.dumps(asdict(config))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                # Neither an interrupt nor the end of the terminal reaches it.
                start_new_session=True,
            )
        supervisor_birth = birth(process.pid) or ""
        try:
            return _await_start(state, process)
        except BaseException:
            _end(process.pid, supervisor_birth)
            process.wait()
            raise


def down(state: Path) -> bool:
    """End the device servers that `up` started in the state folder `state`, with the tracker and all their processes.

    Returns whether any were running.

    Raises SettingsError when another command is at work there or the status file is damaged.
    """
    with _hold_lock(state):
        running = status(state)
        if running is not None:
            _end(running.pid, running.birth)
        _remove_status(state)
        return running is not None


@contextlib.contextmanager
def _hold_lock(state: Path) -> Iterator[None]:
    folder = device_folder(state)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "lock").touch()
    busy = f"another `tvmflow devices` is at work in {state}; wait until it is done"
    with exclusive(folder / "lock", SettingsError(busy)):
        yield


def _await_start(state: Path, process: "subprocess.Popen[bytes]") -> Status:
    deadline = time.monotonic() + START_SECONDS
    while True:
        current = status(state)
        if current is not None and current.is_settled:
            dropped_servers = [server for server in current.servers if server.state == "dropped"]
            if dropped_servers:
                raise StackError(
                    f"a device does not start: {dropped_servers[0].message}; its log is in {device_folder(state)}"
                )
            return current
        if process.poll() is not None or time.monotonic() > deadline:
            problem = last_line(log_file(state, "supervisor")) or "the supervisor's log is empty"
            raise StackError(f"the devices do not start: {problem}; their logs are in {device_folder(state)}")
        time.sleep(LOOK_SECONDS)


def _end(pid: int, supervisor_birth: str) -> None:
    """End a supervisor; its servers end with it, however it ends."""
    deadline = time.monotonic() + _STOP_SECONDS
    number = signal.SIGTERM
    while birth(pid) == supervisor_birth and supervisor_birth:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        while birth(pid) == supervisor_birth and (number == signal.SIGKILL or time.monotonic() < deadline):
            time.sleep(LOOK_SECONDS)
        number = signal.SIGKILL


def _remove_status(state: Path) -> None:
    status_file(state).unlink(missing_ok=True)
    shutil.rmtree(work_folder(state), ignore_errors=True)


def _environment() -> dict[str, str]:
    """The environment of a supervisor, which imports this very package."""
    root = str(Path(tvmflow.__file__).resolve().parents[1])
    return {**visible_environment(), "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
