"""The process that keeps the devices of `tvmflow devices up` running: it starts the tracker and RPC servers again.

`python -m tvmflow.tuning.devicesupervisor STATE CONFIG` works until SIGTERM. STATE is the state folder, CONFIG a
`DeviceConfig` as JSON. The state of the tracker and the servers is written to the status file of the state folder.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from tvmflow.errors import RemoteError
from tvmflow.files import write_whole
from tvmflow.processes.supervisor import ChildProcess, describe_exit, visible_environment
from tvmflow.runtime.threads import SPIN
from tvmflow.runtime.tracker import Address, Tracker, is_answering
from tvmflow.stack.record import birth
from tvmflow.tuning.devices import (
    LOOK_SECONDS,
    LOOPBACK,
    START_SECONDS,
    DeviceConfig,
    Server,
    Status,
    log_file,
    status_file,
    work_folder,
)

_FIRST_PORT, _LAST_PORT = 9190, 9290
# How often the tracker is asked which servers it has, and how long one may be missing there: servers take their time to
# notice that the tracker was away.
_ASK_SECONDS, _ASK_TIMEOUT, _MISSING_SECONDS = 0.5, 2.0, 15.0
# How often a server without a session is asked whether it answers, and how many answers in a row it may fail to give.
_PROBE_SECONDS, _PROBE_TIMEOUT, _PROBES = 2.0, 1.0, 5
# A server that lives no longer than this after it was ready has died early; one that did so this often is dropped.
_EARLY_SECONDS, _EARLY_DEATHS = 1.0, 5


class _ServerProcess:
    """One process of a tracker or a server, with every session that it started."""

    def __init__(self, name: str, state: Path, arguments: list[str], threads: int, cores: set[int] | None) -> None:
        folder = work_folder(state) / name
        shutil.rmtree(folder, ignore_errors=True)  # Files that earlier processes left when they were killed.
        folder.mkdir(parents=True)
        environment = {
            **visible_environment(),
            "TMPDIR": str(folder),
            "TVM_USE_RUNTIME_LIB": "1",
            "TVM_NUM_THREADS": str(threads),
            "TVM_THREAD_POOL_SPIN_COUNT": str(SPIN),
            "OMP_NUM_THREADS": str(threads),
            "TVM_BIND_THREADS": "0",
        }
        self._process = ChildProcess(
            "tvmflow.tuning.deviceserver",
            *arguments,
            environment=environment,
            log=log_file(state, name),
            append=True,
            pipes=True,
            folder=folder,
        )
        if cores is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self.pid, cores)
        self.start_time = time.monotonic()
        self._port: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def port(self) -> int | None:
        """Return the port at which the process listens, None before it does."""
        if self._port is None:
            with contextlib.suppress(TimeoutError, EOFError):
                self._port = int(self._process.receive(time.monotonic())["port"])
        return self._port

    def end(self) -> str | None:
        """Return how the process ended, as the rest of a sentence; None while it lives."""
        code = self._process.exit_code()
        return None if code is None else describe_exit(code)

    def has_session(self) -> bool:
        """Whether one of its sessions is at work."""
        try:
            return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(self.pid).children())
        except psutil.NoSuchProcess:
            return False

    def close(self) -> None:
        """Kill it with its sessions."""
        self._process.close()


class _SupervisedServer:
    """One server or the tracker: started again when it dies, until it has died early too often."""

    def __init__(self, name: str, state: Path, cores: set[int] | None) -> None:
        self.name = name
        self.server = Server()
        self._state = state
        self._cores = cores
        self._process: _ServerProcess | None = None
        self._ready_since: float | None = None
        self._last_listed = 0.0
        self._last_probe, self._failed_probes = 0.0, 0
        self._early_deaths = 0

    def ensure_running(self, arguments: list[str], threads: int) -> None:
        """Start the server if it does not run, unless it was dropped."""
        if self._process is not None and (end := self._process.end()) is not None:
            self._replace(end)
        if self._process is None:
            if self.server.state == "dropped":
                return
            self._process = _ServerProcess(self.name, self._state, arguments, threads, self._cores)
            self._ready_since = None
            self._failed_probes = 0
            self.server = replace(self.server, state="starting", port=None, pid=self._process.pid)
        self.server = replace(self.server, port=self._process.port())
        if self._ready_since is None and time.monotonic() > self._process.start_time + START_SECONDS:
            self._replace(f"was not ready within {START_SECONDS:.0f} s")

    def note_listed(self) -> None:
        """Note that the tracker lists the server, or that the tracker itself answers: it is ready."""
        self._last_listed = time.monotonic()
        if self._ready_since is None:
            self._ready_since = self._last_listed
            self.server = replace(self.server, state="up")
            _log(f"{self.name} is up (pid {self.server.pid}, port {self.server.port})")

    def note_missing(self, since: float) -> None:
        """Note that the tracker, which has answered from `since` on, does not list the server."""
        seconds = time.monotonic() - max(since, self._last_listed)
        if self._ready_since is not None and seconds > _MISSING_SECONDS:
            self._replace(f"had left the tracker for {seconds:.0f} s")

    def probe(self, host: str) -> None:
        """Check every two seconds whether the server answers, unless a session keeps it from answering."""
        if self._process is None or self._ready_since is None or self.server.port is None:
            return
        if time.monotonic() < self._last_probe + _PROBE_SECONDS:
            return
        self._last_probe = time.monotonic()
        if self._process.has_session() or is_answering(Address(host, self.server.port), _PROBE_TIMEOUT):
            self._failed_probes = 0
            return
        self._failed_probes += 1
        if self._failed_probes >= _PROBES and self._process.end() is None:
            self._replace("did not answer any more")

    def kill(self) -> None:
        """Kill the server; it is not started again."""
        if self._process is not None:
            self._process.close()

    def _replace(self, end: str) -> None:
        """Kill the rest of the server's process; it is started again or, after too many early deaths, dropped."""
        if self._process is None:
            return
        pid = self._process.pid
        self._process.close()
        self._process = None
        is_early = self._ready_since is None or time.monotonic() < self._ready_since + _EARLY_SECONDS
        self._early_deaths = self._early_deaths + 1 if is_early else 0
        is_dropped = self._early_deaths >= _EARLY_DEATHS
        consequence = f"dropped after {self._early_deaths} early deaths" if is_dropped else "started again"
        message = f"{self.name} (pid {pid}) {end} and is {consequence}"
        _log(message)
        self.server = Server("dropped" if is_dropped else "starting", deaths=self.server.deaths + 1, message=message)


class _Supervisor:
    """Keeps the servers of a state folder running, and their tracker where it is their own."""

    def __init__(self, state: Path, config: DeviceConfig) -> None:
        self._state = state
        self._config = config
        self._must_end = False
        self._last_status: Status | None = None
        self._tracker = None if config.tracker is not None else _SupervisedServer("tracker", state, None)
        self._port = config.port or 0
        self._address = None if config.tracker is None else Address.parse(config.tracker)
        self._answers_since: float | None = None
        self._last_asked = 0.0
        cores = sorted(os.sched_getaffinity(0))
        has_room = config.count * config.threads <= len(cores)
        self._servers = [
            _SupervisedServer(
                f"server{number}",
                state,
                # Each on cores of its own where there are enough, so that servers do not disturb each other.
                set(cores[number * config.threads : (number + 1) * config.threads]) if has_room else None,
            )
            for number in range(config.count)
        ]

    def run(self) -> None:
        """Work until SIGTERM or SIGINT."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        try:
            while not self._must_end:
                self._look()
                self._write_status()
                time.sleep(LOOK_SECONDS)
        finally:
            for server in (*self._servers, *([self._tracker] if self._tracker else [])):
                server.kill()

    def _stop(self, *_: Any) -> None:
        self._must_end = True

    def _look(self) -> None:
        config = self._config
        if self._tracker is not None:
            if not self._port:
                self._port = _free_port(config.host, _FIRST_PORT)
            self._tracker.ensure_running(["tracker", config.host, str(self._port)], 1)
            if self._tracker.server.state == "dropped":
                if config.port:
                    raise SystemExit(f"the tracker cannot listen at {config.host}:{self._port}; choose another --port")
                # Another process took the port after it was seen to be free.
                self._port = _free_port(config.host, self._port + 1)
                self._tracker = _SupervisedServer("tracker", self._state, None)
                return
            if self._tracker.server.port is None:
                self._answers_since = None
                return
            self._address = Address(_reachable(config.host), self._port)
        if self._address is None:
            return
        arguments = ["server", config.host, self._address.host, str(self._address.port), config.key]
        for server in self._servers:
            server.ensure_running(arguments, config.threads)
        if time.monotonic() > self._last_asked + _ASK_SECONDS:
            self._last_asked = time.monotonic()
            self._ask_tracker(self._address)

    def _ask_tracker(self, address: Address) -> None:
        try:
            servers = Tracker(address).summary(_ASK_TIMEOUT).servers
        except RemoteError:
            self._answers_since = None
            return
        if self._tracker is not None:
            self._tracker.note_listed()
        self._answers_since = self._answers_since or time.monotonic()
        ports = {place.port for key, place in servers if key == self._config.key}
        for server in self._servers:
            if server.server.port in ports:
                server.note_listed()
            else:
                server.note_missing(self._answers_since)
            server.probe(_reachable(self._config.host))

    def _write_status(self) -> None:
        current = Status(
            pid=os.getpid(),
            birth=birth(os.getpid()) or "",
            config=self._config,
            tracker=None if self._address is None else str(self._address),
            own_tracker=None if self._tracker is None else self._tracker.server,
            servers=tuple(server.server for server in self._servers),
        )
        # A full disk ends no device: the status is written at a later look.
        with contextlib.suppress(OSError):
            if current != self._last_status:
                write_whole(status_file(self._state), json.dumps(asdict(current), indent=1))
                self._last_status = current


def _free_port(host: str, first: int) -> int:
    for port in range(first, _LAST_PORT):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return port
    raise SystemExit(f"no port from {_FIRST_PORT} to {_LAST_PORT - 1} is free at {host}; choose one with --port")


def _reachable(host: str) -> str:
    """The address at which this machine reaches a server that listens at `host`."""
    return LOOPBACK if host == "0.0.0.0" else host  # noqa: S104 -- the user's own choice


def _log(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=sys.stderr, flush=True)  # noqa: T201 -- the log


if __name__ == "__main__":
    _Supervisor(Path(sys.argv[1]), DeviceConfig(**json.loads(sys.argv[2]))).run()
