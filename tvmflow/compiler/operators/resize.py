"""Linear and cubic resizing of images along one axis, then the other: weighted sums of elements at places of a table.

The tables are constants for a known size; for a free one the function computes them first. Images that
become a whole number of times as large as they are repeat their nearest neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, sym, te, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.interpolation import cubic_weights, interpolation_weights, source_place, source_places
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import call_kernel, constant, is_float32, static
from tvmflow.compiler.vectormath import rounded

# Images with the channels last take so many taps at once, each a whole vector; more are cheaper in two steps.
_MOST_TAPS = 4
# The most terms of a sum that is written out.
_MOST_TERMS = 32
# The integers that ONNX Runtime interpolates.
_INTEGERS = ("uint8", "int8", "int32")
_MODES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
# Where an image becomes a whole number of times as large, these take each element that many times.
_REPEATING = (
    ("asymmetric", "floor"),
    *((mode, f"round{preference}") for mode in _MODES[:2] for preference in ("", "_prefer_floor", "_prefer_ceil")),
)
# The most times that an element is repeated along an axis: so many factors are tried.
_MOST_REPEATS = 64


def legalize(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define the linear or cubic resize of float32 images, NHWC or NCHW, and nearest resizes that are repeats.

    It also defines the linear resize of images of integers. Returns None for other types, modes and sizes.
    """
    data, attrs = call.args[0], call.attrs
    factors = _whole_factors(call)
    if factors is not None:
        return call_kernel(builder, partial(repeat, factors=factors), data, name="repeat")
    mode, layout = str(attrs.method), str(attrs.layout)
    coordinates = str(attrs.coordinate_transformation_mode)
    if mode not in ("linear", "cubic") or layout not in ("NHWC", "NCHW") or coordinates not in _MODES:
        return None
    axes = [layout.index(letter) for letter in "HW"]
    resampling = _Resampling(mode, coordinates, float(attrs.cubic_alpha), bool(attrs.cubic_exclude))
    pairs = [[tensor.ty.shape.values[axis] for tensor in (data, call)] for axis in axes]
    if mode == "linear" and str(call.ty.dtype) == str(data.ty.dtype) and str(data.ty.dtype) in _INTEGERS:
        return _legalize_integers(builder, data, axes, pairs, resampling)
    if not is_float32(data) or str(call.ty.dtype) != "float32":
        return None
    # Memory runs along the width, so the step along it is the slower one: it comes where there are fewer lines.
    order = [place for place in ((1, 0) if _may_grow(*pairs[0]) else (0, 1)) if _may_change(*pairs[place])]
    if not order:
        return None
    steps: list[tuple[int, bool]] = []
    tables: list[Array] = []
    taps = 1
    for place in order:
        is_known = None not in map(static, pairs[place])
        own = resampling.known_tables(*map(int, pairs[place])) if is_known else ()
        steps.append((axes[place], is_known))
        tables += own
        taps *= len(own[0]) if own else resampling.taps
    apart = layout == "NCHW" or taps > _MOST_TAPS
    compute = partial(resize, steps=steps, resampling=resampling, apart=apart)
    results = [pairs[place][1] for place in order]
    return call_kernel(builder, compute, data, results, *map(constant, tables), name="resize2d")


def _legalize_integers(
    builder: relax.BlockBuilder,
    data: relax.Expr,
    axes: Sequence[int],
    pairs: Sequence[Sequence[Any]],
    resampling: "_Resampling",
) -> relax.Expr | None:
    """Define the linear resize of integers along the height and the width, whose sizes before and after are `pairs`."""
    if not any(_may_change(*pair) for pair in pairs):
        return None
    tables: list[Array] = []
    is_known = [None not in map(static, pair) for pair in pairs]
    for pair, known in zip(pairs, is_known, strict=True):
        tables += resampling.known_neighbours(*map(int, pair)) if known else ()
    steps = list(zip(axes, is_known, strict=True))
    compute = partial(resize_integers, steps=steps, resampling=resampling)
    results = [result for _, result in pairs]
    return call_kernel(builder, compute, data, results, *map(constant, tables), name="resize2d")


def _may_grow(size: Any, result: Any) -> bool:
    """Whether an axis is not known to become shorter."""
    return not sym.Analyzer().can_prove(result < size)


def _may_change(size: Any, result: Any) -> bool:
    """Whether an axis is not known to keep its size."""
    return not sym.Analyzer().can_prove_equal(size, result)


@dataclass(frozen=True)
class _Resampling:
    """How an axis is resampled: the attributes of Resize that have these names in ONNX, and two of cubic `mode`."""

    mode: str
    coordinates: str
    alpha: float
    excludes_outside: bool

    @property
    def taps(self) -> int:
        """The elements around a place."""
        return 4 if self.mode == "cubic" else 2

    def known_tables(self, size: int, result: int) -> tuple[Array, Array]:
        """Return the tables of `resize` for an axis of known sizes, before and after."""
        # In float32 as ONNX Runtime does.
        places = source_places(size, result, result / size, self.coordinates, (0.0, 1.0), "float32")
        return _taps(
            interpolation_weights(places, size, result / size, self.mode, False, self.alpha, self.excludes_outside)
        )

    def computed_tables(self, size: Any, result: Any) -> tuple[te.Tensor, te.Tensor]:
        """Return the tables of `resize` as tensors that the function computes, in float32 as ONNX Runtime does."""
        shape, before = (self.taps, result), self.taps // 2 - 1
        # TVM's analysis of an integer that is made of a quotient in floating point raises; it does not look in buffers.
        sources = te.compute((result,), lambda at: self._place(size, result, at), name="sources")
        last, zero = tirx.Cast("int32", size - 1), tirx.const(0, "int32")

        def element(tap: Any, at: Any) -> Any:
            return tirx.Cast("int32", tirx.floor(sources[at])) + tirx.Cast("int32", tap) - before

        def weight(tap: Any, at: Any) -> Any:
            value = self._weight(sources[at], tirx.Cast("float32", tap) - before)
            number = element(tap, at)
            is_inside = tirx.all(number >= 0, number <= last)
            return tirx.Select(is_inside, value, tirx.const(0, "float32")) if self.excludes_outside else value

        def share(tap: Any, at: Any) -> Any:
            return weight(tap, at) / sum(weight(tirx.const(item, "int32"), at) for item in range(self.taps))

        places = te.compute(shape, lambda tap, at: tirx.max(tirx.min(element(tap, at), last), zero), name="places")
        return places, te.compute(shape, share if self.excludes_outside else weight, name="weights")

    def known_neighbours(self, size: int, result: int) -> tuple[Array, Array]:
        """Return the places and weights of the two neighbours of each element of an axis of known sizes.

        They are those of ONNX Runtime: each has weight one half where both are the last element.
        """
        places = source_places(size, result, result / size, self.coordinates, (0.0, 1.0), "float32")
        places = np.clip(places.astype("float32"), 0, size - 1).astype("float32")
        before = np.floor(places)
        after = np.minimum(before + 1, size - 1).astype("float32")
        weights = np.where(before == after, np.float32(0.5), np.stack([after - places, places - before]))
        return np.stack([before, after]).astype("int32"), weights.astype("float32")

    def computed_neighbours(self, size: Any, result: Any) -> tuple[te.Tensor, te.Tensor]:
        """Return the tables of `known_neighbours` as tensors that the function computes."""
        last = tirx.Cast("float32", size - 1)

        def source(at: Any) -> Any:
            return tirx.max(tirx.min(self._place(size, result, at), last), tirx.const(0, "float32"))

        # See `computed_tables`.
        sources = te.compute((result,), source, name="sources")

        def neighbour(tap: Any, at: Any) -> Any:
            return tirx.min(tirx.floor(sources[at]) + tirx.Cast("float32", tap), last)

        def weight(tap: Any, at: Any) -> Any:
            away = tirx.abs(sources[at] - neighbour(1 - tap, at))
            return tirx.Select(tirx.floor(sources[at]) < last, away, tirx.const(0.5, "float32"))

        places = te.compute((2, result), lambda tap, at: tirx.Cast("int32", neighbour(tap, at)), name="places")
        return places, te.compute((2, result), weight, name="weights")

    def _place(self, size: Any, result: Any, at: Any) -> Any:
        """The place of an element of the result in the axis before, as `source_places` has it."""
        size, result, at = (tirx.Cast("float32", item) for item in (size, result, at))
        # Between the corners of one element, there is none.
        length = tirx.max(result, tirx.const(2, "float32")) if self.coordinates == "align_corners" else result
        place = source_place(at, size, length, result / size, self.coordinates)
        if self.coordinates == "pytorch_half_pixel":
            return tirx.Select(result > 1, place, tirx.const(0, "float32"))
        return place

    def _weight(self, place: Any, tap: Any) -> Any:
        """The weight of the element that lies `tap` elements behind the one before a place."""
        away = tirx.abs(place - tirx.floor(place) - tap)
        if self.mode == "linear":
            return 1 - away
        return tirx.Select(away <= 1, *cubic_weights(away, self.alpha))


def _whole_factors(call: relax.Call) -> list[int] | None:
    """How often a nearest resize repeats each element along each axis; None for another resize."""
    attrs, sizes, results = call.attrs, call.args[0].ty.shape.values, call.ty.shape.values
    rounding = str(attrs.coordinate_transformation_mode), str(attrs.rounding_method)
    if str(attrs.method) != "nearest_neighbor" or rounding not in _REPEATING:
        return None
    analyzer = sym.Analyzer()
    factors = []
    for size, result in zip(sizes, results, strict=True):
        fitting = (factor for factor in range(1, _MOST_REPEATS + 1) if analyzer.can_prove_equal(size * factor, result))
        factor = next(fitting, None)
        if factor is None:
            return None
        factors.append(factor)
    # With known sizes, pixels whose channels come last are read where the next function needs them.
    return factors if factors[-1] > 1 or None in map(static, sizes) else None


def repeat(data: te.Tensor, *, factors: Sequence[int]) -> te.Tensor:
    """Repeat each element of `data` as often along each axis as `factors` says."""
    shape = [size * factor for size, factor in zip(data.shape, factors, strict=True)]
    return te.compute(
        shape,
        lambda *index: data[tuple(at // factor for at, factor in zip(index, factors, strict=True))],
        name="repeat",
    )


def resample_axis(builder: relax.BlockBuilder, data: relax.Expr, axis: int, weights: Array) -> relax.Expr | None:
    """Define `data` with the elements along an axis replaced by weighted sums of them: `weights` are `[result, size]`.

    A sum is of the elements whose weight is not zero. Returns None for other types than float32, and for sums of many.
    """
    places, values = _taps(weights)
    if not is_float32(data) or len(places) > _MOST_TERMS:
        return None
    compute = partial(_resample, axis=axis, result=len(weights))
    return call_kernel(builder, compute, data, constant(places), constant(values), name="resample")


def _resample(data: te.Tensor, places: te.Tensor, values: te.Tensor, *, axis: int, result: int) -> te.Tensor:
    shape = [*data.shape[:axis], result, *data.shape[axis + 1 :]]
    element = partial(_interpolate, partial(_read, data), places, values, axis)
    return te.compute(shape, element, name="resize", attrs={KERNEL: "resize"})


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


def resize(
    data: te.Tensor,
    results: Sequence[Any],
    *tables: te.Tensor,
    steps: Sequence[tuple[int, bool]],
    resampling: _Resampling,
    apart: bool,
) -> te.Tensor:
    """Resize `data` to each of the `results` along an axis, in the order of the `steps`.

    A step is an axis, and whether its sizes are known. `tables` are two tensors of shape `[taps, result size]` for each
    axis of known sizes, in the order of the steps; for others, the function computes them. The first holds the indices
    (int32) of the elements whose weighted sum is a result, the second holds their weights (float32). With `apart` the
    result along each axis but the last is stored in a buffer. Without it one expression computes all axes.
    """
    shape, element, given = list(data.shape), partial(_read, data), iter(tables)
    for number, ((axis, is_known), result) in enumerate(zip(steps, results, strict=True)):
        pair = (next(given), next(given)) if is_known else resampling.computed_tables(data.shape[axis], result)
        shape[axis] = result
        element = partial(_interpolate, element, *pair, axis)
        if apart and number < len(steps) - 1:
            line = te.compute(shape, element, name="line")
            element = partial(_read, line)
    return te.compute(shape, element, name="resize", attrs={KERNEL: "resize"})


def resize_integers(
    data: te.Tensor,
    results: Sequence[Any],
    *tables: te.Tensor,
    steps: Sequence[tuple[int, bool]],
    resampling: _Resampling,
) -> te.Tensor:
    """Resize images of integers to the height and width `results`.

    `steps` are the axes of the height and the width, and whether the sizes of each are known. `tables` are two tensors
    of shape `[2, result size]` for each axis of known sizes: the indices (int32) and the weights (float32) of the two
    neighbours of each result. For others, the function computes them. Each result is the sum of four elements in
    float32 without its fraction. The products and sums are those of ONNX Runtime, in its order:
    in another, a sum that is a whole number could be rounded to one just below it.
    """
    given, dtype = iter(tables), data.dtype
    shape, pairs = list(data.shape), []
    for (axis, is_known), result in zip(steps, results, strict=True):
        known = (next(given), next(given)) if is_known else None
        pairs.append(known or resampling.computed_neighbours(data.shape[axis], result))
        shape[axis] = result
    (row, _), (column, _) = steps
    (rows, down), (columns, across) = pairs

    def element(*index: Any) -> Any:
        y, x, total = index[row], index[column], None
        for below in range(2):
            for right in range(2):
                place = list(index)
                place[row], place[column] = (tirx.Cast("int64", item) for item in (rows[below, y], columns[right, x]))
                value = tirx.Cast("float32", data[tuple(place)])
                product = rounded(across[right, x] * down[below, y] * value)
                total = product if total is None else total + product
        return tirx.Cast(dtype, total)

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
