"""Operators on quantised tensors.

Each becomes either dequantise, compute in float32, quantise (the QDQ form), or a product of integers from which the
zero point was subtracted.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx
from tvm import relax, te

from tvmflow.compiler.onnx.broadcasting import agree_in_product
from tvmflow.compiler.onnx.node import Converter, FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of
from tvmflow.compiler.onnx.vision import convert_padding, pads_for_last_windows
from tvmflow.compiler.operators.common import OPAQUE

# The attributes of a node that its counterpart on float32 tensors does not have.
_OWN = ("tvm_custom", "channels_last", "opset")


def convert_by_dequantizing(
    operator: str, operands: Sequence[int], result: int, *, shifts_first: bool = False
) -> Converter:
    """Return a converter that dequantises the operands, computes `operator` in float32, and quantises its result.

    `operands` are the positions of the quantised operands among the node's inputs. The scale and the zero point of each
    are the next two inputs. `result` is the position of the result's scale, which its zero point follows. With
    `shifts_first` the zero point is added before the result is rounded, else after it.
    """

    def convert(node: Node) -> relax.Expr:
        values = [dequantize(node, place) for place in operands]
        attributes = {name: value for name, value in node.attrs.items() if name not in _OWN}
        # Softmax of quantised tensors names the opset whose meaning it has.
        opset = {"opset": int(node.attrs["opset"])} if "opset" in node.attrs else {}
        is_last = bool(node.attrs.get("channels_last", 0))
        if is_last:
            values = [node.emit(channels_first(value)) for value in values]
        value = node.apply(operator, *values, **opset, **attributes)
        quantize = _quantize_shifted if shifts_first else _quantize
        return quantize(node, node.emit(channels_last(value)) if is_last else value, result)

    return convert


def convert_qlinear_add(node: Node) -> relax.Expr:
    """Return the Relax expression of QLinearAdd, in ONNX Runtime's order on x86-64: results at ties depend on it.

    Each operand is multiplied by its scale over the result's. The zero points are one number, to which the second
    product is added, and then the first; fused multiply-adds compute both. The sum is rounded last.
    """
    scale, zero = _scale_and_zero_point(node, 6)
    number = partial(relax.op.astype, dtype="float32")
    ratios = [node.emit(relax.op.divide(_scale(node, place + 1), scale)) for place in (0, 3)]
    if any(dims_of(ratio) != [] for ratio in ratios) or dtype_of(zero) not in ("uint8", "int8"):
        return convert_by_dequantizing("Add", (0, 3), 6)(node)
    # Numbers of float64 hold the product, so the sum is rounded once, as by a fused multiply-add.
    zeros, exact = [_zero_point(node, place) for place in (0, 3)], partial(relax.op.astype, dtype="float64")
    one = node.emit(relax.op.multiply(node.emit(exact(zeros[0])), node.emit(exact(ratios[0]))))
    other = node.emit(exact(node.emit(relax.op.multiply(node.emit(number(zeros[1])), ratios[1]))))
    shift = node.emit(number(node.emit(relax.op.add(one, other))))
    value = node.emit(relax.op.subtract(node.emit(number(zero)), shift))
    for place, ratio in zip((3, 0), reversed(ratios), strict=True):
        product = node.emit(relax.op.multiply(node.emit(number(node.inputs[place])), ratio))
        value = node.emit(relax.op.add(product, value))
    return _round(node, value, dtype_of(zero))


def convert_qlinear_average_pool(node: Node) -> relax.Expr:
    """Return the Relax expression of QLinearAveragePool: dequantise the operand, pool, quantise the result.

    Where the padding counts, so does what the last window of ceil_mode has beyond it: each mean is of a whole window.
    As in ONNX Runtime, the zero point is added before a mean is rounded: a mean between two integers becomes the even
    result.
    """
    is_explicit = node.text("auto_pad", "NOTSET") == "NOTSET"
    if is_explicit and node.attrs.get("count_include_pad", 0) and node.attrs.pop("ceil_mode", 0):
        node.attrs["pads"] = pads_for_last_windows(node)
    return convert_by_dequantizing("AveragePool", (0,), 3, shifts_first=True)(node)


def convert_qlinear_global_average_pool(node: Node) -> relax.Expr:
    """Return the Relax expression of QLinearGlobalAveragePool: the scaled and quantised sum of centred integers.

    Results at ties depend on ONNX Runtime's order: the sum is exact, and one factor makes the result's steps of it.
    """
    dims, (scale, zero) = dims_of(node.inputs[0]), _scale_and_zero_point(node, 3)
    if dims is None or dims_of(_scalar(node, 1)) != []:
        return convert_by_dequantizing("GlobalAveragePool", (0,), 3)(node)
    emit, number = node.emit, partial(relax.op.astype, dtype="float32")
    is_last = bool(node.attrs.get("channels_last", 0))
    pixels = dims[1:-1] if is_last else dims[2:]
    size = reduce(node.evaluator.multiply, pixels, 1)
    count = emit(relax.op.reshape(emit(relax.op.astype(node.vector([size]), "int32")), ()))
    data, axes = node.inputs[0], list(range(2, len(dims)))
    if is_last:
        # The pixels between are one dimension.
        data, axes = emit(relax.op.reshape(data, relax.ShapeExpr([dims[0], size, dims[-1]]))), [1]
    total = emit(relax.op.sum(emit(relax.op.astype(data, "int32")), axes))
    shift = emit(relax.op.multiply(emit(relax.op.astype(_zero_point(node, 0), "int32")), count))
    parts = emit(relax.op.multiply(scale, emit(number(count))))
    ratio = emit(relax.op.divide(_scale(node, 1), parts))
    steps = emit(relax.op.multiply(emit(number(emit(relax.op.subtract(total, shift)))), ratio))
    value = emit(relax.op.add(emit(relax.op.round(steps)), emit(number(zero))))
    ones = [1] * len(pixels)
    result = [dims[0], *ones, dims[-1]] if is_last else [*dims[:2], *ones]
    return relax.op.reshape(emit(_round(node, value, dtype_of(zero))), relax.ShapeExpr(result))


def convert_qlinear_conv(node: Node) -> relax.Expr:
    """Return the Relax expression of QLinearConv: dequantise the operands, convolve, quantise the result.

    Raises UnsupportedFormError where the result has several scales.
    """
    data, weight = dequantize(node, 0), dequantize(node, 3)
    is_last = bool(node.attrs.get("channels_last", 0))
    bias = node.input(8)
    if bias is not None:
        bias = _dequantize_bias(node, bias, 1, 4)
    attributes = {name: value for name, value in node.attrs.items() if name not in _OWN}
    value = node.apply("Conv", node.emit(channels_first(data)) if is_last else data, weight, bias, **attributes)
    return _quantize(node, node.emit(channels_last(value)) if is_last else value, 6)


def convert_qlinear_matmul(node: Node) -> relax.Expr:
    """Return the Relax expression of QLinearMatMul: dequantise the operands, multiply, quantise the result.

    Raises UnsupportedFormError for a scale for each row of the left operand, and where the result has several scales.
    """
    if dims_of(_scalar(node, 1)) != []:
        raise UnsupportedFormError("a scale for each row")
    operands = agree_in_product(node.builder, [dequantize(node, 0), dequantize(node, 3, -1)], node.evaluator)
    return _quantize(node, node.emit(relax.op.matmul(*operands)), 6)


def convert_qgemm(node: Node) -> relax.Expr:
    """Return the Relax expression of QGemm: dequantise the operands, compute Gemm, quantise the result.

    The result stays float32 if the node has no scale for it. Raises UnsupportedFormError where it has several scales.
    """
    is_transposed = bool(node.attrs.get("transB", 0))
    data, weight = dequantize(node, 0), dequantize(node, 3, 0 if is_transposed else 1)
    bias, alpha = node.input(6), node.attrs.get("alpha", 1.0)
    value = node.apply("Gemm", data, weight, transA=node.attrs.get("transA", 0), transB=int(is_transposed), alpha=alpha)
    if bias is not None:
        # The bias counts in steps of the product, so it is multiplied by alpha too.
        scaled = node.emit(relax.op.multiply(_dequantize_bias(node, bias, 1, 4), const(alpha, "float32")))
        value = node.emit(relax.op.add(value, scaled))
    return value if node.input(7) is None else _quantize(node, value, 7)


def convert_qlinear_concat(node: Node) -> relax.Expr:
    """Return the Relax expression of QLinearConcat: dequantise the operands, concatenate, quantise the result.

    Raises UnsupportedFormError where the result has several scales.
    """
    values = [dequantize(node, place) for place in range(2, len(node.inputs), 3)]
    return _quantize(node, node.apply("Concat", *values, axis=node.attrs["axis"]), 0)


def convert_qlinear_where(node: Node) -> relax.Expr:
    """Return the Relax expression of QLinearWhere: dequantise the operands, choose, quantise the result.

    Raises UnsupportedFormError where the result has several scales.
    """
    return _quantize(node, node.apply("Where", node.inputs[0], dequantize(node, 1), dequantize(node, 4)), 7)


def convert_matmul_integer(node: Node) -> relax.Expr:
    """Return the Relax expression of MatMulInteger: an int32 product of integers less their zero points."""
    return _integer_product(node, node.inputs[0], node.input(2), node.inputs[1], node.input(3))


def convert_conv_integer(node: Node) -> relax.Expr:
    """Return the Relax expression of ConvInteger: an int32 convolution of integers less their zero points.

    Padding is zero after the zero point is subtracted. Computed weights are multiplied by the patches of the data.
    """
    if node.constant(1) is None:
        result = _convolve_by_computed(node)
        if result is not None:
            return result
    zero = node.input(3)
    if zero is not None and dims_of(zero) not in ([], [1]):
        zero = node.emit(relax.op.reshape(zero, [-1] + [1] * (node.inputs[1].ty.ndim - 1)))
    attributes = {name: value for name, value in node.attrs.items() if name not in _OWN}
    data, weight = _centred(node, node.inputs[0], node.input(2)), _centred(node, node.inputs[1], zero)
    return node.apply("Conv", data, weight, **attributes)


def _convolve_by_computed(node: Node) -> relax.Expr | None:
    """The product of ConvInteger's computed weights by the patches of the data.

    None for depthwise weights, and for padding that depends on a free size.
    """
    dims, kernel = (dims_of(expr) for expr in node.inputs[:2])
    groups = int(node.attrs.get("group", 1))
    if dims is None or kernel is None or (groups > 1 and kernel[1] == 1):
        return None
    if node.text("auto_pad", "NOTSET").startswith("SAME") and not all(isinstance(size, int) for size in dims[2:]):
        return None
    # The padding has the value of zero, which is subtracted in the product.
    own = replace(node, inputs=node.inputs[:2], attrs=dict(node.attrs))
    convert_padding("Conv")(own)
    (data, weight), rank, emit = own.inputs, len(dims) - 2, node.emit
    pads, strides, dilations = (
        own.attrs.get(name, [default] * count * rank)
        for name, default, count in (("pads", 0, 2), ("strides", 1, 1), ("dilations", 1, 1))
    )
    zero = const(0, dtype_of(data)) if node.input(2) is None else emit(relax.op.reshape(node.inputs[2], ()))
    if dtype_of(data) == "uint8":
        # Right operands of products are signed, and the image is smaller than its patches.
        data, zero = (emit(relax.op.astype(_centred(node, value, const(128)), "int8")) for value in (data, zero))
    if any(pads):
        widths = const(np.array([0, 0, *pads[:rank], 0, 0, *pads[rank:]], "int64"))
        data = node.apply("Pad", data, widths, zero)
    outputs, depth, *taps = dims_of(weight)  # type: ignore[misc]
    batch, channels, *sizes = dims_of(data)  # type: ignore[misc]
    evaluator = node.evaluator
    pixels = [
        evaluator.simplify((size - (count - 1) * dilation - 1) // stride + 1)
        for size, count, stride, dilation in zip(sizes, taps, strides, dilations, strict=True)
    ]

    def cut(image: te.Tensor) -> te.Tensor:
        def element(n: Any, c: Any, *index: Any) -> Any:
            at = zip(index[:rank], index[rank:], strides, dilations, strict=True)
            return image[(n, c, *(pixel * stride + tap * dilation for tap, pixel, stride, dilation in at))]

        return te.compute((batch, channels, *taps, *pixels), element, name="patches")

    if any(count > 1 for count in (*taps, *strides)):
        data = emit(node.builder.call_te(cut, data, primfunc_name_hint="patches", primfunc_attrs=OPAQUE))
    multiply = partial(reduce, evaluator.multiply)
    steps, rows = multiply([depth, *taps]), outputs // groups if groups > 1 else outputs
    patches = emit(relax.op.reshape(data, relax.ShapeExpr([batch, groups, steps, multiply(pixels)])))
    matrix = emit(relax.op.reshape(weight, relax.ShapeExpr([groups, rows, steps])))
    shift = node.input(3)
    if shift is not None and dims_of(shift) not in ([], [1]):
        shift = emit(relax.op.reshape(node.with_sizes(shift, [outputs]), relax.ShapeExpr([groups, rows, 1])))
    operands = _centred(node, matrix, shift), _centred(node, patches, zero)
    result = emit(relax.op.matmul(*operands, out_dtype="int32"))
    return relax.op.reshape(result, relax.ShapeExpr([batch, outputs, *pixels]))


def convert_matmul_integer_to_float(node: Node) -> relax.Expr:
    """Return the Relax expression of MatMulIntegerToFloat, whose result is float32.

    It is an int32 product of integers less their zero points, times both scales, plus the bias, if there is one.
    """
    a, b, a_scale, b_scale = node.inputs[:4]
    product = _integer_product(node, a, node.input(4), b, node.input(5))
    return _scale_product(node, product, a_scale, b_scale, node.input(6))


def convert_dynamic_quantize_matmul(node: Node) -> relax.Expr:
    """Return the Relax expression of DynamicQuantizeMatMul, whose result is float32.

    It quantises the left operand by its own range. Then it computes an int32 product of integers less their zero
    points, times both scales, plus the bias, if there is one.
    """
    integers, scale, zero = quantise_dynamically(node, node.inputs[0])
    product = _integer_product(node, integers, zero, node.inputs[1], node.input(3))
    return _scale_product(node, product, scale, node.inputs[2], node.input(4))


def convert_dynamic_quantize_linear(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's DynamicQuantizeLinear: a tuple of uint8 data, the scale and the zero point.

    Scale and zero point follow from the least and the greatest element.
    """
    return relax.Tuple(list(quantise_dynamically(node, node.inputs[0])))


def channels_first(value: relax.Expr) -> relax.Expr:
    """Return a tensor [n, ..., c] transposed to [n, c, ...]."""
    rank = value.ty.ndim
    return relax.op.permute_dims(value, [0, rank - 1, *range(1, rank - 1)])


def channels_last(value: relax.Expr) -> relax.Expr:
    """Return a tensor [n, c, ...] transposed to [n, ..., c]."""
    rank = value.ty.ndim
    return relax.op.permute_dims(value, [0, *range(2, rank), 1])


def dequantize(node: Node, position: int, axis: int = 0) -> relax.Expr:
    """Return the operand at `position` of the node's inputs, dequantised to float32.

    Its scale and zero point are the next two inputs. Each is one number, or a vector along `axis`.
    """
    value, scale, zero = node.inputs[position], _scale(node, position + 1), _zero_point(node, position)
    axis %= max(value.ty.ndim, 1)
    return node.emit(relax.op.dequantize(value, scale, zero, axis=axis, out_dtype="float32"))


def convert_blocked(node: Node) -> relax.Expr | None:
    """Return the Relax expression of DequantizeLinear or QuantizeLinear with a scale for each block along an axis.

    Each scale is repeated for the elements of its block. Returns None, which leaves the node to TVM's converter, for
    nodes without blocks. For these, the model checks when it runs that there are as many scales as elements along the
    axis, if either number is symbolic. Raises FreeSizeError for blocks along a dimension of symbolic or unknown size.
    """
    block = int(node.attrs.pop("block_size", 0))
    if not block:
        _let_scales_agree(node)
        return None
    data, scale, zero = node.inputs[0], node.inputs[1], node.input(2)
    rank = data.ty.ndim
    axis, dims = int(node.attrs.get("axis", 1)) % rank, dims_of(data)
    if dims is None or not isinstance(dims[axis], int):
        raise FreeSizeError("scales of blocks along a symbolic dimension")

    def spread(value: relax.Expr) -> relax.Expr:
        repeated = node.emit(relax.op.repeat(value, block, axis))
        return node.emit(relax.op.strided_slice(repeated, [axis], [0], [dims[axis]]))

    dtype, places = dtype_of(scale), spread(scale)
    if dtype_of(data).startswith(("int", "uint")):
        value = node.emit(relax.op.astype(data, dtype))
        if zero is not None:
            value = node.emit(relax.op.subtract(value, spread(node.emit(relax.op.astype(zero, dtype)))))
        return relax.op.multiply(value, places)
    result = "uint8" if zero is None else dtype_of(zero)
    if int(node.attrs.get("output_dtype", 0)):
        result = str(onnx.helper.tensor_dtype_to_np_dtype(int(node.attrs["output_dtype"])))
    limits = np.iinfo(result)
    value = node.emit(relax.op.round(node.emit(relax.op.divide(data, places))))
    if zero is not None:
        value = node.emit(relax.op.add(value, spread(node.emit(relax.op.astype(zero, dtype)))))
    return relax.op.astype(node.emit(relax.op.clip(value, int(limits.min), int(limits.max))), result)


def _let_scales_agree(node: Node) -> None:
    """Cast the data, the scales and the zero points so that their sizes along the axis are the same expression."""
    dims, scales = dims_of(node.inputs[0]), dims_of(node.inputs[1])
    # A single scale is that of all the data.
    if not dims or scales is None or len(scales) != 1 or scales[0] == 1:
        return
    axis = int(node.attrs.get("axis", 1)) % len(dims)
    target = scales[0] if isinstance(scales[0], int) else dims[axis]
    for place, own in enumerate(([*dims[:axis], target, *dims[axis + 1 :]], [target], [target])):
        operand = node.input(place)
        if operand is not None and len(dims_of(operand) or ()) == len(own):
            node.inputs[place] = node.with_sizes(operand, own)


def _quantize(node: Node, value: relax.Expr, position: int) -> relax.Expr:
    """Quantise the result; its scale is at `position`, its zero point, or uint8 without one, after it."""
    scale, zero = _scale_and_zero_point(node, position)
    return relax.op.quantize(value, scale, zero, axis=0, out_dtype=dtype_of(zero))


def _quantize_shifted(node: Node, value: relax.Expr, position: int) -> relax.Expr:
    """Quantise the result as `_quantize` does, but add the zero point before the sum is rounded."""
    scale, zero = _scale_and_zero_point(node, position)
    shift = node.emit(relax.op.astype(zero, "float32"))
    return _round(node, node.emit(relax.op.add(node.emit(relax.op.divide(value, scale)), shift)), dtype_of(zero))


def _round(node: Node, value: relax.Expr, dtype: str) -> relax.Expr:
    """Round numbers to the nearest integers of a type, ties to even."""
    limits = np.iinfo(dtype)
    value = node.emit(relax.op.clip(node.emit(relax.op.round(value)), int(limits.min), int(limits.max)))
    return relax.op.astype(value, dtype)


def _scale_and_zero_point(node: Node, position: int) -> tuple[relax.Expr, relax.Expr]:
    """The scale of the result at `position`, and its zero point after it: that of uint8 where the node has none."""
    scale = _scale(node, position)
    zero = const(0, "uint8") if node.input(position + 1) is None else _scalar(node, position + 1)
    if dims_of(scale) != []:
        raise UnsupportedFormError("a scale for each row or channel of the result")
    return scale, zero


def _dequantize_bias(node: Node, bias: relax.Expr, *scales: int) -> relax.Expr:
    """A bias of int32 as float32; its scale is the product of those at two places."""
    scale = relax.op.multiply(*(_scale(node, place) for place in scales))
    return node.emit(relax.op.multiply(node.emit(relax.op.astype(bias, "float32")), node.emit(scale)))


def _scale(node: Node, position: int) -> relax.Expr:
    scale = _scalar(node, position)
    return scale if dtype_of(scale) == "float32" else node.emit(relax.op.astype(scale, "float32"))


def _zero_point(node: Node, position: int) -> relax.Expr:
    """The zero point of the operand at `position`; zero where it has none."""
    if node.input(position + 2) is None:
        return const(0, dtype_of(node.inputs[position]))
    return _scalar(node, position + 2)


def _scalar(node: Node, position: int) -> relax.Expr:
    """An operand of one element as a scalar, and anything else as it is."""
    expr = node.inputs[position]
    if dims_of(expr) != [1]:
        return expr
    value = node.constant(position)
    return node.emit(relax.op.reshape(expr, ())) if value is None else const(value.reshape(()))


def _centred(node: Node, value: relax.Expr, zero: relax.Expr | None) -> relax.Expr:
    """Integers less their zero point, int32; a constant where both are."""
    number, shift = node.constants(value), np.array(0) if zero is None else node.constants(zero)
    if number is not None and shift is not None:
        return const(number.astype("int32") - shift.astype("int32"))
    wide = node.emit(relax.op.astype(value, "int32"))
    if zero is None:
        return wide
    zero = node.emit(relax.op.reshape(zero, ())) if dims_of(zero) == [1] else zero
    return node.emit(relax.op.subtract(wide, node.emit(relax.op.astype(zero, "int32"))))


def _integer_product(
    node: Node, a: relax.Expr, a_zero: relax.Expr | None, b: relax.Expr, b_zero: relax.Expr | None
) -> relax.Expr:
    """The product of centred integers, int32; a vector of zero points has one for each row of `a` or column of `b`."""
    a, b = agree_in_product(node.builder, [a, b], node.evaluator)
    columns, dims = [] if b_zero is None else dims_of(b_zero) or [], dims_of(b)
    # A vector of free length may have a single number.
    if dims is not None and len(columns) == 1 and isinstance(columns[0], int) and columns != [1]:
        b = node.with_sizes(b, [*dims[:-1], *columns])
    if a_zero is not None and len(dims_of(a_zero) or ()) == 1 and dims_of(a_zero) != [1]:
        a_zero = node.emit(relax.op.expand_dims(a_zero, -1))
    return node.emit(relax.op.matmul(_centred(node, a, a_zero), _centred(node, b, b_zero), out_dtype="int32"))


def _scale_product(
    node: Node, product: relax.Expr, a_scale: relax.Expr, b_scale: relax.Expr, bias: relax.Expr | None
) -> relax.Expr:
    scale = node.emit(relax.op.multiply(a_scale, b_scale))
    value = relax.op.multiply(node.emit(relax.op.astype(product, "float32")), scale)
    return value if bias is None else relax.op.add(node.emit(value), bias)


def quantise_dynamically(node: Node, x: relax.Expr) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Return the uint8 integers, the scale and the zero point of numbers whose range, with zero, becomes 0 to 255.

    The scale of zeros alone is one, as in ONNX Runtime.
    """

    def number(value: float) -> relax.Expr:
        return relax.const(np.float32(value))

    emit: Any = node.emit
    greatest = emit(relax.op.maximum(emit(relax.op.max(x)), number(0)))
    least = emit(relax.op.minimum(emit(relax.op.min(x)), number(0)))
    span = emit(relax.op.subtract(greatest, least))
    scale = emit(
        relax.op.where(emit(relax.op.equal(span, number(0))), number(1), emit(relax.op.divide(span, number(255))))
    )
    zero = emit(relax.op.round(emit(relax.op.negative(emit(relax.op.divide(least, scale))))))
    steps = emit(relax.op.round(emit(relax.op.divide(x, scale))))
    # The bounds come first: a number beyond the range of the integers has no defined conversion.
    shifted = emit(relax.op.clip(emit(relax.op.add(steps, zero)), 0, 255))
    return emit(relax.op.astype(shifted, "uint8")), scale, emit(relax.op.astype(zero, "uint8"))
