"""Softmax and norms over the last dimensions, row by row, and softmax over another dimension."""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from tvm import relax, te, tirx, topi

from tvmflow.compiler import doublemath, vectormath
from tvmflow.compiler.annotations import KERNEL, LEAD
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import free_softmax, reductions
from tvmflow.compiler.operators.common import is_float32, round_up, static

Row = Callable[[Sequence[Any]], Any]


def legalize_softmax(
    builder: relax.BlockBuilder, call: relax.Call, machine: Machine, logarithm: bool = False
) -> relax.Expr | None:
    """Define softmax of float32 or float64 over a dimension, or its logarithm; None for other types."""
    data, hint = call.args[0], call.op.name.rpartition(".")[2]
    if str(data.ty.dtype) not in ("float32", "float64"):
        return None
    axis = int(call.attrs.axis) % data.ty.ndim
    shape = list(data.ty.shape.values)
    if axis < len(shape) - 1 and all(static(size) == 1 for size in shape[axis + 1 :]):
        # The numbers of a row lie side by side, as those of the last dimension do.
        row = builder.emit(relax.op.reshape(data, relax.ShapeExpr(shape[: axis + 1])))
        apply = relax.op.nn.log_softmax if logarithm else relax.op.nn.softmax
        rows = legalize_softmax(builder, builder.normalize(apply(row, axis)), machine, logarithm)
        return None if rows is None else relax.op.reshape(builder.emit(rows), call.ty.shape)
    if axis == data.ty.ndim - 1 and is_float32(data):
        of_free_size = free_softmax.legalize(builder, call, machine, logarithm)
        if of_free_size is not None:
            return of_free_size
        compute = partial(log_softmax if logarithm else softmax, machine=machine)
    else:
        compute = partial(softmax_across, axis=axis, logarithm=logarithm)
    return builder.call_te(compute, data, primfunc_name_hint=hint, primfunc_attrs=reductions.REDUCTION)


def _exp_of_negative(dtype: str) -> Callable[[Any], Any]:
    return vectormath.exp_of_negative if dtype == "float32" else doublemath.exp


def softmax(data: te.Tensor, *, machine: Machine) -> te.Tensor:
    """Define softmax over the last dimension; the result has the shape of `data`."""
    rows = list(data.shape[:-1])
    exponential, _, total = _exponentials(data, machine)
    inverse = te.compute(rows, lambda *row: 1.0 / total(row), name="inverse")
    return te.compute(
        data.shape,
        lambda *index: exponential[index] * inverse[index[:-1]],
        name="softmax",
        attrs={KERNEL: "rowwise", LEAD: len(rows)},
    )


def softmax_across(data: te.Tensor, *, axis: int, logarithm: bool) -> te.Tensor:
    """Define softmax, or its `logarithm`, over a dimension that is not the last one.

    Vectors run along the dimensions after it. The result has the shape of `data`.
    """
    k, j = (te.reduce_axis((0, data.shape[axis]), name) for name in "kj")
    others = [*data.shape[:axis], *data.shape[axis + 1 :]]

    def at(index: Sequence[Any], place: Any) -> tuple[Any, ...]:
        return (*index[:axis], place, *index[axis:])

    def without(index: Sequence[Any]) -> tuple[Any, ...]:
        return (*index[:axis], *index[axis + 1 :])

    largest = te.compute(others, lambda *index: reductions.MAX.reducer(data[at(index, k)], axis=k), name="max")
    exponential = te.compute(
        data.shape,
        lambda *index: _exp_of_negative(data.dtype)(data[index] - largest[without(index)]),
        name="exponential",
    )
    total = te.compute(others, lambda *index: te.sum(exponential[at(index, j)], axis=j), name="sum")
    if logarithm:
        shift = te.compute(others, lambda *index: tirx.log(total[index]), name="logarithm")
        return te.compute(
            data.shape,
            lambda *index: data[index] - largest[without(index)] - shift[without(index)],
            name="log_softmax",
        )
    inverse = te.compute(others, lambda *index: 1.0 / total[index], name="inverse")
    return te.compute(data.shape, lambda *index: exponential[index] * inverse[without(index)], name="softmax")


def log_softmax(data: te.Tensor, *, machine: Machine) -> te.Tensor:
    """Define the logarithm of softmax over the last dimension; the result has the shape of `data`."""
    rows = list(data.shape[:-1])
    _, largest, total = _exponentials(data, machine)
    logarithm = te.compute(rows, lambda *row: tirx.log(total(row)), name="logarithm")
    return te.compute(
        data.shape,
        lambda *index: data[index] - largest(index[:-1]) - logarithm[index[:-1]],
        name="log_softmax",
        attrs={KERNEL: "rowwise", LEAD: len(rows)},
    )


def _exponentials(data: te.Tensor, machine: Machine) -> tuple[te.Tensor, Row, Row]:
    """The exponentials of each row minus its largest element, that element, and the sum of the exponentials.

    Rows of a known size that is no multiple of a vector are padded to whole vectors first, so that all exponentials are
    computed in vectors.
    """
    rows, size = list(data.shape[:-1]), data.shape[-1]
    number = static(size)
    if number is not None and number % machine.lanes:
        end = size
        size = round_up(size, machine.lanes)
        ragged = data
        data = te.compute(
            (*rows, size),
            lambda *index: tirx.if_then_else(index[-1] < end, ragged[index], tirx.const(-math.inf, "float32")),
            name="padded",
        )
    largest = row_reduction(lambda row, k: data[(*row, k)], rows, size, reductions.MAX, "max", machine)
    exponential = te.compute(
        data.shape, lambda *index: _exp_of_negative(data.dtype)(data[index] - largest(index[:-1])), name="exponential"
    )
    total = row_reduction(lambda row, k: exponential[(*row, k)], rows, size, reductions.SUM, "sum", machine)
    return exponential, largest, total


def legalize_norm(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define float32 layer norm or RMS norm over the last dimensions; None for other types and dimensions."""
    data, *parameters = call.args
    if not is_float32(data, *parameters):
        return None
    rank = len(data.ty.shape.values)
    axes = [int(axis) % rank for axis in call.attrs.axes]
    lead = rank - len(axes)
    shapes = [parameter.ty.shape.values for parameter in parameters]
    if axes != list(range(lead, rank)) or any(len(shape) != len(axes) for shape in shapes):
        return None
    if len(axes) > 1 and any(static(size) is None for size in data.ty.shape.values[lead:]):
        return None
    name = call.op.name.rpartition(".")[2]
    compute = partial(
        layer_norm if name == "layer_norm" else rms_norm, lead=lead, epsilon=float(call.attrs.epsilon), machine=machine
    )
    return builder.call_te(compute, *call.args, primfunc_name_hint=name, primfunc_attrs=reductions.REDUCTION)


def layer_norm(
    data: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, lead: int, epsilon: float, machine: Machine
) -> te.Tensor:
    """Define layer norm over the dimensions from index `lead` on; `scale` and `bias` have these dimensions.

    The variance is computed from the centred values, and `epsilon` is added to it.
    """
    element, size = _row(data, lead)
    mean, scaling = moments(element, list(data.shape[:lead]), size, epsilon, machine)
    return te.compute(
        data.shape,
        lambda *index: (
            (data[index] - mean(index[:lead])) * scaling(index[:lead]) * scale[index[lead:]] + bias[index[lead:]]
        ),
        name="layer_norm",
        attrs={KERNEL: "rowwise", LEAD: lead},
    )


def rms_norm(data: te.Tensor, scale: te.Tensor, *, lead: int, epsilon: float, machine: Machine) -> te.Tensor:
    """Return `data / sqrt(mean(data ** 2) + epsilon) * scale`.

    The mean is over the dimensions from index `lead` on; `scale` has these dimensions.
    """
    element, size = _row(data, lead)
    rows = list(data.shape[:lead])
    squares = row_reduction(
        lambda row, k: element(row, k) * element(row, k), rows, size, reductions.SUM, "squares", machine
    )
    scaling = te.compute(rows, lambda *row: _inverse_root(squares(row), size, epsilon), name="scaling")
    return te.compute(
        data.shape,
        lambda *index: data[index] * scaling[index[:lead]] * scale[index[lead:]],
        name="rms_norm",
        attrs={KERNEL: "rowwise", LEAD: lead},
    )


def moments(
    element: Callable[[Sequence[Any], Any], Any], rows: Sequence[Any], size: Any, epsilon: float, machine: Machine
) -> tuple[Row, Row]:
    """Return the mean of each row and the inverse of its standard deviation, as functions of the row.

    A row is an index into dimensions of the sizes `rows`. `element(row, k)` returns the element k of the `size`
    elements of a row. `epsilon` is added to the variance.
    """

    def total(value: Callable[[Sequence[Any], Any], Any], name: str) -> Row:
        return row_reduction(value, rows, size, reductions.SUM, name, machine)

    return _moments(element, total, rows, size, epsilon)


def moments_of_image(
    element: Callable[[Sequence[Any], Sequence[Any]], Any],
    rows: Sequence[Any],
    sizes: Sequence[Any],
    epsilon: float,
    machine: Machine,
) -> tuple[Row, Row]:
    """Return the mean and the inverse standard deviation of rows that are images, as functions of the row.

    `sizes` are the dimensions of an image, of which some are symbolic. `element(row, place)` returns the element at an
    index into them. `epsilon` is added to the variance.
    """

    def total(value: Callable[[Sequence[Any], Sequence[Any]], Any], name: str) -> Row:
        return _image_reduction(value, rows, sizes, reductions.SUM, name, machine)

    return _moments(element, total, rows, reduce(operator.mul, sizes), epsilon)


def _moments(
    element: Callable[[Sequence[Any], Any], Any],
    total: Callable[[Callable[[Sequence[Any], Any], Any], str], Row],
    rows: Sequence[Any],
    size: Any,
    epsilon: float,
) -> tuple[Row, Row]:
    """The moments of rows, of which `total(value, name)` sums the values of the elements."""
    sums = total(element, "total")
    mean = te.compute(rows, lambda *row: sums(row) / tirx.Cast("float32", size), name="mean")

    def square(row: Sequence[Any], place: Any) -> Any:
        centred = element(row, place) - mean[tuple(row)]
        return centred * centred

    squares = total(square, "squares")
    scaling = te.compute(rows, lambda *row: _inverse_root(squares(row), size, epsilon), name="scaling")
    return (lambda row: mean[tuple(row)]), (lambda row: scaling[tuple(row)])


def _inverse_root(squares: Any, size: Any, epsilon: float) -> Any:
    return 1.0 / tirx.sqrt(squares / tirx.Cast("float32", size) + epsilon)


def _row(data: te.Tensor, lead: int) -> tuple[Callable[[Sequence[Any], Any], Any], Any]:
    """Join the dimensions from `lead` on to one; returns its element as a function of row and index, and its size."""
    sizes = list(data.shape[lead:])
    if len(sizes) == 1:
        return (lambda row, k: data[(*row, k)]), sizes[0]
    return (lambda row, k: data[(*row, *reductions.unravel(k, sizes))]), math.prod(int(size) for size in sizes)


def row_reduction(
    element: Callable[[Sequence[Any], Any], Any],
    rows: Sequence[Any],
    size: Any,
    kind: reductions.Kind,
    name: str,
    machine: Machine,
) -> Row:
    """Reduce `element(row, k)` over k: whole vectors first, then their lanes and the elements that fill no vector.

    A row is an index into dimensions of the sizes `rows`, and has `size` elements. Returns the result as a function of
    the row. The names of the stages begin with `name`.
    """
    number = static(size)
    if number is not None:
        row = reductions.rows(element, rows, number, kind, name, machine)
        result = te.compute(rows, lambda *at: row(at), name=name)
        return lambda at: result[tuple(at)]
    return _image_reduction(lambda row, place: element(row, place[0]), rows, [size], kind, name, machine)


def _image_reduction(
    element: Callable[[Sequence[Any], Sequence[Any]], Any],
    rows: Sequence[Any],
    sizes: Sequence[Any],
    kind: reductions.Kind,
    name: str,
    machine: Machine,
) -> Row:
    """Reduce `element(row, place)` over places in dimensions of these `sizes`, of which the last is cut in vectors."""
    lanes, size = machine.lanes, sizes[-1]

    def lines() -> list[Any]:
        return [te.reduce_axis((0, extent), "line") for extent in sizes[:-1]]

    line, o = lines(), te.reduce_axis((0, topi.utils.simplify(size // lanes)), "o")
    partial_results = te.compute(
        (*rows, lanes),
        lambda *index: kind.reducer(element(index[:-1], [*line, o * lanes + index[-1]]), axis=[*line, o]),
        name=f"{name}_lanes",
    )
    v = te.reduce_axis((0, lanes), "v")
    vector = te.compute(rows, lambda *row: kind.reducer(partial_results[(*row, v)], axis=v), name=f"{name}_vector")
    after, r = lines(), te.reduce_axis((0, topi.utils.simplify(size % lanes)), "r")
    rest = te.compute(
        rows,
        lambda *row: kind.reducer(element(row, [*after, size // lanes * lanes + r]), axis=[*after, r]),
        name=f"{name}_rest",
    )
    return lambda at: kind.combine(vector[tuple(at)], rest[tuple(at)])
