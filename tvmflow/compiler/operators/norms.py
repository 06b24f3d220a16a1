"""Instance and group norm, with the channels last or first."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from tvm import relax, te, tirx

from tvmflow.compiler.annotations import GROUP, KERNEL, LEAD
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import reductions, rowwise
from tvmflow.compiler.operators.common import is_float32, static


def legalize(builder: relax.BlockBuilder, call: relax.Call, machine: Machine) -> relax.Expr | None:
    """Define float32 instance or group norm; None for other types and axes, and for symbolic sizes after the batch."""
    attrs = call.attrs
    if not is_float32(*call.args):
        return None
    shape = list(call.args[0].ty.shape.values)
    rank, channel = len(shape), int(attrs.channel_axis) % len(shape)
    axes = sorted(int(axis) % rank for axis in attrs.axes)
    if channel not in (1, rank - 1) or axes != [axis for axis in range(1, rank) if axis != channel]:
        return None
    if not axes or any(not static(size) for size in shape[1:]):
        return None
    channels = int(shape[channel])
    name = call.op.name.rpartition(".")[2]
    groups = channels if name == "instance_norm" else int(attrs.num_groups)
    compute = partial(
        _channels_last if channel == rank - 1 else _channels_first,
        group=channels // groups,
        epsilon=float(attrs.epsilon),
        machine=machine,
    )
    return builder.call_te(compute, *call.args, primfunc_name_hint=name, primfunc_attrs=reductions.REDUCTION)


def _channels_first(
    data: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, group: int, epsilon: float, machine: Machine
) -> te.Tensor:
    """Normalise `[N, C, ...]`; a group of channels is one row."""
    batch, channels, *image = data.shape
    pixels = math.prod(int(size) for size in image)

    def element(row: Sequence[Any], k: Any) -> Any:
        return data[(row[0], row[1] * group + k // pixels, *reductions.unravel(k % pixels, image))]

    mean, scaling = rowwise.moments(element, [batch, int(channels) // group], group * pixels, epsilon, machine)

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
    view = reductions.View(list(data.shape), 1, len(image))
    share = tirx.const(1.0 / (view.depth * group), "float32")

    def by_group(total: Any, name: str) -> te.Tensor:
        member = te.reduce_axis((0, group), "member")
        sums = te.compute((batch, channels), lambda n, c: total([n], c), name=f"{name}_channels")
        return te.compute((batch, groups), lambda n, g: te.sum(sums[n, g * group + member], axis=member), name=name)

    def element(outer: Sequence[Any], r: Any, c: Any) -> Any:
        return data[tuple(view.position(outer, r, c))]

    total = by_group(reductions.reduction(element, view, reductions.SUM, "sum", machine), "total")
    mean = te.compute((batch, channels), lambda n, c: total[n, c // group] * share, name="mean")

    def square(outer: Sequence[Any], r: Any, c: Any) -> Any:
        centred = element(outer, r, c) - mean[(*outer, c)]
        return centred * centred

    squares = by_group(reductions.reduction(square, view, reductions.SUM, "square", machine), "squares")
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
