"""Tuning within a budget, from functions to records."""

import os
import signal
from typing import Any

import numpy as np
import psutil
import pytest
import tvm
from tvm.tirx import PrimFunc

from tvmflow.errors import TuneError
from tvmflow.target import Target, resolve
from tvmflow.tuning import Budget, Progress, Record, RecordStore, Task, TuneReport, TunerName, apply, tune, workload_key
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


@pytest.mark.parametrize("budget", [{}, {"trials": 4, "minutes": 1.0}, {"trials": -1}, {"minutes": 0.0}])
def test_a_budget_that_says_nothing_sensible_is_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(TuneError, match="budget"):
        Budget(**budget)


def test_an_unknown_tuner_is_refused(matmul: PrimFunc, native: Target, store: RecordStore) -> None:
    with pytest.raises(TuneError, match="`gridsearch` is no tuner; expected one of xgb, ga, random, grid"):
        tune([Task("matmul", matmul, 1)], native, Budget(trials=1), store, tuner="gridsearch")  # type: ignore[arg-type]
