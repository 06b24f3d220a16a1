"""Which of the tuned and the untuned build is shipped where that needs no measuring, and when one is the faster."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tasks.build import BuildResult
from tasks.choose import Candidate, Choice, Making, distinct, fewer_threads, to_build, tuned_sample, untuned
from tasks.export import export
from tasks.package import PackageResult, package
from tasks.relax_import import relax_import
from tasks.sidebyside import Beside
from tasks.step import Context
from tasks.tune import TuneResult, with_threads
from tasks.validate import Verdict
from tvmflow.bundle import read_manifest
from tvmflow.settings import Settings
from tvmflow.spec import parse
from tvmflow.target import host, resolve
from tvmflow.tuning.best_records import read_decisions, read_threads
from tvmflow.workspace import Artifact, Outcome, Workspace


def _artifact(content: str) -> Artifact:
    return Artifact(sha256=content * 64, size=1, name=content)


def _known(workspace: Workspace, records: str) -> Outcome[TuneResult]:
    result = untuned(workspace).result.model_copy(update={"records": _artifact(records)})
    return Outcome(result, "ran", 0.0)


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
    packaged = PackageResult(bundle=_artifact(content), unpacked=1, algorithms={})
    return Candidate(
        _known(workspace, content), _built(content), Outcome(packaged, "ran", 0.0), Outcome(verdict, "ran", 0.0)
    )


def _making(context: Context) -> Making:
    """One that has nothing to build any more."""
    nothing: Any = None
    return Making(context, nothing, nothing, resolve("native"))


@pytest.fixture
def context(workspace: Workspace, tmp_path: Path) -> Context:
    (tmp_path / "model.onnx").touch()
    return Context(parse({"name": "chosen", "model": {"onnx": "model.onnx"}}, tmp_path), Settings(), workspace)


def test_where_nothing_is_known_there_is_one_build(workspace: Workspace) -> None:
    nothing = untuned(workspace)
    assert to_build(workspace, nothing) == (nothing,)
    found = _known(workspace, "a")
    assert to_build(workspace, found) == (found, nothing)


def test_of_two_builds_that_are_the_same_the_untuned_one_is_left(workspace: Workspace) -> None:
    builds = (_known(workspace, "a"), _built("c")), (untuned(workspace), _built("c"))
    assert distinct(builds) == builds[1:]
    others = (_known(workspace, "a"), _built("d")), builds[1]
    assert distinct(others) == others


@pytest.mark.parametrize(("refused", "shipped"), [("tuned", "untuned"), ("untuned", "tuned")])
def test_a_build_that_validation_refuses_is_not_shipped_if_the_other_passes(
    context: Context, refused: str, shipped: str
) -> None:
    tuned, plain = (
        _candidate(context.workspace, name[0], *(["it is wrong"] if name == refused else []))
        for name in ("tuned", "untuned")
    )
    found, choice = _making(context).best((tuned, plain))
    assert found == {"tuned": tuned, "untuned": plain}[shipped]
    assert choice is not None
    assert choice.result == Choice(
        shipped="tuned" if shipped == "tuned" else "untuned",
        told=f"the {shipped} build is shipped: the {refused} one is refused (it is wrong)",
    )


def test_a_build_alone_is_shipped(context: Context) -> None:
    alone = _candidate(context.workspace, "a")
    assert _making(context).best((alone,)) == (alone, None)


@pytest.mark.parametrize(
    ("ratios", "faster"),
    [
        ([0.9] * 20 + [1.1] * 5, True),
        ([0.9] * 19 + [1.1] * 6, False),
        ([0.995] * 25, False),
        ([1.1] * 25, False),
    ],
)
def test_faster_is_what_gains_enough_in_four_of_five_pairs(ratios: list[float], faster: bool) -> None:
    beside = Beside(ratios=tuple(ratios), candidate_ms=1.0, held_ms=1.0)
    assert beside.is_faster(0.99) == faster
    slower = Beside(ratios=tuple(1 / ratio for ratio in ratios), candidate_ms=1.0, held_ms=1.0)
    assert slower.reversed.is_faster(0.99) == faster


def _save(path: Path, node: onnx.NodeProto, shape: list[Any], **weights: np.ndarray[Any, Any]) -> None:
    """A model of one node, from x to y of one shape."""
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("x", "y"))
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "one", [x], [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


@pytest.fixture
def convolution(workspace: Workspace, tmp_path: Path) -> Making:
    """A convolution, exported and imported."""
    weight = np.random.default_rng(0).normal(size=(32, 32, 3, 3)).astype(np.float32) / 32
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    _save(tmp_path / "m.onnx", node, [1, 32, 28, 28], w=weight)
    document = {"name": "chosen", "model": {"onnx": "m.onnx"}, "validate": {"top1_agreement": None}}
    context = Context(parse(document, tmp_path), Settings(), workspace)
    exported = export.fn(context)
    return Making(context, exported, relax_import.fn(context, exported), resolve("native"))


@pytest.fixture
def usual_and_one_thread(convolution: Making) -> tuple[Candidate, Outcome[TuneResult], Outcome[PackageResult]]:
    """The untuned candidate, and the same build packaged to run on one thread."""
    context = convolution.context
    (usual,) = convolution.candidates([untuned(context.workspace)])
    tuned = with_threads(context.workspace, usual.known, 1)
    return (
        usual,
        tuned,
        package.fn(context, convolution.exported, convolution.imported, tuned, usual.built, convolution.target),
    )


@pytest.mark.skipif(host().cores < 2, reason="one core has no choice of threads")
def test_a_bundle_keeps_its_number_of_threads(
    convolution: Making, usual_and_one_thread: tuple[Candidate, Outcome[TuneResult], Outcome[PackageResult]]
) -> None:
    context = convolution.context
    usual, _, packaged = usual_and_one_thread
    assert read_manifest(context.file(packaged.result.bundle)).threads == 1
    assert read_manifest(context.file(usual.packaged.result.bundle)).threads == convolution.target.threads


@pytest.mark.long
@pytest.mark.skipif(host().cores < 2, reason="one core has no choice of threads")
def test_a_bundle_is_measured_once_on_fewer_threads(
    convolution: Making, usual_and_one_thread: tuple[Candidate, Outcome[TuneResult], Outcome[PackageResult]]
) -> None:
    context, target = convolution.context, convolution.target
    usual, known, packaged = usual_and_one_thread
    fewer = fewer_threads.fn(context, convolution.exported, known, packaged, usual, 1, target)
    again = fewer_threads.fn(context, convolution.exported, known, packaged, usual, 1, target)
    assert (again.status, again.result) == ("cached", fewer.result)


def test_a_number_of_threads_is_no_decision_of_the_compiler(workspace: Workspace) -> None:
    known = with_threads(workspace, with_threads(workspace, untuned(workspace), 4), 2)
    path = workspace.path(known.result.records)
    assert (read_threads(path, 8), read_decisions(path)) == (2, {})
    assert read_threads(workspace.path(untuned(workspace).result.records), 8) == 8


def test_builds_are_compared_at_the_sizes_that_are_tuned(workspace: Workspace, tmp_path: Path) -> None:
    _save(tmp_path / "m.onnx", helper.make_node("Relu", ["x"], ["y"]), ["rows", 4])

    def sample(**rows: Any) -> Any:
        document = {"name": "any", "model": {"onnx": "m.onnx"}, "dimensions": {"rows": {"min": 1, "max": 64, **rows}}}
        context = Context(parse(document, tmp_path), Settings(), workspace)
        return tuned_sample(context, export.fn(context))

    assert sample(tune=32, measure=[8, 32])["x"].shape == (32, 4)
    assert sample(measure=[8, 32]) is None
