"""Operators that read or write elements by indices: Gather, Scatter, Compress and their kind."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.bounds import bounds_of
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.ordering import find_places
from tvmflow.compiler.onnx.sizes import materialise
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of
from tvmflow.compiler.operators.indices import checked


def convert_gather(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Gather; the model checks, when it runs, what is not known at import.

    Returns None, which leaves the node to TVM's converter, for constants alone, for data of unknown shape, and for
    indices that are symbolic sizes. Raises UnsupportedFormError for a constant index outside of a static dimension.
    """
    data, indices = node.inputs[0], node.inputs[1]
    dims, axis = dims_of(data), node.attrs.get("axis", 0)
    if not dims or not isinstance(indices.ty, relax.TensorType):
        return None
    indices = checked_indices(node, indices, [dims[axis]])
    if isinstance(data, tvm.ir.GenericConst) and isinstance(indices, tvm.ir.GenericConst):
        return None
    values = node.constants(indices)
    if values is not None and values.size == 1 and values.min() >= 0:
        return _take_one(node, data, int(axis) % len(dims), int(values.reshape(-1)[0]), dims_of(indices) or [])
    return relax.op.take(data, indices, axis, mode="clip")


def _take_one(node: Node, data: relax.Expr, axis: int, place: int, shape: Sequence[Any]) -> relax.Expr:
    """Return the slice of data at a place along an axis, in whose stead it has the dimensions `shape`, all of size one.

    A slice becomes part of the functions around it, which a place that is an operand does not.
    """
    dims = dims_of(data) or []
    part = node.emit(relax.op.strided_slice(data, [axis], [place], [place + 1], assume_inbound=True))
    return relax.op.reshape(part, relax.ShapeExpr([*dims[:axis], *shape, *dims[axis + 1 :]]))


def checked_indices(node: Node, indices: relax.Expr, sizes: Sequence[Any], *, is_signed: bool = True) -> relax.Expr:
    """Return indices of dimensions of these sizes, counted from the start; the model checks them when it runs.

    `sizes` has one size, or one for each element along the last dimension of the indices. Where `is_signed`, negative
    ones count from the end. Raises UnsupportedFormError for a constant index outside of a static dimension, and
    FreeSizeError for indices of unknown shape.
    """
    values = node.constants(indices)
    if values is not None:
        return _check_constants(node, indices, values, sizes, is_signed)
    if dims_of(indices) is None:
        raise FreeSizeError("indices of unknown shape")
    if len(sizes) == 1 and _are_within(node, indices, sizes[0]):
        return indices
    return node.emit(checked(indices, sizes, is_signed=is_signed))


def _are_within(node: Node, indices: relax.Expr, size: Any) -> bool:
    """Whether indices that are not constant are surely from 0 to `size` less one.

    Where the model counts them itself, as positions up to a free length, and `size` is a number, the model checks that
    length when it runs.
    """
    bounds, holds = bounds_of(node, indices), node.evaluator.holds
    is_counted = bounds.are_taken and isinstance(size, int) and not isinstance(bounds.largest, int)
    if is_counted:
        node.check_size(node.evaluator.greatest(node.evaluator.add(bounds.largest, 1), size), size)
    is_below = is_counted or (bounds.largest is not None and holds(bounds.largest < size))
    return is_below and bounds.least is not None and holds(bounds.least >= 0)


def _check_constants(
    node: Node, indices: relax.Expr, values: Array, sizes: Sequence[Any], is_signed: bool
) -> relax.Expr:
    """Return `indices`, constants of these `values`, as `checked_indices` does.

    The model checks, when it runs, that dimensions of symbolic sizes have these indices.
    """
    rows = values.reshape(-1, len(sizes))
    for size, column in zip(sizes, rows.T, strict=True):
        needed = max(int(column.max(initial=-1)) + 1, -int(column.min(initial=0)))
        if (not is_signed and (column < 0).any()) or (isinstance(size, int) and needed > size):
            raise UnsupportedFormError("an index outside of the data", "check the indices")
        node.check_size(node.evaluator.least(size, needed), needed)
    if not (values < 0).any():
        return indices
    dtype = dtype_of(indices)
    if all(isinstance(size, int) for size in sizes):
        counted = np.where(values < 0, values + np.array(sizes), values)
        # One size makes a row of a scalar.
        return const(counted.reshape(values.shape), dtype)
    whole = materialise(node.builder, node.evaluator.shape(sizes), () if len(sizes) == 1 else None)
    whole = whole if dtype == "int64" else node.emit(relax.op.astype(whole, dtype))
    return node.emit(relax.op.add(indices, node.emit(relax.op.multiply(const(values < 0, dtype), whole))))


def convert_gather_elements(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a GatherElements; the model checks, when it runs, what is not known at import.

    That are the indices, and that the data is as large as these in the other dimensions. Returns None, which leaves the
    node to TVM's converter, for data of unknown shape. Raises UnsupportedFormError for a constant index outside of the
    data.
    """
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    if not dims:
        return None
    axis = int(node.attrs.get("axis", 0)) % len(dims)
    _check_reach(node, dims, dims_of(node.inputs[1]), axis)
    return relax.op.gather_elements(data, checked_indices(node, node.inputs[1], [dims[axis]]), axis)


def _check_reach(node: Node, dims: Sequence[Any], reach: Sequence[Any] | None, axis: int) -> None:
    """Let the model check, when it runs, that data of `dims` has all places that indices of the shape `reach` name.

    Along `axis` the indices themselves say the places. Nothing is checked where `reach` is None.
    """
    for place, (size, count) in enumerate(zip(dims, reach or dims, strict=True)):
        if place != axis:
            node.check_size(tirx.min(size, count), count)


def convert_gather_nd(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a GatherND; the model checks, when it runs, what is not known at import.

    That are the indices, and the dimensions of the batch. Returns None, which leaves the node to TVM's converter, for
    operands of unknown shape. Raises UnsupportedFormError for a constant index outside of the data, and FreeSizeError
    for indices whose last dimension is symbolic.
    """
    dims, places, first = dims_of(node.inputs[0]), dims_of(node.inputs[1]), int(node.attrs.get("batch_dims", 0))
    if places and not isinstance(places[-1], int):
        raise FreeSizeError("indices whose last dimension is symbolic")
    if dims is None or not places:
        return None
    indices = node.with_sizes(node.inputs[1], [*dims[:first], *places[first:]])
    indices = checked_indices(node, indices, dims[first : first + places[-1]])
    return relax.op.gather_nd(node.inputs[0], indices, first)


def convert_compress(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Compress: the elements whose condition holds, along an axis or of all.

    The condition is cut to the length of the data; ONNX Runtime ignores further elements. Raises FreeSizeError for data
    or a condition of unknown shape.
    """
    data, condition = node.inputs
    dims, lengths, axis = dims_of(data), dims_of(condition), node.attrs.get("axis")
    if dims is None or lengths is None or len(lengths) != 1:
        raise FreeSizeError("data or a condition of unknown shape")
    evaluator = node.evaluator
    size = reduce(evaluator.multiply, dims, 1) if axis is None else dims[int(axis)]
    length = evaluator.least(lengths[0], size)
    if not evaluator.are_equal(length, lengths[0]):
        condition = node.emit(relax.op.strided_slice(condition, [0], [0], [length], assume_inbound=True))
    places = node.emit(relax.op.squeeze(find_places(node, condition), [0]))
    if axis is None:
        data, axis = node.emit(relax.op.reshape(data, relax.ShapeExpr([size]))), 0
    return relax.op.take(data, places, int(axis) % len(dims) if dims else 0)


def convert_reverse_sequence(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's ReverseSequence: a copy that reads the start of each sequence backwards.

    A sequence length beyond the data is clamped. The model checks, when it runs, that there are as many lengths as
    sequences. Data of unknown shape is left alone.
    """
    data, lengths = node.inputs
    batch, time = int(node.attrs.get("batch_axis", 1)), int(node.attrs.get("time_axis", 0))
    dims = dims_of(data)
    lengths = lengths if dims is None else node.with_sizes(lengths, [dims[batch]])

    def reverse(data: te.Tensor, lengths: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            # A length beyond the data, which ONNX Runtime refuses, is that of the data.
            length = te.min(lengths[index[batch]].astype("int64"), data.shape[time].astype("int64"))
            place = index[time]
            source = list(index)
            source[time] = te.if_then_else(place < length, length - 1 - place, place)
            return data[tuple(source)]

        return te.compute(data.shape, element, name="reverse")

    return node.builder.call_te(reverse, data, lengths, primfunc_name_hint="reverse_sequence")


def convert_scatter_elements(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's ScatterElements, or of Scatter, its name before opset 11.

    TVM's scatter writes past the data where a dimension of the indices, other than the axis, is smaller than that of
    the data. So it gets only the part of the data that the indices reach, and the rest is added to its result. The
    model checks indices when it runs. Raises FreeSizeError for operands of unknown shape, and UnsupportedFormError for
    a constant index outside of the data.
    """
    data, indices, updates = node.inputs
    dims, reach = dims_of(data), dims_of(indices)
    if dims is None or reach is None:
        raise FreeSizeError("data or indices of unknown shape")
    axis = int(node.attrs.get("axis", 0)) % len(dims)
    _check_reach(node, dims, reach, axis)
    updates = node.with_sizes(updates, reach)
    indices = checked_indices(node, indices, [dims[axis]])
    differ = [
        place
        for place, (size, count) in enumerate(zip(dims, reach, strict=True))
        if place != axis and not node.evaluator.are_equal(size, count)
    ]

    def take(data: te.Tensor, indices: te.Tensor) -> te.Tensor:
        # Indices that reach beyond the data, which ONNX forbids, must not read there.
        shape = [indices.shape[place] if place in differ else size for place, size in enumerate(data.shape)]
        return te.compute(
            shape,
            lambda *index: data[
                tuple(
                    te.min(item, data.shape[place] - 1) if place in differ else item for place, item in enumerate(index)
                )
            ],
            name="part",
        )

    def put(data: te.Tensor, part: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            is_within = tvm.tirx.all(*(index[place] < part.shape[place] for place in differ))
            return te.if_then_else(is_within, part[index], data[index])

        return te.compute(data.shape, element, name="whole")

    reduction = node.text("reduction", "none")
    reached = node.emit(node.builder.call_te(take, data, indices, primfunc_name_hint="part")) if differ else data
    result = relax.op.scatter_elements(reached, indices, updates, axis, "update" if reduction == "none" else reduction)
    if not differ:
        return result
    return node.builder.call_te(put, data, node.emit(result), primfunc_name_hint="whole")


def convert_scatter_nd(node: Node) -> None:
    """Check the indices of ScatterND, and give its operands one expression for each size that must be equal.

    The model checks both when it runs. Returns None, which leaves the node to TVM's converter. Raises
    FreeSizeError for indices whose last dimension is symbolic, and UnsupportedFormError for a constant index outside of
    the data. Operands of unknown shape are left alone.
    """
    shapes = [dims_of(operand) for operand in node.inputs]
    if any(shape is None for shape in shapes):
        return
    data, indices, updates = ([] if shape is None else shape for shape in shapes)
    if not indices or not isinstance(indices[-1], int):
        raise FreeSizeError("indices whose last dimension is symbolic")
    node.inputs[1] = checked_indices(node, node.inputs[1], data[: indices[-1]])
    if len(updates) != len(indices) - 1 + len(data) - indices[-1]:
        return
    rows, whole = indices[:-1], data[indices[-1] :]
    pairs = list(zip([*rows, *whole], updates, strict=True))
    sizes = [size if isinstance(size, int) else other for size, other in pairs]
    own = [[*data[: indices[-1]], *sizes[len(rows) :]], [*sizes[: len(rows)], indices[-1]], sizes]
    node.inputs[:3] = [node.with_sizes(*pair) for pair in zip(node.inputs[:3], own, strict=True)]


def convert_tensor_scatter(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's TensorScatter: each element comes from the data or from the update.

    The update of a row of the batch begins at an index of its own. In mode `linear`, elements that it would write
    beyond the data are dropped. Raises FreeSizeError for operands of unknown shape, and UnsupportedFormError for
    indices along axis 0.
    """
    data, update, first = node.inputs[0], node.inputs[1], node.input(2)
    axis, is_circular = int(node.attrs.get("axis", -2)) % data.ty.ndim, node.text("mode", "linear") == "circular"
    dims, updates = dims_of(data), dims_of(update)
    if dims is None or updates is None:
        raise FreeSizeError("data or an update of unknown shape")
    if first is not None and axis == 0:
        raise UnsupportedFormError("an index for each row along the rows themselves", "scatter along another axis")
    update = node.with_sizes(update, [*dims[:axis], updates[axis], *dims[axis + 1 :]])
    first = const(np.zeros(1, "int64")) if first is None else node.with_sizes(first, dims[:1])

    def scatter(data: te.Tensor, update: te.Tensor, first: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            begin = first[index[0] if node.input(2) is not None else 0]
            own = index[axis].astype("int64") - begin
            own = te.floormod(own, data.shape[axis]) if is_circular else own
            source = list(index)
            source[axis] = te.max(te.min(own, update.shape[axis] - 1), tvm.tirx.const(0, "int64"))
            is_new = tvm.tirx.all(own >= 0, own < update.shape[axis])
            return tvm.tirx.if_then_else(is_new, update[tuple(source)], data[index])

        return te.compute(data.shape, element, name="scatter")

    return node.builder.call_te(scatter, data, update, first, primfunc_name_hint="tensor_scatter")
