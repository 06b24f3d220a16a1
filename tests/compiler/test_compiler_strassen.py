"""Strassen's matrix product beside ONNX Runtime, and the rule that says when it pays."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support import scale
from support.arrays import normal
from support.builds import Preferring, rule_counts
from support.machines import AVX512
from tvmflow.compiler import BuildOptions, Choices, CompiledModel, build, import_onnx
from tvmflow.compiler.machine import of_profile
from tvmflow.compiler.operators import strassen
from tvmflow.hardware.profiles import named
from tvmflow.hardware.target import Target

Check = Callable[..., CompiledModel]


# The shape of a dense layer's input, and its units: half the rows fill a register tile of AVX2 and one of AVX-512.
_DENSE: list[tuple[tuple[int, ...], int]] = [
    ((1, 56, 256), 128),
    ((1, 2, 16, 128), 512),
    ((1, 14, 8, 258), 64),
    ((1, 32, 512), 768),
]
# Channels in and out, height, width, stride of a convolution.
_CONVOLUTIONS = [(256, 64, 14, 16, 1), (128, 256, 28, 28, 1), (192, 96, 28, 20, 1), (256, 128, 28, 32, 2)]


def _dense_layer(shape: tuple[int, ...], units: int) -> tuple[Any, ...]:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"w": normal(shape[-1], units), "b": normal(units)}
    return (nodes, [("x", list(shape))], ["y"], weights), {"x": normal(*shape, seed=1)}


def _convolution(channels: int, out: int, height: int, width: int, stride: int) -> tuple[Any, ...]:
    """A pointwise convolution with a residual."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"], strides=[stride, stride]),
        helper.make_node("Add", ["a", "r"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"w": normal(out, channels, 1, 1), "b": normal(out)}
    feed = {
        "x": normal(1, channels, height, width, seed=1),
        "r": normal(1, out, height // stride, width // stride, seed=2),
    }
    return (nodes, [(name, list(value.shape)) for name, value in feed.items()], ["y"], weights), feed


def test_strassens_products_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = [*(_dense_layer(*case) for case in _DENSE), *(_convolution(*case) for case in _CONVOLUTIONS)]
    cases = scale.choose(normal=[cases[place] for place in (0, 2, 4, 7)], long=cases)
    model = assert_all_same(cases, choices=Preferring(option="strassen"))
    assert rule_counts(model)["strassen"] == len(cases)


def test_the_error_is_a_few_times_that_of_the_usual_product(
    make_model: Any, target: Target, run_built: Callable[..., list[np.ndarray[Any, Any]]]
) -> None:
    x, weight = normal(1, 56, 512), normal(512, 128, seed=1)
    path = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [1, 56, 512])], ["y"], {"w": weight})
    exact = x.astype("float64") @ weight
    errors = []
    for allowed in (True, False):
        options = BuildOptions(fast_algorithms=allowed)
        model = build(import_onnx(path), target, options, choices=Preferring(option="strassen"))
        assert (rule_counts(model)["strassen"] == 1) is allowed
        (actual,) = run_built(model, x)
        errors.append(np.abs(actual - exact).max() / np.abs(exact).max())
    assert errors[0] < 3e-6
    assert errors[0] < 8 * errors[1] + 1e-7


@pytest.mark.parametrize(
    ("rows", "depth", "units"),
    [(49, 512, 2048), (196, 32, 256), (196, 255, 256), (196, 256, 80), (2, 512, 512), (118, 512, 512)],
)
def test_odd_sizes_short_depths_and_few_rows_are_multiplied_as_usual(rows: int, depth: int, units: int) -> None:
    assert strassen.choose([rows], depth, units, AVX512, Choices().about("")) is None


@pytest.mark.parametrize("name", ["zen3", "zen4", "sapphire-rapids", "x86-64-v4"])
def test_weights_that_come_from_memory_are_not_made_larger(name: str) -> None:
    warm = of_profile(named(name), ("avx", "avx512bw", "avx512f"), 2)
    estimates = [strassen.estimate([1, 112, 112], 1024, 1024, replace(warm, cold=cold)) for cold in (False, True)]
    shares = [estimate.share for estimate in estimates if estimate is not None]
    assert shares[0] < shares[1]
    few_rows = strassen.choose([56], 2048, 2048, replace(warm, cold=True), Choices().about(""))
    assert few_rows is None


def test_a_build_computes_a_large_product_by_strassens_algorithm_where_it_is_estimated_faster() -> None:
    slow_arithmetic = replace(AVX512, vectors=replace(AVX512.vectors, multiply_adds=0.125))
    choices = Choices()
    assert strassen.choose([1, 56, 56], 256, 256, slow_arithmetic, choices.about("matmul")) is not None
    (site,) = choices.sites.values()
    assert site.options == ("strassen", "direct")
    assert site.cycles[0] < site.cycles[1]


def test_the_sums_of_weights_are_exact_for_whole_numbers() -> None:
    weight = np.arange(8 * 32, dtype="float32").reshape(8, 32)
    panels = strassen.pack(weight, 16)
    assert panels.shape == (7, 1, 4, 16)
    np.testing.assert_array_equal(panels[0, 0], weight[:4, :16] + weight[4:, 16:])
    np.testing.assert_array_equal(panels[2, 0], weight[:4, 16:] - weight[4:, 16:])
