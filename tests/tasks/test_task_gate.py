"""The gates on a release's figures: what is compared, and what cannot be."""

from typing import Any

import numpy as np
import pytest

from support.releases import make_compared, make_measurements, make_release, make_target, make_verdict
from tasks.gate import GateJob, check_figures, check_ratio, decide_again
from tvmflow.comparison import Comparison, Conditions, Interval, Pair, Plan, find_drop
from tvmflow.comparison.pairs import Samples
from tvmflow.documents.figures import Answers
from tvmflow.documents.release import Blob, Release
from tvmflow.documents.verdict import Check
from tvmflow.promotion.policies import EffectivePolicy
from tvmflow.spec import Policy
from tvmflow.spec.channels import ChannelGates
from tvmflow.store.channel_document import Channel

NEW = Channel(name="m", channel="production")
HELD = Channel(name="m", channel="production", number=1, version="1")


def release(version: str, *metrics: float | None, p50: float | None = None) -> Release:
    """A release with the task metric of each target, and a p50 latency in ms where they were measured."""
    measurements = None if p50 is None else make_measurements(p50)
    targets = (
        make_target(f"t{index}", metric=metric, measurements=measurements) for index, metric in enumerate(metrics)
    )
    return make_release("m", version, *targets)


def judged(new: Release, current: Release | None, destination: Channel = NEW, **gates: float) -> Check:
    """The one gate's check of a release on its way to production."""
    policy = EffectivePolicy(Policy.model_validate({"gates": gates}))
    job = GateJob(release=new, destination=destination, policy=policy, current=current)
    (check,) = check_figures(job)
    return check


@pytest.mark.parametrize(("metric", "passes"), [(0.9, True), (0.85, True), (0.84, False)])
def test_a_metric_may_drop_by_as_much_as_the_gate_allows(metric: float, passes: bool) -> None:
    check = judged(release("2", metric), release("1", 0.95), HELD, max_metric_drop=0.1)
    assert (check.passed, check.value) == (passes, metric)


def test_the_target_that_scores_least_is_compared() -> None:
    check = judged(release("2", 0.95, 0.8), release("1", 0.9), HELD, max_metric_drop=0.05)
    assert (check.passed, check.value) == (False, 0.8)


def _answered(version: str, right: int, data: str = "a") -> Release:
    """A release whose target answers the first `right` of 1000 questions rightly."""
    is_right = np.arange(1000) < right
    verdict = make_verdict(right / 1000).model_copy(update={"answers": Answers.of(is_right, data)})
    return make_release("m", version, make_target(verdict=verdict))


def test_a_drop_has_the_interval_of_the_answers_that_changed() -> None:
    check = judged(_answered("2", 900), _answered("1", 940), HELD, max_metric_drop=0.05)
    assert check.passed
    assert check.interval == find_drop(40, 0, 1000)
    assert check.message.endswith("of 1000 answers 40 became wrong and 0 right: a drop of 0.019 to 0.061")


def test_answers_to_other_questions_are_not_compared() -> None:
    check = judged(_answered("2", 900, "b"), _answered("1", 940, "a"), HELD, max_metric_drop=0.05)
    assert (check.passed, check.interval) == (True, None)


@pytest.mark.parametrize(
    ("current", "destination", "why"),
    [
        (None, NEW, "production holds nothing"),
        (None, HELD, "1, which production holds, is gone from the store"),
        (release("1", None), HELD, "1 on production has none"),
    ],
)
def test_without_anything_to_compare_with_a_drop_passes_and_says_so(
    current: Any, destination: Channel, why: str
) -> None:
    check = judged(release("2", 0.1), current, destination, max_metric_drop=0.0)
    assert check.passed
    assert check.message == f"there is no task metric to compare with: {why}"


@pytest.mark.parametrize("gates", [{"min_metric": 0.5}, {"max_metric_drop": 0.5}])
def test_a_release_without_a_metric_does_not_pass_a_gate_on_it(gates: dict[str, float]) -> None:
    check = judged(release("2", None), release("1", 0.9), HELD, **gates)
    assert not check.passed
    assert "cannot be checked: the release has no task metric; add validate.task" in check.message


# The target's bundle has 8 bytes and was run at 3 ms, loaded in 250 ms and took 123,456 bytes; 0.996 agree.
FIGURES = [
    ("max_latency_ms", 3.0, 2.9, "p50 latency was 3 ms, gate max_latency_ms allows 2.9"),
    ("min_throughput", 333.0, 334.0, "333.3 runs/s, gate min_throughput asks for 334"),
    ("max_load_ms", 250.0, 249.0, "loaded in 250 ms, gate max_load_ms allows 249"),
    ("max_memory_mb", 124.0, 123.0, "its process took 123.5 MB, gate max_memory_mb allows 123"),
    ("max_bundle_mb", 8e-6, 7e-6, "the bundle has 8e-06 MB, gate max_bundle_mb allows 7e-06"),
    (
        "max_relative_error",
        1e-5,
        1e-9,
        "an output is off by 1.00e-06 of its largest value, gate max_relative_error allows 1e-09",
    ),
    (
        "min_top1_agreement",
        0.996,
        0.997,
        "original's in 99.6000% of the samples, gate min_top1_agreement asks for 0.997",
    ),
]


@pytest.mark.parametrize(("gate", "enough", "short", "end"), FIGURES)
def test_a_figure_is_that_of_the_release(gate: str, enough: float, short: float, end: str) -> None:
    assert judged(release("2", None, p50=3.0), None, **{gate: enough}).passed
    check = judged(release("2", None, p50=3.0), None, **{gate: short})
    assert not check.passed
    assert check.message.startswith("target 't0': ")
    assert check.message.endswith(end)


def test_every_gate_on_a_figure_is_checked() -> None:
    decided_elsewhere = {
        "max_ratio_onnxruntime",
        "max_ratio_pytorch",
        "max_ratio_current",
        "max_metric_drop",
        "min_metric",
        "max_vulnerabilities",
    }
    assert {gate for gate, *_ in FIGURES} == ChannelGates.model_fields.keys() - decided_elsewhere


@pytest.mark.parametrize(
    ("rounds", "bound", "passed", "words"),
    [
        (25, 0.92, True, "latency is 0.900 (0.900 to 0.900) of ONNX Runtime's"),
        (25, 0.88, False, "gate max_ratio_onnxruntime allows 0.88"),
        (3, 2.0, False, "undecided"),
    ],
)
def test_a_ratio_to_a_peer_is_decided_by_its_interval(rounds: int, bound: float, passed: bool, words: str) -> None:
    check = judged(make_compared("2", 0.9, rounds=rounds), None, max_ratio_onnxruntime=bound)
    assert (check.passed, check.value, check.bound) == (passed, pytest.approx(0.9), bound)
    assert words in check.message


def test_a_ratio_to_a_peer_that_was_not_measured_does_not_pass() -> None:
    check = judged(make_compared("2", 0.9), None, max_ratio_pytorch=9.0)
    assert not check.passed
    assert "cannot be checked: no target was measured beside it; add pytorch" in check.message


def test_weights_that_are_kept_apart_count_as_size() -> None:
    target = make_target(size=8, weights=Blob(sha256="1" * 64, size=2_000_000))
    check = judged(make_release("m", "2", target), None, max_bundle_mb=1)
    assert (check.passed, check.value) == (False, 2.000008)


def test_an_agreement_that_no_target_has_does_not_pass() -> None:
    target = make_target(verdict=make_verdict().model_copy(update={"comparisons": ()}))
    check = judged(make_release("m", "2", target), None, min_top1_agreement=0.0)
    assert not check.passed
    assert "cannot be checked: no target was compared" in check.message


def test_a_latency_that_was_never_measured_does_not_pass() -> None:
    check = judged(release("2", 0.9), None, max_latency_ms=1e9)
    assert not check.passed
    assert "no target was measured" in check.message


@pytest.mark.parametrize(
    ("ratios", "passes", "end"),
    [
        ([0.99, 1.0, 1.01] * 4, True, "gate max_ratio_current allows 1.02"),
        ([1.03, 1.05] * 6, False, "gate max_ratio_current allows 1.02"),
        ([1.0] * 5 + [1.05] * 7, False, "undecided, about 624 pairs would decide, the budget is 12"),
    ],
)
def test_a_ratio_passes_when_its_whole_interval_is_below_the_bound(ratios: list[float], passes: bool, end: str) -> None:
    pairs = tuple(Pair(candidate=ratio, baseline=1.0, ratio=ratio, runs=1, warmup=0, reference=1.0) for ratio in ratios)
    conditions = Conditions(processor="any", cores=(0,), threads=(1, 1), load=(0.0, 0.0))
    comparison = Comparison(plan=Plan.up_to(12), pairs=pairs, conditions=conditions)
    check = check_ratio(comparison, "the new one's", "the old one's", 1.02)
    assert (check.passed, check.interval, check.value) == (passes, comparison.interval, comparison.ratio)
    assert check.message.endswith(end)
    assert decide_again(Check.model_validate_json(check.model_dump_json())) == check
    assert decide_again(check.model_copy(update={"passed": not passes})).passed == passes
    slow = [Samples(candidate=(2.0,) * 3, baseline=(1.0,) * 3, reference=(1.0,))] * 12
    assert decide_again(check, slow).interval == Interval(low=2.0, high=2.0)
    assert not decide_again(check, slow).passed
