"""Sums of parallel convolutions, as networks that were trained with several branches have them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto
from onnx.helper import make_node

from support.arrays import normal
from tvmflow.compiler import import_onnx, lower, workloads
from tvmflow.compiler.schedules import kernels_of

Weights = dict[str, np.ndarray[Any, Any]]


def _norm(data: str, channels: int, name: str, weights: Weights) -> NodeProto:
    """A batch norm of `data` with the result `name`."""
    values = {"s": normal(channels, seed=1), "b": normal(channels, seed=2), "m": normal(channels, seed=3)}
    weights.update({f"{name}_{key}": value for key, value in values.items()})
    weights[f"{name}_v"] = np.abs(normal(channels, seed=4)) + 0.5
    return make_node("BatchNormalization", [data, *(f"{name}_{key}" for key in "sbmv")], [name])


def _branches(kernels: list[dict[str, Any]], channels: int, groups: int, has_scale: bool) -> tuple[Any, Weights]:
    """The nodes of relu(the sum of batch norms of convolutions of x, and of a batch norm of x), and their weights."""
    weights: Weights = {}
    nodes, terms = [], []
    for place, attributes in enumerate(kernels):
        size = attributes["kernel_shape"]
        weights[f"w{place}"] = normal(channels, channels // groups, *size, seed=place)
        nodes.append(make_node("Conv", ["x", f"w{place}"], [f"c{place}"], group=groups, **attributes))
        nodes.append(_norm(f"c{place}", channels, f"n{place}", weights))
        terms.append(f"n{place}")
    if has_scale:
        nodes.append(_norm("x", channels, "scaled", weights))
        terms.append("scaled")
    for place, term in enumerate(terms[1:]):
        nodes.append(make_node("Add", [terms[0] if place == 0 else f"a{place - 1}", term], [f"a{place}"]))
    nodes.append(make_node("Relu", [f"a{len(terms) - 2}"], ["y"]))
    return nodes, weights


def _count_kernels(path: Path, target: Any) -> int:
    return sum(len(kernels_of(item.func)) for item in workloads(lower(import_onnx(path), target)))


_POINT = {"kernel_shape": [1, 1]}
_THREE = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}


@pytest.mark.few(2)
@pytest.mark.parametrize("groups", [1, 4, 32], ids=["dense", "groups", "depthwise"])
@pytest.mark.parametrize(
    ("kernels", "has_scale"),
    [
        ([_POINT, _THREE, _THREE], True),
        ([_THREE, {"kernel_shape": [3, 1], "pads": [1, 0, 1, 0]}], True),
        ([{**_POINT, "strides": [2, 2]}, {**_THREE, "strides": [2, 2]}], False),
        (
            [
                {"kernel_shape": [5, 5], "pads": [4, 4, 4, 4], "dilations": [2, 2]},
                {**_THREE, "pads": [2] * 4, "dilations": [2, 2]},
            ],
            True,
        ),
    ],
    ids=["three", "a column", "strides", "dilations"],
)
def test_parallel_convolutions_that_are_added_are_one(
    kernels: list[dict[str, Any]],
    has_scale: bool,
    groups: int,
    make_model: Any,
    assert_same_as_onnxruntime: Any,
    target: Any,
) -> None:
    nodes, weights = _branches(kernels, 32, groups, has_scale)
    path = make_model(nodes, [("x", [1, 32, 9, 12])], ["y"], weights)
    assert _count_kernels(path, target) == 1
    assert_same_as_onnxruntime(path, {"x": normal(1, 32, 9, 12, seed=9)})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("second", "results"),
    [({"kernel_shape": [3, 3], "pads": [1] * 4}, ["y", "c1"]), ({"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}, ["y"])],
    ids=["read elsewhere", "no common place"],
)
def test_other_convolutions_that_are_added_stay_apart(
    second: dict[str, Any], results: list[str], make_model: Any, assert_same_as_onnxruntime: Any, target: Any
) -> None:
    sizes = [[2, 2], second["kernel_shape"]]
    weights = {f"w{place}": normal(32, 32, *size, seed=place) for place, size in enumerate(sizes)}
    nodes = [
        make_node("Conv", ["x", "w0"], ["c0"], kernel_shape=[2, 2], pads=[1, 1, 0, 0]),
        make_node("Conv", ["x", "w1"], ["c1"], **second),
        make_node("Add", ["c0", "c1"], ["y"]),
    ]
    path = make_model(nodes, [("x", [1, 32, 9, 12])], results, weights)
    assert _count_kernels(path, target) == 2
    assert_same_as_onnxruntime(path, {"x": normal(1, 32, 9, 12, seed=9)})
