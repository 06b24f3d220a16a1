"""Interpolation for Resize: the source positions of the elements of a resized axis, and the weights around them."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def source_places(
    size: int, result: int, scale: float, mode: str, region: tuple[float, float], dtype: npt.DTypeLike = "float64"
) -> Array:
    """Return the source position of each element of a resized axis, by the ONNX specification of Resize.

    The axis has `size` elements before and `result` after; `scale` is the operator's scale of the axis. `mode` is its
    coordinate_transformation_mode. `region` is the start and the end of its roi, which only tf_crop_and_resize reads.
    The positions are computed in `dtype`. ONNX Runtime computes in float32, which decides where a position is about
    half of the way between two neighbours. Raises ValueError for a mode that the specification does not have.
    """
    x = np.arange(result, dtype=dtype)
    scale = x.dtype.type(scale)
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        length = scale * size
        return np.zeros(result) if length == 1 else x * (size - 1) / (length - 1)
    if mode == "pytorch_half_pixel" and scale * size <= 1:
        return np.full(result, 0.0)
    if mode == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    if mode == "tf_crop_and_resize":
        start, end = region
        if result == 1:
            return np.full(1, 0.5 * (start + end) * (size - 1))
        return start * (size - 1) + x * (end - start) * (size - 1) / (result - 1)
    if mode == "half_pixel_symmetric":
        adjustment = result / (scale * size)
        return size / 2 * (1 - adjustment) + (x + 0.5) / scale - 0.5
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (x + 0.5) / scale - 0.5
    raise ValueError(f"coordinate_transformation_mode {mode!r}")


def interpolation_weights(
    places: Array, size: int, scale: float, mode: str, antialias: bool, alpha: float, exclude: bool
) -> Array:
    """Return the weights `[len(places), size]` of the axis's elements for an interpolation at each source position.

    The filter is cubic for the `mode` "cubic", else a triangle (linear interpolation). `antialias` widens it by
    1 / `scale` where `scale` is below one. `alpha` is the cubic filter's coefficient. Taps outside of the axis have no
    weight with `exclude`; otherwise they are clamped to its ends. The weights of a position add up to one.
    """
    stretch = min(1.0, scale) if antialias else 1.0
    support = math.ceil((2 if mode == "cubic" else 1) / stretch)
    weights = np.zeros((len(places), size))
    for row, place in enumerate(places):
        taps = np.arange(math.floor(place) - support, math.floor(place) + support + 2)
        distance = np.abs(place - taps) * stretch
        if mode == "cubic":
            near = ((alpha + 2) * distance - (alpha + 3)) * distance**2 + 1
            far = ((alpha * distance - 5 * alpha) * distance + 8 * alpha) * distance - 4 * alpha
            values = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
        else:
            values = np.maximum(0.0, 1 - distance)
        inside = (taps >= 0) & (taps < size)
        if exclude:
            values = np.where(inside, values, 0.0)
        values = values / values.sum()
        np.add.at(weights[row], np.clip(taps, 0, size - 1), values)
    return weights
