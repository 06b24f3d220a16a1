"""Linear and cubic resizing of images along one axis, then the other: weighted sums of elements at constant places.

Images of free size that become a whole number of times as large as they are repeat their nearest neighbours.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, sym, te, tirx

from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.interpolation import Array, interpolation_weights, source_places
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import call_kernel, constant, is_float32, static

# Images with the channels last take so many taps at once, each a whole vector; more are cheaper in two steps.
_MOST_TAPS = 4
_MODES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
# Where an image becomes a whole number of times as large, these take each element that many times.
_REPEATING = (
    ("asymmetric", "floor"),
    *((mode, f"round{preference}") for mode in _MODES[:2] for preference in ("", "_prefer_floor", "_prefer_ceil")),
)
# The most times that an element is repeated along an axis: each is a copy of the statement.
_MOST_REPEATS = 8


def legalize(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define the linear or cubic resize of float32 images of known size, NHWC or NCHW, and repeats of free size.

    Returns None for other types, modes and sizes.
    """
    data, attrs = call.args[0], call.attrs
    factors = _whole_factors(call)
    if factors is not None:
        return call_kernel(builder, partial(repeat, factors=factors), data, name="repeat")
    mode, layout = str(attrs.method), str(attrs.layout)
    coordinates = str(attrs.coordinate_transformation_mode)
    if mode not in ("linear", "cubic") or layout not in ("NHWC", "NCHW") or coordinates not in _MODES:
        return None
    if not is_float32(data) or str(call.ty.dtype) != "float32":
        return None
    axes = [layout.index(letter) for letter in "HW"]
    sizes, results = ([static(tensor.ty.shape.values[axis]) or 0 for axis in axes] for tensor in (data, call))
    if not all((*sizes, *results)):
        return None
    tables = []
    for size, result in zip(sizes, results, strict=True):
        places = source_places(size, result, result / size, coordinates, (0.0, 1.0))
        alpha, exclude = float(attrs.cubic_alpha), bool(attrs.cubic_exclude)
        tables.append(_taps(interpolation_weights(places, size, result / size, mode, False, alpha, exclude)))
    # Memory runs along the width, so the step along it is the slower one: it comes where there are fewer lines.
    order = (1, 0) if sizes[0] <= results[0] else (0, 1)
    arguments = [constant(table) for place in order for table in tables[place]]
    taps = math.prod(len(places) for places, _ in tables)
    apart = layout == "NCHW" or taps > _MOST_TAPS
    compute = partial(resize, axes=[axes[place] for place in order], apart=apart)
    return call_kernel(builder, compute, data, *arguments, name="resize2d")


def _whole_factors(call: relax.Call) -> list[int] | None:
    """How often a nearest resize of free size repeats each element along each axis; None for another resize."""
    attrs, sizes, results = call.attrs, call.args[0].ty.shape.values, call.ty.shape.values
    rounding = str(attrs.coordinate_transformation_mode), str(attrs.rounding_method)
    if str(attrs.method) != "nearest_neighbor" or rounding not in _REPEATING or None not in map(static, sizes):
        return None
    analyzer = sym.Analyzer()
    factors = []
    for size, result in zip(sizes, results, strict=True):
        fitting = (factor for factor in range(1, _MOST_REPEATS + 1) if analyzer.can_prove_equal(size * factor, result))
        factor = next(fitting, None)
        if factor is None:
            return None
        factors.append(factor)
    return factors


def repeat(data: te.Tensor, *, factors: Sequence[int]) -> te.Tensor:
    """Repeat each element of `data` as often along each axis as `factors` says."""
    shape = [size * factor for size, factor in zip(data.shape, factors, strict=True)]
    return te.compute(
        shape,
        lambda *index: data[tuple(at // factor for at, factor in zip(index, factors, strict=True))],
        name="repeat",
    )


def _taps(weights: Array) -> tuple[Array, Array]:
    """The places (int32) and the values (float32) of the weights `[result, size]` that are not zero: `[taps, result]`.

    Elements with fewer taps than others have their first one again, with weight zero.
    """
    taps = max(int(np.count_nonzero(row)) for row in weights)
    places, values = np.zeros((taps, len(weights)), "int32"), np.zeros((taps, len(weights)), "float32")
    for number, row in enumerate(weights):
        (own,) = np.nonzero(row)
        places[:, number] = own[0]
        places[: len(own), number], values[: len(own), number] = own, row[own]
    return places, values


def resize(data: te.Tensor, *tables: te.Tensor, axes: Sequence[int], apart: bool) -> te.Tensor:
    """Resize `data` along each of the `axes`, in their order.

    `tables` are two tensors of shape `[taps, result size]` for each axis, in the order of the axes. The first holds the
    indices (int32) of the elements whose weighted sum is a result, the second holds their weights (float32). With
    `apart` the result along each axis but the last is stored in a buffer. Without it one expression computes all axes.
    """
    shape, element = list(data.shape), partial(_read, data)
    for step, axis in enumerate(axes):
        places, weights = tables[2 * step : 2 * step + 2]
        shape[axis] = places.shape[1]
        element = partial(_interpolate, element, places, weights, axis)
        if apart and step < len(axes) - 1:
            line = te.compute(shape, element, name="line")
            element = partial(_read, line)
    return te.compute(shape, element, name="resize", attrs={KERNEL: "resize"})


def _read(tensor: te.Tensor, *index: Any) -> Any:
    return tensor[index]


def _interpolate(read: Callable[..., Any], places: te.Tensor, weights: te.Tensor, axis: int, *index: Any) -> Any:
    """The element at `index` of what `read` returns the elements of, resized along `axis`."""
    total = None
    for tap in range(int(places.shape[0])):
        place = tirx.Cast("int64", places[tap, index[axis]])
        product = read(*index[:axis], place, *index[axis + 1 :]) * weights[tap, index[axis]]
        total = product if total is None else total + product
    return total
