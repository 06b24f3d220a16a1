"""The figures of a benchmark, and gates: what the release file allows against what was measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.benchmark import BenchmarkResult, Round, _point, gate_failures
from tvmflow.errors import VerdictError
from tvmflow.spec import parse
from tvmflow.target import resolve
from tvmflow.workspace import Artifact

_SIZE = {"tvm": 2_000_000, "onnxruntime": 1, "pytorch": 1}


def _rounds(*milliseconds: float) -> list[Round]:
    """Rounds of three runs each, all of the same length."""
    return [Round(seconds=(value / 1e3,) * 3, load_seconds=1.0, peak_memory=10) for value in milliseconds]


@pytest.fixture
def result() -> BenchmarkResult:
    """The bundle at 2 ms, ONNX Runtime at 1 ms, PyTorch not measured."""
    point = _point({}, {"tvm": _rounds(2, 2), "onnxruntime": _rounds(1, 1)}, _SIZE)
    return BenchmarkResult(runs=6, threads=1, points=(point,))


@pytest.fixture
def failures(result: BenchmarkResult, tmp_path: Path) -> Callable[..., list[str]]:
    """What these gates say of the result."""
    inputs = [{"name": "x", "shape": [1]}]

    def judge(**gates: Any) -> list[str]:
        spec = parse({"name": "m", "model": {"factory": "m:m"}, "inputs": inputs, "gates": gates}, tmp_path)
        bundle = Artifact(sha256="0" * 64, size=_SIZE["tvm"], name="m.tar.gz")
        return gate_failures(spec.gates, result, bundle, resolve("x86-64-v2"))

    return judge


def test_the_figures_are_over_all_rounds() -> None:
    rounds = [
        Round(seconds=tuple(value / 1e3 for value in values), load_seconds=load, peak_memory=peak)
        for values, load, peak in (((1, 2, 3), 0.5, 10), ((4, 5, 6), 0.0, 30))
    ]
    measured = _point({}, {"tvm": rounds}, _SIZE).runners["tvm"]
    assert measured.latency_ms.mean == pytest.approx(3.5)
    assert measured.latency_ms.p50 == pytest.approx(3.5)
    assert measured.latency_ms.min == pytest.approx(1.0)
    assert measured.latency_ms.throughput == pytest.approx(1e3 / 3.5)
    assert measured.total_seconds == pytest.approx(21e-3)
    assert (measured.load_seconds, measured.peak_memory, measured.size) == (0.5, 30, _SIZE["tvm"])


@pytest.mark.parametrize(("runs", "has_p90", "has_p99"), [(63, False, False), (64, True, False), (662, True, True)])
def test_a_percentile_needs_enough_runs(runs: int, has_p90: bool, has_p99: bool) -> None:
    rounds = [Round(seconds=(1e-3,) * runs, load_seconds=1.0, peak_memory=10)]
    latency = _point({}, {"tvm": rounds}, _SIZE).runners["tvm"].latency_ms
    assert (latency.p90, latency.p99) == (1.0 if has_p90 else None, 1.0 if has_p99 else None)


def test_the_ratio_is_the_bundle_s_median_over_the_peer_s(result: BenchmarkResult) -> None:
    assert result.typical.ratio == {"onnxruntime": pytest.approx(2.0)}


def test_the_noise_is_the_largest_difference_between_rounds() -> None:
    assert _point({}, {"tvm": _rounds(1.0, 1.1, 0.9)}, _SIZE).noise == pytest.approx(0.2)


def test_gates_that_are_kept_or_not_set_say_nothing(failures: Callable[..., list[str]]) -> None:
    assert failures() == []
    assert failures(max_latency_ms=2.5, max_ratio_onnxruntime=2.5, max_bundle_mb=2) == []


@pytest.mark.parametrize(
    ("gate", "bound", "said"),
    [
        ("max_latency_ms", 1.5, "p50 latency in ms is 2, gate max_latency_ms allows 1.5"),
        ("max_ratio_onnxruntime", 1, "latency over ONNX Runtime's is 2, gate max_ratio_onnxruntime allows 1"),
        ("max_bundle_mb", 1.9, "bundle size in MB is 2, gate max_bundle_mb allows 1.9"),
    ],
)
def test_a_gate_that_is_not_kept_is_reported_with_both_figures(
    failures: Callable[..., list[str]], gate: str, bound: float, said: str
) -> None:
    assert failures(**{gate: bound}) == [f"target 'x86-64-v2': {said}"]


def test_every_gate_that_is_not_kept_is_reported(failures: Callable[..., list[str]]) -> None:
    assert len(failures(max_latency_ms=1, max_bundle_mb=1)) == 2


def test_a_gate_against_a_peer_that_was_not_measured_cannot_be_checked(failures: Callable[..., list[str]]) -> None:
    with pytest.raises(VerdictError, match=r"max_ratio_pytorch cannot be checked: add the peer to benchmark\.peers"):
        failures(max_ratio_pytorch=1)
