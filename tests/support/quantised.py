"""Quantised models, as ONNX Runtime's tools make them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from support.arrays import normal


def quantise(
    path: Path,
    output: Path,
    *,
    signed: bool = False,
    per_channel: bool = True,
    operators: bool = False,
    signed_weights: bool = True,
) -> Path:
    """Write the quantised form of a float32 model with one input `x` of fixed shape to `output`, and return that.

    Weights are int8, or else uint8; activations are uint8, or int8 with `signed`. With `operators` the model has
    operators of quantised tensors (QOperator), else pairs of QuantizeLinear and DequantizeLinear. Normal samples
    calibrate the ranges.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    shape = [dim.dim_value for dim in onnx.load(path).graph.input[0].type.tensor_type.shape.dim]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [{"x": normal(*shape, seed=seed)} for seed in range(3)]

        def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
            return self.left.pop() if self.left else None

    quantize_static(
        path,
        output,
        Reader(),
        quant_format=QuantFormat.QOperator if operators else QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=QuantType.QInt8 if signed else QuantType.QUInt8,
        weight_type=QuantType.QInt8 if signed_weights else QuantType.QUInt8,
    )
    return output


def quantise_dynamically(path: Path, output: Path, *, per_channel: bool = True, signed_weights: bool = True) -> Path:
    """Write the form of a float32 model that quantises its activations as it runs to `output`, and return that.

    Signed weights have seven bits: on a processor with AVX2 alone, ONNX Runtime's sums of two products of eight bits
    saturate.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    weight_type = QuantType.QInt8 if signed_weights else QuantType.QUInt8
    quantize_dynamic(path, output, weight_type=weight_type, per_channel=per_channel, reduce_range=signed_weights)
    return output
