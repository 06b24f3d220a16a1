"""Tuning within a budget, from functions to records."""

import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import tvm
from tvm.tirx import PrimFunc

from tvmflow.errors import TuneError
from tvmflow.target import Target, resolve
from tvmflow.tuning import (
    Budget,
    Progress,
    Record,
    RecordStore,
    Task,
    Trial,
    TuneReport,
    TunerName,
    apply,
    tune,
    workload_key,
)
from tvmflow.tuning.records import SPACE_VERSION, now, tvm_version
from tvmflow.tuning.space import TUNERS


@pytest.fixture(scope="module")
def tuned(
    matmul: PrimFunc, elementwise: PrimFunc, native: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TuneReport, RecordStore]:
    """Two functions tuned with eight trials."""
    store = RecordStore(tmp_path_factory.mktemp("records"))
    tasks = [Task("matmul", matmul, 1), Task("elementwise", elementwise, 1)]
    return tune(tasks, native, Budget(trials=8), store, tuner="random", seed=1), store


def test_a_record_replays_and_computes_what_the_function_does(
    tuned: tuple[TuneReport, RecordStore], matmul: PrimFunc, native: Target
) -> None:
    report, store = tuned
    assert (report.tasks[0].status, report.trials) == ("tuned", 8)
    record = store.best(matmul, native)
    assert record is not None
    scheduled = apply(record, matmul)
    assert scheduled is not None
    library = tvm.compile(
        tvm.IRModule({"main": scheduled.with_attr("global_symbol", "main")}), tvm.target.Target(native.tvm)
    )
    a, b = np.random.default_rng(0).standard_normal((2, 64, 64)).astype("float32")
    c = np.linspace(-1, 1, 64, dtype="float32")
    tensors = [tvm.runtime.tensor(array) for array in (a, b, c, np.empty((64, 64), "float32"))]
    library["main"](*tensors)
    np.testing.assert_allclose(tensors[-1].numpy(), np.maximum(a @ b + c, 0), rtol=1e-4, atol=1e-4)


def test_a_later_run_finds_the_record_under_any_name(
    tuned: tuple[TuneReport, RecordStore], matmul: PrimFunc, native: Target
) -> None:
    renamed = matmul.with_attr("global_symbol", "fused_matmul7")
    again = tune([Task("fused_matmul7", renamed, 1)], native, Budget(trials=0), RecordStore(tuned[1].folder))
    assert (again.tasks[0].status, again.coverage) == ("record", "1 of 1")


def test_a_later_run_does_not_find_the_record_for_another_target(
    tuned: tuple[TuneReport, RecordStore], matmul: PrimFunc
) -> None:
    other = tune([Task("matmul", matmul, 1)], resolve("x86-64-v2"), Budget(trials=0), tuned[1])
    assert (other.tasks[0].status, other.coverage) == ("baseline", "0 of 1")


def test_trials_that_were_spent_before_are_not_spent_again(
    tuned: tuple[TuneReport, RecordStore], matmul: PrimFunc, elementwise: PrimFunc, native: Target
) -> None:
    tasks = [Task("matmul", matmul, 1), Task("elementwise", elementwise, 1)]
    assert tune(tasks, native, Budget(trials=8), tuned[1], tuner="random").trials == 0


def test_a_record_that_does_not_replay_is_passed_over(matmul: PrimFunc, native: Target, store: RecordStore) -> None:
    trace = '[[["GetSBlock", [], ["no such block", "main"], ["b0"]]], []]'
    key = workload_key(matmul)
    store.append(Record(key, "", trace, 1e-9, None, native.canonical, tvm_version(), SPACE_VERSION, "random", 1, now()))
    report = tune([Task("matmul", matmul, 1)], native, Budget(trials=4), store, tuner="ga")
    assert report.trials == 4
    assert report.tasks[0].status in ("tuned", "baseline")


@pytest.mark.parametrize("tuner", TUNERS)
def test_every_tuner_measures_its_trials(conv: PrimFunc, native: Target, store: RecordStore, tuner: TunerName) -> None:
    seen: list[Progress] = []
    report = tune([Task("conv", conv, 2)], native, Budget(trials=3), store, tuner=tuner, on_progress=seen.append)
    assert report.trials == 3
    assert [progress.trials for progress in seen] == [1, 2, 3]


def test_what_is_not_faster_than_the_baseline_becomes_no_record(
    conv: PrimFunc, instant: PrimFunc, native: Target, store: RecordStore
) -> None:
    report = tune([Task("conv", conv, 1)], native, Budget(trials=3), store, tuner="random", baseline=lambda _: instant)
    assert (report.tasks[0].status, report.tasks[0].trials) == ("baseline", 3)
    assert report.tasks[0].baseline_seconds is not None
    assert not store.records(native)


def test_a_baseline_that_hangs_does_not_end_the_run(
    matmul: PrimFunc, sleeps: PrimFunc, native: Target, store: RecordStore
) -> None:
    tasks = [Task("matmul", matmul, 1)]
    report = tune(tasks, native, Budget(trials=4), store, tuner="random", seed=1, baseline=lambda _: sleeps, timeout=4)
    assert (report.tasks[0].trials, report.tasks[0].baseline_seconds) == (4, None)
    assert report.tasks[0].best_seconds is not None


def test_workers_killed_in_mid_run_do_not_end_it(conv: PrimFunc, native: Target, store: RecordStore) -> None:
    others = set(psutil.Process().children())

    def kill_workers(progress: Progress) -> None:
        if progress.trials == 2:
            for worker in set(psutil.Process().children()) - others:
                os.kill(worker.pid, signal.SIGKILL)

    report = tune([Task("conv", conv, 1)], native, Budget(trials=8), store, tuner="random", on_progress=kill_workers)
    assert report.trials == 8
    assert report.tasks[0].status == "tuned"


def test_an_interrupt_keeps_the_records_and_ends_the_workers(
    conv: PrimFunc, native: Target, store: RecordStore
) -> None:
    before = set(psutil.Process().children())

    def interrupt(progress: Progress) -> None:
        if store.records(native) or progress.trials == 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune([Task("conv", conv, 1)], native, Budget(trials=64), store, tuner="random", on_progress=interrupt)
    assert RecordStore(store.folder).best(conv, native) is not None
    assert set(psutil.Process().children()) <= before
    assert sum(effort.trials for effort in store.efforts(native)) < 32


def test_a_budget_of_time_ends(conv: PrimFunc, native: Target, store: RecordStore) -> None:
    report = tune([Task("conv", conv, 1)], native, Budget(minutes=0.1), store, tuner="random")
    assert report.trials < 1000


def test_a_symbolic_function_is_skipped_and_the_others_are_tuned(
    symbolic: PrimFunc, matmul: PrimFunc, native: Target, store: RecordStore
) -> None:
    tasks = [Task("symbolic", symbolic, 1), Task("matmul", matmul, 1)]
    skipped, tuned = tune(tasks, native, Budget(trials=4), store, tuner="random", seed=1).tasks
    assert (skipped.status, skipped.reason) == (
        "skipped",
        "its shapes are symbolic, and MetaSchedule needs static ones",
    )
    assert tuned.trials == 4


@pytest.mark.parametrize(("target", "reason"), [("cuda-sm90", "cannot run cuda-sm90"), ("aarch64-generic", "aarch64")])
def test_a_target_that_this_machine_cannot_run_is_skipped(
    matmul: PrimFunc, store: RecordStore, target: str, reason: str
) -> None:
    (task,) = tune([Task("matmul", matmul, 1)], resolve(target), Budget(trials=4), store).tasks
    assert task.status == "skipped"
    assert task.reason is not None
    assert reason in task.reason


def test_a_budget_until_nothing_is_to_be_gained_ends_by_itself_and_is_not_spent_again(
    conv: PrimFunc, instant: PrimFunc, native: Target, store: RecordStore
) -> None:
    def run(budget: Budget) -> TuneReport:
        return tune([Task("conv", conv, 1)], native, budget, store, tuner="random", baseline=lambda _: instant)

    first = run(Budget(until=0.9, trials=1000))
    assert 16 <= first.trials < 200
    assert run(Budget(until=0.9)).trials == 0
    assert run(Budget(until=0.9, minutes=1)).trials == 0


def test_a_workload_is_left_alone_after_trials_in_vain(
    conv: PrimFunc, instant: PrimFunc, native: Target, store: RecordStore
) -> None:
    def run(budget: Budget) -> TuneReport:
        return tune([Task("conv", conv, 1)], native, budget, store, tuner="random", baseline=lambda _: instant)

    assert run(Budget(trials=1000, early_stopping=8)).trials == 16
    assert run(Budget(trials=1000, early_stopping=8)).trials == 0
    assert run(Budget(minutes=1, early_stopping=8)).trials == 16


def test_the_curve_begins_untuned_falls_and_ends_with_the_last_trial(
    matmul: PrimFunc, elementwise: PrimFunc, native: Target, store: RecordStore
) -> None:
    seen: list[Progress] = []
    tasks = [Task("matmul", matmul, 3), Task("elementwise", elementwise, 1)]
    report = tune(tasks, native, Budget(trials=12), store, tuner="random", seed=1, on_progress=seen.append)
    assert report.latency is not None
    trials, latencies = zip(*report.curve, strict=True)
    assert trials == tuple(range(13))
    assert list(latencies) == sorted(latencies, reverse=True)
    assert (latencies[0], latencies[-1]) == (
        pytest.approx(report.latency.untuned),
        pytest.approx(report.latency.now),
    )
    assert report.latency.now < report.latency.untuned
    assert [progress.latency.now for progress in seen] == pytest.approx(list(latencies[1:]))
    last = seen[-1].standings
    assert sum(item.weight * (item.best_seconds or 0.0) for item in last) == pytest.approx(report.latency.now)
    assert sum(item.trials for item in last) == 12


def test_most_trials_go_where_the_model_spends_its_time(
    matmul: PrimFunc, elementwise: PrimFunc, native: Target, store: RecordStore
) -> None:
    tasks = [Task("elementwise", elementwise, 1), Task("matmul", matmul, 1000)]
    seen: list[Progress] = []
    tune(tasks, native, Budget(trials=12), store, tuner="random", seed=1, on_progress=seen.append)
    spent = {item.name: item.trials for item in seen[-1].standings}
    assert spent["matmul"] > spent["elementwise"]


def test_what_was_measured_and_became_no_record_is_kept_within_bounds(
    conv: PrimFunc, native: Target, store: RecordStore
) -> None:
    report = tune([Task("conv", conv, 1)], native, Budget(trials=8), store, tuner="random", seed=1)
    measured = store.measurements(native)
    records = [entry for entry in measured if isinstance(entry, Record)]
    assert len(measured) == report.trials == 8
    assert 0 < len(records) < len(measured)
    assert len({entry.trace for entry in measured}) == 8
    known = next(entry for entry in measured if isinstance(entry, Trial))
    for number in range(48):
        store.append(replace(known, trace=f"faster {number}", seconds=1e-12))
    again = tune([Task("conv", conv, 1)], native, Budget(trials=12), RecordStore(store.folder), tuner="random", seed=1)
    assert again.trials == 4
    kept = [entry for entry in RecordStore(store.folder).measurements(native) if isinstance(entry, Trial)]
    assert len(kept) == len(measured) - len(records) + 48


@pytest.mark.parametrize(
    "budget",
    [
        {},
        {"trials": 4, "minutes": 1.0},
        {"trials": -1},
        {"minutes": 0.0},
        {"until": 2.0},
        {"trials": 4, "early_stopping": 0},
    ],
)
def test_a_budget_that_says_nothing_sensible_is_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(TuneError, match="budget"):
        Budget(**budget)


def test_an_unknown_tuner_is_refused(matmul: PrimFunc, native: Target, store: RecordStore) -> None:
    with pytest.raises(TuneError, match="`gridsearch` is no tuner; expected one of xgb, ga, random, grid"):
        tune([Task("matmul", matmul, 1)], native, Budget(trials=1), store, tuner="gridsearch")  # type: ignore[arg-type]
