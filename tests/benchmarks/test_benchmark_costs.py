"""`benchmarks/costs.py`: the cost model's estimates beside measurements."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import helper

from support.models import save_model
from tvmflow.tuning.decisions import Function

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_the_rank_correlation_is_spearmans(module: Callable[[str], ModuleType]) -> None:
    correlate = module("costs").correlate
    assert correlate([(1, 10), (2, 40), (3, 50)]) == pytest.approx(1)
    assert correlate([(1, 9), (2, 5), (3, 1)]) == pytest.approx(-1)
    # By hand: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert correlate([(1, 1), (2, 2), (2, 3), (5, 4)]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_equal_values_have_no_rank_correlation(module: Callable[[str], ModuleType]) -> None:
    correlate = module("costs").correlate
    assert correlate([(1, 1), (1, 2), (1, 3)]) is None
    assert correlate([(1, 0), (2, 0), (3, 0)]) is None


def test_the_loss_is_that_of_the_first_options_and_leaves_out_what_was_not_measured(
    module: Callable[[str], ModuleType],
) -> None:
    costs = module("costs")

    def decision(calls: int, *seconds: float | None) -> Any:
        options = tuple(costs.Option(name=str(place), cycles=1, seconds=item) for place, item in enumerate(seconds))
        return costs.Decision(kind="algorithm", subject="", calls=calls, options=options)

    measured = costs.Costs(decisions=(decision(1, 3.0, 2.0), decision(2, 1.0, 4.0), decision(9, 1.0, None)), clock=1.0)
    assert measured.loss == pytest.approx(5 / 4 - 1)
    assert costs.Costs(decisions=(), clock=1.0).loss is None
    assert costs.Costs(decisions=(), clock=1.0).correlation is None


def test_options_differ_by_the_calls_that_only_one_of_them_has(module: Callable[[str], ModuleType]) -> None:
    def functions(**calls: int) -> list[Function]:
        functions = {name: tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(place)) for place, name in enumerate("abc")}
        return [Function(name, functions[name], functions[name], name, count) for name, count in calls.items()]

    excess = module("costs").excess
    one, other = functions(a=5, b=2), functions(a=3, c=1)
    assert {item.name: item.calls for item in excess(one, other)} == {"a": 2, "b": 2}
    assert {item.name: item.calls for item in excess(other, one)} == {"c": 1}


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, "batch"])
def test_every_algorithm_of_a_convolution_is_estimated_and_measured(
    command: Command, tmp_path: Path, batch: int | str
) -> None:
    weight = np.random.default_rng(0).standard_normal((32, 32, 3, 3)).astype("float32")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    model, figures = tmp_path / "convolution.onnx", tmp_path / "figures.json"
    save_model(model, [node], [("x", [batch, 32, 16, 16])], ["y"], {"w": weight})
    process = command("costs", str(model), "--threads", "1", "--json", str(figures))
    assert process.returncode == 0, process.stderr
    (costs,) = json.loads(figures.read_text()).values()
    (decision,) = costs["decisions"]
    assert {option["name"] for option in decision["options"]} == {"direct", "winograd 2", "winograd 4"}
    assert all(option["cycles"] > 0 and option["seconds"] > 0 for option in decision["options"])
    assert costs["loss"] >= 0
    assert costs["clock"] > 1e8
