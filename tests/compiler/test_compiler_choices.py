"""Decisions of the cost model, made otherwise: other functions, the same results."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tvmflow.compiler import build, import_onnx
from tvmflow.compiler.choices import Choices
from tvmflow.target import Target


@pytest.fixture
def model(make_model: Any) -> Path:
    """A convolution that Winograd's algorithm fits, one that Strassen's fits, a block, and a dense layer."""
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray[Any, Any]:
        return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("float32")

    nodes = [
        helper.make_node("Conv", ["x", "w3"], ["a"], pads=[1] * 4),
        helper.make_node("Conv", ["a", "w1"], ["b"]),
        helper.make_node("Conv", ["b", "wd"], ["c"], pads=[1] * 4, group=64),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w2"], ["e"]),
        helper.make_node("GlobalAveragePool", ["e"], ["f"]),
        helper.make_node("Flatten", ["f"], ["g"]),
        helper.make_node("MatMul", ["g", "m"], ["y"]),
    ]
    arrays = {
        "w3": weights(32, 16, 3, 3),
        "w1": weights(64, 32, 1, 1),
        "wd": weights(64, 1, 3, 3),
        "w2": weights(32, 64, 1, 1),
        "m": weights(32, 48),
    }
    return Path(make_model(nodes, [("x", [1, 16, 28, 28])], ["y"], arrays))


def _run(built: Any, run_built: Any) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(1).standard_normal((1, 16, 28, 28)).astype("float32")
    return np.asarray(run_built(built, x)[0])


def test_every_decision_made_otherwise_gives_the_same_results(model: Path, native: Target, run_built: Any) -> None:
    imported, met = import_onnx(model), Choices()
    usual = build(imported, native, choices=met)
    expected = _run(usual, run_built)
    open_sites = [site for site in met.met.values() if len(site.options) > 1]
    assert {site.kind for site in open_sites} >= {"algorithm", "block", "rows", "vectors", "order"}
    for place in (1, 2):
        other = Choices({site.key: site.options[min(place, len(site.options) - 1)] for site in open_sites})
        built = build(imported, native, choices=other)
        assert built.ir_text != usual.ir_text
        np.testing.assert_allclose(_run(built, run_built), expected, rtol=1e-4, atol=1e-5)


def test_a_decision_is_met_under_the_same_name_in_every_build(model: Path, native: Target) -> None:
    imported, first, second = import_onnx(model), Choices(), Choices()
    build(imported, native, choices=first)
    build(imported, native, choices=second)
    assert first.met == second.met


def test_the_first_option_is_what_is_built_without_choices(model: Path, native: Target) -> None:
    imported, met = import_onnx(model), Choices()
    usual = build(imported, native, choices=met)
    named = Choices({site.key: site.options[0] for site in met.met.values()})
    assert build(imported, native, choices=named).ir_text == usual.ir_text


def test_an_option_that_is_none_of_the_decision_is_passed_over(model: Path, native: Target) -> None:
    imported, met = import_onnx(model), Choices()
    usual = build(imported, native, choices=met)
    unknown = Choices(dict.fromkeys(met.met, "no such option"))
    assert build(imported, native, choices=unknown).ir_text == usual.ir_text
