"""Samples of images at the points of a grid, beside ONNX Runtime."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support import builds, scale
from support.arrays import normal
from support.models import save_model
from tvmflow.arrays import Array
from tvmflow.compiler import build, import_onnx
from tvmflow.hardware.target import Target

_FREE: list[tuple[str, list[int | str]]] = [("x", ["n", "c", "h", "w"]), ("grid", ["n", "oh", "ow", 2])]


def _grid(*shape: int, scale: float) -> Array:
    """Points up to `scale` from the middle of an image, whose borders are at a distance of one."""
    return np.random.default_rng(shape).uniform(-scale, scale, (*shape, 2)).astype("float32")


def _node(**attributes: Any) -> Any:
    return helper.make_node("GridSample", ["x", "grid"], ["y"], **attributes)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mode", "padding"),
    scale.choose(
        normal=[("linear", "zeros"), ("nearest", "border"), ("linear", "reflection"), ("cubic", "reflection")],
        long=[
            (mode, padding) for mode in ("linear", "nearest", "cubic") for padding in ("zeros", "border", "reflection")
        ],
    ),
)
def test_samples_are_those_of_onnx_runtime(mode: str, padding: str, tmp_path: Path, target: Target) -> None:
    nodes = [_node(mode=mode, padding_mode=padding, align_corners=aligns) for aligns in (0, 1)]
    nodes[1].output[0] = "z"
    path = save_model(tmp_path / "model.onnx", nodes, _FREE, ["y", "z"], opset=20)
    feeds = [
        {"x": normal(2, 3, 5, 7), "grid": _grid(2, 9, 11, scale=1.0)},
        # Whole blocks of points and a rest; points that are reflected several times; images of one line.
        {"x": normal(1, 2, 6, 4), "grid": _grid(1, 13, 7, scale=5.0)},
        {"x": normal(1, 1, 1, 4), "grid": _grid(1, 1, 1, scale=2.0)},
        {"x": normal(1, 1, 3, 1), "grid": _grid(1, 2, 3, scale=2.0)},
    ]
    model = builds.assert_same_as_onnxruntime(path, feeds, target)
    assert builds.rule_counts(model)["sampling"] == 2


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_points_are_reflected_in_an_image_of_one_line_of_known_size(mode: str, tmp_path: Path, target: Target) -> None:
    shapes = ((1, 2, 1, 5), (1, 2, 5, 1))
    nodes = [_node(mode=mode, padding_mode="reflection", align_corners=1) for _ in shapes]
    inputs = []
    for place, (node, shape) in enumerate(zip(nodes, shapes, strict=True)):
        node.input[0], node.output[0] = f"x{place}", f"y{place}"
        inputs.append((f"x{place}", shape))
    path = save_model(tmp_path / "model.onnx", nodes, [*inputs, ("grid", [1, 3, 4, 2])], ["y0", "y1"], opset=20)
    feed = {name: normal(*shape) for name, shape in inputs} | {"grid": _grid(1, 3, 4, scale=2.0)}
    builds.assert_same_as_onnxruntime(path, [feed], target)


def test_pixels_outside_of_the_image_are_zero_whatever_the_nearest_one_is(tmp_path: Path, target: Target) -> None:
    path = save_model(tmp_path / "model.onnx", [_node(mode="linear")], _FREE, ["y"], opset=20)
    image = np.full((1, 1, 2, 2), np.inf, "float32")
    grid = np.array([[[[-9.0, 0.0], [np.inf, 0.0], [0.0, 9.0], [np.nan, np.nan]]]], "float32")
    assert builds.run_in_memory(build(import_onnx(path), target), [[image, grid]])[0][0].tolist() == [[[[0.0] * 4]]]
