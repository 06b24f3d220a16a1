"""Writes transposed, one- and three-dimensional and some grouped convolutions as ordinary ones of two dimensions."""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.operators.common import constant, static
from tvmflow.compiler.passes.rewrite import Rewriter, dtype, rewriting, sizes

# With more groups, the convolution of each group is too small.
_MOST_GROUPS = 8
# With more phases, the results of a convolution for each of them take longer to interleave than to compute.
_MOST_PHASES = 4


def in_two_dimensions() -> tvm.transform.Pass:
    """Return the pass that writes transposed 1D convolutions and all 3D convolutions as two-dimensional ones.

    It also exchanges height and width of images of one column: a register tile is a part of a line. Of images of one
    channel whose windows are as wide or as high as the image, it makes each column or line a channel.
    """
    return rewriting(
        "InTwoDimensions",
        {
            "nn.conv1d_transpose": (_transposed_1d,),
            "nn.conv2d": (_lay_column, _make_channels),
            "nn.conv3d": (_conv3d,),
            "nn.conv3d_transpose": (_transposed_3d,),
        },
    )


def _lay_column(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    attrs, weight, dims = call.attrs, rewriter.constant(call.args[1]), sizes(call.args[0])
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "OIHW", "NCHW") or weight is None:
        return None
    top, left, bottom, right = (int(size) for size in attrs.padding)
    if dims is None or static(dims[3]) != 1 or static(dims[2]) == 1 or weight.shape[3] != 1 or left or right:
        return None
    image = relax.op.nn.conv2d(
        rewriter.emit(relax.op.permute_dims(call.args[0], [0, 1, 3, 2])),
        constant(np.ascontiguousarray(weight.swapaxes(2, 3))),
        strides=list(attrs.strides)[::-1],
        padding=[0, top, 0, bottom],
        dilation=list(attrs.dilation)[::-1],
        groups=int(attrs.groups),
    )
    return relax.op.permute_dims(rewriter.emit(image), [0, 1, 3, 2])


def _make_channels(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Make the columns of an image the channels of one line, as a network for texts has windows over whole words.

    The result has one column. So a register tile would be one pixel, and one channel of the window is one number.
    """
    attrs, weight, dims = call.attrs, rewriter.constant(call.args[1]), sizes(call.args[0])
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "OIHW", "NCHW") or weight is None:
        return None
    if dims is None or static(dims[1]) != 1 or int(attrs.groups) != 1 or dtype(call) != "float32":
        return None
    pads = [int(size) for size in attrs.padding]
    for axis in (1, 0):
        size, other = weight.shape[2 + axis], 1 - axis
        if size == 1 or static(dims[2 + axis]) != size or pads[axis] or pads[2 + axis]:
            continue
        order = [0, 2 + axis, 1, 2 + other]
        image = relax.op.nn.conv2d(
            rewriter.emit(relax.op.permute_dims(call.args[0], order)),
            constant(np.ascontiguousarray(weight.transpose(order))),
            strides=[1, int(attrs.strides[other])],
            padding=[0, pads[other], 0, pads[2 + other]],
            dilation=[1, int(attrs.dilation[other])],
        )
        return relax.op.permute_dims(rewriter.emit(image), [0, 1, 3, 2]) if axis == 1 else image
    return None


def split_transposed(lanes: int) -> tvm.transform.Pass:
    """Return the pass that replaces a transposed convolution by one ordinary convolution for each phase of its stride.

    A phase is all outputs whose positions leave the same remainder when divided by the stride. They use the same taps
    of the kernel, so an ordinary convolution with these taps, in reverse order, computes the phase. The results of all
    phases are then interleaved. If all phases read the same inputs, as with a kernel of the stride's size, a single
    convolution computes them all; in groups it does where the phases of a group fill vectors of `lanes` channels. Many
    phases that do so but for the padding are computed without it, and the result is cut. Only convolutions of float32
    or int32 in NCHW with constant weights are replaced.
    """
    return rewriting("SplitTransposed", {"nn.conv2d_transpose": (partial(_split_transposed, lanes=lanes),)})


def _transposed_1d(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    attrs, weight = call.attrs, rewriter.constant(call.args[1])
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCW", "IOW", "NCW") or weight is None:
        return None
    before, after = (int(size) for size in attrs.padding)
    image = relax.op.nn.conv2d_transpose(
        rewriter.emit(relax.op.expand_dims(call.args[0], 2)),
        constant(weight[:, :, None]),
        strides=[1, int(attrs.strides[0])],
        padding=[0, before, 0, after],
        output_padding=[0, int(attrs.output_padding[0])],
        dilation=[1, int(attrs.dilation[0])],
        groups=int(attrs.groups),
    )
    return relax.op.squeeze(rewriter.emit(image), [2])


def split_groups(lanes: int) -> tvm.transform.Pass:
    """Return the pass that replaces a grouped convolution by one ordinary convolution for each group.

    It changes float32 convolutions in NCHW with constant weights and two to eight groups. The output channels of a
    group must be at least `lanes`, the number of channels in a vector register, and not a multiple of it.
    """
    return rewriting("SplitGroups", {"nn.conv2d": (partial(_split_groups, lanes=lanes),)})


def _split_groups(rewriter: Rewriter, call: relax.Call, lanes: int) -> relax.Expr | None:
    attrs, weight = call.attrs, rewriter.constant(call.args[1])
    groups = int(attrs.groups)
    if weight is None or not 1 < groups <= _MOST_GROUPS or attrs.data_layout != "NCHW" or dtype(call) != "float32":
        return None
    (outputs, inputs), shared = weight.shape[:2], {"strides": attrs.strides, "padding": attrs.padding}
    if outputs // groups < lanes or outputs // groups % lanes == 0:
        return None
    parts = []
    for group, kernel in enumerate(np.split(weight, groups)):
        data = relax.op.strided_slice(call.args[0], [1], [group * inputs], [(group + 1) * inputs])
        part = relax.op.nn.conv2d(rewriter.emit(data), constant(kernel), dilation=attrs.dilation, **shared)
        parts.append(rewriter.emit(part))
    return relax.op.concat(parts, 1)


def _split_transposed(rewriter: Rewriter, call: relax.Call, lanes: int) -> relax.Expr | None:
    attrs, weight = call.attrs, rewriter.constant(call.args[1])
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "IOHW", "NCHW"):
        return None
    data, dims = call.args[0], sizes(call.args[0])
    kind = dtype(data)
    if weight is None or dims is None or kind not in ("float32", "int32") or str(weight.dtype) != kind:
        return None
    groups = int(attrs.groups)
    strides = [int(item) for item in attrs.strides]
    padding = [int(item) for item in attrs.padding]
    own = weight.shape[1]
    fills_vectors = groups == 1 or own * strides[0] * strides[1] % lanes == 0
    if any(padding) and fills_vectors and strides[0] * strides[1] > _MOST_PHASES and _is_cut(weight, attrs):
        free = {"strides": strides, "dilation": attrs.dilation, "groups": groups}
        whole = rewriter.emit(relax.op.nn.conv2d_transpose(data, call.args[1], **free))
        end = [before + size for before, size in zip(padding, call.ty.shape.values[2:], strict=False)]
        return relax.op.strided_slice(whole, [2, 3], padding[:2], end, assume_inbound=True)
    phases = [
        _phases(weight.shape[2 + axis], strides[axis], int(attrs.dilation[axis]), padding[axis]) for axis in (0, 1)
    ]
    # How many elements more than the input each phase's result has: enough for the longest.
    extra = [
        -(
            -_overhang(weight.shape[2 + axis], strides[axis], int(attrs.dilation[axis]), padding[axis::2], int(more))
            // strides[axis]
        )
        for axis, more in enumerate(attrs.output_padding)
    ]
    image = list(call.ty.shape.values[2:])
    analyzer = tvm.sym.Analyzer()
    whole_size = all(
        analyzer.can_prove_equal((dims[2 + axis] + extra[axis]) * strides[axis], image[axis]) for axis in (0, 1)
    )
    kernel = ordinary_kernel(weight, groups)
    channels = kernel.shape[0]
    alike = fills_vectors and all(len({(len(taps), first) for taps, first, _ in axis}) == 1 for axis in phases)
    alike = alike and all(taps for axis in phases for taps, _, _ in axis)
    pieces, kernels = [], []
    for rows, first_row, step_row in phases[0]:
        for columns, first_column, step_column in phases[1]:
            if rows and columns:
                kernels.append(kernel[:, :, rows][:, :, :, columns])
                pieces.append(((first_row, first_column), (step_row, step_column)))
            else:  # Outputs that no input reaches.
                kernels.append(np.zeros((*kernel.shape[:2], 1, 1), kind))
                pieces.append(((0, 0), (1, 1)))
    if alike:
        # The phases of a group are side by side.
        by_group = [part.reshape(groups, own, *part.shape[1:]) for part in kernels]
        joined = np.concatenate(by_group, axis=1)
        pieces, kernels = pieces[:1], [joined.reshape(-1, *joined.shape[2:])]
    results = []
    for (starts, steps), part in zip(pieces, kernels, strict=True):
        pads = [-start for start in starts] + [
            extra[axis] + (part.shape[2 + axis] - 1) * steps[axis] + starts[axis] for axis in (0, 1)
        ]
        results.append(_convolve(rewriter, data, part, pads, steps, groups))
    whole = results[0] if len(results) == 1 else rewriter.emit(relax.op.concat(results, 1))
    batch = dims[0]
    # TVM compares sizes of functions that it fuses by their form, so each has the form that TVM gives it.
    high, wide = (analyzer.simplify(dims[2 + axis] + extra[axis]) for axis in (0, 1))
    if strides != [1, 1]:
        if alike and groups > 1:
            parts = rewriter.emit(relax.op.reshape(whole, [batch, groups, *strides, own, high, wide]))
            apart = rewriter.emit(relax.op.permute_dims(parts, [0, 1, 4, 5, 2, 6, 3]))
        else:
            parts = rewriter.emit(relax.op.reshape(whole, [batch, *strides, channels, high, wide]))
            apart = rewriter.emit(relax.op.permute_dims(parts, [0, 3, 4, 1, 5, 2]))
        high, wide = image if whole_size else (high * strides[0], wide * strides[1])
        whole = rewriter.emit(relax.op.reshape(apart, [batch, channels, high, wide]))
    if whole_size:
        return whole
    return relax.op.strided_slice(whole, [2, 3], [0, 0], image, assume_inbound=True)


def _is_cut(weight: Array, attrs: Any) -> bool:
    """Whether a transposed convolution is a part of one without padding, whose phases all read the same inputs."""
    return all(
        weight.shape[2 + axis] % int(attrs.strides[axis]) == 0
        and int(attrs.dilation[axis]) == 1
        and int(attrs.output_padding[axis]) <= int(attrs.padding[2 + axis])
        for axis in (0, 1)
    )


def _overhang(kernel: int, stride: int, dilation: int, padding: Sequence[int], more: int) -> int:
    """The size of a transposed convolution's result less the stride times the size of its input."""
    return dilation * (kernel - 1) + 1 - stride - sum(padding) + more


def _phases(kernel: int, stride: int, dilation: int, before: int) -> list[tuple[list[int], int, int]]:
    """For each offset of an output: its taps in the order of the inputs, the first input, and the step between inputs.

    Output q * stride + r reads input q + (r + before - tap * dilation) / stride where that is whole.
    """
    phases = []
    for offset in range(stride):
        taps = [tap for tap in range(kernel) if (offset + before - tap * dilation) % stride == 0][::-1]
        places = [(offset + before - tap * dilation) // stride for tap in taps]
        step = places[1] - places[0] if len(places) > 1 else 1
        phases.append((taps, places[0] if places else 0, step))
    return phases


def ordinary_kernel(weight: Array, groups: int) -> Array:
    """Return a transposed convolution's weights `[CI][CO/g][KH][KW]` as `[CO][CI/g][KH][KW]` of an ordinary one."""
    inputs, outputs, *kernel = weight.shape
    parts = weight.reshape(groups, inputs // groups, outputs, *kernel)
    return parts.swapaxes(1, 2).reshape(groups * outputs, inputs // groups, *kernel)


def _convolve(
    rewriter: Rewriter, data: relax.Expr, kernel: Array, pads: Sequence[int], steps: Sequence[int], groups: int
) -> relax.Expr:
    """Emit a convolution whose padding may be negative."""
    if min(pads) < 0:
        # Padding comes first: where no input reaches an output, the data may be smaller than what is cut off.
        top, left, bottom, right = (max(0, pad) for pad in pads)
        if max(pads) > 0:
            data = rewriter.emit(relax.op.nn.pad(data, [0, 0, 0, 0, top, bottom, left, right]))
        dims = sizes(data) or []
        begin = [max(0, -pads[axis]) for axis in (0, 1)]
        end = [dims[2 + axis] - max(0, -pads[2 + axis]) for axis in (0, 1)]
        data = rewriter.emit(relax.op.strided_slice(data, [2, 3], begin, end, assume_inbound=True))
        pads = [0] * 4
    return rewriter.emit(
        relax.op.nn.conv2d(data, constant(kernel), padding=list(pads), dilation=list(steps), groups=groups)
    )


def _slice_between(data: relax.Expr, begin: int, end: Any, step: int) -> relax.Expr:
    """Every `step`-th slice of volumes from `begin` to before `end`, which are within the data."""
    return relax.op.strided_slice(data, [2], [begin], [end], [step], assume_inbound=True)


def _volumes(rewriter: Rewriter, call: relax.Call, kernel: str) -> tuple[Array, list[Any], list[Any]] | None:
    """The weights of a convolution of float32 volumes, and the dimensions of its data and of its result.

    None for one of unknown shape, and for weights that are not constant or of another layout than `kernel`.
    """
    attrs, weight = call.attrs, rewriter.constant(call.args[1])
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCDHW", kernel, "NCDHW"):
        return None
    dims, out = sizes(call.args[0]), sizes(call)
    if weight is None or dims is None or out is None or dtype(call.args[0]) != "float32":
        return None
    return weight, dims, out


def _conv3d(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write a 3D convolution as a 2D one: the input slices that an output slice reads are an image's channels.

    In groups it is a sum of 2D ones, one for each of these slices. One whose windows have one line and one column has
    slices as lines of an image.
    """
    volumes = _volumes(rewriter, call, "OIDHW")
    if volumes is None:
        return None
    attrs, data, (weight, dims, out) = call.attrs, call.args[0], volumes
    outputs, inputs, taps, *kernel = weight.shape
    (deep, *strides), (step, *dilation) = ([int(item) for item in values] for values in (attrs.strides, attrs.dilation))
    front, top, left, back, bottom, right = (int(item) for item in attrs.padding)
    groups = int(attrs.groups)
    if groups > 1 and (kernel, strides, [top, left, bottom, right]) == ([1, 1], [1, 1], [0] * 4):
        lines = rewriter.emit(relax.op.reshape(data, [*dims[:3], dims[3] * dims[4]]))
        image = relax.op.nn.conv2d(
            lines, constant(weight.reshape(outputs, inputs, taps, 1)), strides=[deep, 1], padding=[front, 0, back, 0],
            dilation=[step, 1], groups=groups,
        )  # fmt: skip
        return relax.op.reshape(rewriter.emit(image), out)
    if front or back:
        data = rewriter.emit(relax.op.nn.pad(data, [0, 0, 0, 0, front, back, 0, 0, 0, 0]))
    count, parts = out[2], [data]
    if taps > 1 or deep > 1:
        parts = [
            rewriter.emit(_slice_between(data, tap * step, tap * step + (count - 1) * deep + 1, deep))
            for tap in range(taps)
        ]

    def convolution(slices: relax.Expr, flat: Array) -> relax.Expr:
        slices_first = rewriter.emit(relax.op.permute_dims(slices, [0, 2, 1, 3, 4]))
        images = rewriter.emit(relax.op.reshape(slices_first, [dims[0] * count, flat.shape[1] * groups, *dims[3:]]))
        result = relax.op.nn.conv2d(
            images, constant(flat), strides=strides, padding=[top, left, bottom, right], dilation=dilation,
            groups=groups,
        )  # fmt: skip
        return rewriter.emit(result)

    if groups > 1:
        sums = [convolution(part, weight[:, :, tap]) for tap, part in enumerate(parts)]
        result = reduce(lambda one, other: rewriter.emit(relax.op.add(one, other)), sums)
    else:
        slices = rewriter.emit(relax.op.concat(parts, 1)) if taps > 1 else parts[0]
        result = convolution(slices, weight.swapaxes(1, 2).reshape(outputs, taps * inputs, *kernel))
    apart = rewriter.emit(relax.op.reshape(result, [dims[0], count, outputs, *out[3:]]))
    return relax.op.permute_dims(apart, [0, 2, 1, 3, 4])


def _transposed_3d(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Write a transposed 3D convolution as transposed 2D ones, one for each phase of the slices, or one for all.

    The input slices that an output slice reads are an image's channels. Output slices whose positions leave the same
    remainder when divided by the stride use the same taps.
    """
    volumes = _volumes(rewriter, call, "IODHW")
    if volumes is None or int(call.attrs.groups) > 1:
        return None
    attrs, data, (weight, dims, out) = call.attrs, call.args[0], volumes
    outputs, taps = weight.shape[1:3]
    (deep, *strides), (step, *dilation) = ([int(item) for item in values] for values in (attrs.strides, attrs.dilation))
    (more, *others), (front, top, left, back, bottom, right) = (
        [int(item) for item in values] for values in (attrs.output_padding, attrs.padding)
    )
    extra = -(-_overhang(taps, deep, step, (front, back), more) // deep)
    analyzer = tvm.sym.Analyzer()
    count = analyzer.simplify(dims[2] + extra)
    whole_depth = analyzer.can_prove_equal(count * deep, out[2])
    if not whole_depth and static(dims[2]) is None:
        return None  # TVM knows no shape for a slice of a symbolic size.
    phases = [(taps, first, step) if taps else ([], 0, 1) for taps, first, step in _phases(taps, deep, step, front)]
    alike = len({(len(taps), first, step) for taps, first, step in phases}) == 1
    starts = [first + step * place for taps, first, step in phases for place in range(max(1, len(taps)))]
    before, after = max(0, -min(starts)), max(0, max(starts) + extra)
    if before or after:
        data = rewriter.emit(relax.op.nn.pad(data, [0, 0, 0, 0, before, after, 0, 0, 0, 0]))

    def transposed(begins: Sequence[int], kernels: Sequence[Array]) -> relax.Expr:
        """The images whose channels are the slices from each of `begins` on; one kernel for each of them."""
        parts = [
            rewriter.emit(_slice_between(data, before + begin, before + begin + count, 1))
            if before or after or begin or extra
            else data
            for begin in begins
        ]
        slices = rewriter.emit(relax.op.concat(parts, 1)) if len(parts) > 1 else parts[0]
        slices_first = rewriter.emit(relax.op.permute_dims(slices, [0, 2, 1, 3, 4]))
        channels = len(begins) * weight.shape[0]
        images = rewriter.emit(relax.op.reshape(slices_first, [dims[0] * count, channels, *dims[3:]]))
        result = relax.op.nn.conv2d_transpose(
            images, constant(np.concatenate(kernels)), strides=strides, padding=[top, left, bottom, right],
            output_padding=others, dilation=dilation,
        )  # fmt: skip
        return rewriter.emit(result)

    # For each phase the kernels of its taps, [inputs, outputs, height, width]; zeros where no input reaches an output.
    kernels = [[weight[:, :, tap] for tap in taps] or [np.zeros_like(weight[:, :, 0])] for taps, _, _ in phases]
    begins = [[first + step * place for place in range(max(1, len(taps)))] for taps, first, step in phases]
    if alike:
        joined = [np.concatenate([item[place] for item in kernels], axis=1) for place in range(len(kernels[0]))]
        whole = transposed(begins[0], joined)
    else:
        results = [transposed(*item) for item in zip(begins, kernels, strict=True)]
        whole = rewriter.emit(relax.op.concat(results, 1))
    parts = rewriter.emit(relax.op.reshape(whole, [dims[0], count, deep, outputs, *out[3:]]))
    apart = rewriter.emit(relax.op.permute_dims(parts, [0, 3, 1, 2, 4, 5]))
    depth = out[2] if whole_depth else count * deep
    volume = relax.op.reshape(apart, [dims[0], outputs, depth, *out[3:]])
    return volume if whole_depth else relax.op.strided_slice(rewriter.emit(volume), [2], [0], [out[2]])
