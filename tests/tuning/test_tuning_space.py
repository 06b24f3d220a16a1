"""What the tuners propose."""

import pytest
from tvm.tirx import PrimFunc

from tvmflow.target import Target
from tvmflow.tuning import TunerName
from tvmflow.tuning.records import normalize
from tvmflow.tuning.space import TUNERS, make_cost_model, make_search


def propose(func: PrimFunc, target: Target, tuner: TunerName, seed: int, rounds: int = 2) -> list[str]:
    """The traces of some rounds whose results are made up, so that they are the same each time."""
    cost_model = make_cost_model(tuner, seed=seed, threads=1)
    search = make_search(normalize(func), target.canonical, tuner, batch=4, seed=seed, cost_model=cost_model)
    traces: list[str] = []
    for _ in range(rounds):
        proposals = search.propose()
        search.tell(proposals, [1e-3 * (index + 1) for index in range(len(proposals))])
        traces += [proposal.trace for proposal in proposals]
    return traces


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_seed_makes_proposals_repeatable(matmul: PrimFunc, native: Target, tuner: TunerName) -> None:
    assert propose(matmul, native, tuner, seed=7) == propose(matmul, native, tuner, seed=7)


@pytest.mark.parametrize("tuner", TUNERS)
def test_another_seed_makes_other_proposals(matmul: PrimFunc, native: Target, tuner: TunerName) -> None:
    assert propose(matmul, native, tuner, seed=7, rounds=1) != propose(matmul, native, tuner, seed=8, rounds=1)


@pytest.mark.parametrize("tuner", TUNERS)
def test_nothing_is_proposed_twice(conv: PrimFunc, native: Target, tuner: TunerName) -> None:
    traces = propose(conv, native, tuner, seed=7, rounds=3)
    assert len(traces) >= 8
    assert len(set(traces)) == len(traces)


@pytest.mark.parametrize("tuner", ["random", "grid"])
def test_a_small_space_comes_to_an_end(elementwise: PrimFunc, native: Target, tuner: TunerName) -> None:
    search = make_search(normalize(elementwise), native.canonical, tuner, batch=16, seed=7, cost_model=None)
    rounds = 0
    while search.propose():
        rounds += 1
        assert rounds < 100
