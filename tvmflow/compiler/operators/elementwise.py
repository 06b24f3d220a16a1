"""Element-wise functions that vectorise. TVM's own definitions call the C library for each lane."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler import doublemath, vectormath
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import is_float32, numbers_of, static

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relax.exp": vectormath.exp,
    "relax.erf": vectormath.erf,
    "relax.tanh": vectormath.tanh,
    "relax.sin": vectormath.sin,
    "relax.cos": vectormath.cos,
    "relax.tan": vectormath.tan,
    "relax.asin": vectormath.asin,
    "relax.acos": vectormath.acos,
    "relax.atan": vectormath.atan,
    "relax.sinh": vectormath.sinh,
    "relax.cosh": vectormath.cosh,
    "relax.asinh": vectormath.asinh,
    "relax.acosh": vectormath.acosh,
    "relax.atanh": vectormath.atanh,
    "relax.log": vectormath.log,
    # Rounds ties to even, as TVM's own definition does, but vectorises.
    "relax.round": tirx.round,
    "relax.sigmoid": vectormath.sigmoid,
    "relax.nn.silu": vectormath.silu,
    "relax.nn.gelu": vectormath.gelu,
    "relax.nn.gelu_tanh": vectormath.gelu_tanh,
}
# Those that are defined for float64 too.
DOUBLES: dict[str, Callable[[Any], Any]] = {
    "relax.exp": doublemath.exp,
    "relax.tanh": doublemath.tanh,
    "relax.sigmoid": doublemath.sigmoid,
}
# The operators that `legalize_class` defines.
CLASSES: dict[str, Callable[[Any, str], Any]] = {
    "relax.isnan": vectormath.is_nan,
    "relax.isinf": vectormath.is_infinite,
    "relax.isfinite": vectormath.is_finite,
}
# By type of integers: the floats that divide them, and the integers that these become first.
_QUOTIENTS = {
    **dict.fromkeys(("int8", "uint8", "int16", "uint16"), ("float32", "int32")),
    "int32": ("float64", "int32"),
    "uint32": ("float64", "uint32"),
}
# By type of floats: the C library's function for their remainder, and their number of binary digits.
_REMAINDERS = {"float32": ("fmodf", 24), "float64": ("fmod", 53)}
# The operators that `legalize_logical` defines.
LOGICAL = ("logical_not", "logical_xor", "not_equal", "equal", "greater_equal", "less_equal")


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, _machine: Machine, function: Callable[[Any], Any]
) -> relax.Expr | None:
    """Apply `function` to every element of a float32 tensor, or that of `DOUBLES` to float64; None for other types."""
    if str(call.args[0].ty.dtype) == "float64" and call.op.name in DOUBLES:
        function = DOUBLES[call.op.name]
    elif not is_float32(call.args[0]):
        return None
    name = call.op.name.rpartition(".")[2]

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: function(x[index]), name=name)

    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)


def relu(x: Any, dtype: str = "float32") -> Any:
    """Write ReLU of one float: NaN stays NaN, since a maximum is its second operand where the two do not compare."""
    return tirx.max(tirx.const(0, dtype), x)


def legalize_relu(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define ReLU of floats, where NaN stays NaN; None for other types."""
    dtype = str(call.ty.dtype)
    if not dtype.startswith("float"):
        return None

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: relu(x[index], dtype), name="relu")

    return builder.call_te(compute, call.args[0], primfunc_name_hint="relu")


def legalize_extreme(
    builder: relax.BlockBuilder, call: relax.Call, _machine: Machine, largest: bool
) -> relax.Expr | None:
    """Define the element-wise maximum (`largest`) or minimum of two float tensors; NaN in either operand gives NaN.

    Returns None for other types and for unknown shapes. The processor's instruction returns its second operand where
    one of the two is NaN. Therefore a constant without NaN becomes the first operand. Without such a constant, the
    elements of the first operand are tested for NaN.
    """
    dtypes = {str(tensor.ty.dtype) for tensor in call.args}
    if len(dtypes) > 1 or not dtypes <= {"float16", "float32", "float64"}:
        return None
    if not all(isinstance(tensor.ty.shape, relax.ShapeExpr) for tensor in (*call.args, call)):
        return None
    (dtype,), extreme = dtypes, tirx.max if largest else tirx.min
    first, second = sorted(call.args, key=_is_free_of_nan, reverse=True)
    may_be_nan = not _is_free_of_nan(first)
    limit = None if may_be_nan or first.ty.ndim else tirx.const(numbers_of(first).item(), dtype)
    name = "maximum" if largest else "minimum"

    def choose(a: Any, b: Any) -> Any:
        # Between variables a choice is no branch, as it is where TVM cannot prove that both operands have this place.
        return vectormath.let(
            a,
            lambda a: vectormath.let(b, lambda b: tirx.Select(vectormath.is_nan(a, dtype), a, extreme(a, b)), dtype),
            dtype,
        )

    def element(*operands: Any) -> Any:
        *others, b = operands
        a = others[0] if others else limit
        return choose(a, b) if may_be_nan else extreme(a, b)

    return _by_element(builder, call, [first, second] if limit is None else [second], element, name)


def legalize_logical(
    builder: relax.BlockBuilder, call: relax.Call, _machine: Machine | None = None, *, name: str
) -> relax.Expr | None:
    """Define an operator of `LOGICAL` as processors compute it, also for NaN; `_machine` is None for a GPU.

    TVM's simplifier makes "not less" of floats "greater or equal", its "not equal" is false for NaN, and a number is
    equal to itself for it. Returns None for `logical_not` and `logical_xor` of other types than bool, for comparisons
    of other types than floats, for other comparisons than `not_equal` of two tensors, and for unknown shapes.
    """
    dtypes = {str(tensor.ty.dtype) for tensor in call.args}
    is_comparison, is_twice = not name.startswith("logical"), len(call.args) > 1 and call.args[0].same_as(call.args[1])
    if len(dtypes) > 1 or not all(dtype.startswith("float") if is_comparison else dtype == "bool" for dtype in dtypes):
        return None
    if is_comparison and name != "not_equal" and not is_twice:
        return None
    if not all(isinstance(tensor.ty.shape, relax.ShapeExpr) for tensor in (*call.args, call)):
        return None
    (dtype,) = dtypes

    def element(first: Any, *others: Any) -> Any:
        if is_comparison and is_twice:
            is_different = vectormath.is_nan(first, dtype)
            return is_different if name == "not_equal" else _xor(is_different, tirx.const(True, "bool"))
        if is_comparison:
            return _xor(tirx.EQ(first, *others), tirx.const(True, "bool"))
        return _xor(first, others[0] if others else tirx.const(True, "bool"))

    return _by_element(builder, call, call.args[:1] if is_comparison and is_twice else call.args, element, name)


def legalize_division(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define the quotient of integers of up to 32 bits, rounded to zero, by a division of floats, which has vectors.

    A float with twice the digits of the integers never rounds a quotient to the next whole number. Returns None for
    other types, for a divisor that is one known number, which becomes a factor, and for unknown shapes.
    """
    dtypes = {str(tensor.ty.dtype) for tensor in call.args}
    if len(dtypes) > 1 or not dtypes <= set(_QUOTIENTS) or _single_number(call.args[1]) is not None:
        return None
    if not all(isinstance(tensor.ty.shape, relax.ShapeExpr) for tensor in (*call.args, call)):
        return None
    (dtype,) = dtypes
    number, whole = _QUOTIENTS[dtype]

    def element(one: Any, other: Any) -> Any:
        return (one.astype(number) / other.astype(number)).astype(whole).astype(dtype)

    return _by_element(builder, call, call.args, element, "divide")


def legalize_remainder(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define the remainder of floats with the sign of the dividend, which is exact, without a call of the C library.

    That is called where the quotient has more digits than a float, and for operands that are not finite. Returns None
    for other types, and for unknown shapes.
    """
    dtypes = {str(tensor.ty.dtype) for tensor in call.args}
    if len(dtypes) > 1 or not dtypes <= set(_REMAINDERS):
        return None
    if not all(isinstance(tensor.ty.shape, relax.ShapeExpr) for tensor in (*call.args, call)):
        return None
    (dtype,) = dtypes
    function, digits = _REMAINDERS[dtype]

    def rest(x: Any, y: Any, quotient: Any) -> Any:
        # The multiple of y is one too many where the quotient was rounded to the next whole number.
        whole = tirx.const(0, dtype) - tirx.trunc(quotient)
        remainder = tirx.call_llvm_pure_intrin(dtype, "llvm.fma", whole, y, x)
        remainder = vectormath.let(remainder, lambda r: tirx.Select(r < tirx.const(0, dtype), r + y, r), dtype)
        return tirx.Select(x < y, x, remainder)

    def divide(one: Any, other: Any) -> Any:
        x, y = tirx.abs(one), tirx.abs(other)

        def choose(quotient: Any) -> Any:
            size = tirx.call_llvm_pure_intrin(dtype, "llvm.copysign", rest(x, y, quotient), one)
            is_short = quotient < tirx.const(2.0**digits, dtype)
            return tirx.if_then_else(is_short, size, tirx.call_pure_extern(dtype, function, one, other))

        return vectormath.let(x / y, choose, dtype)

    def element(one: Any, other: Any) -> Any:
        return vectormath.let(one, lambda a: vectormath.let(other, lambda b: divide(a, b), dtype), dtype)

    return _by_element(builder, call, call.args, element, "remainder")


def legalize_class(
    builder: relax.BlockBuilder, call: relax.Call, _machine: Machine, function: Callable[[Any, str], Any]
) -> relax.Expr | None:
    """Define whether each number is NaN, infinite or finite by `function` of the number and its type, in vectors.

    TVM's own definition tests one number after the other. Returns None for other types than floats of 16 to 64 bits.
    """
    dtype, name = str(call.args[0].ty.dtype), call.op.name.rpartition(".")[2]
    if dtype not in ("float16", "float32", "float64"):
        return None

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: function(x[index], dtype), name=name)

    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)


def _xor(one: Any, other: Any) -> Any:
    """Whether one of two truth values is true; the simplifier knows no opposite of it."""
    return tirx.bitwise_xor(one.astype("uint8"), other.astype("uint8")).astype("bool")


def legalize_prelu(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define PReLU, x where x is positive and x * slope elsewhere, without a choice; None without finite slopes.

    There is one slope, or one for each place along the axis. A choice between two values that read memory is a branch
    in TVM. Where the number of pixels is free, LLVM takes that branch for each element.
    """
    slope, axis = call.args[1], int(call.attrs.axis)
    if not isinstance(slope, tvm.ir.GenericConst) or not np.isfinite(numbers_of(slope)).all():
        return None

    def compute(x: te.Tensor, slope: te.Tensor) -> te.Tensor:
        is_one = int(slope.shape[0]) == 1

        def element(*index: Any) -> Any:
            return _leak(x[index], slope[0 if is_one else index[axis]], x.dtype)

        return te.compute(x.shape, element, name="prelu")

    return builder.call_te(compute, *call.args, primfunc_name_hint="prelu")


def legalize_leaky_relu(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define LeakyReLU, x where x is positive and x times one slope elsewhere, without a choice.

    Returns None, which leaves the call to TVM's definition, for a slope that is not finite.
    """
    slope = float(call.attrs.alpha)
    if not np.isfinite(slope):
        return None

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(
            x.shape, lambda *index: _leak(x[index], tirx.const(slope, x.dtype), x.dtype), name="leaky_relu"
        )

    return builder.call_te(compute, *call.args, primfunc_name_hint="leaky_relu")


def _leak(x: Any, slope: Any, dtype: str) -> Any:
    """The number x where it is positive, else x * slope, for a finite slope. NaN stays NaN: the constant is first."""
    zero = tirx.const(0, dtype)
    return tirx.max(zero, x) + slope * tirx.min(zero, x)


def legalize_quantize(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define the quantisation of float32 numbers to integers of 8 or 16 bits; None for other types.

    A NaN becomes the smallest integer, as in ONNX Runtime: a softmax of masked scores alone is NaN, and models replace
    what follows of it. TVM's own definition makes the largest integer of it.
    """
    data, *parameters = call.args
    dtype, axis = str(call.ty.dtype), int(call.attrs.axis)
    if dtype not in ("int8", "uint8", "int16", "uint16") or not is_float32(data):
        return None
    numbers = [_single_number(parameter) for parameter in parameters]

    def compute(x: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            others = iter(tensors)
            scale, zero = (_parameter(next(others), index, axis) if number is None else number for number in numbers)
            value = tirx.round(x[index] / scale) + zero.astype("float32")
            # The value comes first: of NaN and a bound, these take the second one.
            value = tirx.max(value, tirx.min_value(dtype).astype("float32"))
            return tirx.min(value, tirx.max_value(dtype).astype("float32")).astype(dtype)

        return te.compute(x.shape, element, name="quantize")

    tensors = [parameter for parameter, number in zip(parameters, numbers, strict=True) if number is None]
    return builder.call_te(compute, data, *tensors, primfunc_name_hint="quantize")


def _single_number(tensor: relax.Expr) -> Any:
    """The one number of a constant as a constant of TIR; None for other tensors."""
    if not isinstance(tensor, tvm.ir.GenericConst) or numbers_of(tensor).size != 1:
        return None
    value = numbers_of(tensor)
    return tirx.const(value.item(), str(value.dtype))


def _parameter(tensor: te.Tensor, index: Sequence[Any], axis: int) -> Any:
    """The element of a scale or a zero point for an element of the data: one for all, or one for each along `axis`."""
    is_single = all(static(size) == 1 for size in tensor.shape)
    return tensor(*(0 if is_single else index[axis] for _ in tensor.shape))


def _is_free_of_nan(tensor: relax.Expr) -> bool:
    return isinstance(tensor, tvm.ir.GenericConst) and not np.isnan(numbers_of(tensor)).any()


def _by_element(
    builder: relax.BlockBuilder,
    call: relax.Call,
    operands: Sequence[relax.Expr],
    element: Callable[..., Any],
    name: str,
) -> relax.Expr:
    """Define a function `name` for a call of known shape: `element` of the operands' elements at each place."""

    def compute(*arguments: Any) -> te.Tensor:
        # Sizes that are operands are those of the tensors: the function has variables of its own for all of them.
        *tensors, shape = arguments
        return te.compute(
            list(shape), lambda *index: element(*(_element(tensor, index, shape) for tensor in tensors)), name=name
        )

    return builder.call_te(compute, *operands, call.ty.shape, primfunc_name_hint=name)


def _element(tensor: te.Tensor, index: Sequence[Any], shape: Sequence[Any]) -> Any:
    """The element of a tensor at an index of the `shape` to which it is broadcast.

    A dimension of 1 that stays 1 keeps its index: TVM fuses what reads at the same place as it writes.
    """
    first = len(index) - len(tensor.shape)
    return tensor(
        *(
            0 if static(own) == 1 and static(size) != 1 else place
            for place, own, size in zip(index[first:], tensor.shape, shape[first:], strict=True)
        )
    )
