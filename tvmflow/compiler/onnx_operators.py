"""ONNX operators that are converted here: TVM's importer mistakes or refuses some of their forms."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

Array = np.ndarray[Any, Any]


class Refused(Exception):
    """An operator in a form that would give no or wrong results; the message says which."""


@dataclass(frozen=True)
class Node:
    """A node to convert: its operands, None where an optional one is absent, and attributes."""

    builder: relax.BlockBuilder
    inputs: list[Any]
    attrs: dict[str, Any]
    opset: int
    outputs: int
    constants: Callable[[relax.Expr], Array | None]

    def input(self, position: int) -> relax.Expr | None:
        """An operand; None where it is absent."""
        return self.inputs[position] if position < len(self.inputs) else None

    def constant(self, position: int) -> Array | None:
        """The value of an operand that is known at build time; None also where the operand is absent."""
        expr = self.input(position)
        return None if expr is None else self.constants(expr)

    def text(self, name: str, default: str) -> str:
        """A string attribute."""
        value = self.attrs.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def emit(self, expr: relax.Expr) -> relax.Expr:
        """Bind an expression to a variable."""
        return self.builder.emit(expr)


def const(value: Any, dtype: str | None = None) -> relax.Expr:
    """A Relax constant of an array or a number."""
    return relax.const(tvm.runtime.tensor(np.asarray(value, dtype=dtype, order="C")))


def is_static(dim: Any) -> bool:
    """Whether a dimension is a number rather than a symbol."""
    return isinstance(dim, int | tvm.tirx.IntImm)


def _dims(expr: relax.Expr) -> list[Any] | None:
    """A tensor's dimensions, numbers as int; None where not even symbols are known."""
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    return [int(dim) if is_static(dim) else dim for dim in shape.values]


def _dtype(expr: relax.Expr) -> str:
    return str(expr.ty.dtype)


def _clip(node: Node) -> relax.Expr | None:
    """Clip with constant bounds as relu or maximum, then minimum, which layouts and fusion understand."""
    x = node.inputs[0]
    bounds: list[Any] = []
    for position, key in ((1, "min"), (2, "max")):
        if node.opset < 11:
            bounds.append(node.attrs.get(key))
            continue
        value = node.constant(position)
        if value is None and node.input(position) is not None:
            return None
        bound = None if value is None else value.reshape(-1)[0]
        bounds.append(None if bound is None or np.isnan(bound) else bound)
    low, high = bounds
    if low is not None:
        x = relax.op.nn.relu(x) if low == 0 else relax.op.maximum(x, relax.const(low, _dtype(x)))
        x = x if high is None else node.emit(x)
    if high is not None:
        x = relax.op.minimum(x, relax.const(high, _dtype(x)))
    return x


def _range(node: Node) -> relax.Expr | None:
    """Whole-number ranges over symbolic dimensions, whose length TVM's converter would compute at run time."""
    bounds = []
    for bound in node.inputs:
        if isinstance(bound, tvm.ir.GenericConst) and bound.value.numpy().dtype.kind == "i":
            bounds.append(tvm.tirx.IntImm("int64", int(bound.value.numpy())))
        elif tvm.ir.is_prim_expr(bound) and str(bound.ty) == "int64":
            bounds.append(bound)
        else:
            return None
    start, stop, step = bounds
    dtype = _dtype(node.inputs[0]) if isinstance(node.inputs[0], tvm.ir.GenericConst) else "int64"
    if is_static(start) and is_static(stop):
        return None
    return relax.op.arange(start, stop, step, dtype)


def _gather(node: Node) -> relax.Expr | None:
    """Gather by known indices or along a known dimension; TVM's converter measures it at run time."""
    data, indices = node.inputs[0], node.inputs[1]
    axis = node.attrs.get("axis", 0)
    if isinstance(data, tvm.ir.GenericConst) or not isinstance(data.ty, relax.TensorType) or not data.ty.shape:
        return None
    if not isinstance(indices.ty, relax.TensorType):
        return None
    extent = int(data.ty.shape.values[axis]) if is_static(data.ty.shape.values[axis]) else None
    wanted = indices.value.numpy() if isinstance(indices, tvm.ir.GenericConst) else None
    if extent is None and (wanted is None or (wanted < 0).any()):
        return None
    if wanted is not None:
        positive = np.asarray(np.where(wanted < 0, wanted + (extent or 0), wanted), dtype=wanted.dtype)
        indices = const(positive)
    else:
        dtype = _dtype(indices)
        negative = relax.op.less(indices, relax.const(0, dtype))
        indices = relax.op.where(negative, relax.op.add(indices, relax.const(extent, dtype)), indices)
    return relax.op.take(data, indices, axis, mode="clip")


def _dropout(node: Node) -> relax.Expr:
    """Dropout as inference has it: nothing is dropped."""
    training = node.constant(2)
    ratio = node.constant(1)
    if node.input(2) is not None and training is None:
        raise Refused("whether it trains is computed")
    if training is not None and bool(training) and (ratio is None or float(ratio) != 0.0):
        raise Refused("training_mode is random")
    data = node.inputs[0]
    mask = const(True) if _dims(data) == [] else relax.op.full_like(data, relax.const(True, "bool"), "bool")
    return data if node.outputs == 1 else relax.Tuple([data, node.emit(mask)])


def _elu(node: Node) -> relax.Expr:
    return _exponential_unit(node, node.attrs.get("alpha", 1.0))


def _selu(node: Node) -> relax.Expr:
    alpha = node.attrs.get("alpha", 1.67326319217681884765625)
    gamma = node.attrs.get("gamma", 1.05070102214813232421875)
    return relax.op.multiply(relax.const(gamma, _dtype(node.inputs[0])), node.emit(_exponential_unit(node, alpha)))


def _exponential_unit(node: Node, alpha: float) -> relax.Expr:
    """`alpha * (exp(x) - 1)` for negative x, in x's type; TVM's converters know float32 only."""
    x, dtype = node.inputs[0], _dtype(node.inputs[0])
    below = node.emit(relax.op.exp(node.emit(relax.op.minimum(x, relax.const(0, dtype)))))
    below = node.emit(relax.op.multiply(relax.const(alpha, dtype), relax.op.subtract(below, relax.const(1, dtype))))
    return relax.op.add(below, node.emit(relax.op.nn.relu(x)))


def _thresholded_relu(node: Node) -> relax.Expr:
    x, dtype = node.inputs[0], _dtype(node.inputs[0])
    above = relax.op.greater(x, relax.const(node.attrs.get("alpha", 1.0), dtype))
    return relax.op.where(above, x, relax.const(0, dtype))


def _batch_norm(node: Node) -> relax.Expr | None:
    if node.attrs.get("training_mode", 0) or node.outputs > 1:
        raise Refused("training_mode computes statistics of the batch")
    return None


def _shift(node: Node) -> relax.Expr | None:
    """Shifts by as many bits as a number has, or more, leave none; LLVM leaves such shifts undefined."""
    x, by = node.inputs
    if node.constant(0) is not None or not isinstance(x.ty, relax.TensorType):
        return None
    dtype = _dtype(x)
    bits = int(dtype.lstrip("uint"))
    far = relax.op.greater_equal(by, relax.const(bits, dtype))
    if not dtype.startswith("u"):
        far = relax.op.logical_or(far, relax.op.less(by, relax.const(0, dtype)))
    near = relax.op.where(far, relax.const(0, dtype), by)
    if node.text("direction", "LEFT") == "LEFT":
        return relax.op.where(far, relax.const(0, dtype), relax.op.left_shift(x, near))
    shifted = relax.op.right_shift(x, near)
    if dtype.startswith("u"):
        return relax.op.where(far, relax.const(0, dtype), shifted)
    return relax.op.where(far, relax.op.right_shift(x, relax.const(bits - 1, dtype)), shifted)


def _is_inf(node: Node) -> relax.Expr | None:
    negative, positive = node.attrs.get("detect_negative", 1), node.attrs.get("detect_positive", 1)
    if negative and positive:
        return None
    x = node.inputs[0]
    if not negative and not positive:
        return relax.op.zeros_like(x, "bool")
    return relax.op.equal(x, relax.const(np.inf if positive else -np.inf, _dtype(x)))


def _mod(node: Node) -> relax.Expr | None:
    """The remainder of floats with the sign of the divisor, from the one with the sign of the dividend."""
    if node.attrs.get("fmod", 0) or not all(isinstance(x.ty, relax.TensorType) for x in node.inputs if x is not None):
        return None
    x, y = node.inputs
    dtype = _dtype(x)
    if not dtype.startswith("float"):
        return None
    zero = relax.const(0, dtype)
    rest = node.emit(relax.op.mod(x, y))
    opposite = relax.op.logical_xor(relax.op.less(rest, zero), relax.op.less(y, zero))
    wrong = relax.op.logical_and(relax.op.not_equal(rest, zero), opposite)
    signed = node.emit(relax.op.where(wrong, relax.op.add(rest, y), rest))
    # A remainder of zero has the divisor's sign too.
    zeros = relax.op.where(relax.op.less(y, zero), relax.const(-0.0, dtype), zero)
    return relax.op.where(relax.op.equal(signed, zero), relax.op.multiply(zeros, relax.const(1, dtype)), signed)


def _pow(node: Node) -> relax.Expr | None:
    """Powers of one type to another."""
    x, y = node.inputs
    if not all(isinstance(item.ty, relax.TensorType) for item in (x, y)) or node.constant(0) is not None:
        return None
    dtype, power = _dtype(x), node.constant(1)
    if "float" in dtype:
        return None if _dtype(y) == dtype else relax.op.power(x, node.emit(relax.op.astype(y, dtype)))
    if power is not None and power.size == 1 and float(power.reshape(-1)[0]) in (1.0, 2.0, 3.0):
        result = x
        for _ in range(int(power.reshape(-1)[0]) - 1):
            result = node.emit(relax.op.multiply(result, x))
        return result
    if dtype in ("int64", "uint64"):
        raise Refused("powers of 64-bit whole numbers would lose digits")
    power = relax.op.power(*(node.emit(relax.op.astype(item, "float64")) for item in (x, y)))
    return relax.op.astype(node.emit(relax.op.round(power)) if "float" not in _dtype(y) else power, dtype)


def _pad(node: Node) -> relax.Expr | None:
    """Padding by a constant as an operator, which folds into convolutions; TVM's converter emits a function."""
    data, widths = node.inputs[0], node.constant(1) if node.opset >= 11 else np.asarray(node.attrs.get("pads", ()))
    value = node.constant(2) if node.opset >= 11 else np.asarray(node.attrs.get("value", 0.0))
    axes, dims = node.constant(3), _dims(data)
    computed = (node.input(2) is not None and value is None) or (node.input(3) is not None and axes is None)
    if node.text("mode", "constant") != "constant" or computed or widths is None or dims is None:
        return None
    if _dtype(data) != "float32" or (widths < 0).any():
        return None
    places = range(len(dims)) if axes is None else [int(axis) % len(dims) for axis in axes]
    around = np.zeros((len(dims), 2), "int64")
    around[list(places)] = widths.reshape(2, -1).T
    fill = 0.0 if value is None else float(value.reshape(-1)[0])
    return relax.op.nn.pad(data, around.reshape(-1).tolist(), "constant", fill)


def _conv_transpose(node: Node) -> relax.Expr | None:
    """Turns output_shape into the padding that gives it."""
    wanted = node.attrs.pop("output_shape", None)
    if wanted is None:
        return None
    data, weight = (_dims(expr) for expr in node.inputs[:2])
    if data is None or weight is None or not all(isinstance(size, int) for size in data[2:]):
        raise Refused("output_shape of an input of unknown size")
    rank = len(data) - 2
    spatial = [int(size) for size in wanted][-rank:]
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


def _expand(node: Node) -> relax.Expr | None:
    """Expand to a shape that is computed: a dimension of one keeps that of the data."""
    data, shape = node.inputs
    if isinstance(shape, relax.ShapeExpr) or node.constant(1) is not None:
        return None
    dims, length = _dims(data), _dims(shape)
    if dims is None or length is None or not all(isinstance(size, int) for size in (*dims, *length)):
        raise Refused("a shape that is computed, of data whose shape is symbolic")
    if length[0] < len(dims):
        raise Refused("a shape that is computed, of fewer dimensions than the data")
    padded = np.array([1] * (length[0] - len(dims)) + dims, "int64")
    node.inputs[1] = node.emit(relax.op.maximum(node.emit(relax.op.astype(shape, "int64")), const(padded)))
    return None


def _layer_norm(node: Node) -> relax.Expr | None:
    """The results for training too: the mean and one divided by the standard deviation."""
    if node.outputs == 1:
        return None
    data, scale, bias = node.inputs[0], node.inputs[1], node.input(2)
    rank = data.ty.ndim
    axes = list(range(node.attrs.get("axis", -1) % rank, rank))
    mean = node.emit(relax.op.mean(data, axes, keepdims=True))
    centred = node.emit(relax.op.subtract(data, mean))
    variance = node.emit(relax.op.mean(node.emit(relax.op.multiply(centred, centred)), axes, keepdims=True))
    shifted = node.emit(relax.op.add(variance, relax.const(node.attrs.get("epsilon", 1e-5), _dtype(data))))
    scaling = node.emit(relax.op.divide(relax.const(1.0, _dtype(data)), node.emit(relax.op.sqrt(shifted))))
    result = node.emit(relax.op.multiply(node.emit(relax.op.multiply(centred, scaling)), scale))
    result = result if bias is None else node.emit(relax.op.add(result, bias))
    return relax.Tuple([result, mean, scaling][: node.outputs])


def _rms_norm(node: Node) -> relax.Expr:
    data, scale = node.inputs[:2]
    rank = data.ty.ndim
    axes = list(range(node.attrs.get("axis", -1) % rank, rank))
    square = node.emit(relax.op.mean(node.emit(relax.op.multiply(data, data)), axes, keepdims=True))
    shifted = node.emit(relax.op.add(square, relax.const(node.attrs.get("epsilon", 1e-5), _dtype(data))))
    scaling = node.emit(relax.op.divide(relax.const(1.0, _dtype(data)), node.emit(relax.op.sqrt(shifted))))
    return relax.op.multiply(node.emit(relax.op.multiply(data, scaling)), scale)


def _non_max_suppression(node: Node) -> relax.Expr | None:
    if any(node.input(position) is not None and node.constant(position) is None for position in (2, 3, 4)):
        raise Refused("a limit or threshold that is computed")
    threshold = node.constant(3)
    if threshold is not None:
        # ONNX suppresses what overlaps by more, TVM what overlaps by as much.
        node.inputs[3] = const(np.nextafter(threshold, np.float32(np.inf)))
    return None


def _variadic(combine: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> "Converter":
    """An operator of any number of operands by pairs; TVM's converter stacks them all."""

    def convert(node: Node) -> relax.Expr | None:
        if not all(expr is not None and isinstance(expr.ty, relax.TensorType) for expr in node.inputs):
            return None
        result = node.inputs[0]
        for expr in node.inputs[1:]:
            result = node.emit(combine(result, expr))
        return result

    return convert


def _mean(node: Node) -> relax.Expr | None:
    total = _variadic(relax.op.add)(node)
    return None if total is None else relax.op.divide(total, relax.const(len(node.inputs), _dtype(total)))


def _lp_normalization(node: Node) -> relax.Expr:
    data, axis = node.inputs[0], int(node.attrs.get("axis", -1))
    if int(node.attrs.get("p", 2)) == 1:
        norm = node.emit(relax.op.sum(node.emit(relax.op.abs(data)), axis, keepdims=True))
    else:
        norm = relax.op.sum(node.emit(relax.op.multiply(data, data)), axis, keepdims=True)
        norm = node.emit(relax.op.sqrt(node.emit(norm)))
    none = node.emit(relax.op.equal(norm, relax.const(0, _dtype(data))))
    divisor = node.emit(relax.op.where(none, relax.const(1, _dtype(data)), norm))
    return relax.op.divide(data, divisor)


def _dequantized(node: Node, position: int, axis: int) -> relax.Expr:
    """The operand at `position`, with the scale and zero point that follow it, as float32."""
    value, scale, zero = node.inputs[position : position + 3]
    scale = _scalar(node, scale) if _dtype(scale) == "float32" else _scalar(node, relax.op.astype(scale, "float32"))
    return node.emit(relax.op.dequantize(value, scale, _scalar(node, zero), axis=axis, out_dtype="float32"))


def _scalar(node: Node, expr: relax.Expr) -> relax.Expr:
    """A vector of one element without its dimension."""
    expr = node.builder.normalize(expr)
    return node.emit(relax.op.reshape(expr, ())) if _dims(expr) == [1] else expr


def _quantized(node: Node, value: relax.Expr, position: int) -> relax.Expr:
    scale, zero = (_scalar(node, expr) for expr in node.inputs[position : position + 2])
    if _dims(scale) != []:
        raise Refused("a scale for each row or channel of the result")
    scale = scale if _dtype(scale) == "float32" else node.emit(relax.op.astype(scale, "float32"))
    return relax.op.quantize(value, scale, zero, axis=0, out_dtype=_dtype(zero))


def _qlinear_conv(node: Node) -> relax.Expr:
    """As the QDQ form of the same: dequantized operands, convolution, quantized result."""
    data, weight = _dequantized(node, 0, 1), _dequantized(node, 3, 0)
    bias = node.input(8)
    if bias is not None:
        scale = node.emit(relax.op.multiply(_scalar(node, node.inputs[1]), _scalar(node, node.inputs[4])))
        bias = node.emit(relax.op.multiply(node.emit(relax.op.astype(bias, "float32")), scale))
    convert = onnx_frontend.Conv.get_converter(node.opset)
    operands = onnx_frontend.onnx_input([data, weight, bias])
    return _quantized(node, node.emit(convert(node.builder, operands, node.attrs, [{}, {}])), 6)


def _qlinear_matmul(node: Node) -> relax.Expr:
    for position in (1, 4):
        if _dims(_scalar(node, node.inputs[position])) != []:
            raise Refused("a scale for each row or column")
    product = relax.op.matmul(_dequantized(node, 0, 0), _dequantized(node, 3, 0))
    return _quantized(node, node.emit(product), 6)


def _roi_align(node: Node) -> relax.Expr | None:
    if node.text("mode", "avg") != "avg":
        raise Refused("mode 'max'")
    return None


def _top_k(node: Node) -> relax.Expr | None:
    if _dtype(node.inputs[0]) in ("uint64", "uint32", "uint16"):
        raise Refused(f"{_dtype(node.inputs[0])}: TVM does not sort them")
    return None


def _space_to_depth(node: Node) -> relax.Expr | None:
    if node.text("mode", "DCR") != "CRD":
        return None
    data, block = node.inputs[0], int(node.attrs["blocksize"])
    batch, channels, height, width = data.ty.shape.values
    split = node.emit(relax.op.reshape(data, [batch, channels, height // block, block, width // block, block]))
    moved = node.emit(relax.op.permute_dims(split, [0, 1, 3, 5, 2, 4]))
    return relax.op.reshape(moved, [batch, channels * block * block, height // block, width // block])


def _eye_like(node: Node) -> relax.Expr | None:
    dims = _dims(node.inputs[0])
    if dims is None or not all(isinstance(size, int) for size in dims):
        return None
    wanted = node.attrs.get("dtype")
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(wanted)) if wanted else _dtype(node.inputs[0])
    return const(np.eye(dims[0], dims[1], int(node.attrs.get("k", 0))), dtype)


def _one_hot(node: Node) -> relax.Expr | None:
    """One-hot by comparison; indices outside of the depth select nothing."""
    indices, values = node.inputs[0], node.inputs[2]
    depth = node.constant(1)
    if depth is None:
        raise Refused("a depth that is computed")
    size, rank = int(depth.reshape(-1)[0]), indices.ty.ndim
    axis = int(node.attrs.get("axis", -1)) % (rank + 1)
    whole = node.emit(relax.op.astype(indices, "int64"))
    negative = relax.op.less(whole, relax.const(0, "int64"))
    counted = node.emit(relax.op.where(negative, relax.op.add(whole, relax.const(size, "int64")), whole))
    places = const(np.arange(size).reshape([-1 if i == axis else 1 for i in range(rank + 1)]), "int64")
    chosen = node.emit(relax.op.equal(node.emit(relax.op.expand_dims(counted, axis)), places))
    off, on = (node.emit(relax.op.take(values, const(place, "int64"), axis=0)) for place in (0, 1))
    return relax.op.where(chosen, on, off)


def _resize(node: Node) -> relax.Expr | None:
    """Resize axis by axis, where TVM's own would take sizes for scales or leave an attribute out.

    Each axis is a product with a matrix of interpolation weights, or a gather by the nearest neighbours.
    """
    if node.opset < 11:
        if node.opset < 10:
            return None
        node.inputs[1:] = [None, node.inputs[1]]
    data, shape = node.inputs[0], _dims(node.inputs[0])
    if shape is None:
        raise Refused("an input of unknown shape")
    axes = [int(axis) % len(shape) for axis in node.attrs.get("axes", range(len(shape)))]
    scales, sizes, roi = node.constant(2), node.constant(3), node.constant(1)
    if scales is not None and scales.size == 0:
        scales = None
    if scales is None and sizes is None:
        raise Refused("scales or sizes that are computed")
    coordinates = node.text("coordinate_transformation_mode", "half_pixel")
    if coordinates == "tf_crop_and_resize" and roi is None:
        raise Refused("a region that is computed")
    mode, nearest = node.text("mode", "nearest"), node.text("nearest_mode", "round_prefer_floor")
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    antialias = bool(node.attrs.get("antialias", 0))
    result = data
    wanted = None
    if sizes is not None and scales is None:
        wanted = dict(zip(axes, (int(size) for size in sizes), strict=True))
        if policy != "stretch":
            if not all(isinstance(shape[axis], int) for axis in axes):
                raise Refused("keep_aspect_ratio_policy of symbolic dimensions")
            choose = min if policy == "not_larger" else max
            ratio = choose(wanted[axis] / shape[axis] for axis in axes)
            factors = dict.fromkeys(axes, ratio)
            wanted = {axis: math.floor(ratio * shape[axis] + 0.5) for axis in axes}
        else:
            factors = {axis: size / shape[axis] for axis, size in wanted.items() if isinstance(shape[axis], int)}
    else:
        factors = dict(zip(axes, map(float, np.asarray(scales)), strict=True))
    exact = True
    steps: list[tuple[int, int, int, float]] = []
    for axis in axes:
        size = shape[axis]
        if not isinstance(size, int):
            if wanted is None and factors[axis] == 1.0:
                continue
            exact = exact and axis >= 2
            steps.append((axis, -1, -1, 0.0))
            continue
        out = wanted[axis] if wanted is not None else math.floor(np.float32(factors[axis]) * np.float32(size))
        if coordinates != "tf_crop_and_resize" and out == size and factors[axis] == 1.0:
            continue
        if axis < 2 or abs(out / size - factors[axis]) > 1e-6 * factors[axis]:
            exact = False
        steps.append((axis, size, out, factors[axis]))
    known = coordinates in (
        "half_pixel",
        "asymmetric",
        "align_corners",
        "pytorch_half_pixel",
        "tf_half_pixel_for_nn",
        "tf_crop_and_resize",
    )
    symbolic = any(size < 0 for _, size, _, _ in steps)
    # TVM multiplies by the quotient of the sizes, which moves what lies between two neighbours to either of them.
    ties = mode == "nearest" and coordinates == "align_corners" and not symbolic
    if (
        exact
        and known
        and not ties
        and not antialias
        and "axes" not in node.attrs
        and policy == "stretch"
        and len(shape) in (3, 4, 5)
    ):
        return None if steps else data
    if symbolic:
        raise Refused("symbolic dimensions in this form")
    if not _dtype(data).startswith("float") and mode != "nearest":
        raise Refused(f"{mode} interpolation of {_dtype(data)}")
    for axis, size, out, scale in steps:
        region = (0.0, 1.0)
        if coordinates == "tf_crop_and_resize" and roi is not None:
            place = axes.index(axis)
            region = (float(roi[place]), float(roi[len(axes) + place]))
        places = _source_places(size, out, scale, coordinates, region)
        if mode == "nearest":
            chosen = np.clip(_ROUNDINGS[nearest](places), 0, size - 1).astype("int64")
            if coordinates == "tf_crop_and_resize" and ((places < 0) | (places > size - 1)).any():
                raise Refused("a region beyond the data in this form")
            result = node.emit(relax.op.take(result, const(chosen), axis))
            continue
        weights = _interpolation_weights(
            places,
            size,
            scale,
            mode,
            antialias,
            node.attrs.get("cubic_coeff_a", -0.75),
            bool(node.attrs.get("exclude_outside", 0)),
        )
        if coordinates == "tf_crop_and_resize" and ((places < 0) | (places > size - 1)).any():
            raise Refused("a region beyond the data in this form")
        last = len(shape) - 1
        order = [i for i in range(len(shape)) if i != axis] + [axis]
        moved = result if axis == last else node.emit(relax.op.permute_dims(result, order))
        product = node.emit(relax.op.matmul(moved, const(weights.T, _dtype(data))))
        back = [order.index(i) for i in range(len(shape))]
        result = product if axis == last else node.emit(relax.op.permute_dims(product, back))
    return result


_ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _source_places(size: int, out: int, scale: float, mode: str, region: tuple[float, float]) -> Array:
    """Where in an axis of `size` each of the `out` results lies, as the ONNX specification of Resize says."""
    x = np.arange(out, dtype="float64")
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        length = scale * size
        return np.zeros(out) if length == 1 else x * (size - 1) / (length - 1)
    if mode == "pytorch_half_pixel" and scale * size <= 1:
        return np.full(out, 0.0)
    if mode == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    if mode == "tf_crop_and_resize":
        start, end = region
        if out == 1:
            return np.full(1, 0.5 * (start + end) * (size - 1))
        return start * (size - 1) + x * (end - start) * (size - 1) / (out - 1)
    if mode == "half_pixel_symmetric":
        adjustment = out / (scale * size)
        return size / 2 * (1 - adjustment) + (x + 0.5) / scale - 0.5
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (x + 0.5) / scale - 0.5
    raise Refused(f"coordinate_transformation_mode {mode!r}")


def _interpolation_weights(
    places: Array, size: int, scale: float, mode: str, antialias: bool, alpha: float, exclude: bool
) -> Array:
    """Weights `[out, size]` of the triangle or cubic filter around each place; a filter is widened to antialias."""
    stretch = min(1.0, scale) if antialias else 1.0
    support = math.ceil((2 if mode == "cubic" else 1) / stretch)
    weights = np.zeros((len(places), size))
    for row, place in enumerate(places):
        taps = np.arange(math.floor(place) - support, math.floor(place) + support + 2)
        distance = np.abs(place - taps) * stretch
        if mode == "cubic":
            near = ((alpha + 2) * distance - (alpha + 3)) * distance**2 + 1
            far = ((alpha * distance - 5 * alpha) * distance + 8 * alpha) * distance - 4 * alpha
            values = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
        else:
            values = np.maximum(0.0, 1 - distance)
        inside = (taps >= 0) & (taps < size)
        if exclude or antialias:
            values = np.where(inside, values, 0.0) if exclude else values
        values = values / values.sum()
        np.add.at(weights[row], np.clip(taps, 0, size - 1), values)
    return weights


Converter = Callable[[Node], relax.Expr | None]

# None from a converter: TVM's own is right for this form.
CONVERTERS: dict[str, Converter] = {
    "BatchNormalization": _batch_norm,
    "BitShift": _shift,
    "Clip": _clip,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "Expand": _expand,
    "Elu": _elu,
    "EyeLike": _eye_like,
    "Gather": _gather,
    "IsInf": _is_inf,
    "LayerNormalization": _layer_norm,
    "LpNormalization": _lp_normalization,
    "Max": _variadic(relax.op.maximum),
    "Mean": _mean,
    "Min": _variadic(relax.op.minimum),
    "Mod": _mod,
    "NonMaxSuppression": _non_max_suppression,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": _pow,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "Range": _range,
    "Resize": _resize,
    "RMSNormalization": _rms_norm,
    "RoiAlign": _roi_align,
    "Selu": _selu,
    "SpaceToDepth": _space_to_depth,
    "Sum": _variadic(relax.op.add),
    "ThresholdedRelu": _thresholded_relu,
    "TopK": _top_k,
}

# Operators of com.microsoft that TVM's importer knows; it does not look at domains.
CONTRIBUTED = {
    *("Attention", "BiasGelu", "EmbedLayerNormalization", "FastGelu", "Gelu"),
    *("MatMulInteger16", "SkipLayerNormalization"),
}
# Operators of TVM's importer that are none of the standard's.
NOT_STANDARD = CONTRIBUTED - {"Gelu"} | {"AllClassNMS"}

# What models compute shapes and indices with: evaluated at import where the operands are known.
FOLDED = {
    *("Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Concat"),
    *("ConstantOfShape", "Cos", "CumSum", "Div", "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather"),
    *("GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Log"),
    *("MatMul", "Max", "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "Or", "Pow", "Range", "Reciprocal"),
    *("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round"),
    *("ScatterElements", "ScatterND", "Shape", "Sign", "Sin", "Size", "Slice", "Split", "Sqrt", "Squeeze"),
    *("Sub", "Sum", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
}
