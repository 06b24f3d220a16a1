"""Every operator node test of the ONNX package through the whole compiler; see `onnx_nodes.py`."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
    return list(nodes.run(list(nodes.cases()), processes=2))


def test_no_operator_gives_wrong_results_or_crashes(results: list[Any]) -> None:
    bad = [f"{result.outcome} {result.name}: {result.message}" for result in results if result.outcome in _BAD]
    assert not bad, "\n".join(bad)


_BAD = ("wrong", "crashed")


def test_most_node_tests_pass(results: list[Any]) -> None:
    counts = Counter(result.outcome for result in results)
    assert counts["passed"] / counts.total() > 0.75


def test_every_refused_node_test_has_a_reason(nodes: ModuleType, results: list[Any]) -> None:
    reasons = nodes.explanations()
    missing = [
        f"{result.name}: {result.message}"
        for result in results
        if result.outcome == "refused" and nodes.reason_of(result.name, reasons) is None
    ]
    assert not missing, "\n".join(missing)


def test_no_reason_is_given_for_a_node_test_that_passes(nodes: ModuleType, results: list[Any]) -> None:
    reasons = nodes.explanations()
    stale = [result.name for result in results if result.outcome == "passed" and nodes.reason_of(result.name, reasons)]
    assert not stale, "\n".join(stale)


def test_no_reason_is_given_for_no_node_test(nodes: ModuleType, results: list[Any]) -> None:
    refused = [result.name for result in results if result.outcome == "refused"]
    unused = [
        pattern
        for patterns in nodes.explanations().values()
        for pattern in patterns
        if not any(nodes.fnmatchcase(name, pattern) for name in refused)
    ]
    assert not unused, "\n".join(unused)
