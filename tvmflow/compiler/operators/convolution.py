"""Convolution of NHWC activations with packed weights: direct, as a matrix product, or by Winograd's algorithm."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi

from tvmflow.compiler import cost, tiles, winograd
from tvmflow.compiler.annotations import AXES, KERNEL, LANES, LEAD, SHARED, SUBJECT, TILE, WINOGRAD
from tvmflow.compiler.choices import Choices, Decisions, shape_text
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import depthwise, products
from tvmflow.compiler.operators import winograd as winograd_stages
from tvmflow.compiler.operators.common import (
    FOLLOWS,
    FUSABLE,
    JoinedRows,
    PaddedImage,
    constant,
    divides,
    is_float32,
    output_size,
    round_up,
    skipped_padding,
    static,
    typical_pixels,
    vector,
)
from tvmflow.compiler.operators.packing import WinogradPacking, pack_weights
from tvmflow.compiler.operators.products import FEWEST_ROWS, rows_product

# The transpose of NHWC images to NCHW.
_CHANNELS_FIRST = [0, 3, 1, 2]
# Element-wise operations between a convolution and the transpose of its result.
_MOST_STEPS = 6


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, machine: Machine, choices: Choices, fast: bool = True
) -> relax.Expr | None:
    """Define a float32 convolution of NHWC data by the fastest algorithm or the one that `choices` name.

    Returns None for other layouts and types, and for kernels of unknown size. `fast` allows Winograd's algorithm.
    """
    if not _is_ours(call):
        return None
    (data, weight), attrs = call.args, call.attrs
    groups, channels = int(attrs.groups), static(data.ty.shape.values[3])
    out_channels, depth, *_ = (int(dim) for dim in weight.ty.shape.values)
    geometry: dict[str, Any] = {
        "strides": [int(item) for item in attrs.strides],
        "padding": [int(item) for item in attrs.padding],
        "dilation": [int(item) for item in attrs.dilation],
    }
    subject = subject_of(call)
    decisions = choices.about(subject)
    is_constant = isinstance(weight, tvm.ir.GenericConst)
    name, packed_weight = "", None
    if channels is not None and groups == channels == out_channels and groups > 1:
        name, packed_weight = "depthwise_conv2d", depthwise.pack(builder, weight, vector(channels, machine))
    elif is_constant and depthwise.is_narrow(out_channels, depth, groups, machine):
        name, packed_weight = "grouped_conv2d", constant(depthwise.pack_groups(weight.value.numpy(), machine.lanes))
    if packed_weight is not None:
        compute = partial(depthwise.depthwise, machine=machine, subject=subject, **geometry)
        return builder.call_te(compute, data, packed_weight, primfunc_name_hint=name, primfunc_attrs=FUSABLE)
    size = winograd_size(data, weight, groups, geometry, machine, decisions) if fast else None
    if size is not None:
        stride = geometry["strides"][0]
        packed_weight = pack_weights(builder, weight, WinogradPacking(size, machine.lanes, stride))
        compute = partial(
            winograd_conv2d,
            channels=out_channels,
            padding=geometry["padding"],
            stride=stride,
            machine=machine,
            decisions=decisions,
        )
        return builder.call_te(
            compute, data, packed_weight, primfunc_name_hint="winograd_conv2d", primfunc_attrs=FUSABLE
        )
    per_group = out_channels // groups
    lanes = vector(per_group, machine)
    if groups > 1:
        # A vector of output channels must read one group's input channels only.
        lanes = math.gcd(per_group, machine.lanes)
    packed_weight = _pack(builder, weight, lanes)
    if _is_pointwise(call) and geometry["strides"] == [1, 1]:
        compute = partial(pointwise_conv2d, channels=out_channels, machine=machine, decisions=decisions)
    else:
        data, axes = _edge(builder, data, decisions)
        compute = partial(
            conv2d, channels=out_channels, groups=groups, machine=machine, decisions=decisions, axes=axes, **geometry
        )
    kind = {**FUSABLE, SUBJECT: subject}
    return builder.call_te(compute, data, packed_weight, primfunc_name_hint="conv2d", primfunc_attrs=kind)


def multiply_fast(
    builder: relax.BlockBuilder, call: relax.Call, machine: Machine, choices: Choices
) -> relax.Expr | None:
    """Define a 1x1 convolution with constant weights by Strassen's algorithm.

    Returns None for other convolutions, and where the algorithm is slower or `choices` name the direct product.
    """
    data, weight = call.args
    if not _is_ours(call) or not _is_pointwise(call) or not isinstance(weight, tvm.ir.GenericConst):
        return None
    strides = [int(item) for item in call.attrs.strides]
    return products.fast_product(builder, data, weight, machine, choices.about(subject_of(call)), strides)


def _is_ours(call: relax.Call) -> bool:
    """Whether a call convolves float32 NHWC data with kernels of known size."""
    data, weight = call.args
    attrs = call.attrs
    return (
        (attrs.data_layout, attrs.out_layout, attrs.kernel_layout) == ("NHWC", "NHWC", "OIHW")
        and is_float32(data, weight)
        and all(static(dim) is not None for dim in weight.ty.shape.values)
    )


def _is_pointwise(call: relax.Call) -> bool:
    """Whether a convolution's kernel is a single tap, without groups and padding."""
    kernel = [int(dim) for dim in call.args[1].ty.shape.values[2:]]
    return kernel == [1, 1] and int(call.attrs.groups) == 1 and not any(int(item) for item in call.attrs.padding)


def legalize_transpose(
    builder: relax.BlockBuilder, call: relax.Call, _machine: Machine, choices: Choices
) -> relax.Expr | None:
    """Define a transpose that a convolution may absorb, as a function with an attribute that marks it.

    Two kinds of transposes are marked: one of a parameter of the program, such as the model's input, and one from NHWC
    to NCHW of a direct convolution's result. With the second mark the convolution itself writes NCHW; `choices` decide
    about it, by default against it. Returns None for a transpose that is not marked.
    """
    (data,) = call.args
    if not isinstance(data, relax.Var) or call.attrs.axes is None:
        return None
    axes = [int(axis) for axis in call.attrs.axes]
    attrs: dict[str, Any] | None = None
    if builder.lookup_binding(data) is None:
        attrs = {AXES: axes}
    elif axes == _CHANNELS_FIRST and (subject := _writer(builder, data)) is not None:
        attrs = choices.choose("output", subject, {"transposed": None, "as it leaves": FOLLOWS})
    if attrs is None:
        return None
    return builder.call_te(topi.transpose, data, axes, primfunc_name_hint="transpose", primfunc_attrs=attrs)


def _writer(builder: relax.BlockBuilder, result: relax.Var, steps: int = _MOST_STEPS) -> str | None:
    """The subject of the direct convolution before at most `steps` element-wise operations; None without one."""
    call = builder.lookup_binding(result)
    if not isinstance(call, relax.Call) or getattr(call.op, "name", "") != "relax.call_tir" or steps == 0:
        return None
    subject = (builder.get()[call.args[0]].attrs or {}).get(SUBJECT)
    if subject is not None:
        return str(subject)
    same = (
        item for item in call.args[1] if isinstance(item, relax.Var) and tvm_ffi.structural_equal(item.ty, result.ty)
    )
    return next(filter(None, (_writer(builder, item, steps - 1) for item in same)), None)


def subject_of(call: relax.Call) -> str:
    """Return the subject of the decisions about a convolution: its shapes and its geometry as text."""
    attrs = call.attrs
    data, weight = (shape_text(tensor.ty.shape.values) for tensor in call.args)
    strides, padding, dilation = (
        shape_text(int(item) for item in items) for items in (attrs.strides, attrs.padding, attrs.dilation)
    )
    geometry = f"strides {strides} padding {padding} dilation {dilation} groups {int(attrs.groups)}"
    return f"conv2d {data} by {weight} {geometry}"


def winograd_conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    kind: str = "winograd",
    decisions: Decisions | None = None,
    **arguments: Any,
) -> te.Tensor:
    """Define a convolution by Winograd's algorithm with the annotations of the schedule rule `kind`.

    The `decisions` about the convolution choose the rows of its register tile; without them the cost model does.
    `arguments` go to `operators.winograd.conv2d`, which also describes the layout of `weight`: `channels`, `padding`,
    `machine`, and optionally `stride` and `rows`.
    """
    return winograd_stages.conv2d(
        data,
        weight,
        annotations=lambda rows, lanes, size: {
            KERNEL: kind,
            TILE: rows,
            LANES: lanes,
            WINOGRAD: size,
            SUBJECT: "" if decisions is None else decisions.subject,
        },
        decisions=decisions,
        **arguments,
    )


def winograd_size(
    data: relax.Expr,
    weight: relax.Expr,
    groups: int,
    geometry: dict[str, Any],
    machine: Machine,
    decisions: Decisions | None = None,
    group: int = 1,
) -> int | None:
    """Choose the size of Winograd's output tiles, in pixels along each side; None for a direct convolution.

    `weight` has the layout `[CO][CI/groups][KH][KW]`. `geometry` has the lists `strides`, `padding` (top, left, bottom,
    right) and `dilation`. The `decisions` about the convolution choose among the sizes that apply. Without decisions
    the cost model chooses. An unknown height or width counts as `typical_pixels`. `group` is the number of products
    that one instruction adds up in a lane: 1 for float32.
    """
    out_channels, channels, *kernel = (int(dim) for dim in weight.ty.shape.values)
    dims = data.ty.shape.values[1:3]
    height, width = map(typical_pixels, dims)
    stride, *others = geometry["strides"]
    if (kernel, others, geometry["dilation"], groups) != ([3, 3], [stride], [1, 1], 1):
        return None
    if not isinstance(weight, tvm.ir.GenericConst):
        return None
    top, left, bottom, right = geometry["padding"]
    high, wide = ((size + around - 3) // stride + 1 for size, around in ((height, top + bottom), (width, left + right)))
    # Where a size is unknown, a line of output tiles is filled up to whole register tiles, of which the last has half
    # the rows in float32 where these are enough (`schedules.tails`).
    least = winograd.UNKNOWN_ROWS // 2 if group == 1 else winograd.UNKNOWN_ROWS
    rows = 1 if all(static(dim) is not None for dim in dims) else least
    sizes = winograd.rank_sizes(high, wide, channels, out_channels, machine, stride, group, rows)
    if decisions is None:
        return sizes[0]
    options = {"direct" if size is None else f"winograd {size}": size for size in sizes}
    images = (static(data.ty.shape.values[0]) or 1) / machine.cores
    pixels_in = images * height * width
    pixels_out = images * high * wide
    moving = cost.images(4 * pixels_in * channels, 4 * pixels_out * out_channels, machine)
    cycles = {
        name: moving + images * winograd.cycles(size, high, wide, channels, out_channels, machine, stride, group, rows)
        for name, size in options.items()
    }
    return decisions.choose("algorithm", options, cycles=cycles)


def _edge(builder: relax.BlockBuilder, data: relax.Expr, decisions: Decisions) -> tuple[relax.Expr, list[int] | None]:
    """Find the tensor that a convolution reads, and the axes of the transpose that it absorbs (None: no transpose).

    The `decisions` choose whether the first convolution absorbs the transpose of the model's input.
    """
    value = builder.lookup_binding(data) if isinstance(data, relax.Var) else None
    function = value.args[0] if isinstance(value, relax.Call) and value.args else None
    if value is None or not isinstance(function, tvm.ir.GlobalVar):
        return data, None
    axes = (builder.get()[function].attrs or {}).get(AXES)
    if axes is None:
        return data, None
    untransposed = (value.args[1][0], [int(axis) for axis in axes])
    return decisions.choose("edge", {"transposed": (data, None), "as it comes": untransposed})


class _Transposed:
    """A view of a tensor with its dimensions in another order."""

    def __init__(self, tensor: te.Tensor, axes: Sequence[int]) -> None:
        self._tensor = tensor
        self._axes = axes
        self.shape = [tensor.shape[axis] for axis in axes]
        self.dtype = tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        return self._tensor[tuple(index[self._axes.index(place)] for place in range(len(self._axes)))]


def _pack(builder: relax.BlockBuilder, weight: relax.Expr, lanes: int) -> relax.Expr:
    channels, per_group, kernel_h, kernel_w = (int(dim) for dim in weight.ty.shape.values)
    vectors = -(-channels // lanes)
    if isinstance(weight, tvm.ir.GenericConst):
        return constant(pack_array(weight.value.numpy(), lanes))

    def pack(w: te.Tensor) -> te.Tensor:
        return te.compute(
            (vectors, kernel_h, kernel_w, per_group, lanes),
            lambda j, y, x, k, v: tirx.if_then_else(j * lanes + v < channels, w[j * lanes + v, k, y, x], 0.0),
            name="pack_weight",
        )

    return builder.emit_te(pack, weight)


def pack_array(weight: np.ndarray[Any, Any], lanes: int) -> np.ndarray[Any, Any]:
    """Pack weights `[CO][CI][KH][KW]` into float32 `[CO/v][KH][KW][CI][v]`, with zeros after the last channel."""
    channels, per_group, kernel_h, kernel_w = weight.shape
    vectors = -(-channels // lanes)
    value = np.zeros((vectors * lanes, per_group, kernel_h, kernel_w), "float32")
    value[:channels] = weight
    return value.reshape(vectors, lanes, per_group, kernel_h, kernel_w).transpose(0, 3, 4, 2, 1)


def conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    channels: int,
    groups: int,
    machine: Machine,
    decisions: Decisions,
    axes: Sequence[int] | None = None,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> te.Tensor:
    """Define a convolution of NHWC data with weights that `pack_array` packed.

    The output channels of a group must fill whole vectors. With `axes` the data has another layout, and its transpose
    by `axes` is NHWC; None means NHWC. `padding` is top, left, bottom, right. The `decisions` choose the rows of the
    register tile. The result is NHWC with `channels` channels.
    """
    if axes is not None:
        data = _Transposed(data, axes)
    batch, in_h, in_w, _ = data.shape
    vectors, kernel_h, kernel_w, depth, lanes = (int(dim) for dim in weight.shape)
    out_h = output_size(in_h, kernel_h, strides[0], padding[0], padding[2], dilation[0])
    out_w = output_size(in_w, kernel_w, strides[1], padding[1], padding[3], dilation[1])
    row_bytes = 4 * strides[1] * (static(data.shape[3]) or 1)
    tile = tiles.choose_rows(tiles.rank(static(out_w), vectors // groups, machine, row_bytes), decisions)
    tiled_w = round_up(out_w, tile)
    height = in_h + padding[0] + padding[2]
    required_width = (tiled_w - 1) * strides[1] + dilation[1] * (kernel_w - 1) + 1
    whole = divides(tile, out_w)
    width = in_w + padding[1] + padding[3] if whole else topi.utils.simplify(required_width)
    read = PaddedImage(
        data, padding, height, width, lines=out_h, taps=kernel_h, stride=strides[0], dilation=dilation[0]
    )
    y = te.reduce_axis((0, kernel_h), "y")
    x = te.reduce_axis((0, kernel_w), "x")
    k = te.reduce_axis((0, depth), "k")
    per_group = vectors // groups
    product = te.compute(
        (batch, out_h, tiled_w, vectors * lanes),
        lambda n, h, w, c: te.sum(
            read(
                n,
                h,
                y,
                w * strides[1] + x * dilation[1],
                k if groups == 1 else c // (per_group * lanes) * depth + k,
            )
            * weight[c // lanes, y, x, k, c % lanes],
            axis=[y, x, k],
        ),
        name="conv2d",
        attrs={
            KERNEL: "conv2d",
            TILE: tile,
            LANES: lanes,
            LEAD: 1,
            SHARED: 1,
            SUBJECT: decisions.subject,
            **skipped_padding(padding, strides, dilation),
        },
    )
    return te.compute((batch, out_h, out_w, channels), lambda n, h, w, c: product[n, h, w, c], name="unpack")


def pointwise_conv2d(
    data: te.Tensor, weight: te.Tensor, *, channels: int, machine: Machine, decisions: Decisions
) -> te.Tensor:
    """Define a 1x1 convolution of NHWC data: the pixels of an image are the rows of a matrix product.

    Where a size is symbolic, the pixels of a line are, because TVM cannot simplify divisions by symbolic sizes.
    It has strides of 1 and no padding. `weight` comes from `pack_array`; the `decisions` choose the product's register
    tile. The result is NHWC with `channels` channels.
    """
    *outer, depth = data.shape
    _, height, width = outer
    vectors, _, _, _, lanes = (int(dim) for dim in weight.shape)
    is_by_line = static(height * width) is None and (static(width) is None or int(width) >= FEWEST_ROWS)
    joined = JoinedRows(outer, [2] if is_by_line else [1, 2])
    product = rows_product(
        joined.batch,
        joined.rows,
        depth,
        lambda *index: data[joined.position(*index)],
        lambda *index: weight[index[-1] // lanes, 0, 0, index[-2], index[-1] % lanes],
        vectors * lanes,
        lanes,
        machine,
        decisions,
        shared=True,
    )
    return te.compute((*outer, channels), lambda *index: product[joined.row(*index)], name="unpack")
