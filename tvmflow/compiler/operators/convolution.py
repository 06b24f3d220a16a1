"""Convolution of NHWC activations with packed weights: direct, as a matrix product, or by Winograd's algorithm."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, te, topi

from tvmflow.compiler import cost, tiles, winograd
from tvmflow.compiler.annotations import AXES, DOT, KERNEL, LANES, LEAD, SHARED, SUBJECT, TILE, WINOGRAD
from tvmflow.compiler.choices import Choices, Decisions, shape_text
from tvmflow.compiler.dotproduct import PAIRS, Dot
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import depthwise, products
from tvmflow.compiler.operators import winograd as winograd_stages
from tvmflow.compiler.operators.common import (
    FOLLOWS,
    call_kernel,
    called_operator,
    is_float32,
    static,
    typical_pixels,
    vector,
)
from tvmflow.compiler.operators.geometry import Geometry, is_channels_last, is_depthwise
from tvmflow.compiler.operators.packing import (
    ConvolutionPacking,
    DepthwisePacking,
    GroupsPacking,
    WinogradPacking,
    pack_weights,
)
from tvmflow.compiler.operators.padding import PaddedImage, skipped_padding
from tvmflow.compiler.operators.products import filled_vectors, rows_product

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
    groups, channels, geometry = int(attrs.groups), static(data.ty.shape.values[3]), Geometry.of(call)
    out_channels, depth, *_ = (int(dim) for dim in weight.ty.shape.values)
    subject = subject_of(call)
    decisions = choices.about(subject)
    is_constant = isinstance(weight, tvm.ir.GenericConst)
    narrow: tuple[str, DepthwisePacking | GroupsPacking] | None = None
    if channels is not None and is_depthwise(call):
        narrow = "depthwise_conv2d", DepthwisePacking(vector(channels, machine))
    elif is_constant and depthwise.is_narrow(out_channels, depth, groups, machine):
        narrow = "grouped_conv2d", GroupsPacking(machine.lanes)
    if narrow is not None:
        name, packing = narrow
        compute = partial(depthwise.depthwise, geometry=geometry, machine=machine, subject=subject)
        return call_kernel(builder, compute, data, pack_weights(builder, weight, packing), name=name)
    size = winograd_size(data, weight, groups, geometry, machine, decisions) if fast else None
    if size is not None:
        lanes = winograd.lanes_of(out_channels, groups, machine)
        packed_weight = pack_weights(builder, weight, WinogradPacking(size, lanes, geometry.strides[0], groups))
        compute = partial(
            winograd_conv2d, channels=out_channels, geometry=geometry, machine=machine, decisions=decisions
        )
        return call_kernel(builder, compute, data, packed_weight, name="winograd_conv2d")
    per_group = out_channels // groups
    lanes = vector(per_group, machine)
    if groups > 1:
        # A vector of output channels must read one group's input channels only.
        lanes = math.gcd(per_group, machine.lanes)
    # The vectors of each group are full.
    vectors = _count_vectors(call, geometry, lanes, machine) if groups == 1 else out_channels // lanes
    packed_weight = pack_weights(builder, weight, ConvolutionPacking(lanes, vectors))
    if groups == 1 and geometry.is_pointwise:
        compute = partial(pointwise_conv2d, channels=out_channels, machine=machine, decisions=decisions)
    else:
        data, axes = _edge(builder, data, decisions)
        compute = partial(
            conv2d,
            channels=out_channels,
            groups=groups,
            geometry=geometry,
            machine=machine,
            decisions=decisions,
            axes=axes,
        )
    return call_kernel(builder, compute, data, packed_weight, name="conv2d", attrs={SUBJECT: subject})


def _is_ours(call: relax.Call) -> bool:
    """Whether a call convolves float32 NHWC data with kernels of known size."""
    data, weight = call.args
    return (
        is_channels_last(call)
        and is_float32(data, weight)
        and all(static(dim) is not None for dim in weight.ty.shape.values)
    )


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
    if called_operator(call) != "relax.call_tir" or steps == 0:
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


def decisions_of_tiles(call: relax.Call, choices: Choices) -> Decisions:
    """Return the decisions about a convolution by AMX's tiles, which are others than those in float32."""
    return choices.about(f"tiles of {subject_of(call)}")


def winograd_conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    dot: Dot | None = None,
    decisions: Decisions | None = None,
    **arguments: Any,
) -> te.Tensor:
    """Define a convolution by Winograd's algorithm, whose products the instruction `dot` computes; None for float32.

    The `decisions` about the convolution choose the rows of its register tile; without them the cost model does.
    `arguments` go to `operators.winograd.conv2d`, which also describes the layout of `weight`: `channels`, `geometry`
    and `machine`.
    """
    kind: dict[str, Any] = {KERNEL: "winograd"} if dot is None else {KERNEL: "dot_winograd", DOT: dot.name}
    return winograd_stages.conv2d(
        data,
        weight,
        annotations=lambda rows, lanes, size: {
            **kind,
            TILE: rows,
            LANES: lanes,
            WINOGRAD: size,
            SUBJECT: "" if decisions is None else decisions.subject,
        },
        dot=dot,
        decisions=decisions,
        **arguments,
    )


def winograd_size(
    data: relax.Expr,
    weight: relax.Expr,
    groups: int,
    geometry: Geometry,
    machine: Machine,
    decisions: Decisions | None = None,
    dot: Dot | None = None,
    allowed: Sequence[int] | None = None,
) -> int | None:
    """Choose the size of Winograd's output tiles, in pixels along each side; None for a direct convolution.

    `weight` has the layout `[CO][CI/groups][KH][KW]`. The `decisions` about the convolution choose among the sizes that
    apply. Without decisions the cost model chooses. An unknown height or width counts as `typical_pixels`. `dot` is
    the dot-product instruction of the direct convolution; None in float32. With it, convolutions in several groups are
    direct where they multiply integers, or where a size is unknown: all groups would go through each stage together. No
    size but those `allowed` is chosen.
    """
    out_channels, depth, *_ = (int(dim) for dim in weight.ty.shape.values)
    channels = depth * groups
    dims = data.ty.shape.values[1:3]
    height, width = map(typical_pixels, dims)
    stride, across = geometry.strides
    if (geometry.kernel, across, geometry.dilation) != ((3, 3), stride, (1, 1)):
        return None
    is_known = all(static(dim) is not None for dim in dims)
    if not isinstance(weight, tvm.ir.GenericConst):
        return None
    if groups > 1 and dot is not None and (dot is PAIRS or not is_known):
        return None
    high, wide = geometry.result_size(height, width)
    # Where a size is unknown, a line of output tiles is filled up to whole register tiles, of which the last has half
    # the rows in float32 where these are enough (`schedules.tails`).
    least = winograd.UNKNOWN_ROWS // 2 if dot is None else winograd.UNKNOWN_ROWS
    rows = 1 if is_known else least
    shape = winograd.Shape(high, wide, channels, out_channels, stride, dot, rows, groups)
    ranked = winograd.rank_sizes(shape, machine)
    sizes = [size for size in ranked if size is None or allowed is None or size in allowed]
    if decisions is None:
        return sizes[0]
    options = {"direct" if size is None else f"winograd {size}": size for size in sizes}
    images = (static(data.ty.shape.values[0]) or 1) / machine.cores
    pixels_in = images * height * width
    pixels_out = images * high * wide
    moving = cost.result_and_input_cycles(4 * pixels_out * out_channels, 4 * pixels_in * channels, machine)
    cycles = {name: moving + images * winograd.cycles(size, shape, machine) for name, size in options.items()}
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


def _count_vectors(call: relax.Call, geometry: Geometry, lanes: int, machine: Machine) -> int:
    """Return the number of vectors to which the weights of a convolution without groups are packed."""
    batch, height, width, channels = call.ty.shape.values
    rows = static(batch * height * width if geometry.is_pointwise else width)
    return filled_vectors(int(channels), lanes, rows, machine, math.prod(geometry.kernel))


def conv2d(
    data: te.Tensor,
    weight: te.Tensor,
    *,
    channels: int,
    groups: int,
    geometry: Geometry,
    machine: Machine,
    decisions: Decisions,
    axes: Sequence[int] | None = None,
) -> te.Tensor:
    """Define a convolution of NHWC data with weights in the layout of `ConvolutionPacking`.

    The output channels of a group must fill whole vectors. With `axes` the data has another layout, and its transpose
    by `axes` is NHWC; None means NHWC. The `decisions` choose the rows of the register tile. The result is NHWC with
    `channels` channels.
    """
    if axes is not None:
        data = _Transposed(data, axes)
    batch, in_h, in_w, in_c = data.shape
    vectors, kernel_h, kernel_w, depth, lanes = (int(dim) for dim in weight.shape)
    per_group = vectors // groups
    out_h, out_w = geometry.result_size(in_h, in_w)
    row_bytes = 4 * geometry.strides[1] * (static(in_c) or 1)
    ranked = tiles.rank(static(out_w), per_group, machine, row_bytes, uses=kernel_h * kernel_w)
    tile = tiles.choose_rows(ranked, decisions)
    read = PaddedImage(data, geometry, (out_h, out_w), tile)
    y, x, k = (te.reduce_axis((0, size), name) for size, name in ((kernel_h, "y"), (kernel_w, "x"), (depth, "k")))

    def term(n: Any, h: Any, w: Any, c: Any) -> Any:
        channel = k if groups == 1 else c // (per_group * lanes) * depth + k
        value = read(n, h, w, y, x, channel) * weight[c // lanes, y, x, k, c % lanes]
        return te.sum(value, axis=[y, x, k])

    product = te.compute(
        (batch, out_h, read.tiled_width, vectors * lanes),
        term,
        name="conv2d",
        attrs={
            KERNEL: "conv2d",
            TILE: tile,
            LANES: lanes,
            LEAD: 1,
            SHARED: 1,
            SUBJECT: decisions.subject,
            **skipped_padding(geometry),
        },
    )
    return te.compute((batch, out_h, out_w, channels), lambda n, h, w, c: product[n, h, w, c], name="unpack")


def pointwise_conv2d(
    data: te.Tensor, weight: te.Tensor, *, channels: int, machine: Machine, decisions: Decisions
) -> te.Tensor:
    """Define a 1x1 convolution of NHWC data: the pixels of an image are the rows of a matrix product.

    Where a size is symbolic, the pixels of a line are (`products.rows_of_pixels`).
    It has strides of 1 and no padding. `weight` has the layout of `ConvolutionPacking`; the `decisions` choose the
    product's register tile. The result is NHWC with `channels` channels.
    """
    *outer, _ = data.shape
    vectors, _, _, _, lanes = (int(dim) for dim in weight.shape)
    joined = products.rows_of_pixels(outer)

    def right(*index: Any) -> Any:
        return weight[index[-1] // lanes, 0, 0, index[-2], index[-1] % lanes]

    product = joined.product(data, right, vectors * lanes, lanes)
    return joined.unpack(rows_product(product, machine, decisions), channels)
