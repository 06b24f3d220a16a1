"""Operators that change the shape or the order of dimensions: Reshape, Expand, Tile, Squeeze, Slice, Split, ..."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax, te, tirx

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.broadcasting import simplest, with_sizes
from tvmflow.compiler.onnx.node import FreeSizeError, Node
from tvmflow.compiler.onnx.sizes import LARGEST_SIZE, elements_at_import
from tvmflow.compiler.onnx.values import const, dims_of
from tvmflow.compiler.size_checks import cast_to


def convert_reshape(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Reshape of or to sizes that are symbolic or computed from data.

    Returns None, which leaves the node to TVM's converter, where the sizes of the data and of the result are constant,
    and for data of unknown shape. Raises FreeSizeError for sizes that are computed from data where their number or the
    shape of the data is unknown.
    """
    data, dims, target = node.inputs[0], dims_of(node.inputs[0]), node.sizes(1)
    if target is None:
        return _reshape_to_data(node)
    keeps_zero = bool(node.attrs.get("allowzero", 0))
    if dims is not None and keeps_zero and any(isinstance(size, int) and size == 0 for size in target):
        return _nothing(node, target)
    if dims is None or all(isinstance(size, int) for size in (*dims, *target)):
        return None
    sizes: list[Any] = [
        dims[axis] if isinstance(size, int) and size == 0 and not keeps_zero else size
        for axis, size in enumerate(target)
    ]
    if any(isinstance(size, int) and size == -1 for size in sizes):
        others = [size for size in sizes if not (isinstance(size, int) and size == -1)]
        sizes[target.index(-1)] = node.evaluator.quotient(dims, others)
    data = _with_implied_size(node, data, sizes)
    node.check_size(*(node.evaluator.quotient(shape, []) for shape in (dims_of(data) or [], sizes)))
    return relax.op.reshape(data, relax.ShapeExpr(sizes))


def _nothing(node: Node, sizes: Sequence[Any]) -> relax.Expr:
    """A tensor without elements, of the first operand's type. TVM's reshape takes a size of 0 for the data's own."""

    def copy(data: te.Tensor) -> te.Tensor:
        # TVM would fold a constant, and cannot store one without elements.
        return te.compute(tuple(sizes), lambda *_: data[(0,) * len(data.shape)], name="nothing")

    return node.builder.call_te(copy, node.inputs[0], primfunc_name_hint="nothing")


def _with_implied_size(node: Node, data: relax.Expr, sizes: Sequence[Any]) -> relax.Expr:
    """Return data whose one free size follows from constant `sizes`, with that size; the model checks it when it runs.

    An export with a batch of 1 often has this 1 in its Reshapes, whatever name the file gives to the batch.
    """
    dims = dims_of(data) or []
    known = math.prod(size for size in dims if isinstance(size, int))
    if sum(not isinstance(size, int) for size in dims) != 1 or not all(isinstance(size, int) for size in sizes):
        return data
    if known == 0 or math.prod(sizes) % known:
        return data
    implied = math.prod(sizes) // known
    own = [size if isinstance(size, int) else implied for size in dims]
    return with_sizes(node.builder, data, own, node.evaluator)


def _reshape_to_data(node: Node) -> relax.Expr:
    """Write Reshape to a shape that is computed from data: zeros and -1 are replaced when the model runs."""
    data, dims, target = node.inputs[0], dims_of(node.inputs[0]), node.integers(1)
    if dims is None:
        raise FreeSizeError("a shape that is computed from data, of data whose shape is unknown")
    (rank,) = dims_of(target)  # type: ignore[misc]
    emit, total = node.emit, node.evaluator.quotient(dims, [])
    elements = elements_at_import(node.builder, target)
    own = [*dims, *[0] * rank][:rank]
    if not node.attrs.get("allowzero", 0):
        is_zero = emit(relax.op.equal(target, const(0, "int64")))
        target = emit(relax.op.where(is_zero, node.vector(own), target))
    is_rest = emit(relax.op.less(target, const(0, "int64")))
    ones = emit(relax.op.where(is_rest, const(1, "int64"), target))
    others = emit(relax.op.maximum(emit(relax.op.prod(ones, keepdims=True)), const(1, "int64")))
    rest = emit(relax.op.floor_divide(node.vector([total]), others))
    sizes = [
        size if item is None or not node.evaluator.holds(item >= 1) else item
        for item, size in zip(elements, node.bind(emit(relax.op.where(is_rest, rest, target))), strict=True)
    ]
    node.check_size(total, node.evaluator.quotient(sizes, []))
    return relax.op.reshape(data, relax.ShapeExpr(sizes))


def convert_expand(node: Node) -> relax.Expr | None:
    """Return the Relax expression of an Expand of or to sizes that are symbolic or computed from data.

    The model checks the sizes when it runs. Returns None, which leaves the node to TVM's converter, where the sizes of
    the data and of the result are constant, and for data of unknown shape. Raises FreeSizeError for sizes that are
    computed from data where their number or the shape of the data is unknown.
    """
    data, dims, target = node.inputs[0], dims_of(node.inputs[0]), node.sizes(1)
    if target is None:
        return _expand_to_data(node)
    if dims is not None and any(isinstance(size, int) and size == 0 for size in (*dims, *target)):
        rank = max(len(dims), len(target))
        pairs = zip([1] * (rank - len(dims)) + dims, [1] * (rank - len(target)) + list(target), strict=True)
        return _nothing(node, [own if isinstance(size, int) and size == 1 else size for own, size in pairs])
    if dims is None or all(isinstance(size, int) for size in (*dims, *target)):
        return None
    rank = max(len(dims), len(target))
    dims = [1] * (rank - len(dims)) + dims
    target = [1] * (rank - len(target)) + target
    sizes = [simplest(pair, node.evaluator) for pair in zip(dims, target, strict=True)]
    own = [
        dim if isinstance(dim, int) and dim == 1 else size
        for dim, size in list(zip(dims, sizes, strict=True))[rank - data.ty.ndim :]
    ]
    if not all(node.evaluator.are_equal(*pair) for pair in zip(own, dims[rank - data.ty.ndim :], strict=True)):
        # A dimension that is no one is as large as the result's, which is checked at run time.
        data = cast_to(node.builder, data, own)
    if len(own) == rank and all(node.evaluator.are_equal(*pair) for pair in zip(own, sizes, strict=True)):
        return data
    return relax.op.broadcast_to(data, relax.ShapeExpr(sizes))


def _expand_to_data(node: Node) -> relax.Expr:
    """Write Expand to a shape that is computed from data, where a one stands for the data's own size."""
    data, dims, target = node.inputs[0], dims_of(node.inputs[0]), node.integers(1)
    if dims is None:
        raise FreeSizeError("a shape that is computed from data, of data whose shape is unknown")
    (length,) = dims_of(target)  # type: ignore[misc]
    rank = max(length, len(dims))
    if length < rank:
        target = node.emit(relax.op.concat([node.vector([1] * (rank - length)), target], 0))
    dims = [1] * (rank - len(dims)) + dims
    is_one = node.emit(relax.op.equal(target, const(1, "int64")))
    elements = elements_at_import(node.builder, target)
    # A size that is known to be one is broadcast against the operands of later nodes.
    sizes = [
        size if item is None else simplest([dim, item], node.evaluator)
        for dim, item, size in zip(
            dims, elements, node.bind(node.emit(relax.op.where(is_one, node.vector(dims), target))), strict=True
        )
    ]
    own = [1 if isinstance(dim, int) and dim == 1 else size for dim, size in zip(dims, sizes, strict=True)]
    # A dimension that is no one is as large as the result's, which is checked at run time.
    data = cast_to(node.builder, data, own[rank - data.ty.ndim :])
    return relax.op.broadcast_to(data, relax.ShapeExpr(sizes))


def convert_tile(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Tile as a broadcast between two reshapes.

    Returns None, which leaves the node to TVM's converter, where one of the repeats is computed from data or the data's
    shape is unknown. It does so for constant repeats, too, unless the last dimension is symbolic and repeated: TVM
    would divide by its size for every element.
    """
    data, dims, repeats = node.inputs[0], dims_of(node.inputs[0]), node.sizes(1)
    if not dims or repeats is None:
        return None
    if any(isinstance(size, int) and size == 0 for size in (*dims, *repeats)):
        return _nothing(node, [node.evaluator.multiply(*pair) for pair in zip(repeats, dims, strict=True)])
    if all(isinstance(size, int) for size in repeats) and (repeats[-1] == 1 or isinstance(dims[-1], int)):
        return None
    apart = [size for dim in dims for size in (1, dim)]
    pairs = [size for pair in zip(repeats, dims, strict=True) for size in pair]
    whole = [node.evaluator.multiply(*pair) for pair in zip(repeats, dims, strict=True)]
    expanded = node.emit(relax.op.broadcast_to(node.emit(relax.op.reshape(data, apart)), relax.ShapeExpr(pairs)))
    return relax.op.reshape(expanded, relax.ShapeExpr(whole))


def convert_unsqueeze(node: Node) -> relax.Expr | None:
    """Return the Relax expression of an Unsqueeze whose axes are one number without a dimension; None for others."""
    axes = node.constant(1)
    if axes is None or axes.ndim:
        return None
    return node.convert("Unsqueeze", [node.inputs[0], const(axes.reshape(1))], node.attrs, node.opset)


def convert_squeeze(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Squeeze of data with symbolic dimensions.

    The model checks when it runs that each dimension it removes is 1. Returns None, which leaves the node to TVM's
    converter, for data of static or unknown shape, and for axes that are computed from data. Raises FreeSizeError for a
    node without axes.
    """
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    if node.input(1) is not None and node.sizes(1) == []:
        # No axes are as absent ones: all dimensions of one element.
        node.inputs[1:] = []
    if dims is None or all(isinstance(size, int) for size in dims):
        return None
    axes = node.sizes(1) if node.input(1) is not None else node.attrs.get("axes")
    if axes is None and node.input(1) is not None:
        return None
    if axes is None:
        raise FreeSizeError(
            "no axes, so that a symbolic dimension is removed where it is one, and no shape in the file says which"
        )
    places = [int(axis) % len(dims) for axis in axes]
    if not all(isinstance(dims[place], int) for place in places):
        data = cast_to(node.builder, data, [1 if place in places else size for place, size in enumerate(dims)])
    return relax.op.squeeze(data, places)


def convert_slice(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Slice of symbolic dimensions, or with bounds that are not constant.

    Bounds are clamped to the dimension. A negative step becomes a positive one along the reversed dimension. Returns
    None, which leaves the node to TVM's converter, where bounds and dimensions are constant and the result is not
    empty. Where the shape of the data is unknown, it returns None for constant and symbolic bounds. Raises
    FreeSizeError for other bounds of data of unknown shape, and for axes or steps that are not constant.
    """
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    if node.opset < 10:
        starts, ends = list(node.attrs["starts"]), list(node.attrs["ends"])
        axes, steps = list(node.attrs.get("axes", range(len(starts)))), [1] * len(starts)
        for position, values in enumerate((starts, ends, axes), 1):
            node.inputs[position:] = [const(np.array(values, "int64"))]
    else:
        first, last = node.sizes(1), node.sizes(2)
        constants = [node.constant(place) for place in (3, 4)]
        if any(node.input(place) is not None and value is None for place, value in zip((3, 4), constants, strict=True)):
            raise FreeSizeError("axes or steps that are computed from data")
        if first is None or last is None:
            _count_bounds(node, 1 if constants[0] is None else constants[0].size)
        bounds = first or last
        count = len(bounds) if bounds else (dims_of(node.integers(1)) or [0])[0]
        axes = list(range(count)) if constants[0] is None else constants[0].tolist()
        steps = [1] * len(axes) if constants[1] is None else constants[1].tolist()
        if first is None or last is None:
            return _slice_by_data(node, axes, steps)
        starts, ends = first, last
    if dims is None:
        return None
    axes = [axis % len(dims) for axis in axes]
    if all(isinstance(size, int) for size in (*starts, *ends, *(dims[axis] for axis in axes))):
        # TVM counts fewer than zero elements where nothing is left.
        parts = (
            range(dims[axis])[start:end:step] for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
        )
        if all(map(len, parts)):
            return None
    if not all(_has_known_sign(node, bound) for bound in (*starts, *ends)):
        return _slice_by_data(node, axes, steps)
    flipped, evaluator = data, node.evaluator
    places, begins, stops, strides = [], [], [], []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size, is_backwards = dims[axis], step < 0
        if is_backwards:
            flipped = node.emit(relax.op.flip(flipped, axis))
            start, end, step = _from_other_end(node, start), _from_other_end(node, end), -step
        begin, stop = (_limit(node, bound, size) for bound in (start, end))
        if is_backwards:
            # A start before the first element is the first element.
            begin = evaluator.greatest(evaluator.least(begin, evaluator.add(size, -1)), 0)
        if isinstance(begin, int) and begin == 0 and step == 1 and evaluator.are_equal(stop, size):
            continue
        places.append(axis)
        begins.append(begin)
        stops.append(evaluator.greatest(stop, begin))
        strides.append(step)
    if not places:
        return flipped
    part = node.emit(relax.op.strided_slice(flipped, places, begins, stops, strides, assume_inbound=True))
    lengths = dims_of(part) or []
    if not any(map(_has_choice, lengths)):
        return part
    # Schedules take a symbol for a size, and no choice between two sizes.
    sizes = [evaluator.new_symbol(size) if _has_choice(size) else size for size in lengths]
    return cast_to(node.builder, part, sizes)


def _count_bounds(node: Node, count: int) -> None:
    """Cast bounds of which only a run knows how many there are to `count`, which the model checks when it runs."""
    for place in (1, 2):
        dims = dims_of(node.inputs[place]) if isinstance(node.inputs[place].ty, relax.TensorType) else None
        if dims is not None and len(dims) == 1 and not isinstance(dims[0], int):
            node.inputs[place] = cast_to(node.builder, node.inputs[place], [count])


def _split_sum(node: Node, vector: relax.Expr) -> tuple[relax.Expr, Array]:
    """A vector as the sum of another and of a constant, which is zero where it is no such sum."""
    source = _definition(node, vector)
    if isinstance(source, relax.Call) and source.op.name == "relax.add":
        for value, other in (source.args, reversed(source.args)):
            number = node.constants(other)
            if number is not None:
                return _definition(node, value), number
    return source, np.array(0)


def _definition(node: Node, value: relax.Expr) -> relax.Expr:
    """The expression that a variable is bound to; a value that is bound to nothing itself."""
    source = node.builder.lookup_binding(value) if isinstance(value, relax.Var) else value
    return value if source is None else source


def _slice_by_data(node: Node, axes: Sequence[int], steps: Sequence[int]) -> relax.Expr:
    """Write Slice by bounds that are computed from data: they are limited to the dimension when the model runs."""
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    if dims is None:
        raise FreeSizeError("bounds that are computed from data, of data of unknown shape")
    axes = [axis % len(dims) for axis in axes]
    emit, zero = node.emit, const(0, "int64")
    whole = node.vector([dims[axis] for axis in axes])
    # A start before the first element, of a negative step, is the first element.
    highest_begin = emit(relax.op.subtract(whole, const(np.array([int(step < 0) for step in steps]), "int64")))
    bounds = [node.integers(1), node.integers(2)]
    (start, before), (stop, after) = (_split_sum(node, bound) for bound in bounds)
    most = after - before if tvm_ffi.structural_equal(start, stop) else None
    if any(step < 0 for step in steps):
        is_backwards = const(np.array([step < 0 for step in steps]), "bool")
        for axis, step in zip(axes, steps, strict=True):
            data = emit(relax.op.flip(data, axis)) if step < 0 else data
        others = [emit(relax.op.subtract(const(-1, "int64"), bound)) for bound in bounds]
        pairs = zip(others, bounds, strict=True)
        bounds = [emit(relax.op.where(is_backwards, other, bound)) for other, bound in pairs]
    begin, end = (
        emit(relax.op.where(emit(relax.op.less(bound, zero)), emit(relax.op.add(bound, whole)), bound))
        for bound in bounds
    )
    begin = emit(relax.op.maximum(emit(relax.op.minimum(begin, highest_begin)), zero))
    length = emit(relax.op.subtract(emit(relax.op.minimum(end, whole)), begin))
    begins = node.bind(begin)
    lengths = node.bind(emit(relax.op.maximum(length, zero)))
    if most is not None:
        for symbol, size in zip(lengths, np.broadcast_to(most, len(lengths)).tolist(), strict=True):
            node.evaluator.limit(symbol, max(size, 0))
    ends = [node.evaluator.add(*pair) for pair in zip(begins, lengths, strict=True)]
    return relax.op.strided_slice(data, axes, begins, ends, list(map(abs, steps)), assume_inbound=True)


def convert_split(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Split, a tuple of slices, whose dimension or part sizes are not constant.

    It also takes empty parts. Returns None, which leaves the node to TVM's converter, where the dimension and the parts
    are constant and none is empty, and for data of unknown shape.
    """
    data, dims = node.inputs[0], dims_of(node.inputs[0])
    lengths = node.sizes(1) if node.opset >= 13 else node.attrs.get("split")
    if dims is None:
        return None
    if node.opset >= 13 and node.input(1) is not None and lengths is None:
        lengths = node.bind(node.emit(relax.op.maximum(node.integers(1), const(0, "int64"))))
        # The cast checks that the parts are the whole.
        axis = node.attrs.get("axis", 0) % len(dims)
        dims[axis] = reduce(node.evaluator.add, lengths)
        data = cast_to(node.builder, data, dims)
    axis, evaluator = node.attrs.get("axis", 0) % len(dims), node.evaluator
    if isinstance(dims[axis], int) and all(isinstance(length, int) and length for length in lengths or ()):
        return None
    if lengths is None:
        # Parts are equal but for the last one, which is smaller where the dimension is no multiple.
        length = evaluator.divide(evaluator.add(dims[axis], node.outputs - 1), node.outputs)
        lengths = [length] * (node.outputs - 1)
        lengths.append(evaluator.add(dims[axis], evaluator.multiply(length, 1 - node.outputs)))
    parts, begin = [], 0
    for length in lengths:
        end = evaluator.add(begin, length)
        part = node.emit(relax.op.strided_slice(data, [axis], [begin], [end], assume_inbound=True))
        parts.append(cast_to(node.builder, part, [*dims[:axis], length, *dims[axis + 1 :]]))
        begin = end
    return relax.Tuple(parts)


def _has_choice(size: Any) -> bool:
    """Whether a size is the smaller or larger of two."""
    if isinstance(size, int):
        return False
    parts = (getattr(size, name, None) for name in ("a", "b", "value"))
    is_choice = isinstance(size, tirx.Min | tirx.Max)
    return is_choice or any(_has_choice(part) for part in parts if part is not None)


def _from_other_end(node: Node, bound: Any) -> Any:
    """A bound of Slice in the reversed dimension: place 2 is place -3 there, and place -1 is place 0."""
    return node.evaluator.add(-1, node.evaluator.negate(bound))


def _has_known_sign(node: Node, bound: Any) -> bool:
    return isinstance(bound, int) or node.evaluator.holds(bound < 0) or node.evaluator.holds(bound >= 0)


def _limit(node: Node, bound: Any, size: Any) -> Any:
    """A bound of Slice, whose sign is known, as a place from 0 to `size`: a negative one counts from the end."""
    evaluator = node.evaluator
    if isinstance(bound, int):
        if bound >= LARGEST_SIZE:
            return size
        if bound < 0:
            return evaluator.greatest(evaluator.add(size, bound), 0)
    elif evaluator.holds(bound < 0):
        return evaluator.greatest(evaluator.add(size, bound), 0)
    return evaluator.least(bound, size)


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
