"""Operators that move, select or make elements by their position."""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.bounds import bounds_of
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.sizes import elements_at_import, materialise
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of, is_static
from tvmflow.compiler.operators.common import registers
from tvmflow.compiler.operators.indices import checked
from tvmflow.compiler.size_checks import cast_to

# The integers that TVM does not sort, and the wider ones in which they are sorted.
_SORTED_AS = {"int8": "int32", "int16": "int32", "uint16": "int32", "uint32": "int64"}
# The opset in which Hardmax and its like came to be along one dimension.
_ONE_AXIS = 13


def convert_range(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Range; None, which leaves the node to TVM's converter, for constants alone.

    Of integers from or to a symbolic size, and of floats from a constant below two to a size with the step one, as the
    centres of pixels, the number is known at import. Of others the model computes it when it runs.
    """
    if all(isinstance(bound, tvm.ir.GenericConst) for bound in node.inputs):
        return None
    first = node.inputs[0]
    dtype = "int64" if tvm.ir.is_prim_expr(first) else dtype_of(first)
    bounds: list[Any] = []
    for bound in node.inputs:
        if isinstance(bound, tvm.ir.GenericConst):
            bounds.append(bound.value.numpy().item())
        elif tvm.ir.is_prim_expr(bound) and str(bound.ty) == "int64":
            bounds.append(int(bound) if is_static(bound) else bound)
        else:
            return _count_when_run(node, dtype)
    start, stop, step = bounds
    if all(isinstance(bound, int | float) for bound in (start, stop)):
        return _count_when_run(node, dtype)
    if not any(isinstance(bound, float) for bound in bounds):
        if not isinstance(step, int):
            # TVM counts them by a quotient of floats.
            return _count_when_run(node, dtype)
        if step < 0 or not node.evaluator.holds(stop >= start):
            return _count_at_import(node, start, stop, step, dtype)
        start, stop, step = (tvm.tirx.IntImm("int64", item) if isinstance(item, int) else item for item in bounds)
        return relax.op.arange(start, stop, step, dtype)
    if not isinstance(start, float) or isinstance(stop, float) or step != 1 or not start < 2:
        return _count_when_run(node, dtype)
    # As many as there are whole numbers from the start, which is rounded up, to the stop.
    count = node.evaluator.add(stop, -math.floor(start))
    places = node.emit(relax.op.astype(node.emit(relax.op.arange(0, count, 1, "int64")), dtype))
    return relax.op.add(places, const(start, dtype))


def _count_when_run(node: Node, dtype: str) -> relax.Expr:
    """The numbers from a start to a stop, of which the model computes how many there are when it runs."""

    def scalar(bound: relax.Expr) -> relax.Expr:
        if not tvm.ir.is_prim_expr(bound):
            return bound
        return node.emit(relax.op.astype(node.emit(relax.op.reshape(node.vector([bound]), ())), dtype))

    start, stop, step = map(scalar, node.inputs)
    if dtype.startswith("float"):
        wide = "float64"
        distance = node.emit(relax.op.astype(node.emit(relax.op.subtract(stop, start)), wide))
        quotient = node.emit(relax.op.divide(distance, node.emit(relax.op.astype(step, wide))))
        count = node.emit(relax.op.ceil(quotient))
    else:
        wide = "int64"
        start, stop, step = (node.emit(relax.op.astype(bound, wide)) for bound in (start, stop, step))
        # The quotient of the distance, rounded up.
        rounded = node.emit(relax.op.floor_divide(node.emit(relax.op.subtract(start, stop)), step))
        count = node.emit(relax.op.negative(rounded))
    count = node.emit(relax.op.maximum(count, const(0, wide)))
    count = node.emit(relax.op.reshape(node.emit(relax.op.astype(count, "int64")), (1,)))
    (size,) = node.bind(count)
    places = node.emit(relax.op.astype(node.emit(relax.op.arange(0, size, 1, "int64")), dtype))
    start, step = (node.emit(relax.op.astype(bound, dtype)) for bound in (start, step))
    return relax.op.add(node.emit(relax.op.multiply(places, step)), start)


def _count_at_import(node: Node, start: Any, stop: Any, step: int, dtype: str) -> relax.Expr:
    """The integers from `start` to `stop`, without it; none where that is behind the start.

    TVM infers a wrong number of them for a negative step, and a negative one where there are none.
    """
    distance = stop - start if step > 0 else start - stop
    count = node.evaluator.greatest(node.evaluator.simplify((distance + abs(step) - 1) // abs(step)), 0)
    places = node.emit(relax.op.multiply(node.emit(relax.op.arange(0, count, 1, "int64")), const(step, "int64")))
    numbers = node.emit(relax.op.add(places, node.emit(relax.op.squeeze(node.vector([start])))))
    return numbers if dtype == "int64" else relax.op.astype(numbers, dtype)


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
    return relax.op.take(data, indices, axis, mode="clip")


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


def convert_non_zero(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's NonZero: a column of the result is the place of an element.

    TVM's operator calls Python, which a bundle does without. Raises FreeSizeError for data of unknown shape.
    """
    return find_places(node, node.inputs[0])


def find_places(node: Node, data: relax.Expr) -> relax.Expr:
    """Return the places of the elements that are not zero, in order, as int64 of shape [rank, number].

    The number is a new symbol, which the model computes when it runs. A scalar counts as a vector. Raises FreeSizeError
    for data of unknown shape.
    """
    dims = dims_of(data)
    if dims is None:
        raise FreeSizeError("data of unknown shape")
    dims, emit = dims or [1], node.emit
    size = reduce(node.evaluator.multiply, dims, 1)
    flat = emit(relax.op.reshape(data, relax.ShapeExpr([size])))
    places = emit(node.builder.call_te(_find_nonzero, flat, primfunc_name_hint="nonzero"))
    order, count = (emit(relax.TupleGetItem(places, place)) for place in range(2))
    (number,) = node.bind(count)

    def coordinate(order: te.Tensor, data: te.Tensor) -> te.Tensor:
        shape = data.shape or [1]

        def element(axis: Any, place: Any) -> Any:
            value, result = order[place], tvm.tirx.const(0, "int64")
            for position in reversed(range(len(shape))):
                result = te.if_then_else(axis == position, te.floormod(value, shape[position]), result)
                value = te.floordiv(value, shape[position])
            return result

        return te.compute((len(shape), number), element, name="coordinate")

    return emit(node.builder.call_te(coordinate, order, data, primfunc_name_hint="coordinate"))


def _find_nonzero(data: te.Tensor) -> list[te.Tensor]:
    """The places of the elements of a vector that are not zero, in order, before room for the others; their number."""
    (size,) = data.shape

    def find(inputs: Any, outputs: Any) -> Any:
        with IRBuilder() as builder, T.seq_scope():
            data, order, count = map(T.buffer_proxy, (inputs[0], *outputs))
            number = registers((1,), "int64")
            T.buffer_store(number, tirx.const(0, "int64"), [0])
            with T.serial(0, size) as place:
                # Without a branch: where elements are zero at random, a processor predicts it wrongly.
                order[number[0]] = place.astype("int64")
                added = data[place]
                if inputs[0].dtype != "bool":
                    # In TVM, NaN is neither equal to zero nor different from it.
                    is_zero = added == tirx.const(0, inputs[0].dtype)
                    added = tirx.Select(is_zero, tirx.const(0, "int64"), tirx.const(1, "int64"))
                T.buffer_store(number, number[0] + added.astype("int64"), [0])
            count[0] = number[0]
        return builder.get()

    buffers = [tirx.decl_buffer(shape, "int64", name) for name, shape in (("order", (size,)), ("count", (1,)))]
    shapes = [buffer.shape for buffer in buffers]
    return list(te.extern(shapes, [data], find, out_buffers=buffers, dtype=["int64"] * 2, name="nonzero"))


def convert_unique(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Unique: the distinct elements, their first places, and their numbers.

    Along an axis of data of several dimensions these are slices, which their elements order one after the other. TVM's
    operator calls Python, which a bundle does without. Raises FreeSizeError for data of unknown shape.
    """
    data, emit = node.inputs[0], node.emit
    dims = dims_of(data)
    if dims is None:
        raise FreeSizeError("data of unknown shape")
    # TVM does not sort every type.
    wider = {"bfloat16": "float32", **_SORTED_AS}.get(dtype_of(data))
    axis = node.attrs.get("axis") if len(dims) > 1 else None
    if axis is None:
        size = reduce(node.evaluator.multiply, dims, 1)
        flat = emit(relax.op.reshape(data, relax.ShapeExpr([size])))
        keys = flat if wider is None else emit(relax.op.astype(flat, wider))
        order = emit(relax.op.argsort(keys, 0, dtype="int64"))
        ordered = emit(relax.op.take(flat, order, 0))
    else:
        axis %= len(dims)
        size, others = dims[axis], [place for place in range(len(dims)) if place != axis]
        width = reduce(node.evaluator.multiply, [dims[place] for place in others], 1)
        slices = emit(relax.op.permute_dims(data, [axis, *others]))
        slices = emit(relax.op.reshape(slices, relax.ShapeExpr([size, width])))
        slices = slices if wider is None else emit(relax.op.astype(slices, wider))
        sorted_rows = emit(node.builder.call_te(_sort_rows, slices, primfunc_name_hint="sort_rows"))
        order, ordered = (emit(relax.TupleGetItem(sorted_rows, place)) for place in range(2))

    def is_first(ordered: te.Tensor) -> te.Tensor:
        """Whether an element differs from the one before."""
        return te.compute(
            ordered.shape,
            lambda place: tvm.tirx.any(place == 0, ordered[place] != ordered[te.max(place - 1, 0)]),
            name="is_first",
        )

    def count(starts: te.Tensor, ordered: te.Tensor) -> te.Tensor:
        """The distance of each start from the next one, of the last from the end."""
        last = starts.shape[0] - 1
        end = ordered.shape[0].astype("int64")
        return te.compute(
            starts.shape,
            lambda place: te.if_then_else(place < last, starts[te.min(place + 1, last)], end) - starts[place],
            name="count",
        )

    firsts = emit(node.builder.call_te(is_first, ordered, primfunc_name_hint="is_first"))
    starts = emit(relax.op.squeeze(find_places(node, firsts), [0]))
    values, places = emit(relax.op.take(ordered, starts, 0)), emit(relax.op.take(order, starts, 0))
    groups = emit(relax.op.cumsum(emit(relax.op.astype(firsts, "int64")), axis=0))
    groups = emit(relax.op.subtract(groups, const(1, "int64")))
    room = emit(relax.op.zeros(relax.ShapeExpr([size]), "int64"))
    inverse = emit(relax.op.scatter_elements(room, order, groups))
    counts = emit(node.builder.call_te(count, starts, ordered, primfunc_name_hint="count"))
    if not node.attrs.get("sorted", 1):
        # By the places of the first elements instead.
        by_place = emit(relax.op.argsort(places, 0, dtype="int64"))
        values, places, counts = (emit(relax.op.take(item, by_place, 0)) for item in (values, places, counts))
        inverse = emit(relax.op.take(emit(relax.op.argsort(by_place, 0, dtype="int64")), inverse, 0))
    if axis is not None:
        values = emit(relax.op.take(data, places, axis))
    results = [values, places, inverse, counts][: node.outputs]
    return results[0] if node.outputs == 1 else relax.Tuple(results)


def _sort_rows(rows: te.Tensor) -> list[te.Tensor]:
    """Sort rows as words are sorted: their places in this order, and in the same order the number of each one's group.

    Equal rows are a group and keep their order; both results are int64. The rows of sorted runs are merged, until one
    run has all of them.
    """
    count, width = (size.astype("int64") for size in rows.shape)
    equal, less, greater = range(3)

    def sort(inputs: Any, outputs: Any) -> Any:
        with IRBuilder() as builder, T.seq_scope():
            rows, order, groups, spare = map(T.buffer_proxy, (inputs[0], *outputs))
            run, one, other, column, relation, number = (registers((1,), "int64") for _ in range(6))

            def compare(former: Any, latter: Any) -> None:
                """Let `relation` be that of one row to another."""
                T.buffer_store(relation, tirx.const(equal, "int64"), [0])
                T.buffer_store(column, tirx.const(0, "int64"), [0])
                with T.While(tirx.all(relation[0] == equal, column[0] < width)):
                    own, its = rows[former, column[0]], rows[latter, column[0]]
                    apart = tirx.Select(own < its, less, tirx.Select(its < own, greater, equal))
                    T.buffer_store(relation, apart.astype("int64"), [0])
                    T.buffer_store(column, column[0] + 1, [0])

            with T.serial(0, count) as place:
                order[place] = place
            T.buffer_store(run, tirx.const(1, "int64"), [0])
            with T.While(run[0] < count):
                with T.serial(0, te.indexdiv(count + 2 * run[0] - 1, 2 * run[0])) as pair:
                    start = pair * 2 * run[0]
                    middle, end = (te.min(start + runs * run[0], count) for runs in (1, 2))
                    T.buffer_store(one, start, [0])
                    T.buffer_store(other, middle, [0])
                    with T.serial(0, end - start) as step:
                        T.buffer_store(relation, tirx.Select(one[0] < middle, equal, less).astype("int64"), [0])
                        with T.If(tirx.all(one[0] < middle, other[0] < end)), T.Then():
                            compare(order[other[0]], order[one[0]])
                        with T.If(relation[0] == less):
                            with T.Then():
                                spare[start + step] = order[other[0]]
                                T.buffer_store(other, other[0] + 1, [0])
                            with T.Else():
                                spare[start + step] = order[one[0]]
                                T.buffer_store(one, one[0] + 1, [0])
                with T.serial(0, count) as place:
                    order[place] = spare[place]
                T.buffer_store(run, 2 * run[0], [0])
            T.buffer_store(number, tirx.const(0, "int64"), [0])
            with T.serial(0, count) as place:
                compare(order[te.max(place - 1, 0)], order[place])
                T.buffer_store(number, number[0] + (relation[0] == less).astype("int64"), [0])
                groups[place] = number[0]
        return builder.get()

    buffers = [tirx.decl_buffer((rows.shape[0],), "int64", name) for name in ("order", "groups", "spare")]
    shapes = [buffer.shape for buffer in buffers]
    return list(te.extern(shapes, [rows], sort, out_buffers=buffers, dtype=["int64"] * 3, name="sort_rows")[:2])


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
    known = _constant_widths(node, len(dims))
    sizes, operands = _sizes_of_padded(node, dims) if known is None else (_sizes_with(node, dims, known), [])

    def pad(data: te.Tensor, fill: te.Tensor, *operands: te.Tensor) -> te.Tensor:
        zero = tirx.const(0, "int64")

        def element(*index: Any) -> Any:
            inside: list[Any] = []
            own, nearest = list(index), list(index)
            for axis, (place, size) in enumerate(zip(index, data.shape, strict=True)):
                if known is not None and not any(known[axis]):
                    continue
                if known is None:
                    before, after = (operand[axis] for operand in operands)
                else:
                    before, after = (tirx.const(width, "int64") for width in known[axis])
                first = te.max(-before, zero)
                length = size + te.min(after, zero) - first
                distance = place.astype("int64") - te.max(before, zero)
                inside += [distance >= 0, distance < length]
                own[axis] = first + distance
                source = _source(distance, length, mode, is_near=known is not None)
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


def convert_depth_to_space(node: Node) -> None:
    """Let the model check, when it runs, that a block divides the channels of DepthToSpace.

    Returns None, which leaves the node to TVM's converter. Data of unknown shape is left alone.
    """
    block = int(node.attrs["blocksize"])
    _check_quotients(node, (dims_of(node.inputs[0]) or ())[1:2], block * block)


def _check_quotients(node: Node, sizes: Sequence[Any], divisor: int) -> None:
    """Let the model check, when it runs, that a divisor leaves no remainder of any of the sizes."""
    for size in sizes:
        node.check_size(node.evaluator.multiply(node.evaluator.divide(size, divisor), divisor), size)


def convert_space_to_depth(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a SpaceToDepth of mode CRD: a transpose between two reshapes.

    The model checks, when it runs, that a block divides the height and the width. Returns None, which leaves the node
    to TVM's converter, for mode DCR.
    """
    data, block = node.inputs[0], int(node.attrs["blocksize"])
    _check_quotients(node, (dims_of(data) or ())[2:], block)
    if node.text("mode", "DCR") != "CRD":
        return None
    batch, channels, height, width = data.ty.shape.values
    split = node.emit(relax.op.reshape(data, [batch, channels, height // block, block, width // block, block]))
    moved = node.emit(relax.op.permute_dims(split, [0, 1, 3, 5, 2, 4]))
    return relax.op.reshape(moved, [batch, channels * block * block, height // block, width // block])


def convert_eye_like(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's EyeLike: a constant or, for symbolic sizes, a comparison of row and column.

    Raises FreeSizeError for data of unknown shape.
    """
    dims, shift = dims_of(node.inputs[0]), int(node.attrs.get("k", 0))
    if dims is None:
        raise FreeSizeError("data of unknown shape")
    element = node.attrs.get("dtype")
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(element)) if element else dtype_of(node.inputs[0])
    if all(isinstance(size, int) for size in dims):
        return const(np.eye(dims[0], dims[1], shift), dtype)
    rows, columns = (node.emit(relax.op.arange(0, size, 1, "int64")) for size in dims)
    rows = node.emit(relax.op.expand_dims(node.emit(relax.op.add(rows, const(shift, "int64"))), 1))
    return relax.op.astype(node.emit(relax.op.equal(rows, columns)), dtype)


def convert_one_hot(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's OneHot: a comparison of each index with 0, 1, ..., depth - 1.

    A negative index counts from the end. An index outside of the depth gives the off value everywhere.
    """
    indices, values, sizes = node.inputs[0], node.inputs[2], node.sizes(1)
    rank = indices.ty.ndim
    (size,) = sizes if sizes is not None else node.bind(node.integers(1))
    axis = int(node.attrs.get("axis", -1)) % (rank + 1)
    integers = node.emit(relax.op.astype(indices, "int64"))
    negative = relax.op.less(integers, relax.const(0, "int64"))
    whole = node.vector([size])
    positions = node.emit(relax.op.where(negative, relax.op.add(integers, whole), integers))
    places = node.emit(relax.op.arange(0, size, 1, "int64"))
    places = node.emit(relax.op.reshape(places, [size if i == axis else 1 for i in range(rank + 1)]))
    is_hot = node.emit(relax.op.equal(node.emit(relax.op.expand_dims(positions, axis)), places))
    off, on = (node.emit(relax.op.take(values, const(place, "int64"), axis=0)) for place in (0, 1))
    return relax.op.where(is_hot, on, off)


def convert_top_k(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a TopK whose k is not constant or is zero: the first k of the sorted elements.

    The model checks, when it runs, that there are as many elements as a constant k. A constant k of opset 10 is
    converted as in opset 11. Returns None, which leaves the node to TVM's converter, for other constant k and before
    opset 10. TVM does not sort every type of integers: those that have a wider one are sorted in it. Raises
    UnsupportedFormError for uint64, which has none, and FreeSizeError for data of unknown shape.
    """
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    dtype = dtype_of(data)
    # Where any order is allowed, the sorted one is.
    node.attrs.pop("sorted", None)
    if dtype == "uint64":
        raise UnsupportedFormError(f"{dtype}: TVM does not sort them")
    if dtype in _SORTED_AS:
        wide = node.emit(relax.op.astype(data, _SORTED_AS[dtype]))
        pair = node.emit(node.convert("TopK", [wide, *node.inputs[1:]], node.attrs, node.opset))
        return relax.Tuple([node.emit(relax.op.astype(node.emit(pair[0]), dtype)), node.emit(pair[1])])
    count = node.constant(1) if node.opset >= 10 else None
    is_constant = count is not None and bool(count.any())
    if count is not None and dims is not None:
        size, least = dims[int(node.attrs.get("axis", -1))], int(count.reshape(-1)[0])
        node.check_size(tirx.min(size, least), least)
    if node.opset == 10 and is_constant:
        # TVM's converter looks for the attribute `k`, which opset 10 made an operand.
        return node.convert("TopK", node.inputs, node.attrs, 11)
    if node.opset < 10 or is_constant:
        return None
    if dims is None:
        raise FreeSizeError("a number of results that is zero or computed, of data of unknown shape")
    axis = int(node.attrs.get("axis", -1)) % len(dims)
    whole = node.vector([dims[axis]])
    sizes = node.bind(node.emit(relax.op.minimum(node.integers(1), whole)))
    in_order = node.emit(
        relax.op.topk(data, -1, axis, "both", largest=bool(node.attrs.get("largest", 1)), dtype="int64")
    )
    return relax.Tuple(
        [
            node.emit(relax.op.strided_slice(node.emit(in_order[place]), [axis], [0], sizes, assume_inbound=True))
            for place in (0, 1)
        ]
    )


def convert_cum_sum(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a CumSum along an axis that is not constant.

    It computes the sums along every axis, and the model chooses when it runs. Returns None, which leaves the node to
    TVM's converter, for a constant axis.
    """
    if node.constant(1) is not None:
        return None
    flags = {name: node.attrs.get(name, 0) for name in ("exclusive", "reverse")}
    return _along_computed_axis(
        node, lambda axis: node.apply("CumSum", node.inputs[0], const(axis, "int64"), opset=14, **flags)
    )


def convert_cum_prod(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's CumProd: a scan, between two flips if the node has `reverse`.

    For an axis that is not constant, it scans along every axis, and the model chooses when it runs.
    """
    data, axis, is_reverse = node.inputs[0], node.constant(1), bool(node.attrs.get("reverse", 0))

    def scan(place: int) -> relax.Expr:
        ordered = node.emit(relax.op.flip(data, place)) if is_reverse else data
        result = relax.op.cumprod(ordered, place, dtype_of(data), exclusive=bool(node.attrs.get("exclusive", 0)))
        return relax.op.flip(node.emit(result), place) if is_reverse else result

    if axis is None:
        return _along_computed_axis(node, lambda place: node.emit(scan(place)))
    return scan(int(axis.reshape(-1)[0]) % data.ty.ndim)


def _along_computed_axis(node: Node, scan: Callable[[int], relax.Expr]) -> relax.Expr:
    """Scan along each axis, and choose one by the second operand when the model runs."""
    rank, axis = node.inputs[0].ty.ndim, node.emit(relax.op.reshape(node.inputs[1], []))
    result = scan(0)
    for place in range(1, rank):
        is_it = (relax.op.equal(axis, const(number, dtype_of(axis))) for number in (place, place - rank))
        result = node.emit(relax.op.where(node.emit(relax.op.logical_or(*map(node.emit, is_it))), scan(place), result))
    return result


def convert_hardmax(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Hardmax: one at the first largest element along the axis, else zero.

    Before opset 13, all dimensions from the axis on count as one. Returns None, which leaves the node to TVM's
    converter, for data of unknown shape.
    """
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    if dims is None:
        return None
    is_flat = node.opset < _ONE_AXIS
    axis = int(node.attrs.get("axis", 1 if is_flat else -1))
    axis += len(dims) if axis < 0 else 0
    shape = [reduce(node.evaluator.multiply, part, 1) for part in (dims[:axis], dims[axis:])] if is_flat else dims
    axis = 1 if is_flat else axis
    table = node.emit(relax.op.reshape(data, relax.ShapeExpr(shape))) if is_flat else data
    places = node.emit(relax.op.arange(0, shape[axis], 1, "int64"))
    places = node.emit(relax.op.reshape(places, [-1 if i == axis else 1 for i in range(len(shape))]))
    largest = node.emit(relax.op.argmax(table, axis, keepdims=True))
    result = node.emit(relax.op.astype(node.emit(relax.op.equal(largest, places)), dtype_of(data)))
    return relax.op.reshape(result, relax.ShapeExpr(dims)) if is_flat else result


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
