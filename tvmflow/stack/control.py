"""The control of the local stack: start servers that do not run, read their status, end them."""

import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import psutil

from tvmflow import __version__
from tvmflow.errors import SettingsError, StackError
from tvmflow.progress import reporter
from tvmflow.stack import record
from tvmflow.stack.record import ServerProcess, StackRecord
from tvmflow.stack.servers import (
    DEFAULT_PORTS,
    HOST,
    TITLES,
    Plan,
    Server,
    crash_left_runs,
    databases,
    is_deployed,
    tvmflow_command,
)

State = Literal["healthy", "not answering", "down", "off"]
# The variable that marks every process of a server, also one that outlives the server or leaves its process group.
_MARK = "_TVMFLOW_STACK"
_START_SECONDS = 180.0
_DEPLOY_SECONDS = 600.0
# A worker reports the runs that end with it; a process that lives on after this time is killed.
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Status:
    """The status of a server of the stack; the receiver is `off` while there are no release files.

    `pid` is None for a server that does not run; `log` is the path of its log.
    """

    name: str
    state: State
    address: str
    pid: int | None
    log: str


@dataclass(frozen=True)
class StackOptions:
    """The options of a start.

    `state` is the state folder. `ports` are new ports by server; other servers keep theirs. `models` are release files;
    without any, those of the last start are used. `pool` is the work pool's name. `database_url` is the address of a
    PostgreSQL server with user and password, None for SQLite.
    """

    state: Path
    ports: Mapping[str, int]
    models: Sequence[Path]
    pool: str
    database_url: str | None


def up(options: StackOptions) -> list[Status]:
    """Start the servers that are not healthy, wait until all are, and register the release files' deployments.

    Returns the status of each server. Servers that this call started are ended again when it fails or is interrupted.
    Raises SettingsError for a mistake that the user can correct, StackError when a server does not start.
    """
    with record.lock(options.state):
        previous = record.read(options.state)
        plan = _make_plan(options, previous)
        models = [str(file.absolute()) for file in options.models] or list(previous.settings.get("models", ()))
        settings: dict[str, Any] = {**plan.settings(), **({"models": models} if models else {})}
        options_now = {"ports": dict(plan.ports), "database": plan.database, "settings": settings}
        record.write(options.state, previous.model_copy(update=options_now))
        # The receiver reads the list of release files when it starts.
        stale = {"receiver"} if settings.get("models") != previous.settings.get("models") else set()
        names = [name for name in plan.ports if models or name != "receiver"]
        new_servers: list[str] = []

        def start(names: Sequence[str]) -> None:
            start_times = {}
            for server in [plan.server(name) for name in names]:
                new_servers.append(server.name)
                start_times[server.name] = time.monotonic()
                _start(plan, server)
            for name in names:
                _await_health(plan, name, start_times[name])

        try:
            unhealthy = [name for name in names if name in stale or not _is_healthy(plan, name)]
            end(options.state, unhealthy)
            for name in unhealthy:
                _require_free_port(name, plan.ports[name])
            start([name for name in unhealthy if name != "receiver"])
            start([name for name in unhealthy if name == "receiver"])
            if models:
                _deploy(plan, models)
            if not _is_healthy(plan, "worker"):
                end(options.state, ["worker"])
                crash_left_runs(plan)
                start(["worker"])
        except BaseException:
            end(options.state, new_servers)
            # Options of a start that failed are not remembered.
            servers = record.read(options.state).servers
            record.write(options.state, previous.model_copy(update={"servers": servers}))
            raise
    return status(options.state)


def status(state: Path) -> list[Status]:
    """Return the status of each server of the stack; empty when no stack was ever started.

    Raises SettingsError when the file that records the servers is damaged.
    """
    stack = record.read(state)
    if not stack.ports:
        return []
    plan = Plan(state, stack.ports, record.make_secrets(state), stack.settings["work_pool"])
    statuses = []
    for name in TITLES:
        server = stack.servers.get(name)
        if name == "receiver" and server is None and not stack.settings.get("models"):
            statuses.append(Status(name, "off", "", None, ""))
            continue
        is_alive = server is not None and server.is_alive
        health: State = "healthy" if _is_healthy(plan, name) else "not answering" if is_alive else "down"
        log = str(_log(state, name))
        statuses.append(Status(name, health, plan.address(name), server.pid if server and is_alive else None, log))
    return statuses


def down(state: Path) -> list[str]:
    """End every server of the stack and the processes that they started; return the names of the servers that ran.

    Raises SettingsError while another command starts or ends the stack.
    """
    with record.lock(state):
        servers = record.read(state).servers
        names = [name for name, server in servers.items() if server.is_alive or _find_marked(server)]
        # The worker first: it still reports to Prefect that its runs have ended.
        end(state, ["worker"])
        end(state, list(TITLES))
        return [name for name in TITLES if name in names]


def end(state: Path, names: Iterable[str]) -> None:
    """End these servers with all their processes, by SIGTERM and then SIGKILL, and remove them from the record."""
    stack = record.read(state)
    ending = {name: stack.servers[name] for name in names if name in stack.servers}
    if not ending:
        return
    deadline = time.monotonic() + _STOP_SECONDS
    for name, server in ending.items():
        _terminate(name, server)
    while time.monotonic() < deadline and any(_list_processes(server) for server in ending.values()):
        time.sleep(_POLL_SECONDS)
    for server in ending.values():
        # Repeated until no process is left, because a process may start another just before it is killed.
        while processes := _list_processes(server):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=1)
    servers = {name: item for name, item in stack.servers.items() if name not in ending}
    record.write(state, stack.model_copy(update={"servers": servers}))


def _make_plan(options: StackOptions, previous: StackRecord) -> Plan:
    ports = {name: options.ports.get(name, previous.ports.get(name, port)) for name, port in DEFAULT_PORTS.items()}
    for name, port in ports.items():
        others = [TITLES[other] for other, other_port in ports.items() if other_port == port and other != name]
        if others:
            raise SettingsError(
                f"{TITLES[name]} and {others[0]} are both given the port {port}; choose another for one"
            )
        server = previous.servers.get(name)
        if server is not None and server.is_alive and port != previous.ports.get(name):
            raise SettingsError(
                f"{TITLES[name]} of this stack runs on port {previous.ports[name]}; end the stack with `tvmflow down` "
                f"before you give it port {port}"
            )
    secrets_of_state = record.make_secrets(options.state)
    if options.database_url is None:
        if previous.database is not None:
            raise SettingsError(
                f"this stack keeps its state in PostgreSQL at {previous.database}; set database_url "
                f"(TVMFLOW_DATABASE_URL) again, or remove {record.folder(options.state)} to start anew on SQLite"
            )
        return Plan(options.state, ports, secrets_of_state, options.pool)
    prefect, mlflow, place = databases(options.database_url)
    if previous.is_running and previous.database != place:
        raise SettingsError(
            f"this stack runs and keeps its state elsewhere than in PostgreSQL at {place}; end it with `tvmflow down`"
        )
    return Plan(options.state, ports, secrets_of_state, options.pool, prefect, mlflow, place)


def _is_healthy(plan: Plan, name: str) -> bool:
    server = record.read(plan.state).servers.get(name)
    return server is not None and server.is_alive and plan.is_healthy(name, server)


def _require_free_port(name: str, port: int) -> None:
    """Raise SettingsError, naming the process that uses it, unless a server's port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise SettingsError(
                    f"port {port} cannot be opened ({error.strerror}); choose another with --{name}-port"
                ) from error
    raise SettingsError(
        f"port {port} of {TITLES[name]} is in use{_describe_user(port)}; end that process, or choose another port with "
        f"--{name}-port"
    )


def _describe_user(port: int) -> str:
    """Return the process that listens at a port, as the end of a sentence; empty when it cannot be seen."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid is not None:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def _start(plan: Plan, server: Server) -> None:
    """Start a server that outlives this process, and record it."""
    reporter().begin(TITLES[server.name], None)
    log = _log(plan.state, server.name)
    if log.exists():
        # The log of the server that ended stays readable.
        log.replace(log.with_suffix(".before.log"))
    mark = secrets.token_hex(8)
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command,
            cwd=server.folder,
            env={**server.environment, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Neither Ctrl-C nor the end of the terminal reaches it.
            start_new_session=True,
        )
    # None when it has ended already: then no process has this birth.
    birth = record.birth(process.pid) or ""
    stack = record.read(plan.state)
    servers = {**stack.servers, server.name: ServerProcess(pid=process.pid, birth=birth, mark=mark)}
    record.write(plan.state, stack.model_copy(update={"servers": servers}))


def _await_health(plan: Plan, name: str, start_time: float) -> None:
    """Wait until a server that was started at `start_time` is healthy. Raises StackError if it ends or is too slow."""
    while not _is_healthy(plan, name):
        seconds = time.monotonic() - start_time
        if not record.read(plan.state).servers[name].is_alive:
            reporter().end(TITLES[name], None, "failed", seconds)
            raise StackError(f"{TITLES[name]} ended while it was starting{_describe_log(plan, name)}")
        if seconds > _START_SECONDS:
            reporter().end(TITLES[name], None, "failed", seconds)
            raise StackError(
                f"{TITLES[name]} was not ready within {_START_SECONDS:.0f} seconds{_describe_log(plan, name)}"
            )
        time.sleep(_POLL_SECONDS)
    reporter().end(TITLES[name], None, "ran", time.monotonic() - start_time)


def _deploy(plan: Plan, models: Sequence[str]) -> None:
    """Register the deployments of the release files, and MLflow's webhook, unless that is done. Raises StackError."""
    words = [__version__, plan.pool, plan.address("receiver"), plan.database, *models]
    digest = sha256(b"\n".join([repr(words).encode(), *(Path(model).read_bytes() for model in models)])).hexdigest()
    if record.read(plan.state).deployed == digest and is_deployed(plan):
        return
    with _reporting("deployments"):
        _register(plan, models)
    record.write(plan.state, record.read(plan.state).model_copy(update={"deployed": digest}))


def _register(plan: Plan, models: Sequence[str]) -> None:
    command = tvmflow_command("deploy", *models, "--receiver", plan.address("receiver"))
    process = subprocess.Popen(
        command,
        env=plan.command_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        errors = process.communicate(timeout=_DEPLOY_SECONDS)[1]
    except subprocess.TimeoutExpired as error:
        raise StackError(f"`tvmflow deploy` did not end within {_DEPLOY_SECONDS:.0f} seconds; try again") from error
    finally:
        if process.poll() is None:
            # Processes that it started would go on alone.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        lines = [line for line in errors.splitlines() if line.strip()] or ["no error was printed"]
        raise StackError(f"the deployments were not registered: {lines[-1].removeprefix('tvmflow: ')}")


def _describe_log(plan: Plan, name: str) -> str:
    """Return the last line of a server's log and the log's path, as the end of a sentence."""
    log = _log(plan.state, name)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last_line = f": {lines[-1][:300].rstrip('.')}" if lines else ""
    return f"{last_line}; its log is {log}"


def _log(state: Path, name: str) -> Path:
    return record.folder(state) / f"{name}.log"


@contextlib.contextmanager
def _reporting(step: str) -> Iterator[None]:
    reporter().begin(step, None)
    start_time, is_done = time.monotonic(), False
    try:
        yield
        is_done = True
    finally:
        reporter().end(step, None, "ran" if is_done else "failed", time.monotonic() - start_time)


def _terminate(name: str, server: ServerProcess) -> None:
    """Send SIGTERM to a server's process, and to a worker's runs, for which the worker would otherwise wait."""
    processes = _list_processes(server)
    leader = [process for process in processes if process.pid == server.pid and server.is_alive]
    with contextlib.suppress(psutil.NoSuchProcess):
        receivers = leader + (leader[0].children() if leader and name == "worker" else [])
        for process in receivers or processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)


def _list_processes(server: ServerProcess) -> list[psutil.Process]:
    """Return the living processes of a server: its own, the children of that, and all that have its mark."""
    processes = {process.pid: process for process in _find_marked(server)}
    if server.is_alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(server.pid)
            processes |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return [process for process in processes.values() if _is_alive(process)]


def _find_marked(server: ServerProcess) -> list[psutil.Process]:
    """The living processes that have the server's mark in their environment, whatever their ids."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == server.mark and _is_alive(process):
                processes.append(process)
    return processes


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
