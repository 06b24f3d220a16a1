"""Starting, mending, asking and ending the local stack."""

import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import psutil

from tvmflow import __version__
from tvmflow.errors import SettingsError, StackError
from tvmflow.progress import reporter
from tvmflow.stack import record
from tvmflow.stack.record import Record, Started
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
# In the environment of every process of a server, also of one that outlives it or has left its process group.
_MARK = "_TVMFLOW_STACK"
_START_SECONDS = 180.0
_DEPLOY_SECONDS = 600.0
# A worker reports the runs that end with it; what has not ended by then is killed.
_STOP_SECONDS = 15.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Status:
    """How a server of the stack is; `off` is one that nothing needs, the receiver without release files."""

    name: str
    state: State
    address: str
    pid: int | None
    log: str


@dataclass(frozen=True)
class Wanted:
    """What the stack is to be: its ports as far as they were given, release files, work pool, PostgreSQL's address."""

    state: Path
    ports: Mapping[str, int]
    models: Sequence[Path]
    pool: str
    database_url: str | None


def up(wanted: Wanted) -> list[Status]:
    """Start what does not run well, wait until all is, and register the deployments of the release files.

    What this call started is ended again when it fails or is interrupted. Raises SettingsError for what the user can
    correct, StackError when a server does not start.
    """
    with record.locked(wanted.state):
        before = record.read(wanted.state)
        plan = _plan(wanted, before)
        models = [str(file.absolute()) for file in wanted.models] or list(before.settings.get("models", ()))
        settings: dict[str, Any] = {**plan.settings(), **({"models": models} if models else {})}
        record.write(wanted.state, replace(before, ports=dict(plan.ports), database=plan.database, settings=settings))
        # The receiver reads which release files there are when it starts.
        stale = {"receiver"} if settings.get("models") != before.settings.get("models") else set()
        servers = [name for name in plan.ports if models or name != "receiver"]
        begun: list[str] = []

        def start(names: Sequence[str]) -> None:
            since = {}
            for server in [plan.server(name) for name in names]:
                begun.append(server.name)
                since[server.name] = time.monotonic()
                _start(plan, server)
            for name in names:
                _await(plan, name, since[name])

        try:
            ill = [name for name in servers if name in stale or not _is_well(plan, name)]
            end(wanted.state, ill)
            for name in ill:
                _refuse_taken(name, plan.ports[name])
            start([name for name in ill if name != "receiver"])
            start([name for name in ill if name == "receiver"])
            if models:
                _deploy(plan, models)
            if not _is_well(plan, "worker"):
                end(wanted.state, ["worker"])
                crash_left_runs(plan)
                start(["worker"])
        except BaseException:
            end(wanted.state, begun)
            # What did not start is not remembered either.
            left = record.read(wanted.state)
            record.write(wanted.state, replace(before, servers=left.servers))
            raise
    return status(wanted.state)


def status(state: Path) -> list[Status]:
    """How each server of the stack is; empty where none was ever started."""
    found = record.read(state)
    if not found.ports:
        return []
    plan = Plan(state, found.ports, record.make_secrets(state), found.settings["work_pool"])
    statuses = []
    for name in TITLES:
        server = found.servers.get(name)
        if name == "receiver" and server is None and not found.settings.get("models"):
            statuses.append(Status(name, "off", "", None, ""))
            continue
        alive = server is not None and server.alive
        state_now: State = "healthy" if _is_well(plan, name) else "not answering" if alive else "down"
        log = str(_log(state, name))
        statuses.append(Status(name, state_now, plan.address(name), server.pid if server and alive else None, log))
    return statuses


def down(state: Path) -> list[str]:
    """End every server of the stack and what they started; return the names of those that ran."""
    with record.locked(state):
        names = [name for name, server in record.read(state).servers.items() if server.alive or _marked(server)]
        # The worker first: it still tells Prefect what became of its runs.
        end(state, ["worker"])
        end(state, list(TITLES))
        return [name for name in TITLES if name in names]


def end(state: Path, names: Iterable[str]) -> None:
    """End these servers with all their processes, politely at first, and strike them from the record."""
    found = record.read(state)
    ending = {name: found.servers[name] for name in names if name in found.servers}
    if not ending:
        return
    deadline = time.monotonic() + _STOP_SECONDS
    for name, server in ending.items():
        _ask_to_end(name, server)
    while time.monotonic() < deadline and any(_processes(server) for server in ending.values()):
        time.sleep(_LOOK_SECONDS)
    for server in ending.values():
        # Until none is left: one that is about to be killed may just have started another.
        while processes := _processes(server):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=1)
    record.write(
        state, replace(found, servers={name: item for name, item in found.servers.items() if name not in ending})
    )


def _plan(wanted: Wanted, before: Record) -> Plan:
    ports = {name: wanted.ports.get(name, before.ports.get(name, port)) for name, port in DEFAULT_PORTS.items()}
    for name, port in ports.items():
        others = [TITLES[other] for other, taken in ports.items() if taken == port and other != name]
        if others:
            raise SettingsError(
                f"{TITLES[name]} and {others[0]} are both given the port {port}; choose another for one"
            )
        server = before.servers.get(name)
        if server is not None and server.alive and port != before.ports.get(name):
            raise SettingsError(
                f"{TITLES[name]} of this stack runs on port {before.ports[name]}; end the stack with `tvmflow down` "
                f"before it is given port {port}"
            )
    state_secrets = record.make_secrets(wanted.state)
    if wanted.database_url is None:
        if before.database is not None:
            raise SettingsError(
                f"this stack keeps its state in PostgreSQL at {before.database}; set database_url "
                f"(TVMFLOW_DATABASE_URL) again, or remove {record.folder(wanted.state)} to start anew on SQLite"
            )
        return Plan(wanted.state, ports, state_secrets, wanted.pool)
    prefect, mlflow, place = databases(wanted.database_url)
    if before.running and before.database != place:
        raise SettingsError(
            f"this stack runs and keeps its state elsewhere than in PostgreSQL at {place}; `tvmflow down` ends it"
        )
    return Plan(wanted.state, ports, state_secrets, wanted.pool, prefect, mlflow, place)


def _is_well(plan: Plan, name: str) -> bool:
    server = record.read(plan.state).servers.get(name)
    return server is not None and server.alive and plan.healthy(name, server)


def _refuse_taken(name: str, port: int) -> None:
    """Say who has the port that a server is to have. Raises SettingsError."""
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
        f"port {port}, which {TITLES[name]} is to have, is in use{_user_of(port)}; end that, or choose another with "
        f"--{name}-port"
    )


def _user_of(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid is not None:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def _start(plan: Plan, server: Server) -> None:
    """Start a server that outlives this process, and note it."""
    reporter().started(TITLES[server.name], None)
    log = _log(plan.state, server.name)
    if log.exists():
        # Why it ended is still to be read after it was started again.
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
    # None when it has ended already: then no process is taken for it.
    born = record.birth(process.pid) or ""
    found = record.read(plan.state)
    record.write(plan.state, replace(found, servers={**found.servers, server.name: Started(process.pid, born, mark)}))


def _await(plan: Plan, name: str, began: float) -> None:
    """Wait until a server that was started at `began` is well. Raises StackError."""
    while not _is_well(plan, name):
        took = time.monotonic() - began
        if not record.read(plan.state).servers[name].alive:
            reporter().ended(TITLES[name], None, "failed", took)
            raise StackError(f"{TITLES[name]} ended while it was starting{_last_words(plan, name)}")
        if took > _START_SECONDS:
            reporter().ended(TITLES[name], None, "failed", took)
            raise StackError(
                f"{TITLES[name]} was not ready within {_START_SECONDS:.0f} seconds{_last_words(plan, name)}"
            )
        time.sleep(_LOOK_SECONDS)
    reporter().ended(TITLES[name], None, "ran", time.monotonic() - began)


def _deploy(plan: Plan, models: Sequence[str]) -> None:
    """Register the deployments of the release files, and MLflow's webhook, unless that is done. Raises StackError."""
    words = [__version__, plan.pool, plan.address("receiver"), plan.database, *models]
    wanted = sha256(b"\n".join([repr(words).encode(), *(Path(model).read_bytes() for model in models)])).hexdigest()
    if record.read(plan.state).deployed == wanted and is_deployed(plan):
        return
    with _reported("deployments"):
        _register(plan, models)
    record.write(plan.state, replace(record.read(plan.state), deployed=wanted))


def _register(plan: Plan, models: Sequence[str]) -> None:
    command = tvmflow_command("deploy", *models, "--receiver", plan.address("receiver"))
    running = subprocess.Popen(
        command,
        env=plan.command_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = running.communicate(timeout=_DEPLOY_SECONDS)[1]
    except subprocess.TimeoutExpired as error:
        raise StackError(f"`tvmflow deploy` did not end within {_DEPLOY_SECONDS:.0f} seconds; try again") from error
    finally:
        if running.poll() is None:
            # It has `prefect deploy` do the work, which would go on alone.
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    if running.returncode != 0:
        lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
        raise StackError(f"the deployments were not registered: {lines[-1].removeprefix('tvmflow: ')}")


def _last_words(plan: Plan, name: str) -> str:
    log = _log(plan.state, name)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = f": {lines[-1][:300].rstrip('.')}" if lines else ""
    return f"{said}; its log is {log}"


def _log(state: Path, name: str) -> Path:
    return record.folder(state) / f"{name}.log"


@contextlib.contextmanager
def _reported(step: str) -> Iterator[None]:
    reporter().started(step, None)
    began, ended = time.monotonic(), False
    try:
        yield
        ended = True
    finally:
        reporter().ended(step, None, "ran" if ended else "failed", time.monotonic() - began)


def _ask_to_end(name: str, server: Started) -> None:
    """Ask a server's process to end; and a worker's runs, which it would otherwise wait for."""
    processes = _processes(server)
    leader = [process for process in processes if process.pid == server.pid and server.alive]
    with contextlib.suppress(psutil.NoSuchProcess):
        asked = leader + (leader[0].children() if leader and name == "worker" else [])
        for process in asked or processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)


def _processes(server: Started) -> list[psutil.Process]:
    """The processes of a server that live: itself and what it started, wherever that has gone since."""
    found = {process.pid: process for process in _marked(server)}
    if server.alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(server.pid)
            found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return [process for process in found.values() if _lives(process)]


def _marked(server: Started) -> list[psutil.Process]:
    """The living processes whose environment holds the server's mark: nobody else's, whatever their ids."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == server.mark and _lives(process):
                found.append(process)
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
