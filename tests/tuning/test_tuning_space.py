"""The proposals of the tuners."""

from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from tvm.tirx import PrimFunc

from support.machines import on_two_cores
from support.models import save_model
from support.scale import choose, count
from tvmflow.compiler import import_onnx, lower, workloads
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import is_of_stages, variants
from tvmflow.hardware.target import Target
from tvmflow.tuning import TunerName
from tvmflow.tuning.space import TUNERS, Variants, make_cost_model, make_search
from tvmflow.tuning.traces import normalize, trace_of


def propose(func: PrimFunc, target: Target, tuner: TunerName, seed: int, rounds: int = 2) -> list[str]:
    """The traces of some rounds; the results of each round are given, so that they are the same each time."""
    cost_model = make_cost_model(tuner, seed=seed, threads=1)
    search = make_search(normalize(func), target.canonical, tuner, batch=4, seed=seed, cost_model=cost_model)
    traces: list[str] = []
    for _ in range(rounds):
        proposals = search.propose()
        search.tell(proposals, [1e-3 * (index + 1) for index in range(len(proposals))])
        traces += [proposal.trace for proposal in proposals]
    return traces


@pytest.mark.few(2)
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_seed_makes_proposals_repeatable(matmul: PrimFunc, native: Target, tuner: TunerName) -> None:
    assert propose(matmul, native, tuner, seed=7) == propose(matmul, native, tuner, seed=7)


@pytest.mark.few(2)
@pytest.mark.parametrize("tuner", TUNERS)
def test_another_seed_makes_other_proposals(matmul: PrimFunc, native: Target, tuner: TunerName) -> None:
    assert propose(matmul, native, tuner, seed=7, rounds=1) != propose(matmul, native, tuner, seed=8, rounds=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("tuner", TUNERS[:: count(normal=2, long=1)])
def test_nothing_is_proposed_twice(conv: PrimFunc, native: Target, tuner: TunerName) -> None:
    traces = propose(conv, native, tuner, seed=7, rounds=count(normal=2, long=3))
    assert len(traces) > 4
    assert len(set(traces)) == len(traces)


@pytest.mark.parametrize("tuner", ["random", "grid"])
def test_a_small_space_comes_to_an_end(elementwise: PrimFunc, native: Target, tuner: TunerName) -> None:
    search = make_search(normalize(elementwise), native.canonical, tuner, batch=16, seed=7, cost_model=None)
    rounds = 0
    while search.propose():
        rounds += 1
        assert rounds < 100


@pytest.fixture(scope="module")
def dense(native: Target, tmp_path_factory: pytest.TempPathFactory) -> PrimFunc:
    """A dense layer as the compiler lowers it, whose rule has many ways to schedule it."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = {"w": np.ones((256, 192), "float32")}
    path = save_model(tmp_path_factory.mktemp("dense") / "dense.onnx", [node], [("x", [49, 256])], ["y"], weights)
    (workload,) = workloads(lower(import_onnx(path), native))
    return normalize(workload.func)


@pytest.mark.few(1)
@pytest.mark.parametrize("tuner", choose(normal=("xgb", "grid"), long=TUNERS))
def test_all_schedules_of_the_compilers_rules_come_first(dense: PrimFunc, native: Target, tuner: TunerName) -> None:
    own = variants(dense, machine(native))[1:]
    assert len(own) > 8

    def proposed() -> list[list[str]]:
        cost_model = make_cost_model(tuner, seed=3, threads=1)
        search = make_search(
            dense, native.canonical, tuner, batch=4, seed=3, cost_model=cost_model, variants=Variants(own)
        )
        rounds = []
        for _ in range(-(-len(own) // 4) + 1):
            proposals = search.propose()
            search.tell(proposals, [1e-3 * (place + 1) for place in range(len(proposals))])
            rounds.append([proposal.trace for proposal in proposals])
        return rounds

    *first, then = proposed()
    traces = {trace_of(schedule) for schedule in own}
    assert {trace for batch in first for trace in batch} == traces
    assert sum(map(len, first)) == len(own)
    assert then
    assert not traces & set(then)
    assert proposed() == [*first, then]


def test_a_schedule_of_an_earlier_run_is_not_proposed_again(dense: PrimFunc, native: Target) -> None:
    own = variants(dense, machine(native))[1:]
    search = make_search(
        dense, native.canonical, "grid", batch=len(own), seed=3, cost_model=None, variants=Variants(own)
    )
    trace = trace_of(own[2])
    search.start_from(trace, 1e-3)
    proposals = search.propose()
    assert len(proposals) == len(own) - 1
    assert trace not in [proposal.trace for proposal in proposals]


def test_only_the_compilers_rules_schedule_kernels_of_several_stages(tmp_path: Path, dense: PrimFunc) -> None:
    # With many cores, the image is too small for Winograd's algorithm.
    target = on_two_cores("native")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    weights = {"w": np.ones((32, 32, 3, 3), "float32")}
    save_model(tmp_path / "c.onnx", [node], [("x", [1, 32, 28, 28])], ["y"], weights)
    functions = workloads(lower(import_onnx(tmp_path / "c.onnx"), target))
    (winograd,) = (normalize(item.func) for item in functions if "winograd" in item.name)
    assert is_of_stages(winograd)
    assert not is_of_stages(dense)
    own = variants(winograd, machine(target))[1:]
    search = make_search(
        winograd,
        target.canonical,
        "random",
        batch=len(own),
        seed=3,
        cost_model=None,
        variants=Variants(own, only=True),
    )
    assert not search.is_beyond_rules
    assert len(search.propose()) == len(own) > 1
    assert search.is_beyond_rules
    assert search.propose() == []
