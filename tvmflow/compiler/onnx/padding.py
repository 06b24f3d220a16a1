"""Pad, in all its modes, and padding of other operators along one axis."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.onnx.node import FreeSizeError, Node
from tvmflow.compiler.onnx.sizes import elements_at_import
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of, is_static
from tvmflow.compiler.size_checks import cast_to


def convert_pad(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Pad, in one of three forms.

    Constant widths that are not negative around float32 data, in mode `constant`, become the operator `nn.pad`, which
    folds into convolutions; TVM's converter would emit a function. Symbolic widths in mode `constant` become a
    concatenation. Other modes and symbolic widths, negative ones, and widths, axes or values that are computed from
    data become a function that computes for each element of the result which element of the data it is. Returns None,
    which leaves the node to TVM's converter, for other constant widths. Raises FreeSizeError for data of unknown shape.
    """
    data, widths = node.inputs[0], node.constant(1) if node.opset >= 11 else np.asarray(node.attrs.get("pads", ()))
    value = node.constant(2) if node.opset >= 11 else np.asarray(node.attrs.get("value", 0.0))
    axes, dims, mode = node.constant(3), dims_of(data), node.text("mode", "constant")
    if dims is None:
        raise FreeSizeError("data of unknown shape")
    is_computed = (node.input(2) is not None and value is None) or (node.input(3) is not None and axes is None)
    if isinstance(node.input(1), relax.ShapeExpr) and mode == "constant" and not is_computed:
        return _pad_by_sizes(node, dims)
    if is_computed or widths is None or mode != "constant" or (widths < 0).any():
        return _pad_by_places(node, dims)
    if dtype_of(data) != "float32":
        return None
    places = range(len(dims)) if axes is None else [int(axis) % len(dims) for axis in axes]
    around = np.zeros((len(dims), 2), "int64")
    around[list(places)] = widths.reshape(2, -1).T
    fill = 0.0 if value is None else float(value.reshape(-1)[0])
    return relax.op.nn.pad(data, around.reshape(-1).tolist(), "constant", fill)


def _pad_by_sizes(node: Node, dims: Sequence[Any]) -> relax.Expr:
    """Write padding whose widths depend on sizes as concatenations."""
    data, widths, value, axes = node.inputs[0], node.sizes(1) or [], node.constant(2), node.constant(3)
    fill = const(np.asarray(0.0 if value is None else value.reshape(-1)[0], dtype_of(data)))
    places = range(len(dims)) if axes is None else [int(axis) % len(dims) for axis in axes]
    for axis, before, after in zip(places, widths, widths[len(widths) // 2 :], strict=False):
        data = pad_axis(node, data, axis, (before, after), fill)
    return data


def _pad_by_places(node: Node, dims: Sequence[Any]) -> relax.Expr:
    """Write padding as a function that computes for each element of the result from which one of the data it is.

    A negative width cuts the data first.
    """
    emit, mode, data = node.emit, node.text("mode", "constant"), node.inputs[0]
    value = node.input(2)
    if node.opset < 11:
        fill = const(np.asarray(node.attrs.get("value", 0.0), dtype_of(data)))
    else:
        fill = const(0, dtype_of(data)) if value is None else emit(relax.op.reshape(value, []))
    widths = _constant_widths(node, len(dims))
    sizes, operands = _sizes_of_padded(node, dims) if widths is None else (_sizes_with(node, dims, widths), [])

    def pad(data: te.Tensor, fill: te.Tensor, *operands: te.Tensor) -> te.Tensor:
        zero = tirx.const(0, "int64")

        def element(*index: Any) -> Any:
            inside: list[Any] = []
            own, nearest = list(index), list(index)
            for axis, (place, size) in enumerate(zip(index, data.shape, strict=True)):
                if widths is not None and not any(widths[axis]):
                    continue
                if widths is None:
                    before, after = (operand[axis] for operand in operands)
                else:
                    before, after = (tirx.const(width, "int64") for width in widths[axis])
                first = te.max(-before, zero)
                length = size + te.min(after, zero) - first
                distance = place.astype("int64") - te.max(before, zero)
                inside += [distance >= 0, distance < length]
                own[axis] = first + distance
                source = _source(distance, length, mode, is_near=widths is not None)
                nearest[axis] = te.max(te.min(first + source, size - 1), zero)
            if mode == "constant":
                return tvm.tirx.if_then_else(tvm.tirx.all(*inside), data[tuple(own)], fill[()])
            if own[-1].same_as(nearest[-1]):
                return data[tuple(nearest)]
            # Of a line, the numbers between its borders lie side by side.
            between, border = (data[(*nearest[:-1], last)] for last in (own[-1], nearest[-1]))
            return tvm.tirx.if_then_else(tvm.tirx.all(*inside[-2:]), between, border)

        return te.compute(sizes, element, name="pad")

    return node.builder.call_te(pad, data, fill, *operands, primfunc_name_hint="pad")


def _source(distance: Any, length: Any, mode: str, *, is_near: bool) -> Any:
    """The place, in a mode of Pad, of the element that stands `distance` after the first one of `length` elements.

    Elements that are near are reflected once.
    """
    zero, one = (tirx.const(number, "int64") for number in (0, 1))
    if mode == "reflect" and is_near:
        place = te.max(distance, -distance)
        return te.min(place, 2 * length - 2 - place)
    if mode == "reflect":
        period = te.max(2 * length - 2, one)
        place = te.floormod(distance, period)
        return te.min(place, period - place)
    if mode == "wrap":
        return te.floormod(distance, te.max(length, one))
    return te.max(te.min(distance, length - 1), zero)


def _constant_widths(node: Node, rank: int) -> list[tuple[int, int]] | None:
    """The widths of Pad before and after the data along each axis; None where the model computes widths or axes."""
    axes = node.constant(3) if node.opset >= 11 else None
    widths = node.constant(1) if node.opset >= 11 else np.asarray(node.attrs.get("pads", ()))
    if widths is None or (axes is None and node.input(3) is not None):
        return None
    pairs = [(0, 0)] * rank
    for axis, pair in zip(range(rank) if axes is None else axes, widths.reshape(2, -1).T.tolist(), strict=True):
        pairs[int(axis) % rank] = (int(pair[0]), int(pair[1]))
    return pairs


def _sizes_with(node: Node, dims: Sequence[Any], widths: Sequence[tuple[int, int]]) -> list[Any]:
    """The sizes of data with constant widths of padding; the model computes those that may be negative else."""
    sizes = [node.evaluator.add(size, sum(pair)) for size, pair in zip(dims, widths, strict=True)]
    unsure = [axis for axis, size in enumerate(sizes) if not node.evaluator.holds(size >= 0)]
    if unsure:
        least = relax.op.maximum(node.vector([sizes[axis] for axis in unsure]), const(0, "int64"))
        for axis, size in zip(unsure, node.bind(node.emit(least)), strict=True):
            sizes[axis] = size
    return sizes


def _sizes_of_padded(node: Node, dims: Sequence[Any]) -> tuple[list[Any], list[relax.Expr]]:
    """The sizes of data with widths of padding that the model computes, and these widths before and after the data."""
    emit, rank = node.emit, len(dims)
    widths, axes = node.integers(1), node.constant(3)
    constants = elements_at_import(node.builder, widths)
    widths = emit(relax.op.reshape(widths, [2, -1]))
    if node.input(3) is not None:
        # Which of the axes given is which of the data.
        chosen = emit(relax.op.floor_mod(node.integers(3), const(rank, "int64")))
        is_axis = relax.op.equal(emit(relax.op.expand_dims(chosen, 1)), const(np.arange(rank)))
        widths = emit(relax.op.matmul(widths, emit(relax.op.astype(emit(is_axis), "int64"))))
    before, after = (emit(relax.op.take(widths, const(place, "int64"), axis=0)) for place in (0, 1))
    whole = emit(relax.op.add(emit(relax.op.add(before, after)), node.vector(dims)))
    sizes = node.bind(emit(relax.op.maximum(whole, const(0, "int64"))))
    if node.input(3) is None or axes is not None:
        places = [int(axis) % rank for axis in (range(rank) if axes is None else axes)]
        for axis, size in enumerate(dims):
            own = [constants[half + places.index(axis)] for half in (0, len(places))] if axis in places else [0, 0]
            total = None if None in own else reduce(node.evaluator.add, own, size)
            sizes[axis] = total if total is not None and node.evaluator.holds(total >= 0) else sizes[axis]
    return sizes, [before, after]


def pad_axis(node: Node, data: relax.Expr, axis: int, widths: Sequence[Any], fill: relax.Expr) -> relax.Expr:
    """Return data padded along `axis` with the scalar `fill`: `widths[0]` elements before it and `widths[1]` after it.

    A width may be symbolic. One that may be negative is checked when the model runs.
    """
    dims, evaluator = dims_of(data) or [], node.evaluator
    are_whole = all(evaluator.holds(width >= 0) for width in widths)
    sizes = widths if are_whole else [evaluator.greatest(width, 0) for width in widths]
    edges = [
        None
        if is_static(size) and not size
        else node.emit(relax.op.broadcast_to(fill, relax.ShapeExpr([*dims[:axis], size, *dims[axis + 1 :]])))
        for size in sizes
    ]
    parts = [part for part in (edges[0], data, edges[1]) if part is not None]
    padded = data if len(parts) == 1 else node.emit(relax.op.concat(parts, axis))
    if are_whole:
        return padded
    whole = evaluator.add(evaluator.add(dims[axis], widths[0]), widths[1])
    return cast_to(node.builder, padded, [*dims[:axis], whole, *dims[axis + 1 :]])
