"""Releases of a model that has tuning records: the better of the tuned and the untuned build is shipped."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.entities import ViewType
from onnx import helper
from tvm import IRModule
from tvm.s_tir import Schedule

from tvmflow import compiler
from tvmflow.bundle import read_manifest
from tvmflow.hardware.target import resolve
from tvmflow.tuning import Record, RecordStore, current_context, workload_key
from tvmflow.tuning.records import Decision, now
from tvmflow.tuning.traces import normalize, trace_of


@dataclass(frozen=True)
class Story:
    """A model whose record is slower than it claims, and a model whose record is faster than the build without it.

    The second model is built without the layout in which convolutions are fast.
    """

    machine: Any
    file: Path
    spoilt: Any
    gained: Any


def _unscheduled(schedule: Schedule) -> None:
    """Leave the loops as they are: one thread, one number at a time."""


def _rows(schedule: Schedule) -> None:
    """Compute products of 16 numbers at once, on all threads."""
    block = schedule.get_sblock("conv2d_nchw")
    schedule.compute_inline(schedule.get_sblock("pad_temp"))
    partial = schedule.rfactor(schedule.get_loops(block)[-1], 4)
    *_, channel, _, _, depth, row, column = schedule.get_loops(partial)
    schedule.reorder(channel, depth, row, column)
    schedule.vectorize(column)
    schedule.parallel(channel)
    schedule.decompose_reduction(partial, depth)


def _record(
    store: Path,
    model: Path,
    build: dict[str, Any],
    scheduled: Callable[[Schedule], None],
    kind: str | None = None,
) -> None:
    """Record a schedule of the model's convolution, and its decisions of a kind, as faster than anything else."""
    target, options = resolve("native"), compiler.BuildOptions(**build)
    imported, choices = compiler.import_onnx(model), compiler.Choices()
    compiler.lower(imported, target, options, choices)
    sites = [site for site in choices.sites.values() if site.kind == kind]
    for site in sites:
        decision = Decision(
            site.key, site.options[1], site.options[0], 1e-9, 1.0, **vars(current_context(target)), created_at=now()
        )
        RecordStore(store).append(decision)
    decided = compiler.Choices({site.key: site.options[1] for site in sites})
    lowered = compiler.lower(imported, target, options, decided)
    (conv,) = (item.func for item in compiler.workloads(lowered) if "conv2d" in item.name)
    schedule = Schedule(IRModule({"main": normalize(conv)}))
    scheduled(schedule)
    RecordStore(store).append(
        Record(
            key=workload_key(conv),
            workload="",
            trace=trace_of(schedule),
            seconds=1e-9,
            baseline_seconds=None,
            **vars(current_context(target)),
            tuner="random",
            trial=1,
            created_at=now(),
        )
    )


@pytest.fixture(scope="module")
def story(machine: Any, make: Any, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("tuned")
    model = make.onnx(folder, [helper.make_node("Conv", ["x", "w"], ["y"])], _weights(64), (1, 64, 18, 18))
    file = make.file(folder, name="tuned", validate={"top1_agreement": None})
    _record(machine.home / "records", model, {}, _unscheduled)
    spoilt = machine.release(file)
    build = {"disabled_passes": ["ChannelsLast"]}
    _record(machine.home / "records", model, build, _rows)
    gained = machine.release(make.file(folder, name="gained", validate={"top1_agreement": None}, build=build))
    assert [result.code for result in (spoilt, gained)] == [0, 0], [result.stderr for result in (spoilt, gained)]
    return Story(machine, file, spoilt, gained)


def _weights(channels: int) -> dict[str, np.ndarray[Any, Any]]:
    chance = np.random.default_rng(0)
    return {"w": chance.normal(size=(channels, 64, 16, 16)).astype(np.float32) / 128}


def _target(ended: Any) -> dict[str, Any]:
    (target,) = ended.document["targets"]
    return dict(target)


def test_a_slower_tuned_build_is_not_shipped(story: Story) -> None:
    target = _target(story.spoilt)
    assert target["choice"]["shipped"] == "untuned"
    assert target["choice"]["ratio"] > 1
    assert "tuned" not in target["schedules"]
    released = story.machine.releases("tuned")[0]["targets"][0]
    assert released["tuning"]["shipped"] == "untuned"


def test_a_faster_tuned_build_is_shipped(story: Story) -> None:
    target = _target(story.gained)
    assert target["choice"]["shipped"] == "tuned"
    assert target["choice"]["ratio"] < 1
    assert target["schedules"] == {"tuned": 1}
    records = story.machine.home.parent / target["bundle_path"]
    assert (
        read_manifest(records).provenance["records"]
        != read_manifest(story.machine.home.parent / _target(story.spoilt)["bundle_path"]).provenance["records"]
    )


@pytest.mark.parametrize(("name", "ended"), [("tuned", "spoilt"), ("gained", "gained")])
def test_release_verdict_and_mlflow_say_which_is_shipped(story: Story, name: str, ended: str) -> None:
    document = getattr(story, ended).document
    choice = {key: value for key, value in _target(getattr(story, ended))["choice"].items() if key != "sources"}
    released = story.machine.releases(name)[-1]["targets"][0]
    assert released["verdict"]["choice"] == choice
    assert (released["tuning"]["shipped"], released["tuning"]["ratio_untuned"]) == (choice["shipped"], choice["ratio"])
    client, run_id = story.machine.mlflow, document["mlflow_run_id"]
    verdict = json.loads(Path(client.download_artifacts(run_id, "verdict.json")).read_text())
    assert verdict["targets"]["native"]["choice"] == choice
    run = client.get_run(run_id)
    (nested,) = client.search_runs(
        [run.info.experiment_id], f"tags.mlflow.parentRunId = '{run_id}'", ViewType.ACTIVE_ONLY
    )
    assert nested.data.tags["tvmflow.shipped"] == choice["shipped"]
    assert nested.data.metrics["ratio_untuned"] == choice["ratio"]


@pytest.mark.parametrize(("name", "ended"), [("tuned", "spoilt"), ("gained", "gained")])
def test_the_choice_is_decided_again_from_the_times_of_all_runs(story: Story, name: str, ended: str) -> None:
    choice = _target(getattr(story, ended))["choice"]
    again = story.machine.run("verdict", name, "1", "--about", "build", "--replay", "--json")
    assert again.code == 0, again.stderr
    check = again.document["checks"][0]
    assert check["value"] == pytest.approx(choice["ratio"])
    assert check["passed"] == (choice["shipped"] == "tuned")
    files = story.machine.mlflow.list_artifacts(getattr(story, ended).document["mlflow_run_id"], "samples")
    assert f"samples/{check['name']}.npz" in [file.path for file in files]


@pytest.mark.long
def test_without_records_nothing_is_compared(machine: Any, make: Any, tmp_path: Path) -> None:
    make.onnx(tmp_path, [helper.make_node("Conv", ["x", "w"], ["y"])], _weights(32), (1, 64, 18, 18))
    result = machine.release(make.file(tmp_path, name="plain", validate={"top1_agreement": None}))
    assert result.code == 0, result.stderr
    assert _target(result)["choice"] is None
    assert "choose" not in result.steps
    released = machine.releases("plain")[0]["targets"][0]
    assert (released["tuning"]["shipped"], released["tuning"]["ratio_untuned"]) == ("untuned", None)


@pytest.mark.long
def test_two_bundles_are_compared_once(story: Story) -> None:
    again = story.machine.release(story.file)
    assert story.spoilt.steps["choose"] == "ran"
    # The record of the other build is new in the store, so the step `tune` looks it up again; nothing else has changed.
    assert (again.steps["build"], again.steps["choose"]) == ("cached", "cached")
    assert _target(again)["choice"] == _target(story.spoilt)["choice"]


@pytest.mark.long
def test_where_the_whole_is_slower_the_decisions_alone_are_compared(story: Story, make: Any, tmp_path: Path) -> None:
    """The record is slower than it claims, and it belongs to a function that the decision leads to."""
    machine = story.machine
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    model = make.onnx(tmp_path, nodes, _weights(48), (1, 64, 18, 18))
    _record(machine.home / "records", model, {}, _unscheduled, "edge")
    result = machine.release(make.file(tmp_path, name="parted", validate={"top1_agreement": None}))
    assert result.code == 0, result.stderr
    target = _target(result)
    assert "tuned" not in target["schedules"]
    choices = [json.loads(path.read_text())["result"] for path in (machine.home / "steps" / "choose").glob("*.json")]
    decisions = [choice for choice in choices if choice["part"] == "decisions"]
    assert [choice["shipped"] for choice in choices if choice["part"] == "all"].count("untuned") == 2
    assert len(decisions) == 1
    assert target["choice"]["part"] == ("decisions" if decisions[0]["shipped"] == "tuned" else "all")
    assert target["choice"]["shipped"] == decisions[0]["shipped"]


@pytest.mark.long
def test_an_untuned_build_is_built_again_without_the_records(story: Story, tmp_path: Path) -> None:
    elsewhere = type(story.machine)(tmp_path / "elsewhere")
    bundle = story.machine.home.parent / _target(story.spoilt)["bundle_path"]
    result = elsewhere.run("verify", bundle, "--rebuild", story.file, "--json")
    assert result.code == 0, result.stderr
    assert {"mod.so", "manifest"} <= set(result.document["rebuilt"])
