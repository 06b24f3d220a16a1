"""Element-wise operators: activations, arithmetic and comparisons."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.onnx.node import IN_EVALUATION, Converter, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of

# The bits of the largest exponent of a 64-bit integer other than 0, 1 and -1.
_POWER_BITS = 6


def convert_clip(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Clip: relu or maximum, then minimum, which TVM can lay out and fuse.

    Returns None, which leaves the node to TVM's converter, for bounds that are no tensors.
    """
    x = node.inputs[0]
    bounds: list[Any] = []
    for position, key in ((1, "min"), (2, "max")):
        if node.opset < 11:
            bounds.append(node.attrs.get(key))
            continue
        value, operand = node.constant(position), node.input(position)
        if value is None and operand is not None:
            if not isinstance(operand.ty, relax.TensorType):
                return None
            bounds.append(operand if operand.ty.ndim == 0 else node.emit(relax.op.reshape(operand, ())))
            continue
        bound = None if value is None else value.reshape(-1)[0]
        bounds.append(None if bound is None or np.isnan(bound) else bound)
    low, high = (
        bound if bound is None or isinstance(bound, relax.Expr) else relax.const(bound, dtype_of(x)) for bound in bounds
    )
    if low is not None:
        is_relu = not isinstance(bounds[0], relax.Expr) and bounds[0] == 0
        x = relax.op.nn.relu(x) if is_relu else relax.op.maximum(x, low)
        x = x if high is None else node.emit(x)
    return x if high is None else relax.op.minimum(x, high)


def convert_dropout(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Dropout: the identity and, if the node has it, a mask full of true.

    Raises UnsupportedFormError for a `training_mode` that is not constant, and for one that is true unless the ratio is
    zero.
    """
    training = node.constant(2)
    ratio = node.constant(1)
    if node.input(2) is not None and training is None:
        raise UnsupportedFormError("a training_mode that is computed", IN_EVALUATION)
    if training is not None and bool(training) and (ratio is None or float(ratio) != 0.0):
        raise UnsupportedFormError("training_mode is random", IN_EVALUATION)
    data = node.inputs[0]
    mask = const(True) if dims_of(data) == [] else relax.op.full_like(data, relax.const(True, "bool"), "bool")
    return data if node.outputs == 1 else relax.Tuple([data, node.emit(mask)])


def convert_elu(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Elu, composed of exp and relu."""
    return _build_exponential_unit(node, node.attrs.get("alpha", 1.0))


def convert_celu(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Celu, composed of exp and relu.

    ONNX's own function body of Celu is not used, because it turns a scalar into a vector. Raises UnsupportedFormError
    for an alpha of zero.
    """
    alpha = float(node.attrs.get("alpha", 1.0))
    if alpha == 0:
        raise UnsupportedFormError("an alpha of zero", "use Relu")
    return _build_exponential_unit(node, alpha, 1 / alpha)


def convert_selu(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Selu, composed of exp and relu."""
    alpha = node.attrs.get("alpha", 1.67326319217681884765625)
    gamma = node.attrs.get("gamma", 1.05070102214813232421875)
    return relax.op.multiply(
        relax.const(gamma, dtype_of(node.inputs[0])), node.emit(_build_exponential_unit(node, alpha))
    )


def _build_exponential_unit(node: Node, alpha: float, factor: float = 1.0) -> relax.Expr:
    """Return x where it is positive, else `alpha * (exp(factor * x) - 1)`, in x's type.

    TVM's converters take float32 only.
    """
    x, dtype = node.inputs[0], dtype_of(node.inputs[0])
    below = node.emit(relax.op.minimum(x, relax.const(0, dtype)))
    below = below if factor == 1.0 else node.emit(relax.op.multiply(relax.const(factor, dtype), below))
    below = node.emit(relax.op.exp(below))
    below = node.emit(relax.op.multiply(relax.const(alpha, dtype), relax.op.subtract(below, relax.const(1, dtype))))
    return relax.op.add(below, node.emit(relax.op.nn.relu(x)))


def convert_thresholded_relu(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's ThresholdedRelu: x where it is greater than `alpha`, else zero."""
    x, dtype = node.inputs[0], dtype_of(node.inputs[0])
    above = relax.op.greater(x, relax.const(node.attrs.get("alpha", 1.0), dtype))
    return relax.op.where(above, x, relax.const(0, dtype))


# The integers to which floats are cast by way of others: what these have too many bits for is cut off.
_CAST_BY = {"int32": "int32", "int64": "int64", "uint32": "int64"} | dict.fromkeys(
    ("int8", "int16", "uint8", "uint16"), "int32"
)


def convert_cast(node: Node) -> relax.Expr | None:
    """Return the Relax expression of a Cast of floats to integers: the conversion of the processor.

    What the integers lack becomes what that gives, in ONNX Runtime too; for NaN on x86, that is the smallest int32 or
    int64. TVM's converter calculates a remainder, number by number. Returns None, which leaves the node to that, for
    other casts and for constants.
    """
    x = node.inputs[0]
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(node.attrs["to"]))
    if isinstance(x, tvm.ir.GenericConst) or not isinstance(x.ty, relax.TensorType) or dtype not in _CAST_BY:
        return None
    if dtype_of(x) not in ("float32", "float64"):
        return None
    whole = relax.op.astype(x, _CAST_BY[dtype])
    return whole if dtype == _CAST_BY[dtype] else relax.op.astype(node.emit(whole), dtype)


def convert_sign(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Sign: unsigned integers have no -1, and that of NaN is NaN.

    Returns None, which leaves the node to TVM's converter, for integers with a sign.
    """
    x, dtype = node.inputs[0], dtype_of(node.inputs[0])
    if dtype.startswith("uint"):
        return relax.op.minimum(x, relax.const(1, dtype))
    if not dtype.startswith("float"):
        return None
    return relax.op.where(node.emit(relax.op.isnan(x)), x, node.emit(relax.op.sign(x)))


def convert_shrink(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Shrink of integers, computed in float32; None for floats."""
    x, dtype = node.inputs[0], dtype_of(node.inputs[0])
    if "float" in dtype:
        return None
    number = node.emit(relax.op.astype(x, "float32"))
    limit, bias = (float(node.attrs.get(name, default)) for name, default in (("lambd", 0.5), ("bias", 0.0)))
    less, more = (node.emit(relax.op.subtract(number, const(move, "float32"))) for move in (bias, -bias))
    is_above = node.emit(relax.op.greater(number, const(limit, "float32")))
    is_below = node.emit(relax.op.less(number, const(-limit, "float32")))
    rest = node.emit(relax.op.where(is_below, more, const(0, "float32")))
    return relax.op.astype(node.emit(relax.op.where(is_above, less, rest)), dtype)


def convert_shift(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's BitShift, with a defined result where LLVM's shift has none.

    A shift by as many bits as the type has, or more, or by a negative number gives zero, or -1 for a negative number
    that is shifted right. Returns None, which leaves the node to TVM's converter, where the number to shift is constant
    or not a tensor.
    """
    x, distance = node.inputs
    if node.constant(0) is not None or not isinstance(x.ty, relax.TensorType):
        return None
    dtype = dtype_of(x)
    bits = int(dtype.lstrip("uint"))
    is_out_of_range = relax.op.greater_equal(distance, relax.const(bits, dtype))
    if not dtype.startswith("u"):
        is_out_of_range = relax.op.logical_or(is_out_of_range, relax.op.less(distance, relax.const(0, dtype)))
    count = relax.op.where(is_out_of_range, relax.const(0, dtype), distance)
    if node.text("direction", "LEFT") == "LEFT":
        return relax.op.where(is_out_of_range, relax.const(0, dtype), relax.op.left_shift(x, count))
    shifted = relax.op.right_shift(x, count)
    if dtype.startswith("u"):
        return relax.op.where(is_out_of_range, relax.const(0, dtype), shifted)
    return relax.op.where(is_out_of_range, relax.op.right_shift(x, relax.const(bits - 1, dtype)), shifted)


def convert_is_inf(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's IsInf for one sign, a comparison, or for no sign, false everywhere.

    Returns None, which leaves the node to TVM's converter, where it detects both signs.
    """
    negative, positive = node.attrs.get("detect_negative", 1), node.attrs.get("detect_positive", 1)
    if negative and positive:
        return None
    x = node.inputs[0]
    if not negative and not positive:
        return relax.op.zeros_like(x, "bool")
    return relax.op.equal(x, relax.const(np.inf if positive else -np.inf, dtype_of(x)))


def convert_mod(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Mod of floats without `fmod`, whose result has the divisor's sign.

    Returns None, which leaves the node to TVM's converter, for integers, for operands that are not tensors, and for
    `fmod`, whose result has the dividend's sign.
    """
    if node.attrs.get("fmod", 0) or not all(isinstance(x.ty, relax.TensorType) for x in node.inputs if x is not None):
        return None
    x, y = node.inputs
    dtype = dtype_of(x)
    if not dtype.startswith("float"):
        return None
    zero = relax.const(0, dtype)
    remainder = node.emit(relax.op.mod(x, y))
    has_other_sign = relax.op.logical_xor(relax.op.less(remainder, zero), relax.op.less(y, zero))
    needs_divisor = relax.op.logical_and(relax.op.not_equal(remainder, zero), has_other_sign)
    signed = node.emit(relax.op.where(needs_divisor, relax.op.add(remainder, y), remainder))
    # A remainder of zero has the divisor's sign too.
    zeros = relax.op.where(relax.op.less(y, zero), relax.const(-0.0, dtype), zero)
    return relax.op.where(relax.op.equal(signed, zero), relax.op.multiply(zeros, relax.const(1, dtype)), signed)


def convert_pow(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Pow of an integer base, or of a float base and an exponent of another type.

    An integer base to the constant exponent 1, 2 or 3 becomes a product. Other powers of 64-bit integers by integers
    are exact; those by floats and those of smaller integers are computed in float64, as in ONNX Runtime. Returns None,
    which leaves the node to TVM's converter, for floats of one type, for a constant float base, for two constants, and
    for operands that are not tensors.
    """
    x, y = node.inputs
    if not all(isinstance(item.ty, relax.TensorType) for item in (x, y)):
        return None
    dtype, power = dtype_of(x), node.constant(1)
    if node.constant(0) is not None and ("float" in dtype or power is not None):
        return None
    if "float" in dtype:
        return None if dtype_of(y) == dtype else relax.op.power(x, node.emit(relax.op.astype(y, dtype)))
    if power is not None and power.size == 1 and float(power.reshape(-1)[0]) in (1.0, 2.0, 3.0):
        result = x
        for _ in range(int(power.reshape(-1)[0]) - 1):
            result = node.emit(relax.op.multiply(result, x))
        return result
    if dtype in ("int64", "uint64") and "float" not in dtype_of(y):
        return _whole_power(node, x, node.emit(relax.op.astype(y, dtype)), dtype)
    power = relax.op.power(*(node.emit(relax.op.astype(item, "float64")) for item in (x, y)))
    return relax.op.astype(node.emit(relax.op.round(power)) if "float" not in dtype_of(y) else power, dtype)


def _whole_power(node: Node, x: relax.Expr, y: relax.Expr, dtype: str) -> relax.Expr:
    """The power of 64-bit integers by squares; one with a negative exponent is rounded towards zero."""
    zero, one = (const(number, dtype) for number in (0, 1))

    def has_bit(number: relax.Expr, bit: int) -> relax.Expr:
        moved = node.emit(relax.op.right_shift(number, const(bit, dtype)))
        return node.emit(relax.op.equal(node.emit(relax.op.bitwise_and(moved, one)), one))

    def where(condition: relax.Expr, yes: relax.Expr, no: relax.Expr) -> relax.Expr:
        return node.emit(relax.op.where(condition, yes, no))

    is_odd = has_bit(y, 0)
    # Beyond that only 0, 1 and -1 have powers of 64 bits, which depend on whether the exponent is odd.
    most = where(is_odd, const(2**_POWER_BITS - 1, dtype), const(2**_POWER_BITS - 2, dtype))
    exponent, square, result = node.emit(relax.op.minimum(y, most)), x, one
    for bit in range(_POWER_BITS):
        result = where(has_bit(exponent, bit), node.emit(relax.op.multiply(result, square)), result)
        square = node.emit(relax.op.multiply(square, square))
    if dtype == "uint64":
        return result
    sign = where(is_odd, x, one)
    is_unit = node.emit(relax.op.equal(node.emit(relax.op.abs(x)), one))
    return where(node.emit(relax.op.less(y, zero)), where(is_unit, sign, zero), result)


def convert_by_pairs(combine: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> "Converter":
    """Return a converter that folds its operands from the left with `combine`; TVM's converter stacks them all.

    The converter returns None, which leaves the node to TVM's converter, where an operand is not a tensor.
    """

    def convert(node: Node) -> relax.Expr | None:
        if not all(expr is not None and isinstance(expr.ty, relax.TensorType) for expr in node.inputs):
            return None
        result = node.inputs[0]
        for expr in node.inputs[1:]:
            result = node.emit(combine(result, expr))
        return result

    return convert


def convert_mean(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Mean: the sum of the operands, divided by their number.

    Returns None, which leaves the node to TVM's converter, where an operand is not a tensor.
    """
    total = convert_by_pairs(relax.op.add)(node)
    return None if total is None else relax.op.divide(total, relax.const(len(node.inputs), dtype_of(total)))


def convert_equal(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's Equal of bools, which TVM would compare as floating point numbers.

    Returns None, which leaves the node to TVM's converter, for other types and for operands that are not tensors.
    """
    one, other = node.inputs
    if not all(isinstance(expr.ty, relax.TensorType) and dtype_of(expr) == "bool" for expr in (one, other)):
        return None
    return relax.op.logical_not(node.emit(relax.op.logical_xor(one, other)))


def convert_bit_cast(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's BitCast: the bits of each element, read as a type of the same width."""
    x, dtype = node.inputs[0], str(onnx.helper.tensor_dtype_to_np_dtype(node.attrs["to"]))
    if "bool" in (dtype, dtype_of(x)):
        # LLVM has a bit for it, memory a byte.
        return relax.op.astype(x, dtype)

    def cast(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: tirx.reinterpret(dtype, x[index]), name="bits")

    return node.builder.call_te(cast, x, primfunc_name_hint="bit_cast")


def convert_prelu(node: Node) -> relax.Expr | None:
    """Return the Relax expression of ONNX's PRelu: x * slope where x is negative, else x.

    Returns None, which leaves the node to TVM's converter, for slopes along one dimension of fixed size.
    """
    x, slope = node.inputs
    dims, own = dims_of(x), dims_of(slope)
    if dims is not None and own is not None:
        axes = [len(dims) - len(own) + place for place, size in enumerate(own) if not isinstance(size, int) or size > 1]
        axes = axes or [len(dims) - 1]
        if dims and len(axes) == 1 and isinstance(dims[axes[0]], int):
            return None
    return relax.op.where(relax.op.less(x, const(0, dtype_of(x))), relax.op.multiply(x, slope), x)
