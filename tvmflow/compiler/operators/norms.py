"""Instance and group norm, with the channels last or first."""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from tvm import relax, te, tirx

from tvmflow.compiler.annotations import GROUP, KERNEL, LEAD
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import reductions, rowwise
from tvmflow.compiler.operators.common import is_float32, static


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define instance or group norm over all dimensions but the batch and the channels.

    It is vectorised for float32 with the channels after the batch, and with a known number of channels last. Returns
    None for norms over other dimensions.
    """
    attrs = call.attrs
    shape = list(call.args[0].ty.shape.values)
    rank, channel = len(shape), int(attrs.channel_axis) % len(shape)
    axes = sorted(int(axis) % rank for axis in attrs.axes)
    if not axes or channel == 0 or axes != [axis for axis in range(1, rank) if axis != channel]:
        return None
    name, epsilon = call.op.name.rpartition(".")[2], float(attrs.epsilon)
    groups = shape[channel] if name == "instance_norm" else int(attrs.num_groups)
    channels = static(shape[channel])
    group = 1 if name == "instance_norm" else None if channels is None else channels // groups
    compute: Callable[..., te.Tensor] = partial(_by_loops, channel=channel, groups=groups, epsilon=epsilon)
    hints: dict[str, Any] = {}
    if is_float32(*call.args) and group is not None:
        options: dict[str, Any] = {"group": group, "epsilon": epsilon, "machine": machine}
        if channel == 1 and len(shape[2:]) > 1 and None in map(static, shape[2:]):
            return _legalize_flat(builder, call, shape, machine)
        if channel == 1:
            compute, hints = partial(_channels_first, **options), reductions.REDUCTION
        elif channel == rank - 1 and channels is not None:
            compute, hints = partial(_channels_last, **options), reductions.REDUCTION
    return builder.call_te(compute, *call.args, primfunc_name_hint=name, primfunc_attrs=hints or None)


def _legalize_flat(
    builder: relax.BlockBuilder, call: relax.Call, shape: Sequence[Any], machine: Machine
) -> relax.Expr | None:
    """Normalise images whose pixels are one dimension: lines of free sizes need not fill vectors."""
    data, *parameters = call.args
    flat = builder.emit(relax.op.reshape(data, relax.ShapeExpr([*shape[:2], reduce(operator.mul, shape[2:])])))
    options: dict[str, Any] = {"channel_axis": 1, "axes": [2], "epsilon": float(call.attrs.epsilon)}
    if call.op.name == "relax.nn.instance_norm":
        norm = relax.op.nn.instance_norm(flat, *parameters, **options)
    else:
        norm = relax.op.nn.group_norm(flat, *parameters, num_groups=int(call.attrs.num_groups), **options)
    rows = legalize(builder, builder.normalize(norm), machine)
    return None if rows is None else relax.op.reshape(builder.emit(rows), relax.ShapeExpr(shape))


def _by_loops(
    data: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, channel: int, groups: Any, epsilon: float
) -> te.Tensor:
    """Normalise by plain loops, in float32 at least.

    TVM's own definition subtracts the square of the mean from the mean of the squares, in which data whose mean is far
    from 0 loses all digits. Here the squares are of the centred data.
    """
    dtype = "float64" if data.dtype == "float64" else "float32"
    batch, channels = data.shape[0], data.shape[channel]
    image = [size for axis, size in enumerate(data.shape) if axis not in (0, channel)]
    group = channels // groups
    count = reduce(operator.mul, image, group).astype(dtype)

    def at(n: Any, c: Any, pixel: Sequence[Any]) -> Any:
        return data[(n, *pixel[: channel - 1], c, *pixel[channel - 1 :])].astype(dtype)

    def average(value: Callable[[Any, Any, Any], Any], name: str) -> te.Tensor:
        member = te.reduce_axis((0, group), "member")
        pixel = [te.reduce_axis((0, size), "pixel") for size in image]

        def total(n: Any, g: Any) -> Any:
            return te.sum(value(n, g * group + member, pixel), axis=[member, *pixel])

        totals = te.compute((batch, groups), total, name=f"{name}_total")
        return te.compute((batch, groups), lambda n, g: totals[n, g] / count, name=name)

    def centred(n: Any, c: Any, pixel: Sequence[Any]) -> Any:
        return at(n, c, pixel) - mean[n, c // group]

    mean = average(at, "mean")
    variance = average(lambda *place: centred(*place) * centred(*place), "variance")

    def value(*index: Any) -> Any:
        n, c = index[0], index[channel]
        pixel = [place for axis, place in enumerate(index) if axis not in (0, channel)]
        scaling = scale[c].astype(dtype) / tirx.sqrt(variance[n, c // group] + tirx.const(epsilon, dtype))
        return (centred(n, c, pixel) * scaling + bias[c].astype(dtype)).astype(data.dtype)

    return te.compute(data.shape, value, name="norm")


def _channels_first(
    data: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, group: int, epsilon: float, machine: Machine
) -> te.Tensor:
    """Normalise `[N, C, ...]`; a group of channels is one row."""
    batch, channels, *image = data.shape
    rows = [batch, channels // group]
    if all(static(size) for size in image):
        pixels = math.prod(int(size) for size in image)

        def element(row: Sequence[Any], k: Any) -> Any:
            return data[(row[0], row[1] * group + k // pixels, *reductions.unravel(k % pixels, image))]

        mean, scaling = rowwise.moments(element, rows, group * pixels, epsilon, machine)
    else:

        def place(row: Sequence[Any], places: Sequence[Any]) -> Any:
            return data[(row[0], row[1] * group + places[0], *places[1:])]

        mean, scaling = rowwise.moments_of_image(place, rows, [group, *image], epsilon, machine)

    def value(n: Any, c: Any, *pixel: Any) -> Any:
        row = (n, c // group)
        return (data[(n, c, *pixel)] - mean(row)) * (scaling(row) * scale[c]) + bias[c]

    attrs = {KERNEL: "rowwise", LEAD: 2, GROUP: group}
    return te.compute(data.shape, value, name="norm", attrs=attrs)


def _channels_last(
    data: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, group: int, epsilon: float, machine: Machine
) -> te.Tensor:
    """Normalise `[N, ..., C]`: reduce each channel in vectors, then combine the channels of each group."""
    batch, *image, channels = data.shape
    groups = int(channels) // group
    is_free = any(not static(size) for size in image)
    count = reduce(operator.mul, image, group)
    share = 1.0 / tirx.Cast("float32", count) if is_free else tirx.const(1.0 / int(count), "float32")

    def by_group(value: Callable[[Any, Sequence[Any], Any], Any], name: str) -> te.Tensor:
        """Sum `value(n, pixel, c)` over the pixels and the channels of each group."""
        if is_free:
            sums = reductions.sum_of_image(
                lambda at, c: value(at[0], at[1:], c), [batch], image, int(channels), f"{name}_pixel"
            )
        else:
            view = reductions.View(list(data.shape), 1, len(image))

            def element(outer: Sequence[Any], r: Any, c: Any) -> Any:
                n, *pixel, channel = view.position(outer, r, c)
                return value(n, pixel, channel)

            sums = reductions.reduction(element, view, reductions.SUM, f"{name}_pixel", machine)
        total = te.compute((batch, channels), lambda n, c: sums([n], c), name=f"{name}_channels")
        member = te.reduce_axis((0, group), "member")
        return te.compute((batch, groups), lambda n, g: te.sum(total[n, g * group + member], axis=member), name=name)

    total = by_group(lambda n, pixel, c: data[(n, *pixel, c)], "total")
    mean = te.compute((batch, channels), lambda n, c: total[n, c // group] * share, name="mean")

    def square(n: Any, pixel: Sequence[Any], c: Any) -> Any:
        centred = data[(n, *pixel, c)] - mean[n, c]
        return centred * centred

    squares = by_group(square, "squares")
    factor = te.compute(
        (batch, channels),
        lambda n, c: scale[c] / tirx.sqrt(squares[n, c // group] * share + epsilon),
        name="factor",
    )
    return te.compute(
        data.shape,
        lambda *index: (data[index] - mean[index[0], index[-1]]) * factor[index[0], index[-1]] + bias[index[-1]],
        name="norm",
        attrs={KERNEL: "reduction"},
    )
