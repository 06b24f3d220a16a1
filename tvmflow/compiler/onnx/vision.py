"""Operators of image models: transposed convolutions and regions."""

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of


def check_padding(node: Node) -> None:
    """Refuse a padding that depends on symbolic sizes; without strides it depends on the window alone."""
    dims = dims_of(node.inputs[0])
    is_same = node.text("auto_pad", "NOTSET").startswith("SAME")
    is_symbolic = dims is None or not all(isinstance(size, int) for size in dims[2:])
    # TVM pads a convolution without strides by itself.
    has_strides = len(node.inputs) == 1 or any(stride != 1 for stride in node.attrs.get("strides", ()))
    if is_same and is_symbolic and has_strides:
        raise FreeSizeError(f"auto_pad {node.text('auto_pad', '')} along symbolic dimensions")


def convert_conv_transpose(node: Node) -> relax.Expr | None:
    """Replace the attribute output_shape by the padding that gives it."""
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


def convert_non_max_suppression(node: Node) -> relax.Expr | None:
    """Change the threshold of NonMaxSuppression in the node, and return None so that TVM's converter takes the node.

    TVM suppresses a box at the overlap threshold itself, ONNX only above it: the threshold becomes the next larger
    number. Raises UnsupportedFormError where max_output_boxes_per_class or a threshold is not constant.
    """
    if any(node.input(position) is not None and node.constant(position) is None for position in (2, 3, 4)):
        raise FreeSizeError("a limit or threshold that is computed")
    threshold = node.constant(3)
    if threshold is not None:
        # ONNX suppresses what overlaps by more, TVM what overlaps by as much.
        node.inputs[3] = const(np.nextafter(threshold, np.float32(np.inf)))
    return None


def convert_roi_align(node: Node) -> relax.Expr | None:
    """Refuse mode max, which TVM computes otherwise than ONNX."""
    if node.text("mode", "avg") != "avg":
        raise UnsupportedFormError("mode 'max'")
    return None


def convert_col2im(node: Node) -> relax.Expr:
    """Write Col2Im as a sum over the elements of the blocks that cover each pixel."""
    image, block = node.constant(1), node.constant(2)
    if image is None or block is None:
        raise UnsupportedFormError("sizes that are computed")
    sizes, kernel = [int(size) for size in image], [int(size) for size in block]
    rank = len(sizes)
    strides, dilations = (node.attrs.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads = node.attrs.get("pads", [0] * (2 * rank))
    blocks = [
        (sizes[i] + pads[i] + pads[rank + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        for i in range(rank)
    ]
    count = math.prod(kernel)

    def fold(columns: te.Tensor) -> te.Tensor:
        taps = [te.reduce_axis((0, size), f"k{place}") for place, size in enumerate(kernel)]

        def element(n: Any, c: Any, *pixel: Any) -> Any:
            tap, column, inside = 0, 0, []
            for i in range(rank):
                distance = pixel[i] + pads[i] - taps[i] * dilations[i]
                place = te.indexdiv(te.max(distance, 0), strides[i])
                inside += [distance >= 0, te.indexmod(distance, strides[i]) == 0, place < blocks[i]]
                tap, column = tap * kernel[i] + taps[i], column * blocks[i] + te.min(place, blocks[i] - 1)
            value = columns[n, c * count + tap, column]
            return te.sum(te.if_then_else(te.all(*inside), value, tirx.const(0, columns.dtype)), axis=taps)

        shape = (columns.shape[0], te.indexdiv(columns.shape[1], count), *sizes)
        return te.compute(shape, element, name="fold")

    return node.builder.call_te(fold, node.inputs[0], primfunc_name_hint="col2im")
