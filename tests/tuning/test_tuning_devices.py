"""Devices: a supervisor keeps them running, candidates run on them side by side, and a run survives their loss."""

import contextlib
import json
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import tvm
from onnx import helper
from tvm import script
from tvm.tirx import PrimFunc

from support.arrays import normal
from support.command_server import CommandServer
from support.models import save_model
from support.processes import clean_environment
from support.scale import choose, count
from support.waits import wait_until
from tvmflow.errors import RemoteError, SettingsError, StackError, TuneError
from tvmflow.hardware.target import Target
from tvmflow.runtime.tracker import Address, Tracker
from tvmflow.tuning import Budget, Device, Progress, RecordStore, Task, devices, devicesupervisor, tune
from tvmflow.tuning.candidates import Candidate, Library, arguments_of
from tvmflow.tuning.devices import DeviceConfig, Status
from tvmflow.tuning.measure import MeasurePool
from tvmflow.tuning.traces import normalize
from tvmflow.tuning.worker_process import LateError, TrialError

TRIALS = count(normal=9, long=24)


def build(pool: MeasurePool, func: PrimFunc) -> Library:
    (library,) = pool.build([Candidate(tvm.ir.save_json(normalize(func)), arguments_of(func) or ())])
    assert isinstance(library, Library)
    return library


def running(state: Path) -> Status:
    status = devices.status(state)
    assert status is not None
    return status


def processes(status: Status) -> list[psutil.Process]:
    """The supervisor, the tracker, the servers and their sessions."""
    supervisor = psutil.Process(status.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def sessions(status: Status) -> list[psutil.Process]:
    children = []
    for server in status.servers:
        with contextlib.suppress(psutil.NoSuchProcess):
            children += psutil.Process(server.pid).children()
    return children


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(pid: int | None) -> None:
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of two devices with key `lab`, started where a file has the name of a module that they need."""
    state = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        Path("json.py").write_text("raise ImportError('a module of the working folder')\n")
        devices.up(state, DeviceConfig("lab", 2, 1))
    yield state
    devices.down(state)


@pytest.fixture
def device(lab: Path) -> Device:
    wait_until(lambda: all(server.state == "up" for server in running(lab).servers))
    return Device("lab", Address.parse(running(lab).tracker or ""))


@pytest.fixture
def pool(native: Target, device: Device) -> Iterator[MeasurePool]:
    with MeasurePool(
        native.canonical, builders=1, threads=1, timeout=10, deadline=math.inf, device=device, weights=1 << 20
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def naps() -> PrimFunc:
    """A function that takes one second."""
    body = 'a[0] = T.cast(T.call_extern("int32", "sleep", 1), "float32")'
    return script.from_source(
        f'@T.prim_func(s_tir=True, private=True)\ndef main(a: T.Buffer((1,), "float32")):\n    {body}\n'
    )


def test_candidates_are_timed_and_checked_on_a_device(
    pool: MeasurePool, adds_one: PrimFunc, adds_one_but_once: PrimFunc, aborts: PrimFunc
) -> None:
    right, wrong, reference, crashes = (build(pool, func) for func in (adds_one, adds_one_but_once, adds_one, aborts))
    pool.check(right, reference)
    with pytest.raises(TrialError, match="argument 1"):
        pool.check(wrong, reference)
    with pytest.raises(TrialError, match="3 devices"):
        pool.time(crashes)
    assert all(seconds > 0 for seconds in (pool.time(right), *pool.compare(right, reference, right)))


@pytest.mark.long
def test_a_candidate_that_hangs_on_a_device_costs_its_time_out_and_not_the_device(
    native: Target, device: Device, sleeps: PrimFunc, adds_one: PrimFunc
) -> None:
    with MeasurePool(native.canonical, builders=1, threads=1, timeout=2, deadline=math.inf, device=device) as pool:
        hangs, returns = build(pool, sleeps), build(pool, adds_one)
        with pytest.raises(LateError):
            pool.time(hangs)
        assert pool.time(returns) > 0
    # The session of what hangs is ended there, too.
    tracker = Tracker(device.tracker)
    wait_until(lambda: tracker.summary().queues["lab"].free == 2)


@pytest.mark.long
def test_two_devices_of_a_key_work_at_the_same_time(pool: MeasurePool, device: Device, naps: PrimFunc) -> None:
    nap, failure = build(pool, naps), TrialError("it cannot be built")
    tracker = Tracker(device.tracker)
    with ThreadPoolExecutor(1) as thread:
        seconds = thread.submit(lambda: list(pool.times([nap, failure, nap], lambda: 1e-9)))
        wait_until(lambda: tracker.summary().queues["lab"].free == 0)
    first, second, third = seconds.result()
    assert second is failure
    assert isinstance(first, float)
    assert isinstance(third, float)


@pytest.mark.long
def test_a_trial_whose_session_is_killed_is_made_again(lab: Path, pool: MeasurePool, naps: PrimFunc) -> None:
    library = build(pool, naps)
    with ThreadPoolExecutor(1) as thread:
        seconds = thread.submit(pool.time, library, 1e-9)
        first = wait_until(lambda: sessions(running(lab)))
        for session in first:
            kill(session.pid)
        # The trial is made again in another session.
        wait_until(lambda: {session.pid for session in sessions(running(lab))} - {session.pid for session in first})
    assert seconds.result() > 0


def test_a_server_that_dies_is_started_again_with_a_message(lab: Path, device: Device) -> None:
    before = running(lab).servers[0]
    kill(before.pid)
    wait_until(lambda: running(lab).servers[0].deaths > before.deaths and running(lab).servers[0].state == "up")
    after = running(lab).servers[0]
    assert f"server0 (pid {before.pid})" in after.message
    assert "SIGKILL" in after.message
    tracker = Tracker(device.tracker)
    assert tracker.request("lab", 30) is not None


@pytest.mark.long
def test_a_server_that_hangs_is_passed_over_and_started_again(
    lab: Path, device: Device, pool: MeasurePool, adds_one: PrimFunc
) -> None:
    before = running(lab).servers[1]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGSTOP)
    library = build(pool, adds_one)
    assert all(isinstance(seconds, float) for seconds in pool.times([library] * 4, lambda: 1e9))
    wait_until(lambda: running(lab).servers[1].deaths > before.deaths and running(lab).servers[1].state == "up")
    assert f"server1 (pid {before.pid})" in running(lab).servers[1].message


def test_a_server_that_never_starts_is_given_up(tmp_path: Path, device: Device) -> None:
    with pytest.raises(StackError, match="server0"):
        devices.up(tmp_path, DeviceConfig("lab", 1, 1, host="192.0.2.1", tracker=str(device.tracker)))
    assert devices.status(tmp_path) is None


def test_a_status_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    """As on a full disk, which must not end the devices."""
    config = DeviceConfig("lab", 1, 1, tracker="127.0.0.1:9190")
    supervisor = devicesupervisor._Supervisor(tmp_path, config)
    supervisor._write_status()
    devices.device_folder(tmp_path).mkdir()
    supervisor._write_status()
    assert running(tmp_path).config == config


def test_devices_that_run_are_left_alone_and_others_refused(lab: Path) -> None:
    status = running(lab)
    assert devices.up(lab, DeviceConfig("lab", 2, 1)).pid == status.pid
    with pytest.raises(SettingsError, match="'lab'"):
        devices.up(lab, DeviceConfig("other", 1, 1))


def test_a_key_that_no_device_has_is_refused_with_the_keys_there_are(native: Target, device: Device) -> None:
    with pytest.raises(RemoteError, match=r"'bal'.* lab"):
        MeasurePool(
            native.canonical, builders=1, threads=1, timeout=9, deadline=math.inf, device=Device("bal", device.tracker)
        )


def test_a_server_that_registers_without_an_address_is_left_out(lab: Path, device: Device) -> None:
    """A tracker asks for no password and lists whatever it is told; the supervisor must live on, too."""
    magic, update_info = struct.pack("<i", 0x2F271), 5
    text = json.dumps([update_info, {"key": "server:lab", "addr": ["here", "no port"]}]).encode()
    supervisor = running(lab).pid
    with socket.create_connection((device.tracker.host, device.tracker.port), 10) as connection:
        connection.sendall(magic)
        assert connection.recv(4) == magic
        connection.sendall(struct.pack("<i", len(text)) + text)
        assert connection.recv(4)
        servers = Tracker(device.tracker).summary().servers
        assert [key for key, _ in servers] == ["lab", "lab"]
        time.sleep(devicesupervisor._ASK_SECONDS + 2 * devices.LOOK_SECONDS)
    assert running(lab).pid == supervisor


@pytest.mark.parametrize("answer", [[0, []], [0, {"server_info": 7, "queue_info": {}}], [0, 7], "[" * 100_000])
def test_what_answers_as_no_tracker_does_is_none(answer: Any) -> None:
    text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
    magic = struct.pack("<i", 0x2F271)

    def reply(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.sendall(magic + struct.pack("<i", len(text)) + text)
            connection.recv(1 << 10)

    for ask in (Tracker.summary, lambda tracker, seconds: tracker.request("lab", seconds)):
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
            thread.submit(reply, listener)
            with pytest.raises(RemoteError, match="there is no RPC tracker at"):
                ask(Tracker(Address(*listener.getsockname())), 5.0)


@pytest.mark.long
def test_a_run_outlives_servers_sessions_and_the_tracker_and_keeps_every_record(
    lab: Path, device: Device, conv: PrimFunc, matmul: PrimFunc, native: Target, store: RecordStore
) -> None:
    chance = random.Random(20)  # noqa: S311 -- the order must be the same each time
    killed: list[str] = []
    reported: set[tuple[str, str]] = set()

    def kill_something(progress: Progress) -> None:
        reported.update((record.key, record.trace) for record in store.records(native))
        if progress.trials % 3:
            return
        status = running(lab)
        tracker = status.own_tracker
        everything = {
            "session": [session.pid for session in sessions(status)],
            "server": [server.pid for server in status.servers if server.state == "up"],
            "tracker": [tracker.pid] if tracker is not None and tracker.state == "up" else [],
        }
        there = {what: pids for what, pids in everything.items() if pids}
        if not there:
            return
        for what in chance.choices(list(there), [{"session": 6, "server": 3, "tracker": 1}[what] for what in there]):
            kill(chance.choice(there[what]))
            killed.append(what)

    tasks = [Task("conv", conv, 3), Task("matmul", matmul, 1)]
    budget = Budget(trials=TRIALS)
    report = tune(tasks, native, budget, store, tuner="random", seed=1, device=device, on_progress=kill_something)
    assert len(killed) > TRIALS // 6
    assert report.trials == TRIALS
    assert report.tasks[0].status == "tuned"
    assert [task.reason for task in report.tasks] == [None, None]
    records = {(record.key, record.trace) for record in RecordStore(store.folder).records(native)}
    assert reported
    assert reported <= records


@pytest.mark.long
def test_a_run_whose_devices_do_not_come_back_ends_with_a_sentence_and_its_records(
    tmp_path: Path, conv: PrimFunc, native: Target, store: RecordStore
) -> None:
    status = devices.up(tmp_path, DeviceConfig("lone", 1, 1))
    everything = processes(status)
    traces: list[str] = []

    def end_devices(progress: Progress) -> None:
        if store.records(native) and not traces:
            traces.extend(record.trace for record in store.records(native))
            devices.down(tmp_path)

    device = Device("lone", Address.parse(status.tracker or ""), patience=1)
    try:
        with pytest.raises(TuneError, match="'lone'"):
            tune(
                [Task("conv", conv, 1)],
                native,
                Budget(trials=64),
                store,
                tuner="random",
                seed=1,
                device=device,
                on_progress=end_devices,
            )
    finally:
        devices.down(tmp_path)
    assert traces
    assert traces == [record.trace for record in RecordStore(store.folder).records(native)]
    wait_until(lambda: all(has_ended(process) for process in everything))


@pytest.mark.long
def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path, native: Target, naps: PrimFunc) -> None:
    status = devices.up(tmp_path, DeviceConfig("lone", 1, 1))
    device = Device("lone", Address.parse(status.tracker or ""), patience=1)

    try:
        with (
            MeasurePool(native.canonical, builders=1, threads=1, timeout=9, deadline=math.inf, device=device) as pool,
            ThreadPoolExecutor(1) as thread,
        ):
            seconds = thread.submit(pool.time, build(pool, naps), 1e-9)
            wait_until(lambda: sessions(running(tmp_path)))
            everything = processes(running(tmp_path))
            kill(status.pid)
            wait_until(lambda: all(has_ended(process) for process in everything))
            with pytest.raises(TuneError, match="'lone'"):
                seconds.result()
    finally:
        devices.down(tmp_path)
    assert len(everything) == 4
    assert devices.status(tmp_path) is None


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Any]:
    """Runs `tvmflow` with a state folder of its own."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).with_name("tvmflow")), *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "TVMFLOW_HOME": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.mark.long
def test_the_command_line_starts_lists_and_ends_devices(command: Callable[..., Any]) -> None:
    assert command("devices", "list").stderr.startswith("tvmflow: ")
    started = command("devices", "up", "--key", "board", "--json")
    try:
        assert started.returncode == 0, started.stderr
        listing = json.loads(command("devices", "list", "--json").stdout)
        assert [server["state"] for server in listing["own"]] == ["up"]
        assert (listing["keys"]["board"]["free"], len(listing["keys"]["board"]["servers"])) == (1, 1)
    finally:
        result = command("devices", "down")
    assert result.stdout == "the devices are ended\n"
    assert command("devices", "down").stdout == "no devices were running\n"


def test_a_model_is_tuned_on_devices(commands: CommandServer, tmp_path: Path, device: Device) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    save_model(tmp_path / "m.onnx", nodes, [("x", [8, 64])], ["y"], {"w": normal(64, 64)})
    (tmp_path / "release.yaml").write_text("name: dense\nmodel: {onnx: m.onnx}\ntargets: [native]\n")
    environment = clean_environment(TVMFLOW_HOME=str(tmp_path / "state"))
    arguments = ["tune", "release.yaml", "--trials", "2", "--device", "lab", "--tracker", str(device.tracker), "--json"]
    # Trials that a run has spent are not spent again.
    for trials in choose(normal=[2], long=[2, 0]):
        result = commands.run(arguments, environment, tmp_path, 300)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["targets"]["native"]["trials"] == trials
