"""This machine as devices to measure on: RPC servers and their tracker, kept running by a supervisor process.

The supervisor outlives the command that starts it, and nothing that it started outlives the supervisor.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

import tvmflow
from tvmflow.errors import RemoteError, SettingsError, StackError
from tvmflow.runtime.tracker import Address, Tracker, is_answering
from tvmflow.stack.record import birth

LOOPBACK = "127.0.0.1"
FIRST_PORT, _LAST_PORT = 9190, 9290
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_LOOK_SECONDS = 0.1
# How often the supervisor asks the tracker which servers it has, and how long one may be missing there: servers take
# their time to notice that it was away.
_ASK_SECONDS, _ASK_TIMEOUT, _MISSING_SECONDS = 0.5, 2.0, 15.0
# How often a server without a session is asked whether it answers, and how many answers in a row it may fail to give.
_PROBE_SECONDS, _PROBE_TIMEOUT, _PROBES = 2.0, 1.0, 5
# A server that lives no longer than this after it was ready has died early; one that did so this often is given up.
_EARLY_SECONDS, _EARLY_DEATHS = 1.0, 5

State = Literal["starting", "up", "dropped"]


@dataclass(frozen=True)
class Wanted:
    """What is to run: `count` servers with `key`, each using `threads` threads, that listen at `host`.

    They belong to `tracker` (HOST:PORT); where there is none, to a tracker of their own at `host` and `port`, None for
    the first that is free from 9190 on.
    """

    key: str
    count: int
    threads: int
    host: str = LOOPBACK
    port: int | None = None
    tracker: str | None = None


@dataclass(frozen=True)
class Server:
    """A server or the tracker as the supervisor sees it: how often it died, and what was last told of it."""

    state: State = "starting"
    port: int | None = None
    pid: int | None = None
    deaths: int = 0
    told: str = ""


@dataclass(frozen=True)
class Status:
    """The devices that were started in a state folder; `own` is their tracker, None where it is somebody else's."""

    pid: int
    birth: str
    wanted: Wanted
    tracker: str | None
    own: Server | None
    servers: tuple[Server, ...]

    @property
    def alive(self) -> bool:
        """Whether the supervisor runs."""
        return birth(self.pid) == self.birth

    @property
    def ready(self) -> bool:
        """Whether every server is at the tracker, or was given up."""
        return self.tracker is not None and all(server.state != "starting" for server in self.servers)


def folder(state: Path) -> Path:
    """Where the supervisor of a state folder keeps its record and its logs."""
    return state / "devices"


def status(state: Path) -> Status | None:
    """What was started in the state folder and still runs, None where nothing does."""
    try:
        document = json.loads((folder(state) / _RECORD).read_text())
        found = Status(
            pid=document["pid"],
            birth=document["birth"],
            wanted=Wanted(**document["wanted"]),
            tracker=document["tracker"],
            own=Server(**document["own"]) if document["own"] else None,
            servers=tuple(Server(**server) for server in document["servers"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SettingsError(
            f"the record of devices {str(folder(state) / _RECORD)!r} cannot be read; end what it names and remove it"
        ) from error
    return found if found.alive else None


def up(state: Path, wanted: Wanted) -> Status:
    """Start the devices and wait until they are at their tracker; those that run already are left alone.

    Raises SettingsError for what the user can correct, RemoteError where there is no tracker, StackError when the
    devices do not start: nothing is left then.
    """
    with _locked(state):
        running = status(state)
        if running is not None:
            if running.wanted != wanted:
                raise SettingsError(
                    f"other devices run in this state folder ({running.wanted.count} with key "
                    f"{running.wanted.key!r}); end them first with `tvmflow devices down`"
                )
            return running
        if wanted.tracker is not None:
            Tracker(Address.parse(wanted.tracker)).summary()
        _remove(state)
        with _log(state, "supervisor").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tvmflow.tuning.devices", str(state), json.dumps(asdict(wanted))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment({}),
                # Neither Ctrl-C nor the end of the terminal reaches it.
                start_new_session=True,
            )
        born = birth(process.pid) or ""
        try:
            return _await(state, process)
        except BaseException:
            _end(process.pid, born)
            process.wait()
            raise


def down(state: Path) -> bool:
    """End the devices of the state folder with all that they started; False where none ran."""
    with _locked(state):
        running = status(state)
        if running is not None:
            _end(running.pid, running.birth)
        _remove(state)
        return running is not None


_RECORD = "devices.json"


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    place = folder(state)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (place / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(f"another `tvmflow devices` is at work in {state}; wait until it is done") from error
        yield


def _await(state: Path, process: "subprocess.Popen[bytes]") -> Status:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        found = status(state)
        if found is not None and found.ready:
            lost = [server for server in found.servers if server.state == "dropped"]
            if lost:
                raise StackError(f"a device does not start: {lost[0].told}; its log is in {folder(state)}")
            return found
        if process.poll() is not None or time.monotonic() > deadline:
            lines = _log(state, "supervisor").read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise StackError(f"the devices do not start: {lines[-1]}; their logs are in {folder(state)}")
        time.sleep(_LOOK_SECONDS)


def _end(pid: int, born: str) -> None:
    """End a supervisor; its servers end with it, however it ends."""
    deadline = time.monotonic() + _STOP_SECONDS
    asked = signal.SIGTERM
    while birth(pid) == born and born:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, asked)
        while birth(pid) == born and (asked == signal.SIGKILL or time.monotonic() < deadline):
            time.sleep(_LOOK_SECONDS)
        asked = signal.SIGKILL


def _remove(state: Path) -> None:
    (folder(state) / _RECORD).unlink(missing_ok=True)
    shutil.rmtree(_work(state), ignore_errors=True)


def _work(state: Path) -> Path:
    return folder(state) / "work"


def _log(state: Path, name: str) -> Path:
    return folder(state) / f"{name}.log"


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(tvmflow.__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])), **more}


# -- The supervisor ----------------------------------------------------------------------------------------------------


class _Process:
    """A tracker or a server, with every session it started in one process group, which is killed whole."""

    def __init__(self, name: str, state: Path, arguments: list[str], threads: int, cores: set[int] | None) -> None:
        work = _work(state) / name
        shutil.rmtree(work, ignore_errors=True)  # What those before it left there when they were killed.
        work.mkdir(parents=True)
        environment = {
            "TMPDIR": str(work),
            "TVM_USE_RUNTIME_LIB": "1",
            "TVM_NUM_THREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
            "TVM_BIND_THREADS": "0",
        }
        with _log(state, name).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tvmflow.tuning.deviceserver", str(os.getpid()), *arguments],
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(environment),
                start_new_session=True,
            )
        if cores is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._process.pid, cores)
        self.pid = self._process.pid
        self.begun = time.monotonic()
        self._said = b""

    def port(self) -> int | None:
        """Where it listens, None as long as it does not."""
        output = self._process.stdout
        if output is not None and not self._said.endswith(b"\n") and select.select([output], [], [], 0)[0]:
            self._said += os.read(output.fileno(), 64)
        return int(self._said) if self._said.endswith(b"\n") else None

    def ended(self) -> str | None:
        """How it ended, None while it lives. It is not reaped yet: its group's number cannot be another's."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        if result.si_code == os.CLD_EXITED:
            return f"ended with exit code {result.si_status}"
        return f"was killed by {signal.Signals(result.si_status).name}"

    def has_session(self) -> bool:
        """Whether a child of it works."""
        try:
            return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(self.pid).children())
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        """Kill the group and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class _Kept:
    """One server or the tracker: started again when it dies, until it has died early too often."""

    def __init__(self, name: str, state: Path, cores: set[int] | None) -> None:
        self.name = name
        self.seen = Server()
        self._state = state
        self._cores = cores
        self._process: _Process | None = None
        self._ready_since: float | None = None
        self._last_listed = 0.0
        self._probed, self._unanswered = 0.0, 0
        self._early = 0

    def look(self, arguments: list[str], threads: int) -> None:
        """Start it where it does not run."""
        if self._process is not None and (how := self._process.ended()) is not None:
            self.died(how)
        if self._process is None:
            if self.seen.state == "dropped":
                return
            self._process = _Process(self.name, self._state, arguments, threads, self._cores)
            self._ready_since = None
            self._unanswered = 0
            self.seen = replace(self.seen, state="starting", port=None, pid=self._process.pid)
        self.seen = replace(self.seen, port=self._process.port())
        if self._ready_since is None and time.monotonic() > self._process.begun + _START_SECONDS:
            self.died(f"was not ready within {_START_SECONDS:.0f} s")

    def ready(self) -> None:
        """Note that it is at work."""
        self._last_listed = time.monotonic()
        if self._ready_since is None:
            self._ready_since = self._last_listed
            self.seen = replace(self.seen, state="up")
            _say(f"{self.name} is up (pid {self.seen.pid}, port {self.seen.port})")

    def missing(self, since: float) -> None:
        """Note that the tracker, which has answered since then, does not have it."""
        lost = time.monotonic() - max(since, self._last_listed)
        if self._ready_since is not None and lost > _MISSING_SECONDS:
            self.died(f"had left the tracker for {lost:.0f} s")

    def probe(self, host: str) -> None:
        """See whether it answers, where it has nothing else to do."""
        if self._process is None or self._ready_since is None or self.seen.port is None:
            return
        if time.monotonic() < self._probed + _PROBE_SECONDS:
            return
        self._probed = time.monotonic()
        if self._process.has_session() or is_answering(Address(host, self.seen.port), _PROBE_TIMEOUT):
            self._unanswered = 0
            return
        self._unanswered += 1
        if self._unanswered >= _PROBES and self._process.ended() is None:
            self.died("did not answer any more")

    def died(self, how: str) -> None:
        """Kill what is left of it, and give it up when that happened too often."""
        if self._process is None:
            return
        pid = self._process.pid
        self._process.kill()
        self._process = None
        early = self._ready_since is None or time.monotonic() < self._ready_since + _EARLY_SECONDS
        self._early = self._early + 1 if early else 0
        dropped = self._early >= _EARLY_DEATHS
        what = f"dropped after {self._early} early deaths" if dropped else "started again"
        told = f"{self.name} (pid {pid}) {how} and is {what}"
        _say(told)
        self.seen = Server("dropped" if dropped else "starting", deaths=self.seen.deaths + 1, told=told)

    def kill(self) -> None:
        """End it for good."""
        if self._process is not None:
            self._process.kill()


class _Supervisor:
    """Keeps a tracker, where it is ours, and its servers running."""

    def __init__(self, state: Path, wanted: Wanted) -> None:
        self._state = state
        self._wanted = wanted
        self._ended = False
        self._written: Status | None = None
        self._tracker = None if wanted.tracker is not None else _Kept("tracker", state, None)
        self._port = wanted.port or 0
        self._address = None if wanted.tracker is None else Address.parse(wanted.tracker)
        self._answers_since: float | None = None
        self._asked = 0.0
        cores = sorted(os.sched_getaffinity(0))
        room = wanted.count * wanted.threads <= len(cores)
        self._servers = [
            _Kept(
                f"server{number}",
                state,
                # Each on cores of its own, where there are enough: those measured side by side do not disturb another.
                set(cores[number * wanted.threads : (number + 1) * wanted.threads]) if room else None,
            )
            for number in range(wanted.count)
        ]

    def run(self) -> None:
        """Work until SIGTERM."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        try:
            while not self._ended:
                self._look()
                self._write()
                time.sleep(_LOOK_SECONDS)
        finally:
            for kept in (*self._servers, *([self._tracker] if self._tracker else [])):
                kept.kill()

    def _end(self, *_: Any) -> None:
        self._ended = True

    def _look(self) -> None:
        wanted = self._wanted
        if self._tracker is not None:
            if not self._port:
                self._port = _free_port(wanted.host, FIRST_PORT)
            self._tracker.look(["tracker", wanted.host, str(self._port)], 1)
            if self._tracker.seen.state == "dropped":
                if wanted.port:
                    raise SystemExit(f"the tracker cannot listen at {wanted.host}:{self._port}; choose another --port")
                # Somebody else took it after it was found free.
                self._port = _free_port(wanted.host, self._port + 1)
                self._tracker = _Kept("tracker", self._state, None)
                return
            if self._tracker.seen.port is None:
                self._answers_since = None
                return
            self._address = Address(_reachable(wanted.host), self._port)
        if self._address is None:
            return
        for server in self._servers:
            place = ["server", wanted.host, self._address.host, str(self._address.port), wanted.key]
            server.look(place, wanted.threads)
        if time.monotonic() > self._asked + _ASK_SECONDS:
            self._asked = time.monotonic()
            self._ask(self._address)

    def _ask(self, address: Address) -> None:
        try:
            servers = Tracker(address).summary(_ASK_TIMEOUT).servers
        except RemoteError:
            self._answers_since = None
            return
        if self._tracker is not None:
            self._tracker.ready()
        now = time.monotonic()
        self._answers_since = self._answers_since or now
        ports = {listed.port for key, listed in servers if key == self._wanted.key}
        for server in self._servers:
            if server.seen.port in ports:
                server.ready()
            else:
                server.missing(self._answers_since)
            server.probe(_reachable(self._wanted.host))

    def _write(self) -> None:
        found = Status(
            pid=os.getpid(),
            birth=birth(os.getpid()) or "",
            wanted=self._wanted,
            tracker=None if self._address is None else str(self._address),
            own=None if self._tracker is None else self._tracker.seen,
            servers=tuple(server.seen for server in self._servers),
        )
        if found == self._written:
            return
        self._written = found
        place = folder(self._state) / _RECORD
        descriptor, partial = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(found), file, indent=1)
        Path(partial).replace(place)


def _free_port(host: str, first: int) -> int:
    import socket

    for port in range(first, _LAST_PORT):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return port
    raise SystemExit(f"no port from {FIRST_PORT} to {_LAST_PORT - 1} is free at {host}; choose one with --port")


def _reachable(host: str) -> str:
    """Where a server that listens at `host` is reached from this machine."""
    return LOOPBACK if host == "0.0.0.0" else host  # noqa: S104 -- said by the user


def _say(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=sys.stderr, flush=True)  # noqa: T201 -- the log


if __name__ == "__main__":
    _Supervisor(Path(sys.argv[1]), Wanted(**json.loads(sys.argv[2]))).run()
