"""Kills devices during a tuning run and counts the records that are lost: `python benchmarks/devices.py --kills 20`.

Starts a tracker and RPC servers on this machine and tunes a convolution on them. Meanwhile servers are killed, one
after another, each while it measures, and sessions and the tracker now and then as well. Exit code 1 when a record that
was reported is not in the store afterwards, when the run does not go on to its end, or when a process is left behind.
"""

import json
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from commandline import new_parser, positive, run_main, state_folder

from tvmflow.hardware.target import resolve
from tvmflow.runtime.tracker import Address
from tvmflow.tuning import Budget, Device, Progress, RecordStore, Task, devices, tune

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

_KEY = "benchmark"
_ROUND_TRIALS = 32
_LOOK_SECONDS = 0.02
# A server has this long to measure something before it is killed: its supervisor drops servers that die early.
_PAUSE_SECONDS, _LIFE_SECONDS = 0.5, 2.0


@dataclass
class Outcome:
    """Counts of the processes that were killed, of trials and records, and of lost records and leaked processes."""

    servers_killed: int = 0
    sessions_killed: int = 0
    trackers_killed: int = 0
    trials: int = 0
    records_reported: int = 0
    records_lost: int = 0
    processes_left: int = 0
    seconds: float = 0.0


def convolution() -> "PrimFunc":
    """Return relu(conv2d(x, w)) of 3 x 3 over 14 x 14 x 32 as a function of TVM."""
    from tvm import relax, tirx

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 14, 14, 32), "float32"))
    w = relax.Var("w", relax.TensorType((3, 3, 32, 32), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            product = relax.op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="HWIO")
            result = builder.emit_output(relax.op.nn.relu(product))
        builder.emit_func_output(result)
    module = relax.get_pipeline("zero")(builder.get())
    (func,) = [func for func in module.functions.values() if isinstance(func, tirx.PrimFunc)]
    return func


class Killer(threading.Thread):
    """A thread that kills `kills` servers while they measure, and counts them in `outcome`.

    It also kills a session for every fifth server, and the tracker for every tenth. Setting `over` ends it early.
    `processes` are all processes of the devices that it has seen, by id.
    """

    def __init__(self, state: Path, kills: int, seed: int, outcome: Outcome) -> None:
        super().__init__(daemon=True)
        self._state = state
        self._kills = kills
        self._random = random.Random(seed)  # noqa: S311 -- the same run each time, no secret
        self._outcome = outcome
        self.over = threading.Event()
        self.processes: dict[int, psutil.Process] = {}
        self._since: dict[int, float] = {}

    def run(self) -> None:
        """Kill one process after another until `kills` servers are dead."""
        while self._outcome.servers_killed < self._kills and not self.over.wait(_LOOK_SECONDS):
            status = devices.status(self._state)
            if status is None:
                return
            self.look(status)
            busy = [process for process in self._servers(status) if _is_alive(process) and _sessions(process)]
            if not busy:
                continue
            victim, turn = self._random.choice(busy), self._outcome.servers_killed + 1
            if turn % 5 == 0 and self._outcome.sessions_killed < turn // 5:
                with suppress(psutil.NoSuchProcess, IndexError):
                    _sessions(victim)[0].kill()
                    self._outcome.sessions_killed += 1
            elif turn % 10 == 0 and self._outcome.trackers_killed < turn // 10 and status.own_tracker is not None:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(status.own_tracker.pid).kill()
                    self._outcome.trackers_killed += 1
            else:
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
                    self._outcome.servers_killed += 1
            self.over.wait(_PAUSE_SECONDS)

    def look(self, status: devices.Status) -> None:
        """Add the processes of the devices that run now to `processes`."""
        with suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(status.pid)
            self.processes.update(
                {process.pid: process for process in (supervisor, *supervisor.children(recursive=True))}
            )

    def _servers(self, status: devices.Status) -> list[psutil.Process]:
        servers = []
        for server in status.servers:
            if server.state != "up" or server.pid is None:
                continue
            if time.monotonic() > self._since.setdefault(server.pid, time.monotonic()) + _LIFE_SECONDS:
                with suppress(psutil.NoSuchProcess):
                    servers.append(psutil.Process(server.pid))
        return servers


def _sessions(server: psutil.Process) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = server.children()
        return children
    except psutil.NoSuchProcess:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def run(state: Path, kills: int, count: int, threads: int, seed: int) -> Outcome:
    """Tune on `count` RPC servers, in rounds, until `kills` of them were killed and the round has ended.

    `threads` are divided among the servers. Returns the counts.
    """
    outcome, start = Outcome(), time.monotonic()
    target = resolve("native")
    store = RecordStore(state / "records")
    reported: set[tuple[str, str]] = set()
    status = devices.up(state, devices.DeviceConfig(_KEY, count, max(1, threads // count)))
    killer = Killer(state, kills, seed, outcome)

    def report(progress: Progress) -> None:
        reported.update((record.key, record.trace) for record in store.records(target))

    try:
        tasks = [Task("conv", convolution(), 1)]
        device = Device(_KEY, Address.parse(status.tracker or ""))
        killer.start()
        trials = 0
        while killer.is_alive() or trials == 0:
            trials += _ROUND_TRIALS
            tune_report = tune(
                tasks,
                target,
                Budget(trials=trials),
                store,
                tuner="random",
                seed=seed + trials,
                device=device,
                on_progress=report,
                threads=max(1, threads // count),
            )
            outcome.trials += tune_report.trials
            print(
                f"{outcome.servers_killed} servers, {outcome.sessions_killed} sessions, {outcome.trackers_killed} "
                f"trackers killed; {outcome.trials} trials, {len(reported)} records",
                file=sys.stderr,
            )
    finally:
        killer.over.set()
        killer.join()
        if (status_at_end := devices.status(state)) is not None:
            killer.look(status_at_end)
        devices.down(state)
    present = {(record.key, record.trace) for record in RecordStore(store.folder).records(target)}
    outcome.records_reported, outcome.records_lost = len(reported), len(reported - present)
    outcome.processes_left = sum(map(_is_alive, killer.processes.values()))
    outcome.seconds = time.monotonic() - start
    return outcome


def main() -> int:
    """Run the benchmark and print the outcome; return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--kills", type=positive, default=20, help="servers to kill (20)")
    parser.add_argument("--devices", type=positive, default=2, help="servers to start (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of victims and of the schedules (0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="devices-", dir=state_folder(options)) as folder:
        outcome = run(Path(folder), options.kills, options.devices, options.threads, options.seed)
    print(
        f"{outcome.servers_killed} servers, {outcome.sessions_killed} sessions and {outcome.trackers_killed} trackers "
        f"killed in {outcome.trials} trials: {outcome.records_lost} of {outcome.records_reported} records lost, "
        f"{outcome.processes_left} processes left"
    )
    if options.json:
        options.json.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    return 1 if outcome.records_lost or outcome.processes_left or outcome.servers_killed < options.kills else 0


if __name__ == "__main__":
    # These are settings of the whole process: whoever calls `main` from another program keeps its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("tvmflow").setLevel(logging.ERROR)
    run_main(main)
