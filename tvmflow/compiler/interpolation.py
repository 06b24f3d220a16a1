"""Interpolation for Resize: the source positions of the elements of a resized axis, and the weights around them."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tvmflow.arrays import Array


def source_places(
    size: int, result: int, scale: float, mode: str, region: tuple[float, float], dtype: npt.DTypeLike = "float64"
) -> Array:
    """Return the source position of each element of a resized axis, as ONNX Runtime's Resize has it.

    The axis has `size` elements before and `result` after; `scale` is the operator's scale of the axis. `mode` is its
    coordinate_transformation_mode. `region` is the start and the end of its roi, which only tf_crop_and_resize reads.
    The positions are computed in `dtype`. ONNX Runtime computes in float32, which decides where a position is about
    half of the way between two neighbours. Between aligned corners, and for a result of one element, its length is
    `result`; ONNX's specification has the size times the scale there. Raises ValueError for a mode that the
    specification does not have.
    """
    x = np.arange(result, dtype=dtype)
    scale = x.dtype.type(scale)
    if mode in ("align_corners", "pytorch_half_pixel") and result == 1:
        return np.zeros(result)
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
    if mode in ("asymmetric", "align_corners", "half_pixel", "pytorch_half_pixel"):
        places: Array = source_place(x, size, result, scale, mode)
        return places
    raise ValueError(f"coordinate_transformation_mode {mode!r}")


def source_place(x: Any, size: Any, length: Any, scale: Any, mode: str) -> Any:
    """Return the source position of an element `x` of a resized axis, an array or an expression.

    The axis has `size` elements before and `length` after. `mode` is asymmetric, align_corners or half_pixel.
    """
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        return x * (size - 1) / (length - 1)
    return (x + 0.5) / scale - 0.5


def cubic_weights(distance: Any, alpha: float) -> tuple[Any, Any]:
    """Return the cubic filter at a distance of one at most, and at one of one to two; an array or an expression."""
    near = ((alpha + 2) * distance - (alpha + 3)) * (distance * distance) + 1
    far = ((alpha * distance - 5 * alpha) * distance + 8 * alpha) * distance - 4 * alpha
    return near, far


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
            near, far = cubic_weights(distance, alpha)
            values = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
        else:
            values = np.maximum(0.0, 1 - distance)
        inside = (taps >= 0) & (taps < size)
        if exclude:
            values = np.where(inside, values, 0.0)
        values = values / values.sum()
        np.add.at(weights[row], np.clip(taps, 0, size - 1), values)
    return weights
