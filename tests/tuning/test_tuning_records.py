"""Records, the store that they are kept in, and how they are applied."""

import json
import logging
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tvm import ir, script
from tvm.tirx import PrimFunc

from tvmflow.hardware.profiles import named
from tvmflow.hardware.target import Target, resolve
from tvmflow.tuning import Record, RecordStore, Trial, apply, workload_key
from tvmflow.tuning.records import SPACE_VERSION, Effort, tvm_version
from tvmflow.tuning.space import make_search
from tvmflow.tuning.traces import normalize


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


NAMES = {
    "a": "a",
    "b": "b",
    "c": "c",
    "t": "t",
    "i": "i",
    "j": "j",
    "k": "k",
    "block": "mm",
    "x": "x",
    "attr": "p",
}


def _product(names: dict[str, str]) -> PrimFunc:
    """A product with a ReLU of 64 x 64, by these names."""
    text = """
@T.prim_func(s_tir=True, private=True)
def main({a}: T.Buffer((64, 64), "float32"), {b}: T.Buffer((64, 64), "float32"), {c}: T.Buffer((64, 64), "float32")):
    T.func_attr({{"{attr}": 4}})
    {t} = T.alloc_buffer((64, 64), "float32")
    for {i}, {j}, {k} in T.grid(64, 64, 64):
        with T.sblock("{block}"):
            {x}, y, z = T.axis.remap("SSR", [{i}, {j}, {k}])
            with T.init():
                {t}[{x}, y] = T.float32(0)
            {t}[{x}, y] = {t}[{x}, y] + {a}[{x}, z] * {b}[z, y]
    for {i}, {j} in T.grid(64, 64):
        with T.sblock("{block}_relu"):
            {x}, y = T.axis.remap("SS", [{i}, {j}])
            {c}[{x}, y] = T.max({t}[{x}, y], T.float32(0))
"""
    return script.from_source(text.format(**names))


@pytest.fixture(scope="module")
def key_of_product() -> str:
    return workload_key(_product(NAMES))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_variable_buffer_axis_block_or_attribute_matters_to_the_key(
    name: str, key_of_product: str
) -> None:
    assert workload_key(_product(NAMES | {name: "renamed"})) == key_of_product


def test_a_record_applies_to_the_same_workload_by_other_names(native: Target, store: RecordStore) -> None:
    func, renamed = _product(NAMES), _product({name: f"new_{name}" for name in NAMES})
    search = make_search(normalize(func), native.canonical, "random", batch=4, seed=1, cost_model=None)
    proposals = search.propose()
    assert proposals
    for proposal in proposals:
        record = replace(make_record(workload_key(func), native), trace=proposal.trace)
        store.append(replace(record, workload=ir.save_json(normalize(func))))
        last = store.records(native)[-1]
        here, there = apply(last, func), apply(last, renamed)
        assert here is not None
        assert there is not None
        assert workload_key(here) == workload_key(there) != workload_key(func)
        assert not {"mm", "mm_init"} & set(there.script().split('"'))


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


def test_a_record_of_another_processor_is_not_found(store: RecordStore, matmul: PrimFunc, native: Target) -> None:
    """Two processors of one instruction set take different times for one schedule: their profiles tell them apart."""
    target, other = (replace(native, profile=named(name)) for name in ("zen4", "zen5"))
    assert target.tvm == other.tvm
    store.append(make_record(workload_key(matmul), other))
    assert store.best(matmul, target) is None
    assert store.best(matmul, other) is not None


def test_a_torn_last_line_is_skipped(store: RecordStore, native: Target) -> None:
    store.append(make_record("a", native))
    store.append(make_record("b", native))
    (path,) = store.folder.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-40])
    assert [record.key for record in RecordStore(store.folder).records(native)] == ["a"]


def _line(target: Target, **changes: object) -> bytes:
    return json.dumps({"kind": "record", **asdict(make_record("b", target)), **changes}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": 1},
        {"trace": None},
        {"seconds": "1.0"},
        {"seconds": None},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"trial": 1.5},
        {"created_at": 2026},
    ],
    ids=str,
)
def test_a_record_with_a_value_that_none_can_have_is_skipped(
    store: RecordStore, native: Target, changes: dict[str, object]
) -> None:
    store.append(make_record("a", native))
    (store.folder / "damaged.jsonl").write_bytes(_line(native, **changes) + b"\n" + _line(native, key="c") + b"\n")
    assert {record.key for record in store.records(native)} == {"a", "c"}


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"kind": "replaces", "files": {"a.jsonl": 1e999}}'], ids=["deep", "inf"]
)
def test_a_line_that_python_cannot_take_is_skipped(store: RecordStore, native: Target, line: bytes) -> None:
    store.append(make_record("a", native))
    (store.folder / "damaged.jsonl").write_bytes(line + b"\n" + _line(native, key="c") + b"\n")
    assert {record.key for record in store.records(native)} == {"a", "c"}


def test_a_record_added_after_reading_is_read_as_well(store: RecordStore, native: Target) -> None:
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
    records = {(record.key, record.trial) for record in store.records(native)}
    assert records == {(key, trial) for key in ("first", "second") for trial in range(50)}


def test_a_file_that_was_copied_in_twice_counts_once(store: RecordStore, native: Target) -> None:
    store.append(make_record("a", native))
    (path,) = store.folder.glob("*.jsonl")
    path.with_name("copy.jsonl").write_bytes(path.read_bytes())
    assert len(store.records(native)) == 1


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


def make_effort(key: str, target: Target, trials: int) -> Effort:
    return Effort(key, target.canonical, tvm_version(), SPACE_VERSION, trials, 1.0, "2026-11-21T00:00:00+00:00")


def test_a_workload_is_written_once_in_a_file_and_found_with_each_record(store: RecordStore, native: Target) -> None:
    for seconds in (2.0, 1.0):
        store.append(replace(make_record("a", native, seconds), workload="the function"))
    (path,) = store.folder.glob("*.jsonl")
    assert path.read_text().count("the function") == 1
    assert {record.workload for record in RecordStore(store.folder).records(native)} == {"the function"}


def test_a_run_begins_another_file_when_one_is_large(store: RecordStore, native: Target) -> None:
    for trial in range(30):
        store.append(replace(make_record("a", native), trial=trial, trace="x" * 100_000, workload="the function"))
    assert 2 < len(list(store.folder.glob("*.jsonl"))) < 6
    records = RecordStore(store.folder).records(native)
    assert sorted(record.trial for record in records) == list(range(30))
    assert {record.workload for record in records} == {"the function"}


def test_a_cost_model_can_learn_from_all_that_was_measured(store: RecordStore, native: Target) -> None:
    record = replace(make_record("a", native), workload="the function")
    store.append(record)
    store.append(replace(record, space_version="another", trial=2))
    store.append(replace(record, tvm_version="another", trial=3))
    store.append(Trial("b", "other", "[]", None, native.canonical, tvm_version(), SPACE_VERSION, "xgb", "now"))
    assert {(item.key, item.seconds) for item in store.measurements(native)} == {("a", 1.0), ("b", None)}
    assert len(store.measurements(native)) == 3
    assert [item.key for item in store.records(native)] == ["a"]


def test_efforts_of_a_file_that_was_copied_in_twice_count_once(store: RecordStore, native: Target) -> None:
    for _ in range(2):
        store.append(make_effort("a", native, 4))
    (path,) = store.folder.glob("*.jsonl")
    path.with_name("copy.jsonl").write_bytes(path.read_bytes())
    assert [effort.trials for effort in store.efforts(native)] == [4, 4]


def test_pruning_keeps_the_fastest_and_the_trials_spent(store: RecordStore, native: Target) -> None:
    for seconds in (3.0, 1.0, 2.0):
        store.append(replace(make_record("a", native, seconds), workload="the function"))
        store.append(make_effort("a", native, 8))
    store.append(replace(make_record("a", native, 0.5), tvm_version="another"))
    counts = store.prune(2)
    assert (counts.before, counts.after) == (7, 3)
    assert sorted(record.seconds for record in store.records(native)) == [1.0, 2.0]
    assert {record.workload for record in store.records(native)} == {"the function"}
    assert [effort.trials for effort in store.efforts(native)] == [24]
    assert len(list(store.entries())) == 3
    assert store.prune(2).files == 0


def test_pruning_keeps_what_is_in_a_file_that_was_copied_in(store: RecordStore, native: Target) -> None:
    store.append(make_record("a", native))
    (path,) = store.folder.glob("*.jsonl")
    store.prune(1)
    copied = (path if path.exists() else next(store.folder.glob("*.jsonl"))).read_text().replace('"a"', '"b"')
    (store.folder / "copied.jsonl").write_text(copied)
    for _ in range(2):
        store.prune(1)
        assert sorted(record.key for record in store.records(native)) == ["a", "b"]
    assert len(list(store.folder.glob("*.jsonl"))) == 1


def test_a_run_that_is_writing_while_others_are_pruned_loses_nothing(store: RecordStore, native: Target) -> None:
    running = RecordStore(store.folder)
    running.append(make_record("a", native, 3.0))
    store.append(make_record("a", native, 2.0))
    store.append(make_record("a", native, 1.0))
    store.prune(1)
    running.append(make_record("b", native))
    assert sorted((item.key, item.seconds) for item in store.records(native)) == [("a", 1.0), ("a", 3.0), ("b", 1.0)]


def test_pruning_again_and_again_while_others_write_loses_nothing(store: RecordStore, native: Target) -> None:
    root = str(Path(__file__).parents[2])
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(store.folder), key, native.canonical], cwd=root)
        for key in ("first", "second", "third")
    ]
    while any(writer.poll() is None for writer in writers):
        RecordStore(store.folder).prune(1000)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    records = {(key, trial) for key in ("first", "second", "third") for trial in range(50)}
    for _ in range(2):
        assert {(record.key, record.trial) for record in store.records(native)} == records
        assert len(store.records(native)) == len(records)
        store.prune(1000)
    assert len(list(store.folder.glob("*.jsonl"))) == 1


def test_records_appended_to_a_pruned_file_still_count(store: RecordStore, native: Target) -> None:
    store.append(make_record("a", native, 2.0))
    store.append(make_record("a", native, 1.0))
    (path,) = store.folder.glob("*.jsonl")
    content = path.read_bytes()
    store.prune(1)
    assert not path.exists()
    # The file as another machine sends it that had gone on writing.
    (store.folder / "fetched").mkdir()
    late = json.dumps({"kind": "record", **vars(make_record("b", native))}).encode()
    (store.folder / "fetched" / path.name).write_bytes(content + late + b"\n")
    assert sorted((item.key, item.seconds) for item in store.records(native)) == [("a", 1.0), ("b", 1.0)]


KILLED = WRITER.replace("range(50)", "range(10**9)") + "    print(trial, flush=True)\n"


def test_records_that_writers_reported_before_they_were_killed_are_there(store: RecordStore, native: Target) -> None:
    root = str(Path(__file__).parents[2])
    writers = {
        key: subprocess.Popen(
            [sys.executable, "-c", KILLED, str(store.folder), key, native.canonical], cwd=root, stdout=subprocess.PIPE
        )
        for key in ("first", "second", "third")
    }
    reported = {}
    for (key, writer), number in zip(writers.items(), (1, 170, 60), strict=True):
        assert writer.stdout is not None
        lines = [int(writer.stdout.readline()) for _ in range(number)]
        writer.kill()
        reported[key] = {*lines, *map(int, writer.stdout.read().split())}
        writer.wait(30)
        writer.stdout.close()
    records = {key: {record.trial for record in store.records(native) if record.key == key} for key in writers}
    assert all(records[key] >= reported[key] for key in writers)
