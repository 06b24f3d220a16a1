"""Exponentials of float64 as quotients of polynomials, which vectorise. LLVM would call the C library for each lane.

All functions take float64 and are accurate to within a few units in the last place. The coefficients are those of the
Cephes library.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from tvmflow.compiler.vectormath import let

# On the square of a number r up to half the logarithm of two: with a for r times the first polynomial, and b for the
# second one less a, e to the r is 1 + 2 a / b.
_ABOVE = (1.26177193074810590878e-4, 3.02994407707441961300e-2, 9.99999999999999999910e-1)
_BELOW = (3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.00000000000000000005)
# The natural logarithm of two in two numbers, the first of few bits, so that its product with an exponent is exact.
_LOG_2 = (6.93145751953125e-1, 1.42860682030941723212e-6)
# The logarithm to base two of e.
_IN_POWERS = 1.4426950408889634073599
# Below and above these numbers, the exponential is zero and infinity.
_SMALLEST_EXP, _LARGEST_EXP = -746.0, 710.0
# Above these numbers, the hyperbolic tangent and the logistic function are one.
_LARGEST_TANH, _LARGEST_SIGMOID = 20.0, 40.0
# The place of the lowest bit of the exponent, and the exponent of one.
_EXPONENT, _OF_ONE = 52, 1023


def exp(x: Any) -> Any:
    """Return e to the float64 expression x."""

    def scale(above: Any, below: Any, n: Any) -> Any:
        # Two to the n may be subnormal or infinite, and two to the half of n is neither.
        half = n >> tirx.const(1, "int64")
        return (1.0 + 2.0 * above / below) * _power(half) * _power(n - half)

    return _let(_clamp(x, _SMALLEST_EXP, _LARGEST_EXP), lambda y: _split(y, scale))


def sigmoid(x: Any) -> Any:
    """Return the logistic function of a float64 expression, 1 / (1 + e to the -x)."""
    # Two to the 1024, the power for the largest number, is infinity.
    return _let(
        _clamp(0.0 - x, -_LARGEST_SIGMOID, _LARGEST_EXP),
        lambda y: _split(y, lambda above, below, n: below / (below + _power(n) * (below + 2.0 * above))),
    )


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of a float64 expression."""

    def quotient(above: Any, below: Any, n: Any) -> Any:
        # That of y is (e^2y - 1) / (e^2y + 1), where the difference is exact near zero.
        return _let(
            _power(n),
            lambda power: _let(
                2.0 * power * above + (power - 1.0) * below, lambda difference: difference / (difference + 2.0 * below)
            ),
        )

    def apply(y: Any) -> Any:
        size = _split(2.0 * tirx.min(tirx.const(_LARGEST_TANH, "float64"), tirx.abs(y)), quotient)
        sign = tirx.reinterpret("int64", y) & tirx.const(tirx.min_value("int64").value, "int64")
        return tirx.reinterpret("float64", tirx.reinterpret("int64", size) | sign)

    return _let(x, apply)


def _split(x: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Return `combine(a, b, n)` of two numbers and an integer: e to the x is 1 + 2 a / b, times two to the n."""

    def parts(y: Any, n: Any) -> Any:
        first, second = _LOG_2
        return _let(
            y - n * first - n * second,
            lambda r: _let(
                r * r,
                lambda square: _let(
                    r * _polynomial(square, _ABOVE),
                    lambda above: _let(
                        _polynomial(square, _BELOW) - above,
                        lambda below: let(tirx.Cast("int64", n), lambda whole: combine(above, below, whole), "int64"),
                    ),
                ),
            ),
        )

    return _let(x, lambda y: _let(tirx.floor(y * _IN_POWERS + 0.5), lambda n: parts(y, n)))


def _power(n: Any) -> Any:
    """Two to the n, for n from -1022 to 1024. Two to the 1024 is infinity."""
    return tirx.reinterpret("float64", (n + _OF_ONE) << tirx.const(_EXPONENT, "int64"))


def _clamp(x: Any, lowest: float, highest: float) -> Any:
    """Clamp to [lowest, highest]; NaN stays NaN, for a maximum is its second operand where the two do not compare."""
    return tirx.min(tirx.const(highest, "float64"), tirx.max(tirx.const(lowest, "float64"), x))


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    value = tirx.const(coefficients[0], "float64")
    for coefficient in coefficients[1:]:
        value = value * x + tirx.const(coefficient, "float64")
    return value


def _let(value: Any, function: Callable[[Any], Any]) -> Any:
    return let(value, function, "float64")
