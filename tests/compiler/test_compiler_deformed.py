"""Convolutions whose taps are moved by offsets, beside ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from support.arrays import normal
from tvmflow.compiler import CompiledModel


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
