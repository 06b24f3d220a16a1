"""The cached step `tune` of a release, and records that other machines have written since."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from support.steps import steps_in_this_process
from tasks.relax_import import ImportJob
from tasks.relax_import import work as import_model
from tasks.step import StepRunner
from tasks.tune import TuneJob, TuneResult, tune
from tvmflow import compiler
from tvmflow import spec as release_file
from tvmflow.hardware.target import Target
from tvmflow.settings import Settings
from tvmflow.spec import Spec
from tvmflow.tuning import Record, RecordStore, current_context
from tvmflow.tuning.records import now
from tvmflow.workspace import Outcome, Workspace


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    folder = tmp_path_factory.mktemp("cached")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    weights = {"w": np.ones((32, 16, 3, 3), np.float32)}
    save_model(folder / "model.onnx", [node], [("x", [1, 16, 12, 12])], ["y"], weights)
    document = {"name": "cached", "model": {"onnx": "model.onnx"}, "tune": {"trials": 6, "tuner": "random", "seed": 1}}
    return release_file.parse(document, folder)


def test_without_records_and_budget_the_model_is_not_lowered(
    spec: Spec, native: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(spec.folder / "empty")
    runner = StepRunner.of(spec, Settings(), workspace)
    shapes: dict[str, tuple[int | str, ...]] = {"x": (1, 16, 12, 12)}
    onnx = workspace.keep(spec.folder / "model.onnx")
    imported = import_model(
        ImportJob(home=workspace.folder, onnx=onnx, model_label="model.onnx", shapes=shapes), lambda *_: None
    )
    job = TuneJob.of(spec, imported, native)
    job = job.model_copy(update={"tune": job.tune.model_copy(update={"trials": 0})})

    def tuned() -> Outcome[TuneResult]:
        with steps_in_this_process():
            return tune(runner, job)

    lowered = []
    lower = compiler.lower
    monkeypatch.setattr(compiler, "lower", lambda *arguments: lowered.append(arguments) or lower(*arguments))
    first = tuned()
    assert (first.status, first.result.workloads, str(first.result.coverage)) == ("ran", (), "nothing tuned")
    assert tuned().status == "cached"
    assert not lowered
    # Once anything was measured for the target, the model's functions are looked up.
    times = {"seconds": 1e-9, "baseline_seconds": 1e-8}
    record = Record(
        "another", "", "", **times, **asdict(current_context(native)), tuner="random", trial=1, created_at=now()
    )
    RecordStore(workspace.records).append(record)
    second = tuned()
    assert (second.status, len(lowered)) == ("ran", 1)
    assert str(second.result.coverage).startswith("0 of ")


@pytest.mark.long
def test_a_cached_step_is_looked_up_anew_when_the_store_has_a_better_record(spec: Spec, native: Target) -> None:
    def emit(done: float, total: float, message: str) -> None:
        """Nobody watches."""

    def tuned() -> Outcome[TuneResult]:
        with steps_in_this_process():
            return tune(runner, TuneJob.of(spec, imported, native))

    workspace = Workspace(spec.folder / "state")
    runner = StepRunner.of(spec, Settings(), workspace)
    path = spec.folder / "model.onnx"
    shapes: dict[str, tuple[int | str, ...]] = {"x": (1, 16, 12, 12)}
    job = ImportJob(home=workspace.folder, onnx=workspace.keep(path), model_label="model.onnx", shapes=shapes)
    imported = import_model(job, emit)
    first = tuned()
    assert (first.status, first.result.trials) == ("ran", 6)
    assert first.result.curve[-1][0] == 6
    assert tuned().status == "cached"

    store = RecordStore(workspace.records)
    # A schedule that lost here, which another machine then records as the fastest. The time of a record is of a second
    # measurement, so that the record of the winner may have the longest time of all.
    winners = {entry.trace for entry in store.records(native)}
    slower = next(entry for entry in store.measurements(native) if entry.trace not in winners)
    faster = Record(
        slower.key,
        slower.workload,
        slower.trace,
        seconds=1e-9,
        baseline_seconds=1e-8,
        **asdict(current_context(native)),
        tuner="random",
        trial=1,
        created_at=now(),
    )
    store.append(replace(faster, key="another model's"))
    assert tuned().status == "cached"

    store.append(faster)
    later = tuned()
    assert (later.status, later.result.trials, later.result.curve) == ("ran", 6, first.result.curve)
    lines = workspace.path(later.result.records).read_text().splitlines()
    assert slower.trace in [json.loads(line).get("trace") for line in lines]
    assert tuned().status == "cached"
