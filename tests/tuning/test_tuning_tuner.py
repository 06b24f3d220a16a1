"""Tuning within a budget, from functions to records."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import tvm
from tvm.tirx import PrimFunc

from support.measurers import GivenSeconds
from tvmflow.errors import TuneError
from tvmflow.hardware.target import Target, resolve
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
from tvmflow.tuning.candidates import Candidate
from tvmflow.tuning.records import SPACE_VERSION, now, tvm_version
from tvmflow.tuning.space import TUNERS


def falling(candidate: Candidate, number: int) -> float:
    """Seconds of a candidate: each that is built is a tenth faster than the one before it."""
    return float(0.9**number)


def rising(candidate: Candidate, number: int) -> float:
    """Seconds of a candidate: what is built first is the fastest."""
    return 1.0 + number


@pytest.fixture(scope="module")
def tuned(
    matmul: PrimFunc, elementwise: PrimFunc, native: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TuneReport, RecordStore]:
    """Two functions tuned with eight trials, of which each is faster than the one before."""
    store = RecordStore(tmp_path_factory.mktemp("records"))
    tasks = [Task("matmul", matmul, 1), Task("elementwise", elementwise, 1)]
    measurer = GivenSeconds(falling)
    return tune(tasks, native, Budget(trials=8), store, tuner="random", seed=1, measurer=measurer), store


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
    assert [task.status for task in again.tasks] == ["record"]


def test_a_later_run_does_not_find_the_record_for_another_target(
    tuned: tuple[TuneReport, RecordStore], matmul: PrimFunc
) -> None:
    other = tune([Task("matmul", matmul, 1)], resolve("x86-64-v2"), Budget(trials=0), tuned[1])
    assert other.tasks[0].status in ("baseline", "skipped")


def test_trials_that_were_spent_before_are_not_spent_again(
    tuned: tuple[TuneReport, RecordStore], matmul: PrimFunc, elementwise: PrimFunc, native: Target
) -> None:
    tasks = [Task("matmul", matmul, 1), Task("elementwise", elementwise, 1)]
    assert tune(tasks, native, Budget(trials=8), tuned[1], tuner="random").trials == 0


def test_a_record_that_does_not_replay_is_passed_over(matmul: PrimFunc, native: Target, store: RecordStore) -> None:
    trace = '[[["GetSBlock", [], ["no such block", "main"], ["b0"]]], []]'
    key = workload_key(matmul)
    store.append(Record(key, "", trace, 1e-9, None, native.canonical, tvm_version(), SPACE_VERSION, "random", 1, now()))
    report = tune([Task("matmul", matmul, 1)], native, Budget(trials=1), store, tuner="random")
    assert report.trials == 1
    assert report.tasks[0].status != "record"


@pytest.mark.parametrize("tuner", TUNERS)
def test_every_tuner_measures_its_trials(conv: PrimFunc, native: Target, store: RecordStore, tuner: TunerName) -> None:
    progress: list[Progress] = []
    report = tune(
        [Task("conv", conv, 2)],
        native,
        Budget(trials=3),
        store,
        tuner=tuner,
        on_progress=progress.append,
        measurer=GivenSeconds(falling),
    )
    assert report.trials == 3
    assert [item.trials for item in progress] == [1, 2, 3]
    assert len({record.trace for record in store.records(native)}) == 3


@pytest.mark.parametrize(
    ("seconds", "is_right"), [(1.0, True), (0.985, True), (0.5, False)], ids=["equal", "little faster", "wrong"]
)
def test_what_is_wrong_or_not_clearly_faster_than_the_baseline_becomes_no_record(
    conv: PrimFunc, native: Target, store: RecordStore, seconds: float, is_right: bool
) -> None:
    measurer = GivenSeconds(lambda candidate, number: seconds if number else 1.0, lambda candidate: is_right)
    report = tune(
        [Task("conv", conv, 1)],
        native,
        Budget(trials=3),
        store,
        tuner="random",
        baseline=lambda func: func,
        measurer=measurer,
    )
    assert (report.tasks[0].status, report.tasks[0].trials) == ("baseline", 3)
    assert report.tasks[0].baseline_seconds == 1.0
    assert not store.records(native)


@pytest.mark.long
def test_a_baseline_that_hangs_does_not_end_the_run(
    matmul: PrimFunc, sleeps: PrimFunc, native: Target, store: RecordStore
) -> None:
    tasks = [Task("matmul", matmul, 1)]
    report = tune(tasks, native, Budget(trials=1), store, tuner="random", seed=1, baseline=lambda _: sleeps, timeout=4)
    assert (report.tasks[0].trials, report.tasks[0].baseline_seconds) == (1, None)
    assert report.tasks[0].best_seconds is not None


@pytest.mark.long
def test_workers_killed_in_mid_run_do_not_end_it(conv: PrimFunc, native: Target, store: RecordStore) -> None:
    others = set(psutil.Process().children())

    def kill_workers(progress: Progress) -> None:
        if progress.trials == 2:
            for worker in set(psutil.Process().children()) - others:
                os.kill(worker.pid, signal.SIGKILL)

    report = tune([Task("conv", conv, 1)], native, Budget(trials=6), store, tuner="random", on_progress=kill_workers)
    assert report.trials == 6
    assert report.tasks[0].status == "tuned"


def test_an_interrupt_keeps_the_records_and_ends_the_workers(
    matmul: PrimFunc, native: Target, store: RecordStore
) -> None:
    before = set(psutil.Process().children())

    def interrupt(progress: Progress) -> None:
        if store.records(native) or progress.trials == 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune([Task("matmul", matmul, 1)], native, Budget(trials=64), store, tuner="random", on_progress=interrupt)
    assert RecordStore(store.folder).best(matmul, native) is not None
    assert set(psutil.Process().children()) <= before
    assert sum(effort.trials for effort in store.efforts(native)) < 32


def test_a_budget_of_time_ends_with_the_measurement_that_outlasts_it(
    matmul: PrimFunc, native: Target, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    def seconds(candidate: Candidate, number: int) -> float:
        nonlocal clock
        clock += 200.0 if number == 3 else 1.0
        return 1.0

    monkeypatch.setattr("tvmflow.tuning.tuner.time", SimpleNamespace(monotonic=lambda: clock))
    measurer = GivenSeconds(seconds)
    report = tune([Task("matmul", matmul, 1)], native, Budget(minutes=3), store, tuner="random", measurer=measurer)
    assert 0 < report.trials <= 3


def test_a_symbolic_function_is_skipped_and_the_others_are_tuned(
    symbolic: PrimFunc, matmul: PrimFunc, native: Target, store: RecordStore
) -> None:
    tasks = [Task("symbolic", symbolic, 1), Task("matmul", matmul, 1)]
    budget, measurer = Budget(trials=4), GivenSeconds(falling)
    skipped, tuned = tune(tasks, native, budget, store, tuner="random", seed=1, measurer=measurer).tasks
    assert skipped.status == "skipped"
    assert "symbolic" in (skipped.reason or "")
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
    conv: PrimFunc, native: Target, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    def measure(candidate: Candidate, number: int) -> float:
        nonlocal clock
        clock += 0.1
        return rising(candidate, number)

    def learn(*_: object) -> None:
        nonlocal clock
        clock += 600.0

    def run(budget: Budget) -> TuneReport:
        return tune([Task("conv", conv, 1)], native, budget, store, tuner="random", measurer=GivenSeconds(measure))

    monkeypatch.setattr("tvmflow.tuning.tuner.time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr("tvmflow.tuning.contest.Contest.learn", learn)
    # A round of 16 trials takes ten minutes, most of them to learn, so that another minute is expected to save little.
    assert run(Budget(until=0.9, trials=1000)).trials == 16
    assert run(Budget(until=0.9)).trials == 0
    assert run(Budget(until=0.9, minutes=1)).trials == 0


def test_a_workload_is_left_alone_after_trials_in_vain(conv: PrimFunc, native: Target, store: RecordStore) -> None:
    def run(budget: Budget) -> TuneReport:
        measurer = GivenSeconds(rising)
        return tune([Task("conv", conv, 1)], native, budget, store, tuner="random", measurer=measurer)

    assert run(Budget(trials=1000, early_stopping=8)).trials == 16
    assert run(Budget(trials=1000, early_stopping=8)).trials == 0
    assert run(Budget(minutes=1, early_stopping=8)).trials == 16


def test_the_curve_begins_untuned_falls_and_ends_with_the_last_trial(
    matmul: PrimFunc, elementwise: PrimFunc, native: Target, store: RecordStore
) -> None:
    seconds = iter([8.0, 4.0, *(4.0 * 0.5**trial for trial in range(1, 13))])
    by_number: dict[int, float] = {}

    def halving(candidate: Candidate, number: int) -> float:
        if number not in by_number:
            by_number[number] = next(seconds)
        return by_number[number]

    progress: list[Progress] = []
    report = tune(
        [Task("matmul", matmul, 3), Task("elementwise", elementwise, 1)],
        native,
        Budget(trials=12),
        store,
        tuner="random",
        seed=1,
        on_progress=progress.append,
        measurer=GivenSeconds(halving),
    )
    assert report.latency is not None
    trials, latencies = zip(*report.curve, strict=True)
    assert trials == tuple(range(13))
    assert report.latency.untuned == latencies[0] == 3 * 8.0 + 4.0
    assert list(latencies) == sorted(latencies, reverse=True)
    assert report.latency.now == latencies[-1] < 28.0 / 2
    assert [item.latency.now for item in progress] == list(latencies[1:])
    standings = progress[-1].standings
    assert sum(item.weight * (item.best_seconds or 0.0) for item in standings) == report.latency.now
    assert sum(item.trials for item in standings) == 12


def test_most_trials_go_where_the_model_spends_its_time(
    matmul: PrimFunc, elementwise: PrimFunc, native: Target, store: RecordStore
) -> None:
    tasks = [Task("elementwise", elementwise, 1), Task("matmul", matmul, 1000)]
    measurer = GivenSeconds(lambda candidate, number: 1.0)
    report = tune(tasks, native, Budget(trials=12), store, tuner="random", seed=1, measurer=measurer)
    trials = {item.name: item.trials for item in report.tasks}
    assert trials["matmul"] > trials["elementwise"]


def test_measurements_that_are_no_records_are_kept_within_bounds(
    conv: PrimFunc, native: Target, store: RecordStore
) -> None:
    # The first trial of eight is the only one that is faster than the function it starts from.
    first = GivenSeconds(lambda candidate, number: {0: 2.0, 1: 1.0}.get(number, 3.0))
    report = tune([Task("conv", conv, 1)], native, Budget(trials=8), store, tuner="random", seed=1, measurer=first)
    measurements = store.measurements(native)
    assert len(measurements) == report.trials == 8
    assert [isinstance(entry, Record) for entry in measurements].count(True) == 1
    assert len({entry.trace for entry in measurements}) == 8
    trial = next(entry for entry in measurements if isinstance(entry, Trial))
    for number in range(48):
        store.append(replace(trial, trace=f"faster {number}", seconds=1e-12))
    again = tune(
        [Task("conv", conv, 1)],
        native,
        Budget(trials=12),
        RecordStore(store.folder),
        tuner="random",
        seed=1,
        measurer=GivenSeconds(rising),
    )
    assert again.trials == 4
    trials = [entry for entry in RecordStore(store.folder).measurements(native) if isinstance(entry, Trial)]
    assert len(trials) == 7 + 48


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
    with pytest.raises(TuneError, match="'gridsearch'"):
        tune([Task("matmul", matmul, 1)], native, Budget(trials=1), store, tuner="gridsearch")  # type: ignore[arg-type]
