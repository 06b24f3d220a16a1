"""The import of records from our own files and from MetaSchedule's databases."""

import json
from pathlib import Path

import pytest
import tvm
from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.tirx import PrimFunc

from tvmflow.errors import InputError
from tvmflow.hardware.target import Target, resolve
from tvmflow.tuning import RecordStore, apply
from tvmflow.tuning.imports import export_records, import_metaschedule, import_records, is_database
from tvmflow.tuning.record_store import write_entries
from tvmflow.tuning.records import SPACE_VERSION, Effort, Record, Trial, tvm_version
from tvmflow.tuning.space import make_search
from tvmflow.tuning.traces import normalize


@pytest.fixture
def database(matmul: PrimFunc, native: Target, tmp_path: Path) -> Path:
    """MetaSchedule's database of a product: three candidates, the second the fastest, and one that failed."""
    module = IRModule({"main": normalize(matmul)})
    files = ms.database.JSONDatabase(work_dir=str(tmp_path))
    workload = files.commit_workload(module)
    target = tvm.target.Target(native.tvm)
    search = make_search(module["main"], native.canonical, "random", batch=4, seed=1, cost_model=None)
    traces = [proposal.candidate.sch.trace for proposal in search.propose()[:4]]
    for trace, seconds in zip(traces, ([5e-3, 3e-3, 4e-3], [2e-3], [3e-3], [1e10]), strict=True):
        files.commit_tuning_record(ms.database.TuningRecord(trace, workload, seconds, target))
    return tmp_path


def test_the_records_of_a_metaschedule_database_are_found(
    database: Path, store: RecordStore, matmul: PrimFunc, native: Target
) -> None:
    assert is_database(database)
    counts = import_metaschedule(store, database, None)
    assert (counts.read, counts.added, sum(counts.refused.values())) == (4, 3, 1)
    best = store.best(matmul.with_attr("global_symbol", "fused_matmul7"), native)
    assert best is not None
    assert (best.seconds, best.tuner) == (2e-3, "metaschedule")
    assert apply(best, matmul) is not None
    assert sorted(item.seconds or 0 for item in store.measurements(native)) == [2e-3, 3e-3, 4e-3]


def test_a_database_is_imported_once(database: Path, store: RecordStore) -> None:
    import_metaschedule(store, database, None)
    assert import_metaschedule(store, database, None).added == 0


def test_a_database_of_another_kind_of_target_is_refused(database: Path, store: RecordStore) -> None:
    counts = import_metaschedule(store, database, resolve("cuda-sm90"))
    assert (counts.added, sorted(counts.refused.values())) == (0, [1, 3])
    assert any("llvm" in reason for reason in counts.refused)


def test_a_trace_that_does_not_replay_is_refused(database: Path, store: RecordStore) -> None:
    path = database / "database_tuning_record.json"
    path.write_text(path.read_text().replace('"DecomposeReduction"', '"NoSuchStep"').replace('"Fuse"', '"NoSuchStep"'))
    counts = import_metaschedule(store, database, None)
    assert counts.added == 0
    assert sorted(counts.refused.values()) == [1, 3]


def test_a_wrong_schedule_is_refused_though_it_is_the_fastest(
    database: Path, store: RecordStore, matmul: PrimFunc, native: Target
) -> None:
    # It keeps the sums in 16 bits.
    schedule = Schedule(IRModule({"main": normalize(matmul)}))
    schedule.unsafe_set_dtype(schedule.get_child_blocks(schedule.get_sblock("root"))[0], 0, "float16")
    source = ms.database.JSONDatabase(work_dir=str(database))
    workload = source.commit_workload(IRModule({"main": normalize(matmul)}))
    source.commit_tuning_record(
        ms.database.TuningRecord(schedule.trace, workload, [1e-3], tvm.target.Target(native.tvm))
    )
    counts = import_metaschedule(store, database, None)
    assert sorted(counts.refused.values()) == [1, 1]
    best = store.best(matmul, native)
    assert best is not None
    assert best.seconds == 2e-3


def _entries(native: Target) -> list[Record | Trial | Effort]:
    versions = (native.canonical, tvm_version(), SPACE_VERSION)
    record = Record("a", "f", "[[], []]", 2.0, 4.0, *versions, "xgb", 1, "2026-11-21T00:00:00+00:00")
    faster = Record("a", "f", "[[], []]", 1.0, 4.0, *versions, "xgb", 2, "2026-11-21T00:00:00+00:00")
    return [record, faster, Effort("a", *versions, 8, 4.0, "2026-11-21T00:00:00+00:00")]


def test_exporting_writes_the_best_and_the_trials_spent(store: RecordStore, native: Target, tmp_path: Path) -> None:
    for entry in _entries(native):
        store.append(entry)
    write_entries(tmp_path / "best.jsonl", export_records(store, everything=False))
    other = RecordStore(tmp_path / "other")
    assert import_records(other, tmp_path / "best.jsonl").added == 1
    assert ([item.seconds for item in other.records(native)], other.efforts(native)[0].trials) == ([1.0], 8)
    assert len(export_records(store, everything=True)) == 3


def test_importing_again_adds_nothing_and_counts_no_trial_twice(
    store: RecordStore, native: Target, tmp_path: Path
) -> None:
    for entry in _entries(native):
        store.append(entry)
    write_entries(tmp_path / "best.jsonl", export_records(store, everything=False))
    counts = import_records(store, tmp_path / "best.jsonl")
    assert (counts.added, list(counts.refused.values())) == (0, [1])
    assert sum(effort.trials for effort in store.efforts(native)) == 8


def test_the_records_that_a_release_keeps_can_be_imported(store: RecordStore, native: Target, tmp_path: Path) -> None:
    lines = (json.dumps(vars(entry)) for entry in _entries(native)[:2])
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    assert import_records(store, tmp_path / "records.jsonl").added == 2


def test_a_file_without_records_is_refused(store: RecordStore, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(InputError, match=r"none\.jsonl"):
        import_records(store, tmp_path / "none.jsonl")
