"""`tvmflow records`: list, show, export, import and prune, here and in a release store."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tvm import ir, script

from support.rclone import rclone_s3
from tvmflow.hardware.target import resolve
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.store.records import RecordObjects
from tvmflow.tuning import Record, RecordStore, workload_key
from tvmflow.tuning.records import SPACE_VERSION, Effort, tvm_version
from tvmflow.tuning.traces import normalize

Command = Callable[..., Any]
RELU = """
@T.prim_func(s_tir=True, private=True)
def main(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("relu"):
            v = T.axis.spatial(64, i)
            b[v] = T.max(a[v], T.float32(0))
"""
SPLIT = json.dumps(
    [
        [
            ["GetSBlock", [], ["relu", "main"], ["b0"]],
            ["GetLoops", ["b0"], [], ["l1"]],
            ["Split", ["l1", "None", 16], [1, 0], ["l2", "l3"]],
        ],
        [],
    ]
)


@pytest.fixture
def recorded(state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[RecordStore, str]:
    """A state folder with three records of a ReLU, the second the fastest, and ten trials; and the ReLU's key."""
    func = script.from_source(RELU)
    key, target = workload_key(func), resolve("native").canonical
    versions = (target, tvm_version(), SPACE_VERSION)
    store = RecordStore(tmp_path / "home" / "records")
    for trial, seconds in enumerate((3e-6, 1e-6, 2e-6), 1):
        when = f"2026-11-21T00:00:0{trial}+00:00"
        store.append(Record(key, ir.save_json(normalize(func)), SPLIT, seconds, 4e-6, *versions, "ga", trial, when))
    store.append(Effort(key, *versions, 10, 4e-6, "2026-11-21T00:00:09+00:00"))
    store.close()
    return store, key


@pytest.fixture
def records(recorded: tuple[RecordStore, str], tvmflow: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call `tvmflow records` in that state folder."""
    monkeypatch.setenv("TVMFLOW_HOME", str(recorded[0].folder.parent))
    return lambda *arguments: tvmflow("records", *arguments)


def test_the_list_has_the_numbers_of_records_and_their_gain(records: Command) -> None:
    assert "native" in records("list").stdout
    (row,) = json.loads(records("list", "--json").stdout)
    assert (row["workloads"], row["records"], row["trials"], row["ratio"]) == (1, 3, 10, 0.25)
    assert json.loads(records("list", "--target", "x86-64-v2", "--json").stdout) == []


def test_workloads_are_listed_with_their_keys(records: Command, recorded: tuple[RecordStore, str]) -> None:
    assert recorded[1] in records("list", "--workloads").stdout
    (row,) = json.loads(records("list", "--workloads", "--json").stdout)
    assert (row["key"], row["best_seconds"]) == (recorded[1], 1e-6)


def test_a_workload_is_shown_with_its_history_and_its_best_schedule(
    records: Command, recorded: tuple[RecordStore, str]
) -> None:
    report = records("show", recorded[1][:6])
    assert "T.max(" in report.stdout
    assert "sch.split(" in report.stdout
    document = json.loads(records("show", recorded[1], "--json").stdout)
    assert [record["seconds"] for record in document["history"]] == [3e-6, 1e-6, 2e-6]


def test_an_unknown_key_is_refused(records: Command) -> None:
    assert "'zz'" in records("show", "zz").sentence


def test_exported_records_can_be_imported_elsewhere(
    records: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(records("export", "best.jsonl", "--json").stdout)["records"] == 1
    assert json.loads(records("export", "all.jsonl", "--all", "--json").stdout)["records"] == 3
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "elsewhere"))
    (best,) = json.loads(records("import", "best.jsonl", "--json").stdout)
    assert (best["file"], best["read"], best["taken"], best["refused"]) == ("best.jsonl", 1, 1, {})
    everything = records("import", "all.jsonl").stdout
    assert "2 of 3" in everything
    (row,) = json.loads(records("list", "--json").stdout)
    assert (row["records"], row["trials"]) == (3, 10)


def test_a_file_without_records_is_refused(records: Command, tmp_path: Path) -> None:
    Path("none.jsonl").touch()
    assert "'none.jsonl'" in records("import", "none.jsonl").sentence


def test_pruning_keeps_the_fastest(records: Command, recorded: tuple[RecordStore, str]) -> None:
    assert json.loads(records("prune", "--keep", "1", "--json").stdout)["after"] == 2
    assert [record.seconds for record in RecordStore(recorded[0].folder).records(resolve("native"))] == [1e-6]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreConfig]:
    with rclone_s3(tmp_path_factory.mktemp("s3"), bucket="releases") as config:
        yield config


def test_a_named_release_store_shares_imports_and_prunings(
    records: Command, server: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records("export", "all.jsonl", "--all")
    monkeypatch.setenv("TVMFLOW_S3_ENDPOINT", server.endpoint or "")
    monkeypatch.setenv("TVMFLOW_S3_BUCKET", server.bucket)
    monkeypatch.setenv("TVMFLOW_S3_ACCESS_KEY", server.access_key or "")
    monkeypatch.setenv("TVMFLOW_S3_SECRET_KEY", server.secret_key or "")
    for name in ("one", "two"):
        monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / name))
        if name == "one":
            records("import", "all.jsonl")
        (row,) = json.loads(records("list", "--json").stdout)
        assert (row["records"], row["trials"]) == (3, 10)
    shared = RecordObjects(ReleaseStore(server))
    (before,) = shared.sizes()
    assert json.loads(records("prune", "--keep", "1", "--json").stdout)["objects"] == 1
    assert before not in shared.sizes()
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "one"))
    (row,) = json.loads(records("list", "--json").stdout)
    assert (row["records"], row["trials"]) == (1, 10)


def test_without_the_release_store_the_records_here_are_listed(
    records: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ENDPOINT": "http://127.0.0.1:9", "ACCESS_KEY": "key", "SECRET_KEY": "secret"}.items():
        monkeypatch.setenv(f"TVMFLOW_S3_{name}", value)
    listing = records("list", "--json")
    assert json.loads(listing.stdout)[0]["records"] == 3
    assert "127.0.0.1:9" in listing.stderr
    assert len(listing.stderr.splitlines()) == 1
