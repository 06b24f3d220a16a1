"""Which of the tuned and the untuned build is shipped where that needs no measuring, and when one is the faster."""

from pathlib import Path

import pytest

from tasks.build import BuildResult
from tasks.choose import Candidate, Choice, better, choose, distinct, to_build, untuned
from tasks.package import PackageResult
from tasks.sidebyside import Beside
from tasks.step import Context
from tasks.tune import TuneResult
from tasks.validate import Verdict
from tvmflow.settings import Settings
from tvmflow.spec import parse
from tvmflow.target import resolve
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
    target = resolve("native")
    found, choice = better((tuned, plain), lambda one, other: choose.fn(context, one, other, target))
    assert found == {"tuned": tuned, "untuned": plain}[shipped]
    assert choice is not None
    assert choice.result == Choice(
        shipped="tuned" if shipped == "tuned" else "untuned",
        told=f"the {shipped} build is shipped: the {refused} one is refused (it is wrong)",
    )


def test_a_build_alone_is_shipped(workspace: Workspace) -> None:
    alone = _candidate(workspace, "a")
    assert better((alone,), lambda one, other: pytest.fail("there is nothing to compare")) == (alone, None)


@pytest.mark.parametrize(
    ("ratios", "faster"),
    [
        ([0.9] * 12 + [1.1] * 3, True),
        ([0.9] * 11 + [1.1] * 4, False),
        ([0.995] * 15, False),
        ([1.1] * 15, False),
    ],
)
def test_faster_is_what_gains_enough_in_four_of_five_pairs(ratios: list[float], faster: bool) -> None:
    beside = Beside(ratios=tuple(ratios), candidate_ms=1.0, held_ms=1.0)
    assert beside.is_faster(0.99) == faster
    slower = Beside(ratios=tuple(1 / ratio for ratio in ratios), candidate_ms=1.0, held_ms=1.0)
    assert slower.reversed.is_faster(0.99) == faster
