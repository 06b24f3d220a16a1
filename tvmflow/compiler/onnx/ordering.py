"""Operators that sort elements, find their places or sum them in order: TopK, Unique, NonZero, CumSum and others."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of
from tvmflow.compiler.operators.common import registers

# The integers that TVM does not sort, and the wider ones in which they are sorted.
_SORTED_AS = {"int8": "int32", "int16": "int32", "uint16": "int32", "uint32": "int64"}
# The opset in which Hardmax and its like came to be along one dimension.
_ONE_AXIS = 13


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
