"""Decisions of the compiler, measured: which option is taken, which is passed over, and what a later run does."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import tvm
from tvm.tirx import PrimFunc

from support.measurers import GivenSeconds
from tvmflow.compiler.choices import Site
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import schedule
from tvmflow.hardware.target import Target, resolve
from tvmflow.tuning import RecordStore
from tvmflow.tuning.candidates import Candidate
from tvmflow.tuning.decisions import Function, Lower, TrialCount, decide
from tvmflow.tuning.records import decisions_key
from tvmflow.tuning.traces import normalize

Decide = Callable[..., TrialCount]


@pytest.fixture(scope="module")
def functions(matmul: PrimFunc, native: Target) -> dict[str, Function]:
    """One function as two options schedule it: as it is, and by the rules."""
    scheduled = {
        "plain": matmul.with_attr("tirx.is_scheduled", True),
        "rules": schedule(matmul, machine(native))[0],
    }
    return {option: Function("f", matmul, func, "product", 1) for option, func in scheduled.items()}


@pytest.fixture
def decide_between(functions: dict[str, Function], native: Target, store: RecordStore) -> Decide:
    """Decide one site whose options take the given seconds; what is lowered is appended to `lowered`."""
    texts = {tvm.ir.save_json(normalize(function.scheduled)): option for option, function in functions.items()}

    def run(
        site: Site,
        seconds: Mapping[str, float],
        wrong: str | None = None,
        trials: int | None = None,
        lowered: list[dict[str, str]] | None = None,
    ) -> TrialCount:
        def lower(options: Mapping[str, str]) -> tuple[Mapping[str, Site], Sequence[Function]]:
            if lowered is not None:
                lowered.append(dict(options))
            return {site.key: site}, [functions[options.get(site.key, site.options[0])]]

        def option_of(candidate: Candidate) -> str:
            return texts.get(candidate.func, "unscheduled")

        measurer = GivenSeconds(
            lambda candidate, _: seconds[option_of(candidate)], lambda candidate: option_of(candidate) != wrong
        )
        return run_decide(lower, measurer, trials)

    def run_decide(lower: Lower, measurer: GivenSeconds, trials: int | None) -> TrialCount:
        return decide(
            lower,
            native,
            RecordStore(store.folder),
            trials=trials,
            seconds=None,
            threads=1,
            on_progress=lambda message: None,
            measurer=measurer,
        )

    return run


@pytest.mark.parametrize("kind", ["rows", "block"])
def test_a_faster_option_is_taken_and_not_measured_again(
    kind: str, decide_between: Decide, native: Target, store: RecordStore
) -> None:
    site = Site(kind, "product", ("plain", "rules"))
    assert decide_between(site, {"plain": 2.0, "rules": 1.0}) == TrialCount(2, 0)
    decision = store.decisions(native)[site.key]
    assert (decision.option, decision.default) == ("rules", "plain")
    assert (decision.seconds, decision.default_seconds) == (1.0, 2.0)

    # Nothing is left to decide: the model is lowered to see that, and nothing is measured.
    lowered: list[dict[str, str]] = []
    assert decide_between(site, {}, lowered=lowered) == TrialCount(0, 2)
    assert lowered == [{}]


@pytest.mark.parametrize("seconds", [2.0, 0.98])
def test_the_default_stays_where_the_other_option_is_not_clearly_faster(
    seconds: float, decide_between: Decide, native: Target, store: RecordStore
) -> None:
    site = Site("algorithm", "product", ("plain", "rules"))
    decide_between(site, {"plain": 1.0, "rules": seconds})
    assert store.decisions(native)[site.key].option == "plain"


def test_an_option_with_wrong_results_is_passed_over(
    decide_between: Decide, native: Target, store: RecordStore
) -> None:
    site = Site("rows", "product", ("plain", "rules"))
    decide_between(site, {"plain": 2.0, "rules": 1.0}, wrong="rules")
    assert store.decisions(native)[site.key].option == "plain"


def test_trials_are_a_budget_that_earlier_runs_count_towards(
    decide_between: Decide, native: Target, store: RecordStore
) -> None:
    site, seconds = Site("rows", "product", ("plain", "rules")), {"plain": 2.0, "rules": 1.0}
    assert decide_between(site, seconds, trials=0) == TrialCount(0, 0)
    assert decide_between(site, seconds, trials=1) == TrialCount(1, 0)
    assert not store.decisions(native)
    assert decide_between(site, seconds, trials=1) == TrialCount(0, 1)
    assert [effort.key for effort in store.efforts(native) if effort.is_on_decisions] == [decisions_key([site.key])]


def test_options_are_built_run_and_checked_on_this_machine(
    functions: dict[str, Function], native: Target, store: RecordStore
) -> None:
    site = Site("rows", "product", ("plain", "rules"))

    def lower(options: Mapping[str, str]) -> tuple[Mapping[str, Site], Sequence[Function]]:
        return {site.key: site}, [functions[options.get(site.key, site.options[0])]]

    count = decide(lower, native, store, trials=None, seconds=None, threads=1, on_progress=lambda message: None)
    assert count == TrialCount(2, 0)
    decision = store.decisions(native)[site.key]
    assert decision.seconds > 0
    assert decision.default_seconds > 0


def test_nothing_is_decided_for_a_machine_that_is_not_this_one(store: RecordStore) -> None:
    def lower(options: Mapping[str, str]) -> tuple[Mapping[str, Site], Sequence[Function]]:
        raise AssertionError("nothing is to be lowered")

    count = decide(
        lower,
        resolve("aarch64-generic"),
        store,
        trials=None,
        seconds=None,
        threads=1,
        on_progress=lambda message: None,
    )
    assert count == TrialCount(0, 0)
