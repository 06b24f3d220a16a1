"""Resize by products and gathers, for the forms in which TVM's own operator would be wrong."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.compiler.interpolation import interpolation_weights, source_places
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import Array, const, dims_of, dtype_of


@dataclass(frozen=True)
class _Step:
    """One axis to resize from `size` to `result` elements; both are None where the axis is symbolic.

    Coordinates are computed with `scale`, which need not be the quotient of the sizes.
    """

    axis: int
    size: int | None
    result: int | None
    scale: float


def convert_resize(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Resize for which TVM's converter would use wrong scales or ignore an attribute.

    It resizes one axis after another: by a product with a matrix of interpolation weights, or by a gather of the
    nearest neighbours. An image [n, c, h, w] with symbolic h or w is resized by TVM's operator. Returns None, which
    leaves the node to TVM's converter, before opset 10, and for constant sizes in the forms that TVM computes
    correctly. Raises FreeSizeError for an input of unknown shape, for scales, sizes or a region that are not constant,
    and for symbolic dimensions in other forms. Raises UnsupportedFormError for interpolation of integers, for an
    unknown `coordinate_transformation_mode`, and for a region beyond the data.
    """
    if node.opset < 10:
        return None
    if node.opset < 11:
        node.inputs[1:] = [None, node.inputs[1]]
    data, shape = node.inputs[0], dims_of(node.inputs[0])
    if shape is None:
        raise FreeSizeError("an input of unknown shape")
    axes = [int(axis) % len(shape) for axis in node.attrs.get("axes", range(len(shape)))]
    results, scales = _results_and_scales(node, shape, axes)
    coordinates = node.text("coordinate_transformation_mode", "half_pixel")
    region = node.constant(1)
    if coordinates == "tf_crop_and_resize" and region is None:
        raise FreeSizeError("a region that is computed")
    steps, is_exact = _plan_steps(shape, axes, results, scales, coordinates)
    is_symbolic = any(step.size is None for step in steps)
    mode = node.text("mode", "nearest")
    # TVM multiplies by the quotient of the sizes, which moves what lies between two neighbours to either of them.
    has_ties = mode == "nearest" and coordinates == "align_corners" and not is_symbolic
    # TVM divides by the distance of the corners of the result.
    is_thin = coordinates == "align_corners" and any(
        axis > 1 and axis in scales and round(shape[axis] * scales[axis]) == 1
        for axis in axes
        if isinstance(shape[axis], int)
    )
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
            return _resize_image(node, shape, axes, results, scales)
        if not has_symbols or not steps:
            return None if steps else data
    if is_symbolic:
        raise FreeSizeError("symbolic dimensions in this form")
    if not dtype_of(data).startswith("float") and mode != "nearest":
        raise UnsupportedFormError(f"{mode} interpolation of {dtype_of(data)}")
    result = data
    for step in steps:
        bounds = (0.0, 1.0)
        if coordinates == "tf_crop_and_resize" and region is not None:
            position = axes.index(step.axis)
            bounds = (float(region[position]), float(region[len(axes) + position]))
        result = _resize_axis(node, result, step, coordinates, bounds)
    return result


def convert_upsample(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Upsample: the Resize that replaced it in later opsets."""
    scales = node.input(1) if node.opset >= 9 else const(np.asarray(node.attrs["scales"], "float32"))
    attributes: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return node.apply("Resize", node.inputs[0], None, scales, mode=node.text("mode", "nearest"), **attributes)


_COORDINATES_OF_TVM = {
    *("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "tf_half_pixel_for_nn"),
    "tf_crop_and_resize",
}


def _resize_image(
    node: Node, shape: list[Any], axes: list[int], results: dict[int, Any] | None, scales: dict[int, float]
) -> relax.Expr:
    """Resize the last two of four dimensions, of which one or both are symbolic, by TVM's operator."""
    sizes = [
        results[axis] if results is not None else node.evaluator.multiply(shape[axis], round(scales[axis]))
        for axis in (2, 3)
    ]
    mode = node.text("mode", "nearest")
    return relax.op.image.resize2d(
        node.inputs[0],
        relax.ShapeExpr(sizes),
        layout="NCHW",
        method="nearest_neighbor" if mode == "nearest" else mode,
        coordinate_transformation_mode=node.text("coordinate_transformation_mode", "half_pixel"),
        rounding_method=node.text("nearest_mode", "round_prefer_floor"),
        cubic_alpha=node.attrs.get("cubic_coeff_a", -0.75),
        cubic_exclude=node.attrs.get("exclude_outside", 0),
        extrapolation_value=node.attrs.get("extrapolation_value", 0.0),
    )


def _results_and_scales(
    node: Node, shape: list[Any], axes: list[int]
) -> tuple[dict[int, Any] | None, dict[int, float]]:
    """The sizes of the result, where the node gives sizes, and the scales, both by axis.

    Symbolic axes have no scale where the node gives sizes.
    """
    scales, sizes = node.constant(2), node.sizes(3)
    if scales is not None and scales.size > 0:
        return None, dict(zip(axes, map(float, np.asarray(scales)), strict=True))
    if sizes is None:
        raise FreeSizeError("scales or sizes that are computed")
    results = dict(zip(axes, sizes, strict=True))
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    static = {axis for axis, size in results.items() if isinstance(shape[axis], int) and isinstance(size, int)}
    if policy == "stretch":
        return results, {axis: results[axis] / shape[axis] for axis in static}
    if static != set(axes):
        raise FreeSizeError("keep_aspect_ratio_policy of symbolic dimensions")
    limit = min if policy == "not_larger" else max
    ratio = limit(results[axis] / shape[axis] for axis in axes)
    return {axis: math.floor(ratio * shape[axis] + 0.5) for axis in axes}, dict.fromkeys(axes, ratio)


def _plan_steps(
    shape: list[Any], axes: list[int], results: dict[int, Any] | None, scales: dict[int, float], coordinates: str
) -> tuple[list[_Step], bool]:
    """The axes that change, and whether each is an axis of the image whose scale is the quotient of its sizes."""
    steps: list[_Step] = []
    is_exact = True
    for axis in axes:
        size = shape[axis]
        if axis not in scales or not isinstance(size, int):
            if axis in scales and scales[axis] == 1.0:
                continue
            if results is not None and axis < 2:
                # The batch and the channels stay; the sizes that the node gives for them are their own.
                continue
            # A scale that is no whole number need not be the quotient of the sizes.
            is_exact = is_exact and axis >= 2 and float(scales.get(axis, 1.0)).is_integer()
            steps.append(_Step(axis, None, None, 0.0))
            continue
        scale = scales[axis]
        result = results[axis] if results is not None else math.floor(np.float32(scale) * np.float32(size))
        if coordinates != "tf_crop_and_resize" and result == size and scale == 1.0:
            continue
        if axis < 2 or abs(result / size - scale) > 1e-6 * scale:
            is_exact = False
        steps.append(_Step(axis, size, result, scale))
    return steps, is_exact


def _resize_axis(
    node: Node, data: relax.Expr, step: _Step, coordinates: str, region: tuple[float, float]
) -> relax.Expr:
    """`data` with one axis, of a known size, resized."""
    size, axis = step.size or 0, step.axis
    mode = node.text("mode", "nearest")
    dtype = "float32" if mode == "nearest" else "float64"
    try:
        places = source_places(size, step.result or 0, step.scale, coordinates, region, dtype).astype("float64")
    except ValueError:
        raise UnsupportedFormError(f"coordinate_transformation_mode {coordinates!r}") from None
    if coordinates == "tf_crop_and_resize" and ((places < 0) | (places > size - 1)).any():
        raise UnsupportedFormError("a region beyond the data in this form")
    if mode == "nearest":
        neighbours = np.clip(_ROUNDINGS[node.text("nearest_mode", "round_prefer_floor")](places), 0, size - 1)
        return node.emit(relax.op.take(data, const(neighbours.astype("int64")), axis))
    weights = interpolation_weights(
        places,
        size,
        step.scale,
        mode,
        bool(node.attrs.get("antialias", 0)),
        node.attrs.get("cubic_coeff_a", -0.75),
        bool(node.attrs.get("exclude_outside", 0)),
    )
    rank = data.ty.ndim
    last = rank - 1
    order = [i for i in range(rank) if i != axis] + [axis]
    moved = data if axis == last else node.emit(relax.op.permute_dims(data, order))
    product = node.emit(relax.op.matmul(moved, const(weights.T, dtype_of(data))))
    back = [order.index(i) for i in range(rank)]
    return product if axis == last else node.emit(relax.op.permute_dims(product, back))


_ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
