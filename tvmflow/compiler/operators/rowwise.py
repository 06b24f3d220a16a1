"""Softmax and layer norm: reductions over the last dimension, row by row."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import relax, te, tirx, topi

from tvmflow.compiler import vectormath
from tvmflow.compiler.annotations import KERNEL
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import is_float32, static


def legalize_softmax(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Softmax over the last dimension; None over another."""
    data = call.args[0]
    if not is_float32(data) or int(call.attrs.axis) not in (-1, len(data.ty.shape.values) - 1):
        return None
    return builder.call_te(partial(softmax, machine=machine), data, primfunc_name_hint="softmax")


def softmax(data: te.Tensor, *, machine: Machine) -> te.Tensor:
    """Softmax over the last dimension."""
    rows, size = list(data.shape[:-1]), data.shape[-1]
    largest = row_reduction(lambda row, k: data[(*row, k)], rows, size, te.max, tirx.max, "max", machine)
    exponential = te.compute(
        data.shape, lambda *index: vectormath.exp(data[index] - largest(index[:-1])), name="exponential"
    )
    total = row_reduction(lambda row, k: exponential[(*row, k)], rows, size, te.sum, lambda a, b: a + b, "sum", machine)
    return te.compute(
        data.shape,
        lambda *index: exponential[index] / total(index[:-1]),
        name="softmax",
        attrs={KERNEL: "rowwise"},
    )


def legalize_layer_norm(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Layer norm over the last dimension; None over others."""
    data, scale, bias = call.args
    rank = len(data.ty.shape.values) if is_float32(data, scale, bias) else 0
    if rank < 2 or [int(axis) % rank for axis in call.attrs.axes] != [rank - 1]:
        return None
    compute = partial(layer_norm, epsilon=float(call.attrs.epsilon), machine=machine)
    return builder.call_te(compute, data, scale, bias, primfunc_name_hint="layer_norm")


def layer_norm(data: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, epsilon: float, machine: Machine) -> te.Tensor:
    """Normalisation over the last dimension; the variance is that of the centred values."""
    rows, size = list(data.shape[:-1]), data.shape[-1]
    count = tirx.Cast("float32", size)
    total = row_reduction(lambda row, k: data[(*row, k)], rows, size, te.sum, lambda a, b: a + b, "mean", machine)
    mean = te.compute(rows, lambda *row: total(row) / count, name="mean")
    squares = row_reduction(
        lambda row, k: (data[(*row, k)] - mean[row]) * (data[(*row, k)] - mean[row]),
        rows,
        size,
        te.sum,
        lambda a, b: a + b,
        "variance",
        machine,
    )
    scaling = te.compute(rows, lambda *row: 1.0 / tirx.sqrt(squares(row) / count + epsilon), name="scaling")
    return te.compute(
        data.shape,
        lambda *index: (data[index] - mean[index[:-1]]) * scaling[index[:-1]] * scale[index[-1]] + bias[index[-1]],
        name="layer_norm",
        attrs={KERNEL: "rowwise"},
    )


def row_reduction(
    element: Callable[[Sequence[Any], Any], Any],
    rows: Sequence[Any],
    size: Any,
    reduce: Callable[..., Any],
    combine: Callable[[Any, Any], Any],
    name: str,
    machine: Machine,
) -> Callable[[Sequence[Any]], Any]:
    """Reduce the last dimension in whole vectors, their lanes, and what is left over.

    Returns the result as a function of the row. The stages are named `name` with `_lanes`, `vector` and `_rest`.
    """
    lanes, known = machine.lanes, static(size)
    parts = []
    if known is None or known >= lanes:
        o = te.reduce_axis((0, topi.utils.simplify(size // lanes)), "o")
        partial_results = te.compute(
            (*rows, lanes),
            lambda *index: reduce(element(index[:-1], o * lanes + index[-1]), axis=o),
            name=f"{name}_lanes",
        )
        v = te.reduce_axis((0, lanes), "v")
        parts.append(te.compute(rows, lambda *row: reduce(partial_results[(*row, v)], axis=v), name=f"{name}vector"))
    if known is None or known % lanes:
        r = te.reduce_axis((0, topi.utils.simplify(size % lanes)), "r")
        parts.append(
            te.compute(rows, lambda *row: reduce(element(row, size // lanes * lanes + r), axis=r), name=f"{name}_rest")
        )

    def result(row: Sequence[Any]) -> Any:
        return combine(parts[0][tuple(row)], parts[1][tuple(row)]) if len(parts) == 2 else parts[0][tuple(row)]

    return result
