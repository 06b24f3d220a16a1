"""Resize by sums, products and gathers, for the forms in which TVM's own operator would be wrong."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
from tvm import relax, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.interpolation import interpolation_weights, source_places
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of
from tvmflow.compiler.operators.resize import resample_axis

# The largest denominator of a scale by which float32 multiplies sizes exactly: 1.5 is such a scale, 1.7 is not.
_LARGEST_DENOMINATOR = 1 << 12


@dataclass(frozen=True)
class _Step:
    """One axis to resize from `size` to `result` elements, ints or symbolic sizes.

    Coordinates are computed with `scale`, which need not be the quotient of the sizes. Where one of them is symbolic,
    so that the axis `is_free`, `scale` may also be a tensor, or None for the quotient.
    """

    axis: int
    size: Any
    result: Any
    scale: Any
    is_free: bool = False


def convert_resize(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Resize for which TVM's converter would use wrong scales or ignore an attribute.

    It resizes one axis after another: by sums of few weighted elements, by a product with a matrix of interpolation
    weights where these are many, or by a gather of the nearest neighbours. An axis of symbolic size, before or after,
    is resized by gathers whose places the model computes when it runs, with `antialias` by a product whose weights it
    computes; an image [n, c, h, w] by TVM's operator in the forms that TVM computes correctly. Returns None, which
    leaves the node to TVM's converter, before opset 10, and for constant sizes in such forms. Raises FreeSizeError for
    an input of unknown shape, for a region that is not constant, and for a symbolic axis with a region, with a policy
    for the aspect ratio, with `half_pixel_symmetric`, or with `antialias` and clamped neighbours. Raises
    UnsupportedFormError for interpolation of integers, for an unknown `coordinate_transformation_mode`, and for a
    region beyond the data.
    """
    if node.opset < 10:
        return None
    if node.opset < 11:
        return _resize_of_opset_10(node)
    if node.input(3) is not None:
        # Exporters write empty scales beside sizes, which TVM's converter takes for scales.
        node.inputs[2] = None
    data, shape = node.inputs[0], dims_of(node.inputs[0])
    if shape is None:
        raise FreeSizeError("an input of unknown shape")
    axes = [int(axis) % len(shape) for axis in node.attrs.get("axes", range(len(shape)))]
    results, scales, factors = _results_and_scales(node, shape, axes)
    coordinates = node.text("coordinate_transformation_mode", "half_pixel")
    region = node.constant(1)
    if coordinates == "tf_crop_and_resize" and region is None:
        raise FreeSizeError("a region that is computed")
    steps, is_exact = _plan_steps(node, shape, axes, results, scales, factors, coordinates)
    is_symbolic = any(step.is_free for step in steps)
    mode = node.text("mode", "nearest")
    # TVM multiplies by the quotient of the sizes, which moves what lies between two neighbours to either of them.
    # Of a free axis with a result of known size, it cannot build `asymmetric`.
    is_built = coordinates == "asymmetric" and not any(step.is_free and isinstance(step.result, int) for step in steps)
    has_quotients = is_symbolic and results is not None and not is_built
    has_ties = mode == "nearest" and (
        coordinates == "align_corners"
        or has_quotients
        or any(_is_between_neighbours(node, step, coordinates) for step in steps if not step.is_free)
    )
    # TVM divides by the distance of the corners of the result.
    lengths = {axis: shape[axis] for axis in axes if axis > 1} | {step.axis: step.result for step in steps}
    is_thin = coordinates == "align_corners" and not all(node.evaluator.holds(size > 1) for size in lengths.values())
    if (
        is_exact
        and coordinates in _COORDINATES_OF_TVM
        and not has_ties
        and not is_thin
        and not node.attrs.get("antialias", 0)
        and "axes" not in node.attrs
        and node.text("keep_aspect_ratio_policy", "stretch") == "stretch"
        and len(shape) in (3, 4, 5)
    ):
        # TVM's converter takes no sizes with a symbol among them, be it the batch alone.
        has_symbols = is_symbolic or isinstance(node.input(3), relax.ShapeExpr)
        if has_symbols and steps and len(shape) == 4:
            return _resize_image(node, data, [lengths[axis] for axis in (2, 3)])
        # Integers that are interpolated would be rounded after each axis.
        takes_lines = coordinates in _COORDINATES_OF_LINES and (mode == "nearest" or dtype_of(data).startswith("float"))
        if steps and len(shape) != 4 and takes_lines:
            return _resize_lines(node, data, shape, steps)
        if not has_symbols or not steps:
            return None if steps else data
    if not dtype_of(data).startswith("float") and mode != "nearest":
        raise UnsupportedFormError(f"{mode} interpolation of {dtype_of(data)}")
    is_sum_of_neighbours = mode != "nearest" and not node.attrs.get("antialias", 0) and dtype_of(data) == "float32"
    # A line between the corners needs two elements, as does what `_resize_lines` makes the width of its image.
    has_corners = coordinates == "align_corners" and isinstance(shape[-1], int) and shape[-1] > 1
    has_corners = has_corners and all(step.axis < len(shape) - 1 and step.result != 1 for step in steps)
    if is_sum_of_neighbours and (coordinates in _COORDINATES_OF_LINES or has_corners) and all(map(_is_line, steps)):
        # As images with the channels last have their height and width.
        return _resize_lines(node, data, shape, steps)
    result = data
    for step in steps:
        if step.is_free:
            result = _resize_free_axis(node, result, step, coordinates)
            continue
        bounds = (0.0, 1.0)
        if coordinates == "tf_crop_and_resize" and region is not None:
            position = axes.index(step.axis)
            bounds = (float(region[position]), float(region[len(axes) + position]))
        result = _resize_axis(node, result, step, coordinates, bounds)
    return result


def _is_line(step: _Step) -> bool:
    """Whether an axis of known size, not the batch, is resized by the quotient of its sizes."""
    if step.is_free or step.axis < 1:
        return False
    return bool(abs(step.result / step.size - step.scale) <= 1e-6 * step.scale)


def _resize_of_opset_10(node: Node) -> relax.Expr:
    """Resize from the first pixel's corner; where an axis shrinks, the nearest pixel is the one after a place."""
    data, scales, mode = node.inputs[0], node.inputs[1], node.text("mode", "nearest")
    form: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    numbers = node.constant(1)
    if mode != "nearest":
        return node.apply("Resize", data, None, scales, **form)
    if numbers is None:
        raise FreeSizeError("scales that are computed, of the nearest pixels in opset 10")
    for part, rounding in ((np.maximum(numbers, 1), "floor"), (np.minimum(numbers, 1), "ceil")):
        if (part != 1).any():
            data = node.apply("Resize", data, None, const(part), nearest_mode=rounding, **form)
    return data


def convert_upsample(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Upsample: the Resize that replaced it in later opsets."""
    scales = node.input(1) if node.opset >= 9 else const(np.asarray(node.attrs["scales"], "float32"))
    attributes: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return node.apply("Resize", node.inputs[0], None, scales, mode=node.text("mode", "nearest"), **attributes)


def _is_between_neighbours(node: Node, step: _Step, coordinates: str) -> bool:
    """Whether rounding its scale could move a place of an axis of known size from one neighbour to the other."""
    quotient = Fraction(step.size, step.result)
    if quotient.denominator & (quotient.denominator - 1) == 0 or coordinates == "tf_crop_and_resize":
        return False  # The scale, as TVM has it, is exact.
    places = source_places(step.size, step.result, step.scale, coordinates, (0.0, 1.0), "float64")
    border = 0.5 if node.text("nearest_mode", "round_prefer_floor").startswith("round") else 0.0
    # The first place of `asymmetric` is 0 whatever the scale.
    distances = np.abs(places - border - np.rint(places - border))[1 if coordinates == "asymmetric" else 0 :]
    return bool(distances.min(initial=1.0) < step.size * _ROUNDING_OF_PLACES)


# The error of a place that a run computes in float32, over the size of the axis.
_ROUNDING_OF_PLACES = 2.0**-21

_COORDINATES_OF_TVM = {
    *("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "tf_half_pixel_for_nn"),
    "tf_crop_and_resize",
}


# Those that leave an axis of one element as it is.
_COORDINATES_OF_LINES = {"half_pixel", "pytorch_half_pixel", "asymmetric"}


def _resize_image(node: Node, image: relax.Expr, sizes: Sequence[Any]) -> relax.Expr:
    """Resize the last two of four dimensions by TVM's operator."""
    mode = node.text("mode", "nearest")
    return relax.op.image.resize2d(
        image,
        relax.ShapeExpr(sizes),
        layout="NCHW",
        method="nearest_neighbor" if mode == "nearest" else mode,
        coordinate_transformation_mode=node.text("coordinate_transformation_mode", "half_pixel"),
        rounding_method=node.text("nearest_mode", "round_prefer_floor"),
        cubic_alpha=node.attrs.get("cubic_coeff_a", -0.75),
        cubic_exclude=node.attrs.get("exclude_outside", 0),
        extrapolation_value=node.attrs.get("extrapolation_value", 0.0),
    )


def _resize_lines(node: Node, data: relax.Expr, shape: Sequence[Any], steps: Sequence[_Step]) -> relax.Expr:
    """Resize one axis after another as that of an image.

    The dimensions before the axis become the channels of the image, those behind it its width.
    """
    sizes, last = list(shape), len(shape) - 1
    results = {step.axis: step.result for step in steps}

    def product(values: Iterable[Any]) -> Any:
        return reduce(node.evaluator.multiply, values, 1)

    for axis in sorted(results):
        height, width = (1, sizes[axis]) if axis == last else (sizes[axis], product(sizes[axis + 1 :]))
        batch, channels = sizes[0], product(sizes[1:axis])
        sizes[axis] = results[axis]
        image = node.emit(relax.op.reshape(data, (batch, channels, height, width)))
        result = (1, sizes[axis]) if axis == last else (sizes[axis], width)
        data = node.emit(relax.op.reshape(node.emit(_resize_image(node, image, result)), sizes))
    return data


def _results_and_scales(
    node: Node, shape: list[Any], axes: list[int]
) -> tuple[dict[int, Any] | None, dict[int, float], dict[int, relax.Expr]]:
    """The sizes of the result, where the node gives sizes, the scales, and those that a run computes, all by axis.

    Symbolic axes have no scale where the node gives sizes.
    """
    scales, sizes = node.constant(2), node.sizes(3)
    if scales is not None and scales.size > 0:
        return None, dict(zip(axes, map(float, np.asarray(scales)), strict=True)), {}
    if sizes is None and node.input(3) is None:
        return _computed_scales(node, shape, axes)
    results = dict(zip(axes, _computed_sizes(node, shape, axes) if sizes is None else sizes, strict=True))
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    static = {axis for axis, size in results.items() if isinstance(shape[axis], int) and isinstance(size, int)}
    if policy == "stretch":
        return results, {axis: results[axis] / shape[axis] for axis in static}, {}
    if static != set(axes):
        raise FreeSizeError("keep_aspect_ratio_policy of symbolic dimensions")
    limit = min if policy == "not_larger" else max
    ratio = limit(results[axis] / shape[axis] for axis in axes)
    return {axis: math.floor(ratio * shape[axis] + 0.5) for axis in axes}, dict.fromkeys(axes, ratio), {}


def _computed_sizes(node: Node, shape: list[Any], axes: list[int]) -> list[Any]:
    """The sizes of the axes that the model computes when it runs; those of the batch and the channels must stay."""
    sizes = node.with_sizes(node.integers(3), [len(axes)])
    return node.bind(sizes, [shape[axis] if axis < 2 else None for axis in axes])


def _computed_scales(
    node: Node, shape: list[Any], axes: list[int]
) -> tuple[dict[int, Any], dict[int, float], dict[int, relax.Expr]]:
    """The sizes of the axes, and their scales, which the model computes when it runs."""
    scales = node.with_sizes(node.inputs[2], [len(axes)])
    sizes = node.emit(relax.op.astype(node.vector([shape[axis] for axis in axes]), "float32"))
    whole = node.emit(relax.op.floor(node.emit(relax.op.multiply(sizes, scales))))
    kept = [shape[axis] if axis < 2 else None for axis in axes]
    results = node.bind(node.emit(relax.op.astype(whole, "int64")), kept)
    places = {axis: const(place, "int64") for place, axis in enumerate(axes) if axis > 1}
    factors = {axis: node.emit(relax.op.take(scales, place, 0, mode="clip")) for axis, place in places.items()}
    return dict(zip(axes, results, strict=True)), {}, factors


def _plan_steps(
    node: Node,
    shape: list[Any],
    axes: list[int],
    results: dict[int, Any] | None,
    scales: dict[int, float],
    factors: dict[int, relax.Expr],
    coordinates: str,
) -> tuple[list[_Step], bool]:
    """The axes that change, and whether each is an axis of the image whose scale is the quotient of its sizes."""
    steps: list[_Step] = []
    is_exact = not factors
    for axis in axes:
        size = shape[axis]
        if axis not in scales or not isinstance(size, int):
            if axis in scales and scales[axis] == 1.0:
                continue
            if results is not None and axis < 2 and len(shape) > 2 and "axes" not in node.attrs:
                # The batch and the channels stay; the sizes that the node gives for them are their own.
                continue
            # A scale that is no whole number need not be the quotient of the sizes.
            is_exact = is_exact and axis >= 2 and float(scales.get(axis, 1.0)).is_integer()
            result = results[axis] if results is not None else _scaled(node, size, scales[axis])
            steps.append(_Step(axis, size, result, factors.get(axis, scales.get(axis)), is_free=True))
            continue
        scale = scales[axis]
        result = results[axis] if results is not None else math.floor(np.float32(scale) * np.float32(size))
        if coordinates != "tf_crop_and_resize" and result == size and scale == 1.0:
            continue
        steps.append(_Step(axis, size, result, scale))
        is_exact = is_exact and axis >= 2 and _is_line(steps[-1])
    return steps, is_exact


def _scaled(node: Node, size: Any, scale: float) -> Any:
    """A symbolic size times a scale, rounded down."""
    factor = Fraction(scale)
    if factor.denominator <= _LARGEST_DENOMINATOR:
        return node.evaluator.simplify(tirx.floordiv(size * factor.numerator, factor.denominator))
    product = relax.op.multiply(_as_float(node, size), const(scale, "float32"))
    whole = relax.op.reshape(node.emit(relax.op.floor(node.emit(product))), [1])
    return node.bind(node.emit(relax.op.astype(node.emit(whole), "int64")))[0]


def _as_float(node: Node, size: Any) -> relax.Expr:
    """A size as a float32 tensor without dimensions."""
    if isinstance(size, int):
        return const(size, "float32")
    return node.emit(relax.op.astype(node.emit(relax.op.reshape(node.vector([size]), ())), "float32"))


def _resize_free_axis(node: Node, data: relax.Expr, step: _Step, coordinates: str) -> relax.Expr:
    """`data` with one axis resized, whose size before or after only a run knows."""
    mode, emit, axis = node.text("mode", "nearest"), node.emit, step.axis
    if node.attrs.get("antialias", 0) and mode != "nearest":
        return _multiply_axis(node, data, axis, _antialiased_weights(node, step, coordinates))
    last = emit(relax.op.subtract(_as_float(node, step.size), const(1, "float32")))
    places = _free_places(node, step, last, coordinates)

    def clamped(value: relax.Expr) -> relax.Expr:
        return emit(relax.op.minimum(emit(relax.op.maximum(value, const(0, "float32"))), last))

    def taken(value: relax.Expr) -> relax.Expr:
        taken_values = emit(relax.op.take(data, emit(relax.op.astype(clamped(value), "int64")), axis, mode="clip"))
        dims = dims_of(data) or []
        return node.with_sizes(taken_values, [*dims[:axis], step.result, *dims[axis + 1 :]])

    if mode == "nearest":
        shift, rounding = _FREE_ROUNDINGS[node.text("nearest_mode", "round_prefer_floor")]
        return taken(emit(rounding(emit(relax.op.add(places, const(shift, "float32"))))))
    if mode == "linear":
        places = clamped(places)
    lower = emit(relax.op.floor(places))
    distance = emit(relax.op.subtract(places, lower))
    taps = [emit(relax.op.add(lower, const(tap, "float32"))) for tap in ((0, 1) if mode == "linear" else _CUBIC_TAPS)]
    if mode == "linear":
        weights = [emit(relax.op.subtract(const(1, "float32"), distance)), distance]
    else:
        weights = _cubic_weights(node, distance, node.attrs.get("cubic_coeff_a", -0.75))
    if mode == "cubic" and node.attrs.get("exclude_outside", 0):
        weights = [
            emit(relax.op.where(emit(relax.op.equal(tap, clamped(tap))), weight, const(0, "float32")))
            for tap, weight in zip(taps, weights, strict=True)
        ]
        total = _sum(node, weights)
        weights = [emit(relax.op.divide(weight, total)) for weight in weights]
    column = [step.result, *[1] * (int(data.ty.ndim) - axis - 1)]
    dtype = dtype_of(data)
    parts = []
    for tap, weight in zip(taps, weights, strict=True):
        weight = emit(relax.op.reshape(node.with_sizes(weight, [step.result]), column))
        weight = weight if dtype == "float32" else emit(relax.op.astype(weight, dtype))
        parts.append(emit(relax.op.multiply(taken(tap), weight)))
    return _sum(node, parts)


def _free_places(node: Node, step: _Step, last: relax.Expr, coordinates: str) -> relax.Expr:
    """The place in the axis of each element of the result, as `interpolation.source_places` has it, in float32."""
    emit, half, one = node.emit, const(0.5, "float32"), const(1, "float32")
    x, length = _numbers(node, step.result), _as_float(node, step.result)
    if coordinates == "align_corners":
        corners = emit(relax.op.maximum(emit(relax.op.subtract(length, one)), one))
        return emit(relax.op.divide(emit(relax.op.multiply(x, last)), corners))
    scale = _free_scale(node, step)
    if coordinates == "asymmetric":
        return emit(relax.op.divide(x, scale))
    if coordinates not in ("half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn"):
        raise FreeSizeError(f"coordinate_transformation_mode {coordinates!r} of symbolic dimensions")
    places = emit(relax.op.divide(emit(relax.op.add(x, half)), scale))
    if coordinates == "tf_half_pixel_for_nn":
        return places
    places = emit(relax.op.subtract(places, half))
    if coordinates == "pytorch_half_pixel":
        places = emit(relax.op.where(emit(relax.op.greater(length, one)), places, const(0, "float32")))
    return places


def _numbers(node: Node, count: Any) -> relax.Expr:
    """The numbers from 0 on, in float32."""
    return node.emit(relax.op.astype(node.emit(relax.op.arange(0, count, 1, "int64")), "float32"))


def _free_scale(node: Node, step: _Step) -> relax.Expr:
    """The scale of an axis as a float32 tensor without dimensions."""
    if isinstance(step.scale, float):
        return const(step.scale, "float32")
    if step.scale is not None:
        return step.scale
    return node.emit(relax.op.divide(_as_float(node, step.result), _as_float(node, step.size)))


def _antialiased_weights(node: Node, step: _Step, coordinates: str) -> relax.Expr:
    """The weights `[size, result]` of an axis's elements, as `interpolation_weights` has them with `exclude`."""
    if not node.attrs.get("exclude_outside", 0):
        raise FreeSizeError("antialias of symbolic dimensions without exclude_outside")
    emit, one = node.emit, const(1, "float32")
    last = emit(relax.op.subtract(_as_float(node, step.size), one))
    places = _free_places(node, step, last, coordinates)
    elements = emit(relax.op.expand_dims(_numbers(node, step.size), 1))
    away = emit(relax.op.abs(emit(relax.op.subtract(elements, emit(relax.op.expand_dims(places, 0))))))
    distance = emit(relax.op.multiply(away, emit(relax.op.minimum(_free_scale(node, step), one))))
    if node.text("mode", "nearest") == "linear":
        weights = emit(relax.op.nn.relu(emit(relax.op.subtract(one, distance))))
    else:
        near, far = (
            _polynomial(node, distance, factors) for factors in _cubic_factors(node.attrs.get("cubic_coeff_a", -0.75))
        )
        is_near, is_far = (emit(relax.op.less(distance, const(end, "float32"))) for end in (1, 2))
        beyond = emit(relax.op.where(is_far, far, const(0, "float32")))
        weights = emit(relax.op.where(is_near, near, beyond))
    weights = emit(relax.op.divide(weights, emit(relax.op.sum(weights, 0, keepdims=True))))
    # As in ONNX Runtime, an axis whose size stays is left as it is, whatever its scale.
    results = emit(relax.op.expand_dims(_numbers(node, step.result), 0))
    itself = emit(relax.op.astype(emit(relax.op.equal(elements, results)), "float32"))
    stays = emit(relax.op.equal(_as_float(node, step.size), _as_float(node, step.result)))
    return emit(relax.op.where(stays, itself, weights))


# The elements that a cubic interpolation weights, counted from the one before the place.
_CUBIC_TAPS = (-1, 0, 1, 2)


def _cubic_weights(node: Node, distance: relax.Expr, alpha: float) -> list[relax.Expr]:
    """The weights of the four elements around a place, which is `distance` behind the second of them."""
    near, far = _cubic_factors(alpha)
    weights = []
    for tap in _CUBIC_TAPS:
        away = node.emit(relax.op.abs(node.emit(relax.op.subtract(distance, const(tap, "float32")))))
        weights.append(_polynomial(node, away, near if tap in (0, 1) else far))
    return weights


def _cubic_factors(alpha: float) -> tuple[Sequence[float], Sequence[float]]:
    """The factors of the cubic filter at a distance of one at most, and at one of one to two."""
    return (alpha + 2, -(alpha + 3), 0.0, 1.0), (alpha, -5 * alpha, 8 * alpha, -4 * alpha)


def _polynomial(node: Node, x: relax.Expr, factors: Sequence[float]) -> relax.Expr:
    value = const(factors[0], "float32")
    for factor in factors[1:]:
        value = node.emit(relax.op.add(node.emit(relax.op.multiply(value, x)), const(factor, "float32")))
    return value


def _sum(node: Node, values: list[relax.Expr]) -> relax.Expr:
    total = values[0]
    for value in values[1:]:
        total = node.emit(relax.op.add(total, value))
    return total


def _resize_axis(
    node: Node, data: relax.Expr, step: _Step, coordinates: str, region: tuple[float, float]
) -> relax.Expr:
    """`data` with one axis, of a known size, resized."""
    size, axis = step.size, step.axis
    mode = node.text("mode", "nearest")
    dtype = "float32" if mode == "nearest" else "float64"
    try:
        places = source_places(size, step.result, step.scale, coordinates, region, dtype).astype("float64")
    except ValueError:
        raise UnsupportedFormError(f"coordinate_transformation_mode {coordinates!r}") from None
    if coordinates == "tf_crop_and_resize" and ((places < 0) | (places > size - 1)).any():
        raise UnsupportedFormError("a region beyond the data in this form")
    if mode == "nearest":
        neighbours = np.clip(_ROUNDINGS[node.text("nearest_mode", "round_prefer_floor")](places), 0, size - 1)
        return node.emit(relax.op.take(data, const(neighbours.astype("int64")), axis))
    antialias = bool(node.attrs.get("antialias", 0))
    if antialias and step.result == size:
        # As in ONNX Runtime, whatever the scale.
        return data
    weights = interpolation_weights(
        places,
        size,
        step.scale,
        mode,
        antialias,
        node.attrs.get("cubic_coeff_a", -0.75),
        bool(node.attrs.get("exclude_outside", 0)),
    )
    if np.array_equal(weights, np.eye(size)):
        return data
    # Most weights are zero.
    sums = resample_axis(node.builder, data, axis, weights)
    return _multiply_axis(node, data, axis, const(weights.T, dtype_of(data))) if sums is None else node.emit(sums)


def _multiply_axis(node: Node, data: relax.Expr, axis: int, weights: relax.Expr) -> relax.Expr:
    """The products of one axis of `data` with the matrix `weights`, whose rows are the elements of that axis."""
    rank = data.ty.ndim
    last = rank - 1
    order = [i for i in range(rank) if i != axis] + [axis]
    moved = data if axis == last else node.emit(relax.op.permute_dims(data, order))
    if dtype_of(weights) != dtype_of(data):
        weights = node.emit(relax.op.astype(weights, dtype_of(data)))
    product = node.emit(relax.op.matmul(moved, weights))
    back = [order.index(i) for i in range(rank)]
    return product if axis == last else node.emit(relax.op.permute_dims(product, back))


_ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
# What is added to places before they are rounded, and how.
_FREE_ROUNDINGS: dict[str, tuple[float, Callable[[relax.Expr], relax.Expr]]] = {
    "round_prefer_floor": (-0.5, relax.op.ceil),
    "round_prefer_ceil": (0.5, relax.op.floor),
    "floor": (0.0, relax.op.floor),
    "ceil": (0.0, relax.op.ceil),
}
