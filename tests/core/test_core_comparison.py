"""Comparisons: how often a verdict is wrong, when it stops, where a warm-up ends, and what a percentile needs."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from support.scale import count
from tvmflow.comparison import Comparison, Conditions, Interval, Pair, Plan, compare, find_drop, find_steady, percentile
from tvmflow.comparison.pairs import Samples, read_samples, write_samples
from tvmflow.comparison.plan import Verdict, ranks
from tvmflow.comparison.samples import runs_needed
from tvmflow.documents.figures import Answers

Noise = Callable[[np.random.Generator], float]
_CONDITIONS = Conditions(processor="any", cores=(0,), threads=(1, 1), load=(0.0, 0.0))

NOISES: dict[str, Noise] = {
    "normal": lambda random: random.normal(0, 0.015),
    "heavy tails": lambda random: 0.01 * random.standard_t(2),
    "two placements of memory": lambda random: random.choice([-0.03, 0.03]) + random.normal(0, 0.01),
    "the candidate's alone, and skewed": lambda random: random.exponential(0.02) - 0.02 * math.log(2),
}


def _pair(ratio: float) -> Pair:
    """A pair of one run each."""
    return Pair.of(Samples(candidate=(ratio,), baseline=(1.0,), reference=(1.0,)))


def _verdict(plan: Plan, bound: float, ratio: float, noise: Noise, seed: int) -> Verdict:
    """The verdict on a candidate whose true ratio is `ratio`."""
    random = np.random.default_rng(seed)
    ratios = [ratio * math.exp(noise(random)) for _ in range(plan.budget)]
    verdicts = (plan.interval(ratios[:look]).judge(bound) for look in plan.looks)
    return next((verdict for verdict in verdicts if verdict != "undecided"), "undecided")


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_ratio_at_the_bound_is_decided_as_seldom_as_the_plan_says(noise: Noise) -> None:
    plan, trials = Plan.up_to(40, error=0.1), count(normal=200, long=4000)
    verdicts = [_verdict(plan, 1.0, 1.0, noise, seed) for seed in range(trials)]
    wrong = [verdict for verdict in verdicts if verdict != "undecided"]
    # Three deviations above the error, which no interval that is looked at naively stays below.
    assert len(wrong) <= trials * 0.1 + 3 * math.sqrt(trials * 0.1 * 0.9)


def test_an_interval_that_is_naive_about_its_looks_would_be_wrong_more_often() -> None:
    looks, error = Plan.up_to(150, error=0.1).looks, 0.1
    alone = [ranks((look,), error)[0] for look in looks]
    together = ranks(looks, error)
    assert all(rank <= other for rank, other in zip(together, alone, strict=True))
    assert together[-1] < alone[-1]


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "pass"), (1.05, "fail"), (1.1, "fail"), (0.5, "pass")])
@pytest.mark.parametrize("noise", list(NOISES.values())[:2], ids=list(NOISES)[:2])
def test_a_ratio_away_from_the_bound_is_decided(noise: Noise, ratio: float, verdict: Verdict) -> None:
    plan = Plan.up_to(150)
    verdicts = [_verdict(plan, 1.02, ratio, noise, seed) for seed in range(count(normal=12, long=250))]
    assert set(verdicts) == {verdict}


def test_the_first_look_can_decide_and_the_last_one_is_the_budget() -> None:
    for budget in (12, 40, 150):
        looks = Plan.up_to(budget).looks
        assert looks[0] <= 13
        assert looks[-1] == budget
        assert list(looks) == sorted(set(looks))
        assert ranks(looks, 0.01)[0] == 1


def test_too_few_pairs_decide_nothing() -> None:
    assert Plan.up_to(5).interval([2.0] * 5) == Interval(low=0.0, high=math.inf)
    assert Plan.up_to(40).interval([2.0] * 11).judge(1.0) == "undecided"
    assert str(Plan.up_to(40).interval([])) == "unknown"


def test_a_comparison_stops_at_the_first_clear_interval() -> None:
    plan = Plan.up_to(100)
    assert len(compare(plan, {"a": (1.0,)}, lambda index: {"a": _pair(2.0)})["a"]) == plan.looks[0]
    assert len(compare(plan, {"a": (1.0, 2.0)}, lambda index: {"a": _pair((1.9, 2.1)[index % 2])})["a"]) == 100
    assert len(compare(plan, {"a": ()}, lambda index: {"a": _pair(2.0)})["a"]) == 100


def test_a_comparison_with_two_baselines_goes_on_until_both_are_decided() -> None:
    def measure(index: int) -> dict[str, Pair]:
        return {"clear": _pair(2.0), "close": _pair(0.9 if index % 8 == 0 else 2.0)}

    plan = Plan.up_to(100)
    pairs = compare(plan, {"clear": (1.0,), "close": (1.0,)}, measure)
    assert plan.looks[0] < len(pairs["close"]) == len(pairs["clear"]) < 100
    assert len(compare(plan, {"clear": (1.0,), "close": ()}, measure)["close"]) == plan.looks[0]


def test_progress_counts_up_to_the_budget() -> None:
    counts: list[tuple[int, int]] = []
    compare(
        Plan.up_to(12), {"a": ()}, lambda index: {"a": _pair(1.0)}, lambda done, budget: counts.append((done, budget))
    )
    assert counts == [(done, 12) for done in range(12)]


def test_an_undecided_comparison_says_how_many_pairs_it_takes() -> None:
    random = np.random.default_rng(1)
    ratios, plan = [0.98] * 16 + [1.02] * 24, Plan.up_to(40)
    pairs = plan.pairs_needed(ratios, 1.0)
    assert pairs is not None
    draws = [list(random.choice([0.98, 1.02], pairs, p=[0.4, 0.6])) for _ in range(count(normal=40, long=400))]
    decided = [Plan(looks=(pairs,)).interval(each).judge(1.0) for each in draws].count("fail")
    assert 0.75 * len(draws) < decided < len(draws)
    at_the_bound = _comparison(plan, [0.99, 1.01] * 20)
    assert at_the_bound.describe_lack(1.0) == "no number of pairs tells this ratio from 1"
    assert _comparison(plan, ratios).describe_lack(1.0) == f"about {pairs} pairs would decide, the budget is 40"


def _comparison(plan: Plan, ratios: list[float]) -> Comparison:
    pairs = [_pair(ratio) for ratio in ratios]
    return Comparison(plan=plan, pairs=tuple(pairs), conditions=_CONDITIONS)


def test_a_comparison_in_words_has_ratio_interval_and_both_times() -> None:
    comparison = _comparison(Plan.up_to(12), [1.0, 1.1, 1.2] * 4)
    sentence = comparison.describe("the new one's", "the old one's")
    assert sentence == (
        "the new one's latency is 1.100 (1.000 to 1.200) of the old one's (1100.000 ms beside 1000.000 ms, 12 pairs)"
    )


def test_a_machine_whose_clock_or_neighbours_change_is_noticed() -> None:
    steady, uneven = (
        [Pair.of(Samples(candidate=(1.0,), baseline=(1.0,), reference=(kernel,))) for kernel in kernels]
        for kernels in ((1.0, 1.01) * 10, (1.0,) * 15 + (1.4,) * 5)
    )
    plan = Plan.up_to(20)
    one, other = (Comparison(plan=plan, pairs=tuple(pairs), conditions=_CONDITIONS) for pairs in (steady, uneven))
    assert "uneven" not in one.describe("a", "b")
    assert "the machine was uneven: a fixed kernel took 1.40 times as long at times" in other.describe("a", "b")


@pytest.mark.parametrize("warmup", [0, 10, 40, 80])
def test_the_warm_up_is_told_by_the_data(warmup: int) -> None:
    random = np.random.default_rng(warmup)
    times = 1 + 0.02 * random.standard_exponential(200)
    times[:warmup] *= np.linspace(3, 1.5, warmup)
    times[100] = 50.0  # One run that the system interrupted is no warm-up.
    steady = find_steady(list(times))
    assert warmup <= steady <= warmup + 30


def test_few_runs_have_no_warm_up() -> None:
    assert find_steady([9.0, 1.0, 1.0, 1.0, 1.0]) == 0


def test_the_warm_up_of_either_side_is_left_out_of_both() -> None:
    slow_start = (5.0,) * 40 + (2.0,) * 60
    pair = Pair.of(Samples(candidate=(1.0,) * 100, baseline=slow_start, reference=(1.0,)))
    assert (pair.ratio, pair.warmup, pair.runs) == (0.5, 40, 60)


def test_every_load_has_a_warm_up_of_its_own() -> None:
    load = (5.0,) * 40 + (2.0,) * 60
    pair = Pair.of(Samples(candidate=(1.0,) * 200, baseline=load * 2, reference=(1.0,), loads=(100, 100)))
    assert (pair.ratio, pair.warmup, pair.runs) == (0.5, 80, 120)


@pytest.mark.parametrize(("lost", "won"), [(0.1, 0.1), (0.02, 0.0), (0.3, 0.05)])
def test_a_drop_lies_in_its_interval_as_often_as_it_says(lost: float, won: float) -> None:
    random, trials = np.random.default_rng(0), count(normal=30, long=2000)
    draws = random.multinomial(360, (lost, won, 1 - lost - won), trials)
    intervals = [find_drop(int(first), int(second), 360, error=0.1) for first, second, _ in draws]
    misses = sum(not interval.low <= lost - won <= interval.high for interval in intervals)
    assert misses <= trials * 0.1 + 3 * math.sqrt(trials * 0.1 * 0.9)


def test_the_interval_of_a_drop_of_nothing_is_as_wide_as_the_data_are_few() -> None:
    few, many = find_drop(0, 0, 100), find_drop(0, 0, 10_000)
    assert (few.low, many.low) == (-few.high, -many.high)
    assert few.high > 0.05 > 0.001 > many.high > 0


@pytest.mark.parametrize("size", [1, 8, 1001])
def test_answers_are_read_as_they_were_written(size: int) -> None:
    is_right = np.random.default_rng(size).random(size) < 0.9
    answers = Answers.of(is_right, "a")
    assert answers is not None
    assert (answers.is_right() == is_right).all()
    for change in ({"count": size + 8}, {"bits": "!"}, {"bits": "AAAA"}):
        with pytest.raises(ValidationError):
            Answers.model_validate({**answers.model_dump(), **change})


def test_too_many_answers_are_not_kept() -> None:
    assert Answers.of(np.ones(1 << 17, bool), "a") is not None
    assert Answers.of(np.ones((1 << 17) + 1, bool), "a") is None


def test_percentiles_need_as_many_runs_as_mlperf_asks_for() -> None:
    assert [runs_needed(which) for which in (50, 90, 99)] == [11, 64, 662]


@pytest.mark.parametrize("which", [-1, 100, 101])
def test_a_percentile_that_no_number_of_runs_reaches_is_refused(which: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        runs_needed(which)
    assert percentile([1.0] * 63, 90) is None
    assert percentile([1.0] * 64, 90) == 1.0


def test_the_verdict_from_kept_samples_is_the_same(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    samples = [
        Samples(
            **{
                name: tuple(random.random(20).astype(np.float32).tolist())
                for name in ("candidate", "baseline", "reference")
            },
            loads=(12, 8),
        )
        for _ in range(12)
    ]
    write_samples(tmp_path / "samples.npz", samples)
    assert read_samples(tmp_path / "samples.npz") == samples


@pytest.mark.parametrize("names", [("a",), ("0.candidate", "0.baseline", "1.reference")])
def test_a_file_of_other_arrays_holds_no_samples(tmp_path: Path, names: tuple[str, ...]) -> None:
    np.savez(tmp_path / "samples.npz", **dict.fromkeys(names, np.ones(1)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not hold the times of a comparison"):
        read_samples(tmp_path / "samples.npz")


@pytest.mark.parametrize("budget", [1, 7, 8, 25, 150])
def test_pairs_are_missing_exactly_while_there_is_no_interval(budget: int) -> None:
    plan = Plan.up_to(budget)
    for pairs in range(budget + 1):
        is_unknown = str(plan.interval([1.0] * pairs)) == "unknown"
        assert (plan.pairs_missing(pairs) > 0) == is_unknown
    assert plan.pairs_missing(0) >= 8
    enough = Plan.up_to(plan.pairs_missing(0))
    assert budget >= 8 or str(enough.interval([1.0] * 8)) == "1.000 to 1.000"
