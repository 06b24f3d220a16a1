"""The figures of a benchmark, and gates: what the release file allows against what was measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.benchmark import BenchmarkResult, Measurement, Runner, _concurrency, _point, _split, gate_failures
from tasks.turns import Round, Turn
from tvmflow.comparison import Comparison, Conditions, Plan
from tvmflow.errors import VerdictError
from tvmflow.hardware.target import resolve
from tvmflow.spec import parse
from tvmflow.workspace import Artifact

_SIZE: dict[Runner, int] = {"tvm": 2_000_000, "onnxruntime": 1, "pytorch": 1}


def _turn(*milliseconds: float, load: float = 1.0, peak: int = 10) -> Turn:
    return Turn(seconds=tuple(value / 1e3 for value in milliseconds), load_seconds=load, peak_memory=peak)


def _round(**milliseconds: float) -> Round[Runner]:
    """A round of two turns of three runs of the same length for each runner."""
    turns = {(0, name): [_turn(*(value,) * 3)] * 2 for name, value in milliseconds.items()}
    return Round(turns, (1.0,))  # type: ignore[arg-type]


def _bundle_alone(*turns: Turn) -> Measurement:
    """The figures of the bundle, from rounds of one turn each."""
    rounds = [Round({(0, "tvm"): [turn]}, (1.0,)) for turn in turns]
    return _point({}, 0, rounds, (), _SIZE).runners["tvm"]


@pytest.fixture
def result() -> BenchmarkResult:
    """The bundle at 2 ms, ONNX Runtime at 1 ms in twelve rounds, PyTorch not measured."""
    rounds = [_round(tvm=2, onnxruntime=1)] * 12
    conditions = Conditions(processor="any", cores=(0,), threads=(1, 1), load=(0.0, 0.0))
    pairs = tuple(each.pair("tvm", "onnxruntime") for each in rounds)
    comparison = Comparison(plan=Plan.up_to(12), pairs=pairs, conditions=conditions)
    point = _point({}, 0, rounds, ("onnxruntime",), _SIZE)
    return BenchmarkResult(runs=6, threads=1, points=(point,), comparisons={"onnxruntime": comparison})


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
    figures = _bundle_alone(_turn(1, 2, 3, load=0.5, peak=10), _turn(4, 5, 6, load=0.1, peak=30))
    assert figures.latency_ms.mean == pytest.approx(3.5)
    assert figures.latency_ms.p50 == pytest.approx(3.5)
    assert figures.latency_ms.min == pytest.approx(1.0)
    assert figures.latency_ms.throughput == pytest.approx(1e3 / 3.5)
    assert figures.total_seconds == pytest.approx(21e-3)
    assert figures.load_seconds == pytest.approx(0.3)
    assert (figures.peak_memory, figures.size) == (30, _SIZE["tvm"])
    assert (figures.loads, figures.peaks) == ((0.5, 0.1), (10, 30))


@pytest.mark.parametrize(("runs", "has_p90", "has_p99"), [(63, False, False), (64, True, False), (662, True, True)])
def test_a_percentile_needs_enough_runs(runs: int, has_p90: bool, has_p99: bool) -> None:
    latency = _bundle_alone(_turn(*(1,) * runs)).latency_ms
    assert (latency.p90, latency.p99) == (1.0 if has_p90 else None, 1.0 if has_p99 else None)


def test_a_first_run_and_the_energy_of_a_round_are_kept() -> None:
    turns = [
        _turn(1.0).model_copy(update={"first_seconds": seconds, "joules": joules})
        for seconds, joules in ((0.5, 0.25), (0.75, None))
    ]
    measurement = _bundle_alone(*turns)
    assert (measurement.firsts, measurement.joules) == ((0.5, 0.75), (0.25,))


def test_the_throughput_of_callers_is_that_of_all() -> None:
    turns = [_turn(*(1,) * 12).model_copy(update={"wall_seconds": wall}) for wall in (2.0, 4.0, 3.0)]
    concurrency = _concurrency(3, [Round({}, (), {(3, "tvm"): turn}) for turn in turns], ("tvm",))
    assert (concurrency.callers, concurrency.runs, concurrency.runners["tvm"].throughput) == (3, 36, 4.0)


@pytest.mark.parametrize(("repeats", "turns"), [(1, [1]), (4, [1, 1, 1, 1]), (5, [1] * 5), (52, [11, 11, 10, 10, 10])])
def test_the_runs_of_a_round_are_split_into_turns(repeats: int, turns: list[int]) -> None:
    assert _split(repeats) == turns


def test_the_ratio_is_the_bundle_s_median_over_the_peer_s(result: BenchmarkResult) -> None:
    assert result.typical.ratio == {"onnxruntime": pytest.approx(2.0)}


def test_the_noise_is_the_largest_difference_between_rounds() -> None:
    rounds = [_round(tvm=value) for value in (1.0, 1.1, 0.9)]
    assert _point({}, 0, rounds, (), _SIZE).noise == pytest.approx(0.2)


def test_gates_that_are_kept_or_not_set_say_nothing(failures: Callable[..., list[str]]) -> None:
    assert failures() == []
    assert failures(max_latency_ms=2.5, max_ratio_onnxruntime=2.5, max_bundle_mb=2) == []


@pytest.mark.parametrize(
    ("gate", "bound", "reason"),
    [
        ("max_latency_ms", 1.5, "p50 latency in ms is 2, gate max_latency_ms allows 1.5"),
        ("max_bundle_mb", 1.9, "bundle size in MB is 2, gate max_bundle_mb allows 1.9"),
    ],
)
def test_a_gate_that_is_not_kept_is_reported_with_both_figures(
    failures: Callable[..., list[str]], gate: str, bound: float, reason: str
) -> None:
    assert failures(**{gate: bound}) == [f"target 'x86-64-v2': {reason}"]


def test_a_ratio_is_refused_with_its_interval(failures: Callable[..., list[str]]) -> None:
    assert failures(max_ratio_onnxruntime=2) == []
    assert failures(max_ratio_onnxruntime=1.9) == [
        "target 'x86-64-v2': latency is 2.000 (2.000 to 2.000) of ONNX Runtime's (2.000 ms beside 1.000 ms, 12 pairs), "
        "gate max_ratio_onnxruntime allows 1.9"
    ]


def test_a_ratio_of_too_few_rounds_is_refused_as_undecided(
    failures: Callable[..., list[str]], result: BenchmarkResult
) -> None:
    comparison = result.comparisons["onnxruntime"]
    result.comparisons["onnxruntime"] = comparison.model_copy(update={"pairs": comparison.pairs[:3]})
    (sentence,) = failures(max_ratio_onnxruntime=3)
    assert "is 2.000 (unknown) of ONNX Runtime's" in sentence
    assert "undecided, about" in sentence


def test_every_gate_that_is_not_kept_is_reported(failures: Callable[..., list[str]]) -> None:
    assert len(failures(max_latency_ms=1, max_bundle_mb=1)) == 2


def test_a_gate_against_a_peer_that_was_not_measured_cannot_be_checked(failures: Callable[..., list[str]]) -> None:
    with pytest.raises(VerdictError, match=r"max_ratio_pytorch cannot be checked: add the peer to benchmark\.peers"):
        failures(max_ratio_pytorch=1)
