"""Which of the tuned and the untuned build is shipped where that needs no measuring."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from support.models import save_model
from tasks.build import BuildResult
from tasks.candidates import TargetBuilder, distinct_builds, tunings_to_build
from tasks.choose import (
    Candidate,
    Choice,
    ThreadsJob,
    comparison_fields,
    fewer_threads,
    tuned_sample,
)
from tasks.export import ExportJob, ExportResult, export
from tasks.options import variants
from tasks.original import find_original
from tasks.package import PackageJob, PackageResult, limit_sizes, package
from tasks.relax_import import ImportJob, ImportResult, relax_import
from tasks.step import StepRunner
from tasks.tune import TuneResult, skip_tuning, with_threads
from tasks.validate import Verdict
from tvmflow.bundle import TensorSpec, read_manifest
from tvmflow.hardware.target import host, resolve
from tvmflow.settings import Settings
from tvmflow.spec import Dimension, parse
from tvmflow.tuning.best_records import read_decisions, read_threads
from tvmflow.workspace import Artifact, Outcome, Workspace

pytestmark = pytest.mark.usefixtures("children_in_forks")


def _artifact(content: str) -> Artifact:
    return Artifact(sha256=content * 64, size=1, name=content)


def _tuned(workspace: Workspace, records: str) -> TuneResult:
    return skip_tuning(workspace).model_copy(update={"records": _artifact(records)})


def _built(library: str) -> Outcome[BuildResult]:
    artifact = _artifact(library)
    result = BuildResult(
        library=artifact,
        ir=artifact,
        text=artifact,
        params=None,
        pass_timings=artifact,
        schedules={},
        variants={},
        algorithms={},
        fresh_outputs=True,
        weights="inside",
        llvm="20",
        inspected=artifact,
    )
    return Outcome(result, "ran", 0.0)


def _candidate(workspace: Workspace, content: str, *reasons: str) -> Candidate:
    verdict = Verdict(
        passed=not reasons,
        verified=True,
        reasons=reasons,
        algorithms={},
        comparisons=(),
        metric_name=None,
        metric_original=None,
        metric_bundle=None,
    )
    return Candidate(
        tuned=_tuned(workspace, content),
        build=_built(content).result,
        packaged=PackageResult(bundle=_artifact(content), algorithms={}),
        verdict=verdict,
        steps={},
    )


@pytest.fixture
def builder(workspace: Workspace, tmp_path: Path) -> TargetBuilder:
    """One that has nothing to build any more."""
    (tmp_path / "model.onnx").touch()
    spec = parse({"name": "chosen", "model": {"onnx": "model.onnx"}}, tmp_path)
    artifact = _artifact("e")
    exported = ExportResult(
        onnx=artifact,
        samples=artifact,
        undecided=artifact,
        golden=0,
        inputs=(),
        outputs=(),
        max_abs_error=None,
        opset=18,
    )
    nothing: Any = None
    return TargetBuilder(StepRunner.of(spec, Settings(), workspace), spec, exported, nothing, resolve("native"))


def test_where_nothing_is_known_there_is_one_build(workspace: Workspace) -> None:
    nothing = skip_tuning(workspace)
    assert tunings_to_build(workspace, nothing) == (nothing,)
    tuned = _tuned(workspace, "a")
    assert tunings_to_build(workspace, tuned) == (tuned, nothing)


def test_of_two_builds_that_are_the_same_the_untuned_one_is_left(workspace: Workspace) -> None:
    builds = (_tuned(workspace, "a"), _built("c")), (skip_tuning(workspace), _built("c"))
    assert distinct_builds(builds) == builds[1:]
    others = (_tuned(workspace, "a"), _built("d")), builds[1]
    assert distinct_builds(others) == others


@pytest.mark.parametrize(("refused", "shipped"), [("tuned", "untuned"), ("untuned", "tuned")])
def test_a_build_that_validation_refuses_is_not_shipped_if_the_other_passes(
    builder: TargetBuilder, workspace: Workspace, refused: str, shipped: str
) -> None:
    tuned, plain = (
        _candidate(workspace, name[0], *(["it is wrong"] if name == refused else [])) for name in ("tuned", "untuned")
    )
    best, choice = builder.best((tuned, plain))
    assert best == {"tuned": tuned, "untuned": plain}[shipped]
    assert choice is not None
    assert choice.result == Choice(
        shipped="tuned" if shipped == "tuned" else "untuned",
        message=f"the {shipped} build is shipped: the {refused} one is refused (it is wrong)",
    )


def test_a_build_alone_is_shipped(builder: TargetBuilder, workspace: Workspace) -> None:
    alone = _candidate(workspace, "a")
    assert builder.best((alone,)) == (alone, None)


def _save(path: Path, node: onnx.NodeProto, shape: list[Any], **weights: np.ndarray[Any, Any]) -> None:
    """A model of one node, from x to y of one shape."""
    save_model(path, [node], [("x", shape)], [("y", shape)], weights)


@pytest.fixture
def convolution(workspace: Workspace, tmp_path: Path) -> TargetBuilder:
    """A convolution, exported and imported."""
    weight = np.random.default_rng(0).normal(size=(32, 32, 3, 3)).astype(np.float32) / 32
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    _save(tmp_path / "m.onnx", node, [1, 32, 28, 28], w=weight)
    document = {"name": "chosen", "model": {"onnx": "m.onnx"}, "validate": {"top1_agreement": None}}
    spec = parse(document, tmp_path)
    runner = StepRunner.of(spec, Settings(), workspace)
    exported = export(runner, ExportJob.of(spec, find_original(spec, workspace))).result
    imported = relax_import(runner, ImportJob.of(spec, exported)).result
    return TargetBuilder(runner, spec, exported, imported, resolve("native"))


@pytest.fixture
def usual_and_one_thread(convolution: TargetBuilder, workspace: Workspace) -> tuple[Candidate, Candidate]:
    """The untuned candidate, and the same build packaged to run on one thread."""
    item = convolution
    (usual,) = item.candidates([skip_tuning(workspace)])
    tuned = with_threads(workspace, usual.tuned, 1)
    job = PackageJob.of(
        item.spec, workspace, item.exported, item.imported, tuned, usual.build, item.target, signer=None
    )
    packaged = package(item.runner, job, None).result
    return usual, usual.model_copy(update={"tuned": tuned, "packaged": packaged})


def test_a_bundle_takes_no_sizes_at_which_the_model_has_no_data() -> None:
    spec = TensorSpec("x", ("n", 3, "h"), "float32")
    imported = ImportResult.model_construct(inputs=(spec,), smallest={"h": 4})
    assert limit_sizes(imported, {"h": Dimension(min=2, max=9)}) == {"h": (4, 9), "n": (1, None)}
    assert limit_sizes(imported, {"h": Dimension(min=5)}) == {"h": (5, None), "n": (1, None)}


@pytest.mark.long
@pytest.mark.skipif(host().cores < 2, reason="one core has no choice of threads")
def test_a_bundle_keeps_its_number_of_threads(
    convolution: TargetBuilder, workspace: Workspace, usual_and_one_thread: tuple[Candidate, Candidate]
) -> None:
    usual, narrow = usual_and_one_thread
    assert read_manifest(workspace.path(narrow.packaged.bundle)).threads == 1
    assert read_manifest(workspace.path(usual.packaged.bundle)).threads == convolution.target.threads


@pytest.mark.long
@pytest.mark.skipif(host().cores < 2, reason="one core has no choice of threads")
def test_a_bundle_is_measured_once_on_fewer_threads(
    convolution: TargetBuilder, usual_and_one_thread: tuple[Candidate, Candidate]
) -> None:
    usual, narrow = usual_and_one_thread
    fields = comparison_fields(convolution.spec, convolution.exported, narrow, usual, convolution.target)
    fewer = fewer_threads(convolution.runner, ThreadsJob(**fields, threads=1))
    again = fewer_threads(convolution.runner, ThreadsJob(**fields, threads=1))
    assert (again.status, again.result) == ("cached", fewer.result)


def test_a_number_of_threads_is_no_decision_of_the_compiler(workspace: Workspace) -> None:
    tuned = with_threads(workspace, with_threads(workspace, skip_tuning(workspace), 4), 2)
    path = workspace.path(tuned.records)
    assert (read_threads(path, 8), read_decisions(path)) == (2, {})
    assert read_threads(workspace.path(skip_tuning(workspace).records), 8) == 8


def test_builds_are_compared_at_the_sizes_that_are_tuned(workspace: Workspace, tmp_path: Path) -> None:
    _save(tmp_path / "m.onnx", helper.make_node("Relu", ["x"], ["y"]), ["rows", 4])

    def sample(**rows: Any) -> Any:
        document = {"name": "any", "model": {"onnx": "m.onnx"}, "dimensions": {"rows": {"min": 1, "max": 64, **rows}}}
        spec = parse(document, tmp_path)
        runner = StepRunner.of(spec, Settings(), workspace)
        exported = export(runner, ExportJob.of(spec, find_original(spec, workspace))).result
        return tuned_sample(workspace, exported, variants(spec, exported.inputs))

    assert sample(tune=32, measure=[8, 32])["x"].shape == (32, 4)
    assert sample(measure=[8, 32])["x"].shape == (8, 4)
