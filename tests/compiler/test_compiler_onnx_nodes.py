"""The operator node tests of the ONNX package through the whole compiler; see `onnx_nodes.py`.

The normal run takes one case of each operator that no other test file compares, of some others, and of each pattern of
refused cases; the long run takes every case.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import scale

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def nodes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("onnx_nodes", Path(__file__).with_name("onnx_nodes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["onnx_nodes"] = module  # the workers import it by name
    sys.path.insert(0, str(Path(__file__).parent))
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(nodes: ModuleType) -> list[Any]:
    cases = nodes.cases()
    names = list(cases) if scale.is_long() else nodes.representatives(cases, nodes.explanations())
    processes, level = scale.choose(normal=(1, 1), long=(2, 3))
    return list(nodes.run([cases[name] for name in names], processes, level))


def _of_outcome(results: list[Any], *outcomes: str) -> list[str]:
    return [f"{result.outcome} {result.name}: {result.message}" for result in results if result.outcome in outcomes]


def test_no_operator_gives_wrong_results_or_crashes(results: list[Any]) -> None:
    assert _of_outcome(results, "wrong", "crashed") == []


def test_most_cases_that_are_not_refused_for_a_reason_pass(nodes: ModuleType, results: list[Any]) -> None:
    reasons = nodes.explanations()
    unexplained_results = [result for result in results if nodes.reason_of(result.name, reasons) is None]
    passed = [result for result in unexplained_results if result.outcome == "passed"]
    assert len(passed) == len(unexplained_results) > scale.choose(normal=40, long=1400)


def test_every_refused_node_test_has_a_reason(nodes: ModuleType, results: list[Any]) -> None:
    reasons = nodes.explanations()
    unexplained = [
        f"{result.name}: {result.message}"
        for result in results
        if result.outcome == "refused" and nodes.reason_of(result.name, reasons) is None
    ]
    assert unexplained == []


def test_no_reason_is_given_for_a_node_test_that_passes(nodes: ModuleType, results: list[Any]) -> None:
    reasons = nodes.explanations()
    stale = [result.name for result in results if result.outcome == "passed" and nodes.reason_of(result.name, reasons)]
    assert stale == []


def test_every_pattern_of_a_reason_matches_a_refused_node_test(nodes: ModuleType, results: list[Any]) -> None:
    refusal = [result.name for result in results if result.outcome == "refused"]
    unused = [
        pattern
        for patterns in nodes.explanations().values()
        for pattern in patterns
        if not any(nodes.fnmatchcase(name, pattern) for name in refusal)
    ]
    assert unused == []
