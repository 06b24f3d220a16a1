"""Records, the folder they are kept in, and how they are applied."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tvm.tirx import PrimFunc

from tvmflow.target import Target, resolve
from tvmflow.tuning import Record, RecordStore, apply, workload_key
from tvmflow.tuning.records import SPACE_VERSION, tvm_version


def make_record(key: str, target: Target, seconds: float = 1.0) -> Record:
    return Record(
        key=key,
        workload="",
        trace="[[], []]",
        seconds=seconds,
        baseline_seconds=None,
        target=target.canonical,
        tvm_version=tvm_version(),
        space_version=SPACE_VERSION,
        tuner="random",
        trial=1,
        created_at="2026-11-21T00:00:00+00:00",
    )


def test_the_key_of_a_workload_does_not_depend_on_its_name(matmul: PrimFunc) -> None:
    assert workload_key(matmul.with_attr("global_symbol", "fused_matmul7")) == workload_key(matmul)


def test_different_workloads_have_different_keys(matmul: PrimFunc, conv: PrimFunc) -> None:
    assert workload_key(matmul) != workload_key(conv)


def test_the_fastest_record_is_the_best(store: RecordStore, matmul: PrimFunc, native: Target) -> None:
    for seconds in (3.0, 1.0, 2.0):
        store.append(make_record(workload_key(matmul), native, seconds))
    best = store.best(matmul, native)
    assert best is not None
    assert best.seconds == 1.0


def test_a_record_of_another_version_is_not_found(store: RecordStore, matmul: PrimFunc, native: Target) -> None:
    record = make_record(workload_key(matmul), native)
    store.append(replace(record, tvm_version="another"))
    store.append(replace(record, space_version="another"))
    assert store.best(matmul, native) is None


def test_a_record_of_another_target_is_not_found(store: RecordStore, matmul: PrimFunc, native: Target) -> None:
    store.append(make_record(workload_key(matmul), resolve("aarch64-generic")))
    assert store.best(matmul, native) is None


def test_a_torn_last_line_is_skipped(store: RecordStore, native: Target) -> None:
    store.append(make_record("a", native))
    store.append(make_record("b", native))
    (path,) = store.folder.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-40])
    assert [record.key for record in RecordStore(store.folder).records(native)] == ["a"]


def test_a_record_added_after_reading_is_seen(store: RecordStore, native: Target) -> None:
    store.append(make_record("a", native))
    assert len(store.records(native)) == 1
    RecordStore(store.folder).append(make_record("b", native))
    store.append(make_record("c", native))
    assert {record.key for record in store.records(native)} == {"a", "b", "c"}


WRITER = """
import sys
from pathlib import Path
from tvmflow.tuning import Record, RecordStore
from tvmflow.tuning.records import SPACE_VERSION, tvm_version
store = RecordStore(Path(sys.argv[1]))
key, target = sys.argv[2:]
for trial in range(50):
    store.append(Record(key, "", "[[], []]", 1.0, None, target, tvm_version(), SPACE_VERSION, "", trial, ""))
"""


def test_two_processes_writing_to_one_folder_lose_nothing(store: RecordStore, native: Target) -> None:
    root = str(Path(__file__).parents[2])
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(store.folder), key, native.canonical], cwd=root)
        for key in ("first", "second")
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    written = {(record.key, record.trial) for record in store.records(native)}
    assert written == {(key, trial) for key in ("first", "second") for trial in range(50)}


def test_the_digest_changes_with_each_record_of_its_target_only(store: RecordStore, native: Target) -> None:
    other = resolve("aarch64-generic")
    digests = [store.digest(native)]
    for key in ("a", "b"):
        store.append(make_record(key, native))
        digests.append(store.digest(native))
    store.append(make_record("a", other))
    assert len(set(digests)) == 3
    assert store.digest(native) == digests[-1]


def test_the_digest_does_not_change_when_a_file_is_copied_in_twice(store: RecordStore, native: Target) -> None:
    store.append(make_record("a", native))
    digest = store.digest(native)
    (path,) = store.folder.glob("*.jsonl")
    path.with_name("copy.jsonl").write_bytes(path.read_bytes())
    assert store.digest(native) == digest


def test_a_record_that_does_not_replay_is_skipped_with_a_warning(
    matmul: PrimFunc, native: Target, caplog: pytest.LogCaptureFixture
) -> None:
    trace = '[[["GetSBlock", [], ["no such block", "main"], ["b0"]]], []]'
    with caplog.at_level(logging.WARNING):
        assert apply(replace(make_record(workload_key(matmul), native), trace=trace), matmul) is None
    assert "does not replay" in caplog.text


def test_a_scheduled_function_keeps_its_name_and_says_that_it_is_scheduled(matmul: PrimFunc, native: Target) -> None:
    scheduled = apply(make_record(workload_key(matmul), native), matmul.with_attr("global_symbol", "fused_matmul7"))
    assert scheduled is not None
    assert scheduled.attrs["global_symbol"] == "fused_matmul7"
    assert scheduled.attrs["tirx.is_scheduled"]
