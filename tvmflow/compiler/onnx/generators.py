"""Operators that make numbers from sizes, bounds or indices: Range, ConstantOfShape, EyeLike and OneHot."""

import math
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import numpy_helper
from tvm import relax

from tvmflow.compiler.onnx.node import FreeSizeError, Node
from tvmflow.compiler.onnx.sizes import elements_at_import
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of, is_static


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


def convert_constant_of_shape(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a ConstantOfShape of sizes that are computed from data, each with a symbol.

    Returns None, which leaves the node to TVM's converter, for other sizes. Raises FreeSizeError where the number of
    sizes is unknown.
    """
    if node.sizes(0) is not None:
        return None
    target, value = node.integers(0), node.attrs.get("value")
    sizes = node.bind(target, elements_at_import(node.builder, target))
    number = np.zeros(1, "float32") if value is None else numpy_helper.to_array(value)
    return relax.op.broadcast_to(const(number.reshape(())), relax.ShapeExpr(sizes))


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
