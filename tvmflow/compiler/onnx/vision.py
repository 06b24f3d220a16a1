"""Operators of image models: the padding of convolutions and pooling, transposed convolutions, and regions."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tvmflow.compiler.onnx.node import Converter, FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.padding import pad_axis
from tvmflow.compiler.onnx.pooling import convert_max_pool_with_places
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of

# The opset in which the regions of RoiAlign got their offset.
_HALF_PIXELS = 16

# The most elements that cover a pixel of Col2Im and are written as a sum: TVM takes minutes for longer ones, or fails.
_MOST_TERMS = 4

# The most samples along each side of a bin of RoiAlign that chooses their number by the region.
_MOST_SAMPLES = 1 << 15


def convert_grid_sample(node: Node) -> relax.Expr | None:
    """Make two equal lines of each dimension of one element where points are reflected between aligned corners.

    TVM would divide by the distance of the corners, which is zero, and the samples are the same. Returns None, which
    leaves the node with these data to TVM's converter.
    """
    dims = dims_of(node.inputs[0])
    if node.attrs.get("align_corners", 0) and node.text("padding_mode", "zeros") == "reflection" and dims is not None:
        for axis in range(2, len(dims)):
            if dims[axis] == 1:
                node.inputs[0] = node.emit(relax.op.repeat(node.inputs[0], 2, axis))
    return None


def convert_padding(operator: str) -> Converter:
    """Return a converter of `operator` (Conv, AveragePool, LpPool or MaxPool) that works out the padding.

    It replaces `auto_pad` and `ceil_mode` by explicit padding where TVM's converter would refuse them or pad wrongly,
    and returns None, which leaves the node to TVM's converter. It returns an expression for a MaxPool with two results,
    and for an AveragePool of symbolic size that has `auto_pad` and must not count the padding. It raises FreeSizeError
    for convolution weights of symbolic size and for `auto_pad` of data of unknown shape.
    """

    def convert(node: Node) -> relax.Expr | None:
        if operator == "MaxPool" and node.outputs > 1:
            return convert_max_pool_with_places(node)
        data, dims, auto_pad = node.inputs[0], dims_of(node.inputs[0]), node.text("auto_pad", "NOTSET")
        if operator == "Conv":
            _check_weights(node, outputs_axis=0)
            _let_channels_agree(node, inputs_axis=1)
        if not auto_pad.startswith("SAME"):
            is_free = dims is None or not all(isinstance(size, int) for size in dims[2:])
            pools = operator != "Conv"
            if (operator == "LpPool" or is_free or (pools and any(_count_missing(node)))) and node.attrs.pop(
                "ceil_mode", 0
            ):
                _pad(node, pads_for_last_windows(node), counts_end=False)
            if pools:
                _let_one_window_fit(node)
            return None
        kernel = node.attrs.get("kernel_shape") or dims_of(node.inputs[1])[2:]  # type: ignore[index]
        strides, dilations = (node.attrs.get(name, [1] * len(kernel)) for name in ("strides", "dilations"))
        extents = [(taps - 1) * dilation + 1 for taps, dilation in zip(kernel, dilations, strict=True)]
        if dims is not None and all(isinstance(size, int) for size in dims[2:]):
            # TVM's converter cuts data where the stride exceeds the window.
            counts = [-(-size // stride) for size, stride in zip(dims[2:], strides, strict=True)]
            ends = [
                (count - 1) * stride + extent for count, stride, extent in zip(counts, strides, extents, strict=True)
            ]
            _pad_evenly(node, [max(end - size, 0) for end, size in zip(ends, dims[2:], strict=True)])
            return None
        befores = [
            _befores(extent, stride, auto_pad == "SAME_UPPER") for extent, stride in zip(extents, strides, strict=True)
        ]
        if all(len(before) == 1 for before in befores):
            # As much for data of any size. TVM's converter pads by a function, which no pass folds into the windows.
            _set_padding(node, [extent - 1 for extent in extents], [min(before) for before in befores])
            return None
        if dims is None:
            raise FreeSizeError(f"auto_pad {auto_pad} of an input of unknown shape")
        axes = [
            _same_padding(node, size, extent, stride, auto_pad == "SAME_UPPER")
            for size, stride, extent in zip(dims[2:], strides, extents, strict=True)
        ]
        node.inputs[0] = padded = _pad_to_windows(node, data, axes, -np.inf if operator == "MaxPool" else 0.0)
        node.attrs["auto_pad"] = b"NOTSET"
        if operator != "AveragePool" or node.attrs.get("count_include_pad", 0):
            return None
        attributes = {name: value for name, value in node.attrs.items() if name not in ("tvm_custom", "auto_pad")}
        means = node.apply(operator, padded, **attributes)
        if set(dilations) != {1}:
            # Of each window only the elements within the data count.
            ones = node.emit(relax.op.ones(relax.ShapeExpr([1, 1, *dims[2:]]), dtype_of(data)))
            return relax.op.divide(means, node.apply(operator, _pad_to_windows(node, ones, axes, 0.0), **attributes))
        # Dilated windows aside, the elements of the data in a window lie side by side.
        shares = partial(_inverse_shares, windows=list(zip(kernel, strides, strict=True)))
        pixels = (dims_of(means) or [])[2:]
        # Sizes that a function gets are expressions.
        sizes = [[tirx.convert(item) for item in part] for part in (pixels, dims[2:], [axis.before for axis in axes])]
        factors = node.emit(node.builder.call_te(shares, *sizes, primfunc_name_hint="shares"))
        factors = factors if dtype_of(data) == "float32" else node.emit(relax.op.astype(factors, dtype_of(data)))
        return relax.op.multiply(means, factors)

    return convert


def _check_weights(node: Node, outputs_axis: int) -> None:
    """Refuse weights of a window of symbolic size, and symbolic weights in groups; let the bias be of fixed size.

    The number of outputs of a group is along `outputs_axis` of the weights.
    """
    dims, bias, groups = dims_of(node.inputs[1]), node.input(2), int(node.attrs.get("group", 1))
    fixed = (dims or [])[0 if groups > 1 else 2 :]
    if dims is None or not all(isinstance(size, int) for size in fixed):
        raise FreeSizeError("weights of symbolic size")
    count = node.evaluator.multiply(dims[outputs_axis], groups if outputs_axis else 1)
    if bias is not None:
        node.inputs[2] = node.with_sizes(bias, [count])


def _let_channels_agree(node: Node, inputs_axis: int) -> None:
    """Give the data of a convolution as many channels as its weights take; the model checks that when it runs.

    The number of channels that a group takes, or all groups of a transposed convolution, is along `inputs_axis` of the
    weights. Data of unknown shape is left alone.
    """
    data, weight = (dims_of(expr) for expr in node.inputs[:2])
    if data is None or weight is None:
        return
    count = node.evaluator.multiply(weight[inputs_axis], int(node.attrs.get("group", 1)) if inputs_axis else 1)
    if isinstance(count, int):
        node.inputs[0] = node.with_sizes(node.inputs[0], [data[0], count, *data[2:]])
    else:
        node.inputs[1] = node.with_sizes(node.inputs[1], [*weight[:inputs_axis], data[1], *weight[inputs_axis + 1 :]])


def pads_for_last_windows(node: Node) -> list[int]:
    """Return the padding of a pooling with which all windows of ceil_mode fit, of which none begins beyond the data.

    TVM's converter multiplies the means of LpPool by a whole window, and does not build windows of data of free size.
    """
    rank = len(node.attrs["kernel_shape"])
    strides, dilations = (node.attrs.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads = list(node.attrs.get("pads", [0] * 2 * rank))
    for axis, taps in enumerate(node.attrs["kernel_shape"]):
        pads[rank + axis] = min((taps - 1) * dilations[axis], pads[rank + axis] + strides[axis] - 1)
    return pads


def _pad_evenly(node: Node, totals: Sequence[int]) -> None:
    """Set the padding of a node that has `auto_pad`: `totals` elements along each dimension, half of them before it."""
    rest = int(node.text("auto_pad", "NOTSET") != "SAME_UPPER")
    _set_padding(node, totals, [(total + rest) // 2 for total in totals])


def _set_padding(node: Node, totals: Sequence[int], before: Sequence[int]) -> None:
    """Set the padding of a node that has `auto_pad`: of the `totals`, so many elements `before` each dimension."""
    node.attrs["pads"] = [*before, *(total - first for total, first in zip(totals, before, strict=True))]
    node.attrs["auto_pad"] = b"NOTSET"


def _befores(extent: int, stride: int, upper: bool) -> set[int]:
    """How many elements `auto_pad` puts before a dimension, for each number that windows and strides may lack.

    Where it is the same for all sizes, the most elements may follow each of them: no window reaches more than it needs.
    """
    return {(total + (not upper)) // 2 for total in range(max(extent - stride, 0), extent)}


def _pad(node: Node, pads: Sequence[int], counts_end: bool) -> None:
    """Set the padding of a pooling, which exceeds the node's own at the end of dimensions.

    Unless `counts_end`, an average that counts its padding does not count what exceeds it.
    """
    if not counts_end and node.attrs.pop("count_include_pad", 0):
        rank = len(pads) // 2
        own = node.attrs.get("pads", [0] * 2 * rank)
        fill = const(0, dtype_of(node.inputs[0]))
        for axis in range(rank):
            node.inputs[0] = pad_axis(node, node.inputs[0], 2 + axis, (own[axis], own[rank + axis]), fill)
        pads = [size - counted for size, counted in zip(pads, own, strict=True)]
    node.attrs["pads"] = list(pads)
    node.attrs["auto_pad"] = b"NOTSET"


def _count_missing(node: Node) -> list[int]:
    """How many elements the padded data of a pooling lack to a first window, if they are fewer than a stride.

    Zero along dimensions in which a window fits, and along those of symbolic size.
    """
    kernel = node.attrs["kernel_shape"]
    rank = len(kernel)
    strides, dilations = (node.attrs.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads = node.attrs.get("pads", [0] * 2 * rank)
    missing = [0] * rank
    for axis, size in enumerate((dims_of(node.inputs[0]) or [])[2:]):
        if isinstance(size, int):
            lack = (kernel[axis] - 1) * dilations[axis] + 1 - (size + pads[axis] + pads[rank + axis])
            missing[axis] = lack if 0 < lack < strides[axis] else 0
    return missing


def _let_one_window_fit(node: Node) -> None:
    """Pad the end of data that is shorter than the window of a pooling by less than a stride, as ONNX Runtime does.

    It rounds the number of further windows towards zero, so that there is one window, of which a part is beyond the
    data. Along dimensions of symbolic size there is none, and the bundle asks for a larger size. An average that counts
    its padding counts what is beyond it too, but not from opset 19 on.
    """
    missing = _count_missing(node)
    pads = node.attrs.get("pads", [0] * 2 * len(missing))
    if any(missing):
        _pad(node, [a + b for a, b in zip(pads, [0] * len(missing) + missing, strict=True)], counts_end=node.opset < 19)


@dataclass(frozen=True)
class _SamePadding:
    """The padding of a dimension of free size: `before` elements, and `whole` ones with the data and what follows.

    No size has more than `most_before` and `most_after` elements before and after it.
    """

    before: Any
    whole: Any
    most_before: int
    most_after: int


def _same_padding(node: Node, size: Any, extent: int, stride: int, upper: bool) -> _SamePadding:
    """The padding that gives `ceil(size / stride)` windows of `extent`."""
    evaluator = node.evaluator
    windows = evaluator.divide(evaluator.add(size, stride - 1), stride)
    missing = evaluator.add(evaluator.multiply(windows, stride), evaluator.negate(size))
    total = evaluator.greatest(evaluator.add(missing, extent - stride), 0)
    before = evaluator.divide(evaluator.add(total, 0 if upper else 1), 2)
    whole = evaluator.add(evaluator.multiply(evaluator.add(windows, -1), stride), extent)
    halves = ((extent - 1) // 2, extent // 2)
    return _SamePadding(
        before, whole if extent >= stride else evaluator.add(size, total), *(halves if upper else reversed(halves))
    )


def _pad_to_windows(node: Node, data: relax.Expr, axes: Sequence[_SamePadding], fill: float) -> relax.Expr:
    """The data with the padding of its spatial dimensions.

    It is padded by the most elements that any size needs, and sliced: one function does both, and copies the data once.
    """
    widths = [0] * 4 + [width for axis in axes for width in (axis.most_before, axis.most_after)]
    if any(widths):
        data = node.emit(relax.op.nn.pad(data, widths, pad_value=fill))
    evaluator = node.evaluator
    begins = [evaluator.add(axis.most_before, evaluator.negate(axis.before)) for axis in axes]
    ends = [evaluator.add(begin, axis.whole) for begin, axis in zip(begins, axes, strict=True)]
    places = list(range(2, 2 + len(axes)))
    part = node.emit(relax.op.strided_slice(data, places, begins, ends, assume_inbound=True))
    return node.with_sizes(part, [*(dims_of(data) or [])[:2], *(axis.whole for axis in axes)])


def _inverse_shares(
    pixels: Sequence[Any], sizes: Sequence[Any], before: Sequence[Any], *, windows: Sequence[tuple[int, int]]
) -> te.Tensor:
    """One over the share of each window that is within the data, float32: `[1, 1, *pixels]`.

    The data has `sizes`, after a padding of `before` elements. `windows` are their lengths and strides.
    """

    def share(_batch: Any, _channel: Any, *pixel: Any) -> Any:
        total, count = 1, tirx.const(1, "float32")
        for at, size, start, (taps, stride) in zip(pixel, sizes, before, windows, strict=True):
            first = at * stride - start
            number = tirx.min(first + taps, size) - tirx.max(first, 0)
            total, count = total * taps, count * tirx.Cast("float32", number)
        return tirx.const(total, "float32") / count

    return te.compute((1, 1, *pixels), share, name="shares")


def convert_conv_transpose(node: Node) -> relax.Expr | None:
    """Replace the node's attribute `output_shape` by the padding that gives this shape.

    Returns None, which leaves the node to TVM's converter. Raises FreeSizeError for weights of symbolic size, and for
    `output_shape` of data whose size is symbolic or unknown.
    """
    _check_weights(node, outputs_axis=1)
    _let_channels_agree(node, inputs_axis=0)
    output_shape = node.attrs.pop("output_shape", None)
    if output_shape is None:
        return None
    data, weight = (dims_of(expr) for expr in node.inputs[:2])
    if data is None or weight is None or not all(isinstance(size, int) for size in data[2:]):
        raise FreeSizeError("output_shape of an input of unknown size")
    rank = len(data) - 2
    spatial = [int(size) for size in output_shape][-rank:]
    kernel = node.attrs.get("kernel_shape", weight[2:])
    strides, dilations, extra = (
        node.attrs.get(name, [default] * rank)
        for name, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    totals = [
        strides[i] * (data[2 + i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - spatial[i] for i in range(rank)
    ]
    # Where the output is larger than all of the input's products, the rest is zeros at its end.
    extra = [more + max(0, -total) for more, total in zip(extra, totals, strict=True)]
    totals = [max(0, total) for total in totals]
    upper = node.text("auto_pad", "NOTSET") == "SAME_UPPER"
    first = [total // 2 if upper else total - total // 2 for total in totals]
    node.attrs.pop("auto_pad", None)
    node.attrs["pads"] = [*first, *(total - size for total, size in zip(totals, first, strict=True))]
    node.attrs["output_padding"] = extra
    return None


def convert_roi_align(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's RoiAlign: for each bin of a region, the mean or the maximum of its samples.

    Batch indices are clamped to the batch. A sample is the sum of four weighted pixels or, in mode `max`, the largest
    of them, as in ONNX and ONNX Runtime. Raises UnsupportedFormError for a mode other than `avg` and `max`.
    """
    mode = node.text("mode", "avg")
    if mode not in ("avg", "max"):
        raise UnsupportedFormError(f"mode {mode!r}")
    default = "half_pixel" if node.opset >= _HALF_PIXELS else "output_half_pixel"
    is_half = node.text("coordinate_transformation_mode", default) == "half_pixel"
    scale, ratio = float(node.attrs.get("spatial_scale", 1.0)), int(node.attrs.get("sampling_ratio", 0))
    bins = [int(node.attrs.get(name, 1)) for name in ("output_height", "output_width")]

    def align(data: te.Tensor, rois: te.Tensor, images: te.Tensor) -> te.Tensor:
        dtype, sizes = rois.dtype, data.shape[2:]
        zero = tirx.const(0, data.dtype)
        # The number of samples of an infinite region is none of a whole number's.
        most = tirx.const(_MOST_SAMPLES, dtype)

        def region(roi: Any, axis: int) -> tuple[Any, Any, Any]:
            """The start of a region, the extent of one of its bins and the number of samples along a bin."""
            # A region is (left, upper, right, lower).
            start, end = (rois[roi, place] * tirx.const(scale, dtype) for place in (1 - axis, 3 - axis))
            extent = end - start if is_half else te.max(end - start, tirx.const(1, dtype))
            extent = extent / tirx.const(bins[axis], dtype)
            count = tirx.const(ratio, "int32") if ratio > 0 else te.ceil(te.min(extent, most)).astype("int32")
            return start - tirx.const(0.5 if is_half else 0, dtype), extent, count

        def element(roi: Any, channel: Any, *place: Any) -> Any:
            regions = [region(roi, axis) for axis in (0, 1)]
            taps = [te.reduce_axis((0, count), f"k{axis}") for axis, (_, _, count) in enumerate(regions)]
            last = data.shape[0].astype("int64") - 1
            image = te.max(te.min(images[roi].astype("int64"), last), tirx.const(0, "int64"))
            corners, is_outside = [], []
            for (start, extent, count), bin_, tap, size in zip(regions, place, taps, sizes, strict=True):
                at = start + tirx.Cast(dtype, bin_) * extent
                at = at + (tirx.Cast(dtype, tap) + tirx.const(0.5, dtype)) * extent / tirx.Cast(dtype, count)
                is_outside += [at < -1.0, at > tirx.Cast(dtype, size)]
                # The limits hold for a position that is no number too.
                at = te.min(te.max(at, tirx.const(0, dtype)), tirx.Cast(dtype, size - 1))
                low = te.max(te.min(at.astype("int64"), size - 1), tirx.const(0, "int64"))
                share = at - tirx.Cast(dtype, low)
                corners.append([(low, 1 - share), (te.min(low + 1, size - 1), share)])
            products = [
                data[image, channel, row, column] * tirx.Cast(data.dtype, above * left)
                for row, above in corners[0]
                for column, left in corners[1]
            ]
            combine = te.max if mode == "max" else operator.add
            sample = tirx.if_then_else(tirx.any(*is_outside), zero, reduce(combine, products))
            if mode == "max":
                return te.max(sample, axis=taps)
            return te.sum(sample / tirx.Cast(data.dtype, regions[0][2] * regions[1][2]), axis=taps)

        samples = te.compute((rois.shape[0], data.shape[1], *bins), element, name="samples")
        if ratio > 0:
            return samples

        def aligned(roi: Any, channel: Any, *place: Any) -> Any:
            # A loop without steps leaves its result as it was in memory.
            is_empty = tirx.any(*(region(roi, axis)[2] <= 0 for axis in (0, 1)))
            return tirx.if_then_else(is_empty, zero, samples[(roi, channel, *place)])

        return te.compute(samples.shape, aligned, name="aligned")

    regions = dims_of(node.inputs[1])
    images = node.inputs[2] if regions is None else node.with_sizes(node.inputs[2], regions[:1])
    return node.builder.call_te(align, *node.inputs[:2], images, primfunc_name_hint="roi_align")


def convert_max_roi_pool(node: Node) -> None:
    """Clamp the batch indices of MaxRoiPool, column 0 of its `rois`, to the batch.

    Returns None, which leaves the node to TVM's converter. Raises FreeSizeError for data of unknown shape.
    """
    data, rois = node.inputs
    dims = dims_of(data)
    if dims is None:
        raise FreeSizeError("data of unknown shape")
    last = node.vector([node.evaluator.add(dims[0], -1)])
    last = node.emit(relax.op.astype(last, dtype_of(rois)))
    images, corners = (node.emit(relax.op.strided_slice(rois, [1], [begin], [end])) for begin, end in ((0, 1), (1, 5)))
    images = node.emit(relax.op.maximum(node.emit(relax.op.minimum(images, last)), const(0, dtype_of(rois))))
    node.inputs[1] = node.emit(relax.op.concat([images, corners], 1))


def convert_col2im(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Col2Im: for each pixel, the sum of the block elements that cover it.

    The model checks, when it runs, that there are as many blocks as the image has. Raises UnsupportedFormError for a
    block shape that is not constant and for blocks of an unknown number of dimensions.
    """
    block, dims = node.constant(2), dims_of(node.inputs[0])
    if block is None:
        raise UnsupportedFormError("a block whose shape is computed")
    if dims is None:
        raise UnsupportedFormError("blocks of unknown shape")
    kernel = [int(size) for size in block]
    rank = len(kernel)
    sizes = node.sizes(1) or node.bind(node.integers(1))
    strides, dilations = (node.attrs.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads = node.attrs.get("pads", [0] * (2 * rank))
    blocks = [
        (sizes[i] + pads[i] + pads[rank + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        for i in range(rank)
    ]
    count = math.prod(kernel)
    data = node.with_sizes(node.inputs[0], [*dims[:2], node.evaluator.simplify(math.prod(blocks))])

    def fold(columns: te.Tensor) -> te.Tensor:
        # Without dilation, a pixel is covered by every stride-th tap alone, from its own first one on.
        steps = [stride if dilation == 1 else 1 for stride, dilation in zip(strides, dilations, strict=True)]
        turns = [-(-size // step) for size, step in zip(kernel, steps, strict=True)]

        def element(n: Any, c: Any, *pixel: Any) -> Any:
            def covering(turn: Sequence[Any]) -> Any:
                tap, column, inside = 0, 0, []
                for i in range(rank):
                    own = te.indexmod(pixel[i] + pads[i], steps[i]) + turn[i] * steps[i]
                    distance = pixel[i] + pads[i] - own * dilations[i]
                    place = te.indexdiv(te.max(distance, 0), strides[i])
                    inside += [own < kernel[i], distance >= 0, place < blocks[i]]
                    if steps[i] != strides[i]:
                        inside.append(te.indexmod(distance, strides[i]) == 0)
                    tap = tap * kernel[i] + te.min(own, kernel[i] - 1)
                    column = column * blocks[i] + te.min(place, blocks[i] - 1)
                value = columns[n, c * count + tap, column]
                return te.if_then_else(te.all(*inside), value, tirx.const(0, columns.dtype))

            if steps != [1] * rank and math.prod(turns) <= _MOST_TERMS:
                # The pixels of each remainder then have a loop of their own.
                return reduce(operator.add, map(covering, product(*map(range, turns))))
            axes = [te.reduce_axis((0, size), f"k{place}") for place, size in enumerate(turns)]
            return te.sum(covering(axes), axis=axes)

        shape = (columns.shape[0], te.indexdiv(columns.shape[1], count), *sizes)
        return te.compute(shape, element, name="fold")

    return node.builder.call_te(fold, data, primfunc_name_hint="col2im")


def convert_deform_conv(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's DeformConv: samples at offset positions, then a product with the weights.

    Samples are interpolated; pixels outside of the image are zero. Raises UnsupportedFormError for data of other than
    two spatial dimensions and for operands of unknown shape, and FreeSizeError for a symbolic number of channels.
    """
    data, weight, offset = node.inputs[:3]
    dims, kernel, places = (dims_of(value) for value in (data, weight, offset))
    if dims is None or kernel is None or places is None or len(dims) != 4:
        raise UnsupportedFormError("an image of other than two known dimensions")
    if not all(isinstance(size, int) for size in (dims[1], *kernel)):
        raise FreeSizeError("a symbolic number of channels")
    emit, (batch, channels), (height, width) = node.emit, dims[:2], places[2:]
    groups, moves = (int(node.attrs.get(name, 1)) for name in ("group", "offset_group"))
    outputs, _, *taps = kernel
    count = taps[0] * taps[1]

    def sample(image: te.Tensor, offset: te.Tensor, *mask: te.Tensor) -> te.Tensor:
        lines, columns = image.shape[2:]
        strides, dilations = (node.attrs.get(name, [1, 1]) for name in ("strides", "dilations"))
        pads = node.attrs.get("pads", [0] * 4)

        def element(n: Any, c: Any, tap: Any, y: Any, x: Any) -> Any:
            move = te.indexdiv(c, channels // moves) * count + tap
            steps = (te.indexdiv(tap, taps[1]), te.indexmod(tap, taps[1]))
            where = [
                (place * strides[axis] - pads[axis] + steps[axis] * dilations[axis]).astype(offset.dtype)
                + offset[n, 2 * move + axis, y, x]
                for axis, place in enumerate((y, x))
            ]
            first = [te.floor(place) for place in where]
            total: Any = tirx.const(0, image.dtype)
            for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
                line, column = (first[axis].astype("int64") + corner[axis] for axis in (0, 1))
                shares = [
                    1 - te.abs(where[axis] - first[axis] - tirx.const(corner[axis], offset.dtype)) for axis in (0, 1)
                ]
                is_inside = te.all(line >= 0, line < lines, column >= 0, column < columns)
                pixel = te.if_then_else(is_inside, image[n, c, line, column], tirx.const(0, image.dtype))
                total = total + pixel * shares[0] * shares[1]
            return total * mask[0][n, move, y, x] if mask else total

        return te.compute((image.shape[0], channels, count, *offset.shape[2:]), element, name="sample")

    masks = [] if node.input(4) is None else [node.inputs[4]]
    samples = emit(node.builder.call_te(sample, data, offset, *masks, primfunc_name_hint="deform"))
    pixels = node.evaluator.multiply(height, width)
    samples = emit(relax.op.reshape(samples, [batch, groups, channels // groups * count, pixels]))
    matrix = emit(relax.op.reshape(weight, [groups, outputs // groups, channels // groups * count]))
    result = emit(relax.op.matmul(matrix, samples))
    result = emit(relax.op.reshape(result, [batch, outputs, height, width]))
    if node.input(3) is None:
        return result
    return relax.op.add(result, emit(relax.op.reshape(node.inputs[3], [1, outputs, 1, 1])))
