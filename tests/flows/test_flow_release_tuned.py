"""Releases of a model that records are known of: the better of the tuned and the untuned build is shipped."""

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
from tvmflow.target import resolve
from tvmflow.tuning import Record, RecordStore, current_context, workload_key
from tvmflow.tuning.records import Decision, now
from tvmflow.tuning.traces import normalize, trace_of


@dataclass(frozen=True)
class Story:
    """A model released without any record, with one that is slower than it says, again, and with one that is faster.

    The last is of a build without the layout that convolutions are fast in. `parted` is of another model, of which a
    decision is known as well, and again a record that is slower than it says.
    """

    machine: Any
    file: Path
    plain: Any
    spoilt: Any
    again: Any
    gained: Any
    parted: Any


def _nothing(schedule: Schedule) -> None:
    """The loops as they are: one thread, one number at a time."""


def _rows(schedule: Schedule) -> None:
    """Products of 16 numbers at once, on all threads."""
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
    """Record a schedule of the model's convolution as faster than anything, and so its decisions of a kind."""
    target, options = resolve("native"), compiler.BuildOptions(**build)
    imported, choices = compiler.import_onnx(model), compiler.Choices()
    compiler.lower(imported, target, options, choices)
    sites = [site for site in choices.met.values() if site.kind == kind]
    for site in sites:
        decided = Decision(
            site.key, site.options[1], site.options[0], 1e-9, 1.0, **vars(current_context(target)), created_at=now()
        )
        RecordStore(store).append(decided)
    made = compiler.Choices({site.key: site.options[1] for site in sites})
    lowered = compiler.lower(imported, target, options, made)
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
    weights = {"w": np.random.default_rng(0).normal(size=(64, 64, 16, 16)).astype(np.float32) / 128}
    model = make.onnx(folder, [helper.make_node("Conv", ["x", "w"], ["y"])], weights, (1, 64, 16, 16))
    file = make.file(folder, name="tuned", validate={"top1_agreement": None})
    plain = machine.release(file)
    _record(machine.home / "records", model, {}, _nothing)
    spoilt, again = machine.release(file), machine.release(file)
    build = {"disabled_passes": ["ChannelsLast"]}
    _record(machine.home / "records", model, build, _rows)
    gained = machine.release(make.file(folder, name="gained", validate={"top1_agreement": None}, build=build))
    weights = {"w": np.random.default_rng(0).normal(size=(48, 64, 16, 16)).astype(np.float32) / 128}
    other = make.onnx(folder, [helper.make_node("Conv", ["x", "w"], ["y"])], weights, (1, 64, 16, 16), "other.onnx")
    _record(machine.home / "records", other, {}, _nothing, "edge")
    sections: dict[str, Any] = {"model": {"onnx": "other.onnx"}, "validate": {"top1_agreement": None}}
    parted = machine.release(make.file(folder, name="parted", **sections))
    assert [ended.code for ended in (plain, spoilt, again, gained, parted)] == [0] * 5, [
        ended.stderr for ended in (plain, spoilt, again, gained, parted)
    ]
    return Story(machine, file, plain, spoilt, again, gained, parted)


def _target(ended: Any) -> dict[str, Any]:
    (target,) = ended.document["targets"]
    return dict(target)


def test_where_nothing_is_known_nothing_is_compared(story: Story) -> None:
    assert _target(story.plain)["choice"] is None
    assert "choose" not in story.plain.steps
    released = story.machine.releases("tuned")[0]["targets"][0]
    assert (released["tuning"]["shipped"], released["tuning"]["ratio_untuned"]) == ("untuned", None)


def test_a_slower_tuned_build_is_not_shipped(story: Story) -> None:
    target = _target(story.spoilt)
    assert target["choice"]["shipped"] == "untuned"
    assert target["choice"]["ratio"] > 1
    assert target["choice"]["told"].startswith("the untuned build is shipped: the tuned one's latency is ")
    assert "tuned" not in target["schedules"]
    assert target["bundle_sha256"] == _target(story.plain)["bundle_sha256"]
    assert story.spoilt.document["version"] == "2"


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


def test_of_what_is_slower_as_a_whole_a_part_may_be_shipped_but_not_what_spoils_it(story: Story) -> None:
    target = _target(story.parted)
    assert "tuned" not in target["schedules"]
    part = "decisions" if target["choice"]["shipped"] == "tuned" else "all"
    assert target["choice"]["part"] == part
    # The whole was compared, then the decisions alone; without them the record is of no function.
    compared = [json.loads(path.read_text()) for path in (story.machine.home / "steps" / "choose").glob("*.json")]
    assert {"all", "decisions"} == {item["result"]["part"] for item in compared}


@pytest.mark.parametrize(("name", "ended"), [("tuned", "spoilt"), ("gained", "gained")])
def test_release_verdict_and_mlflow_say_which_is_shipped(story: Story, name: str, ended: str) -> None:
    document = getattr(story, ended).document
    choice = {key: value for key, value in _target(getattr(story, ended))["choice"].items() if key != "sources"}
    released = story.machine.releases(name)[-1]["targets"][0]
    assert released["verdict"]["choice"] == choice
    assert (released["tuning"]["shipped"], released["tuning"]["ratio_untuned"]) == (choice["shipped"], choice["ratio"])
    client, run_id = story.machine.mlflow, document["mlflow_run_id"]
    verdict = json.loads(Path(client.download_artifacts(run_id, "verdict.json")).read_text())
    assert verdict["native"]["choice"] == choice
    run = client.get_run(run_id)
    (nested,) = client.search_runs(
        [run.info.experiment_id], f"tags.mlflow.parentRunId = '{run_id}'", ViewType.ACTIVE_ONLY
    )
    assert nested.data.tags["tvmflow.shipped"] == choice["shipped"]
    assert nested.data.metrics["ratio_untuned"] == choice["ratio"]


def test_two_bundles_are_compared_once(story: Story) -> None:
    assert story.spoilt.steps["choose"] == "ran"
    assert set(story.again.steps.values()) == {"cached"}
    assert story.again.document["version"] == "2"
    assert _target(story.again)["choice"] == _target(story.spoilt)["choice"]


def test_an_untuned_build_is_built_again_without_the_records(story: Story, tmp_path: Path) -> None:
    elsewhere = type(story.machine)(tmp_path / "elsewhere")
    bundle = story.machine.home.parent / _target(story.spoilt)["bundle_path"]
    ended = elsewhere.run("verify", bundle, "--rebuild", story.file, "--json")
    assert ended.code == 0, ended.stderr
    assert {"mod.so", "manifest"} <= set(ended.document["rebuilt"])
