"""Decisions of the compiler, measured: what is kept, what is passed over, what is remembered."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from tvm.script import from_source
from tvm.tirx import PrimFunc

from tvmflow.compiler.choices import Site
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import schedule
from tvmflow.target import Target, resolve
from tvmflow.tuning import RecordStore
from tvmflow.tuning.decisions import Function, Spent, decide
from tvmflow.tuning.records import decisions_key

Lower = Callable[[Mapping[str, str]], tuple[Mapping[str, Site], Sequence[Function]]]


def _slow(func: PrimFunc) -> PrimFunc:
    return func.with_attr("tirx.is_scheduled", True)


def _wrong(func: PrimFunc, native: Target) -> PrimFunc:
    """Faster than what is right: it sums half of the products."""
    text = schedule(func, machine(native))[0].script()
    half = text.replace("for k in range(T.int64(64))", "for k in range(T.int64(32))")
    assert half != text
    return from_source(half).with_attr("tirx.is_scheduled", True)


def _lower(site: Site, functions: Mapping[str, Sequence[Function]], seen: list[dict[str, str]]) -> Lower:
    def lower(made: Mapping[str, str]) -> tuple[Mapping[str, Site], Sequence[Function]]:
        seen.append(dict(made))
        return {site.key: site}, functions[made.get(site.key, site.options[0])]

    return lower


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path)


def _decide(lower: Lower, native: Target, store: RecordStore, trials: int | None = None) -> Spent:
    return decide(lower, native, store, trials=trials, seconds=None, threads=1, on_progress=lambda told: None)


@pytest.mark.parametrize("kind", ["rows", "block"])
def test_what_is_much_faster_is_decided_and_remembered(
    kind: str, conv: PrimFunc, native: Target, store: RecordStore
) -> None:
    fast, slow = (Function("f", conv, made, "conv", 1) for made in (schedule(conv, machine(native))[0], _slow(conv)))
    site = Site(kind, "conv", ("slow", "fast"))
    seen: list[dict[str, str]] = []
    lower = _lower(site, {"slow": [slow], "fast": [fast]}, seen)
    assert _decide(lower, native, store) == Spent(2, 0)
    decision = store.decisions(native)[site.key]
    assert (decision.option, decision.default) == ("fast", "slow")
    assert 0 < decision.seconds < decision.default_seconds

    # Nothing is left to decide: the model is lowered to see that, and nothing is measured.
    seen.clear()
    assert _decide(lower, native, RecordStore(store.folder)) == Spent(0, 2)
    assert seen == [{}]


def test_the_default_stays_where_the_other_option_is_slower(conv: PrimFunc, native: Target, store: RecordStore) -> None:
    fast, slow = (Function("f", conv, made, "conv", 1) for made in (schedule(conv, machine(native))[0], _slow(conv)))
    site = Site("algorithm", "conv", ("fast", "slow"))
    _decide(_lower(site, {"slow": [slow], "fast": [fast]}, []), native, store)
    assert store.decisions(native)[site.key].option == "fast"


def test_an_option_with_wrong_results_is_passed_over(matmul: PrimFunc, native: Target, store: RecordStore) -> None:
    right, wrong = (Function("f", matmul, made, "product", 1) for made in (_slow(matmul), _wrong(matmul, native)))
    site = Site("rows", "product", ("right", "wrong"))
    _decide(_lower(site, {"right": [right], "wrong": [wrong]}, []), native, store)
    assert store.decisions(native)[site.key].option == "right"


def test_trials_are_a_budget_that_earlier_runs_count_towards(
    conv: PrimFunc, native: Target, store: RecordStore
) -> None:
    fast, slow = (Function("f", conv, made, "conv", 1) for made in (schedule(conv, machine(native))[0], _slow(conv)))
    site = Site("rows", "conv", ("slow", "fast"))
    lower = _lower(site, {"slow": [slow], "fast": [fast]}, [])
    assert _decide(lower, native, store, trials=0) == Spent(0, 0)
    assert _decide(lower, native, store, trials=1) == Spent(1, 0)
    assert not store.decisions(native)
    assert _decide(lower, native, store, trials=1) == Spent(0, 1)
    assert [effort.key for effort in store.efforts(native) if effort.on_decisions] == [decisions_key([site.key])]


def test_nothing_is_decided_for_a_machine_that_is_not_this_one(conv: PrimFunc, store: RecordStore) -> None:
    def lower(made: Mapping[str, str]) -> tuple[Mapping[str, Site], Sequence[Function]]:
        raise AssertionError("nothing is to be lowered")

    assert _decide(lower, resolve("aarch64-generic"), store) == Spent(0, 0)
