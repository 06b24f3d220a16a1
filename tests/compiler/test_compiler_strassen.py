"""Strassen's matrix product beside ONNX Runtime, and the rule that says when it pays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.arrays import normal
from support.builds import rule_counts
from support.machines import AVX512
from tvmflow.compiler import BuildOptions, Built, Choices
from tvmflow.compiler.operators import strassen

Check = Callable[..., Built]


@pytest.mark.parametrize(
    ("shape", "units"),
    [((1, 56, 256), 128), ((1, 2, 14, 128), 512), ((1, 14, 8, 258), 64), ((1, 28, 1024), 1536)],
    ids=str,
)
def test_dense_layers_by_strassen_equal_onnx_runtime(
    shape: tuple[int, ...], units: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"w": normal(shape[-1], units), "b": normal(units)}
    path = make_model(nodes, [("x", list(shape))], ["y"], weights)
    assert rule_counts(assert_same_as_onnxruntime(path, {"x": normal(*shape, seed=1)})) == {"strassen": 1}


# batch, channels in and out, height, width, stride
_CONVOLUTIONS = [
    (1, 256, 64, 14, 14, 1),
    (1, 128, 512, 28, 28, 1),
    (1, 192, 96, 28, 20, 1),
    (1, 256, 128, 28, 28, 2),
]


@pytest.mark.parametrize("case", _CONVOLUTIONS, ids=lambda case: "-".join(map(str, case)))
def test_pointwise_convolutions_with_residuals_equal_onnx_runtime(
    case: tuple[int, ...], make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    batch, channels, out, height, width, stride = case
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"], strides=[stride, stride]),
        helper.make_node("Add", ["a", "r"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"w": normal(out, channels, 1, 1), "b": normal(out)}
    feed = {
        "x": normal(batch, channels, height, width, seed=1),
        "r": normal(batch, out, height // stride, width // stride, seed=2),
    }
    path = make_model(nodes, [(name, list(value.shape)) for name, value in feed.items()], ["y"], weights)
    assert rule_counts(assert_same_as_onnxruntime(path, feed))["strassen"] == 1


def test_the_error_is_a_few_times_that_of_the_usual_product(
    make_model: Any, target: Any, run_built: Callable[..., list[np.ndarray[Any, Any]]]
) -> None:
    from tvmflow.compiler import build, import_onnx

    x, weight = normal(1, 56, 512), normal(512, 128, seed=1)
    path = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [1, 56, 512])], ["y"], {"w": weight})
    exact = x.astype("float64") @ weight
    errors = []
    for allowed in (True, False):
        built = build(import_onnx(path), target, BuildOptions(fast_algorithms=allowed))
        assert (rule_counts(built)["strassen"] == 1) is allowed
        (actual,) = run_built(built, x)
        errors.append(np.abs(actual - exact).max() / np.abs(exact).max())
    assert errors[0] < 3e-6
    assert errors[0] < 8 * errors[1] + 1e-7


@pytest.mark.parametrize(
    ("rows", "depth", "units"),
    [(49, 512, 2048), (196, 32, 256), (196, 255, 256), (196, 256, 80), (2, 512, 512), (118, 512, 512)],
)
def test_odd_sizes_short_depths_and_few_rows_are_multiplied_as_usual(rows: int, depth: int, units: int) -> None:
    assert strassen.choose([rows], depth, units, AVX512, Choices().about("")) is None


@pytest.mark.parametrize(("table_size", "expected"), [(1 << 10, "strassen"), (1 << 23, "rows")])
def test_weights_that_come_from_memory_are_not_made_larger(
    table_size: int, expected: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Gather", ["table", "row"], ["r"]),
        helper.make_node("Add", ["a", "r"], ["y"]),
    ]
    weights = {"w": normal(384, 384), "table": normal(table_size // 384, 384)}
    path = make_model(nodes, [("x", [1, 128, 384]), ("row", [1], TensorProto.INT64)], ["y"], weights)
    feed = {"x": normal(1, 128, 384, seed=1), "row": np.array([1])}
    assert rule_counts(assert_same_as_onnxruntime(path, feed))[expected] == 1


def test_the_sums_of_weights_are_exact_for_whole_numbers() -> None:
    weight = np.arange(8 * 32, dtype="float32").reshape(8, 32)
    panels = strassen.pack(weight, 16)
    assert panels.shape == (7, 1, 4, 16)
    np.testing.assert_array_equal(panels[0, 0], weight[:4, :16] + weight[4:, 16:])
    np.testing.assert_array_equal(panels[2, 0], weight[:4, 16:] - weight[4:, 16:])
