"""Records that machines share through the release store's bucket."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.rclone import rclone_s3
from support.waits import wait_until
from tasks.tune import send_records
from tvmflow.errors import StoreError
from tvmflow.hardware.target import Target, resolve
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.records import RecordObjects
from tvmflow.tuning import Record, RecordStore, current_context
from tvmflow.tuning.records import SPACE_VERSION, tvm_version
from tvmflow.tuning.sharing import Sharing, sharing
from tvmflow.workspace import Workspace


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreConfig]:
    with rclone_s3(tmp_path_factory.mktemp("s3"), bucket="releases") as config:
        yield config


@pytest.fixture
def config(server: StoreConfig, request: pytest.FixtureRequest) -> StoreConfig:
    return replace(server, prefix=request.node.name.replace("_", "-"))


@pytest.fixture
def shared(config: StoreConfig) -> RecordObjects:
    return RecordObjects(ReleaseStore(config))


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], RecordStore]:
    """The folder of a machine's records."""
    return lambda name: RecordStore(tmp_path / name)


def make_record(key: str, target: Target, trial: int = 1, seconds: float = 1.0) -> Record:
    versions = (tvm_version(), SPACE_VERSION)
    return Record(key, "the function", "[[], []]", seconds, None, target.canonical, *versions, "xgb", trial, "")


def test_a_machine_gets_the_records_of_another(
    machine: Callable[[str], RecordStore], shared: RecordObjects, native: Target
) -> None:
    here, there = machine("here"), machine("there")
    with sharing(here, shared, current_context(native).digest):
        here.append(make_record("a", native))
    with sharing(there, shared, current_context(native).digest):
        assert there.records(native) == [make_record("a", native)]


def test_a_release_on_a_pool_depends_on_the_records_of_its_target(
    shared: RecordObjects, native: Target, tmp_path: Path
) -> None:
    workspace, other = Workspace(tmp_path / "state"), resolve("x86-64-v3")
    store = RecordStore(workspace.records)
    assert send_records(workspace, native, shared) == {}
    store.append(make_record("a", native))
    first = send_records(workspace, native, shared)
    assert first == shared.sizes()
    assert (len(first), send_records(workspace, other, shared)) == (1, {})
    store.append(make_record("b", native))
    assert sum(send_records(workspace, native, shared).values()) > sum(first.values())


def test_only_files_that_are_new_or_have_grown_are_fetched_and_sent(
    machine: Callable[[str], RecordStore], shared: RecordObjects, native: Target
) -> None:
    here, there = machine("here"), machine("there")
    sender, reader = Sharing(here, shared), Sharing(there, shared)
    here.append(make_record("a", native))
    assert (sender.send(), sender.send(), reader.fetch(), reader.fetch(), sender.fetch()) == (1, 0, 1, 0, 0)
    here.append(make_record("b", native))
    assert (sender.send(), reader.fetch(), reader.send()) == (1, 1, 0)
    assert [record.key for record in there.records(native)] == ["a", "b"]


def test_records_are_sent_while_the_run_goes_on(
    machine: Callable[[str], RecordStore], shared: RecordObjects, native: Target
) -> None:
    here, context = machine("here"), current_context(native).digest
    with sharing(here, shared, context, interval=0.01):
        here.append(make_record("a", native))
        wait_until(lambda: shared.sizes(context))


def test_a_dead_store_costs_one_warning_and_no_record(
    machine: Callable[[str], RecordStore],
    config: StoreConfig,
    shared: RecordObjects,
    native: Target,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, there = machine("here"), machine("there")
    dead = RecordObjects(ReleaseStore(replace(config, endpoint="http://127.0.0.1:9", attempts=1)))
    with caplog.at_level(logging.WARNING), sharing(here, dead, current_context(native).digest):
        here.append(make_record("a", native))
    assert len(caplog.records) == 1
    with pytest.raises(StoreError):
        dead.sizes()
    # The next run sends what this one could not.
    with sharing(machine("here"), shared, current_context(native).digest):
        pass
    assert Sharing(there, shared).fetch() == 1
    assert len(there.records(native)) == 1


def test_pruned_records_do_not_come_back_from_the_machine_that_wrote_them(
    machine: Callable[[str], RecordStore], shared: RecordObjects, native: Target
) -> None:
    writer, other, third = machine("writer"), machine("other"), machine("third")
    for seconds in (2.0, 1.0):
        writer.append(make_record("a", native, seconds=seconds))
    Sharing(writer, shared).send()
    pruning = Sharing(other, shared)
    pruning.fetch()
    other.prune(1)
    assert (pruning.send(), pruning.clear()) == (1, 1)
    writing = Sharing(writer, shared)
    assert (writing.fetch(), writing.send()) == (1, 0)
    assert [record.seconds for record in writer.records(native)] == [1.0]
    # The writer has been alive all the time; others get what it measures next.
    writer.append(make_record("b", native))
    assert writing.send() == 1
    Sharing(third, shared).fetch()
    assert sorted(record.key for record in third.records(native)) == ["a", "b"]


WRITER = """
import sys
from pathlib import Path
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.records import RecordObjects
from tvmflow.tuning import Record, RecordStore
from tvmflow.tuning import sharing
from tvmflow.tuning.records import SPACE_VERSION, tvm_version, Context
folder, key, target, trials, endpoint, prefix, access, secret = sys.argv[1:]
config = StoreConfig("releases", prefix, endpoint, access_key=access, secret_key=secret)
store = RecordStore(Path(folder))
context = Context(target, tvm_version(), SPACE_VERSION)
with sharing.sharing(store, RecordObjects(ReleaseStore(config)), context.digest, interval=0.02):
    for trial in range(int(trials)):
        store.append(Record(key, "f", "[[], []]", 1.0, None, target, *(tvm_version(), SPACE_VERSION), "", trial, ""))
        print(trial, flush=True)
"""


def _start(folder: Path, key: str, native: Target, trials: int, config: StoreConfig) -> "subprocess.Popen[bytes]":
    address = (config.endpoint or "", config.prefix, config.access_key or "", config.secret_key or "")
    arguments = [str(folder), key, native.canonical, str(trials), *address]
    command = [sys.executable, "-c", WRITER, *arguments]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)


def test_two_tuners_writing_to_one_store_at_once_lose_nothing(
    machine: Callable[[str], RecordStore], config: StoreConfig, shared: RecordObjects, native: Target
) -> None:
    # The first two are one machine, the third is another.
    folders = {"first": "one", "second": "one", "third": "two"}
    writers = [_start(machine(folder).folder, key, native, 15, config) for key, folder in folders.items()]
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    reader = machine("reader")
    Sharing(reader, shared).fetch()
    records = {(record.key, record.trial) for record in reader.records(native)}
    assert records == {(key, trial) for key in folders for trial in range(15)}


@pytest.mark.long
def test_tuners_killed_in_mid_run_lose_nothing(
    machine: Callable[[str], RecordStore], config: StoreConfig, shared: RecordObjects, native: Target
) -> None:
    reported = set()
    folders = {"first": "one", "second": "one", "third": "two"}
    writers = {key: _start(machine(name).folder, key, native, 10**9, config) for key, name in folders.items()}
    for (key, writer), number in zip(writers.items(), (10, 30, 4), strict=True):
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(number)]
        writer.kill()
        reported |= {(key, int(line)) for line in (*lines, *writer.stdout.read().split())}
        writer.wait(30)
        writer.stdout.close()
    for name in set(folders.values()):
        with sharing(machine(name), shared, current_context(native).digest):
            pass  # The next run on that machine.
    reader = machine("reader")
    Sharing(reader, shared).fetch()
    assert {(record.key, record.trial) for record in reader.records(native)} >= reported
