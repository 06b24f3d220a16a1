"""Samples of images at computed places, beside ONNX Runtime: deformed convolutions, regions, enlarged images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.arrays import normal
from tvmflow.compiler import CompiledModel


@pytest.mark.long
def test_deformed_convolutions_equal_onnx_runtime(
    make_model: Callable[..., Path], assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    def node(result: str, *operands: str, **attributes: Any) -> Any:
        return helper.make_node("DeformConv", ["x", *operands], [result], **attributes)

    nodes = [
        node("plain", "w", "offset", pads=[1, 1, 1, 1]),
        node("whole", "w", "offset", "bias", "mask", pads=[1, 0, 1, 2]),
        node("grouped", "half", "wide", group=2, offset_group=2, strides=[2, 1], dilations=[1, 2], pads=[1, 2, 0, 2]),
    ]
    weights = {"w": normal(6, 4, 3, 3), "half": normal(6, 2, 2, 3), "bias": normal(6)}
    inputs = [
        ("x", ["n", 4, "h", 7]),
        ("offset", ["n", 18, "h", 7]),
        ("mask", ["n", 9, "h", 7]),
        ("wide", ["n", 24, "half_h", 7]),
    ]
    path = make_model(nodes, inputs, ["plain", "whole", "grouped"], weights, opset=19)
    feeds = [
        {
            "x": normal(batch, 4, lines, 7),
            "offset": 2 * normal(batch, 18, lines, 7, seed=1),
            "mask": np.abs(normal(batch, 9, lines, 7, seed=2)),
            "wide": normal(batch, 24, (lines - 1) // 2 + 1, 7, seed=3),
        }
        for batch, lines in ((1, 5), (2, 8))
    ]
    assert_same_as_onnxruntime(path, *feeds)


@pytest.mark.parametrize("opset", [10, 16])
def test_regions_of_scaled_features_equal_onnx_runtime(
    opset: int, make_model: Callable[..., Path], assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    node = helper.make_node(
        "RoiAlign", ["x", "rois", "places"], ["y"],
        output_height=3, output_width=2, sampling_ratio=2, spatial_scale=0.7,
    )  # fmt: skip
    inputs = [("x", [2, 3, "h", "w"]), ("rois", ["n", 4]), ("places", ["n"], TensorProto.INT64)]
    path = make_model([node], inputs, ["y"], opset=opset)
    rois = np.array([[1, 1, 6, 5], [-3, -2, 6, 5], [5, 5, 14, 13], [2, 2, 2.3, 2.2]], "float32")
    places = np.array([0, 1, 1, 0], "int64")
    assert_same_as_onnxruntime(path, {"x": normal(2, 3, 10, 12), "rois": rois, "places": places})


@pytest.mark.parametrize("opset", [7, 9])
def test_an_image_of_free_size_is_enlarged_as_old_files_say(
    opset: int, make_model: Callable[..., Path], assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    scales = np.array([1, 1, 2, 3], "float32")
    form: dict[str, Any] = {"scales": scales.tolist()} if opset < 9 else {}
    operands = ["x"] if opset < 9 else ["x", "scales"]
    nodes = [helper.make_node("Upsample", operands, [mode], mode=mode, **form) for mode in ("nearest", "linear")]
    weights = {} if opset < 9 else {"scales": scales}
    path = make_model(nodes, [("x", [1, 2, "h", "w"])], ["nearest", "linear"], weights, opset=opset)
    assert_same_as_onnxruntime(path, {"x": normal(1, 2, 5, 4)}, {"x": normal(1, 2, 2, 7)})
