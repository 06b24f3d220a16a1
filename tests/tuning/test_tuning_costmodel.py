"""The training of a cost model before the first trial."""

import json
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.tirx import PrimFunc

from tvmflow.hardware.target import Target
from tvmflow.tuning import Trial, workload_key
from tvmflow.tuning.costmodel import warm_up
from tvmflow.tuning.records import SPACE_VERSION, now, tvm_version
from tvmflow.tuning.space import Proposal, make_cost_model, make_search, runner_result, without_tensor_intrinsics
from tvmflow.tuning.traces import normalize

Measured = tuple[PrimFunc, list[Proposal], list[float]]


def _cost(proposal: Proposal) -> float:
    """A made-up time that depends on how the loops are tiled, and so on what the cost model sees."""
    _, decisions = json.loads(proposal.trace)
    inner = [decision[1][-1] for decision in decisions if isinstance(decision[1], list)]
    return 1e-3 / (1 + float(np.prod(inner)))


def _measured(func: PrimFunc, target: Target, seed: int) -> Measured:
    search = make_search(normalize(func), target.canonical, "random", batch=24, seed=seed, cost_model=None)
    proposals = sorted(search.propose(), key=lambda proposal: (_cost(proposal), proposal.trace))
    return func, proposals, [_cost(proposal) for proposal in proposals]


@pytest.fixture(scope="module")
def learnt(conv: PrimFunc, native: Target) -> Measured:
    return _measured(conv, native, 1)


@pytest.fixture(scope="module")
def others(conv: PrimFunc, native: Target) -> Measured:
    return _measured(conv, native, 2)


def trials(measured: Measured, target: Target) -> list[Trial]:
    func, proposals, seconds = measured
    workload = tvm.ir.save_json(normalize(func))
    context = (target.canonical, tvm_version(), SPACE_VERSION, "random", now())
    return [
        Trial(workload_key(func), workload, proposal.trace, value, *context)
        for proposal, value in zip(proposals, seconds, strict=True)
    ]


def predicted(cost_model: Any, measured: Measured, target: Target) -> Any:
    return cost_model.predict(_context(measured, target), [proposal.candidate for proposal in measured[1]])


def _context(measured: Measured, target: Target) -> Any:
    with without_tensor_intrinsics():
        return ms.TuneContext(
            tvm.IRModule({"main": normalize(measured[0])}), target=tvm.target.Target(json.loads(target.canonical))
        )


def test_a_warmed_model_predicts_what_one_does_that_saw_the_measurements(
    learnt: Measured, others: Measured, native: Target
) -> None:
    warmed, saw = (make_cost_model("xgb", seed=0, threads=1) for _ in range(2))
    assert warm_up(warmed, trials(learnt, native), native.canonical) == len(learnt[1])
    assert saw is not None
    saw.update(
        _context(learnt, native),
        [proposal.candidate for proposal in learnt[1]],
        [runner_result(seconds) for seconds in learnt[2]],
    )
    np.testing.assert_allclose(predicted(warmed, others, native), predicted(saw, others, native), rtol=0.05, atol=0.01)


def test_a_warmed_model_does_not_guess(learnt: Measured, others: Measured, native: Target) -> None:
    cold, warmed = (make_cost_model("xgb", seed=0, threads=1) for _ in range(2))
    warm_up(warmed, trials(learnt, native), native.canonical)
    assert not np.array_equal(predicted(cold, others, native), predicted(cold, others, native))
    assert np.array_equal(predicted(warmed, others, native), predicted(warmed, others, native))


def test_what_a_model_learns_does_not_depend_on_the_order_of_the_records(
    learnt: Measured, others: Measured, native: Target
) -> None:
    entries = trials(learnt, native)
    first, second = (make_cost_model("xgb", seed=0, threads=1) for _ in range(2))
    assert warm_up(first, entries, native.canonical, limit=20) == 20
    assert warm_up(second, entries[::-1], native.canonical, limit=20) == 20
    assert np.array_equal(predicted(first, others, native), predicted(second, others, native))


def test_schedules_that_do_not_replay_are_passed_over(learnt: Measured, native: Target) -> None:
    good, *_ = trials(learnt, native)
    bad = Trial(
        good.key,
        good.workload,
        '[[["GetSBlock", [], ["no such block", "main"], ["b0"]]], []]',
        1e-9,
        *(good.target, good.tvm_version, good.space_version, good.tuner, good.created_at),
    )
    assert warm_up(make_cost_model("xgb", seed=0, threads=1), [bad, good], native.canonical) == 1
