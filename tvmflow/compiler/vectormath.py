"""Exponentials and related functions as polynomials, which vectorise. LLVM would call the C library for each lane.

All functions take float32 and are accurate to within a few units in the last place. The ranges and coefficients are
those of Eigen's rational approximations (tanh, erf), least-squares fits (exponential, sine, cosine and arctangent),
weighted until the largest relative error was smallest, and those of the Cephes library for all others.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from tvm import tirx

# On a number r up to half the logarithm of two: e to the r, the highest power first. The relative error is 3e-9.
_EXP = (
    1.381459878757596e-3,
    8.368716575205326e-3,
    4.166838899254799e-2,
    0.1666652113199234,
    0.4999999403953552,
    1.0,
    1.0,
)
_TANH_P = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_ERF_P = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)
# On the square of an angle up to a quarter of pi: (sin(x) / x - 1) / x^2 and (cos(x) - 1 + x^2 / 2) / x^4.
_SINE = (-1.9502134819049388e-4, 8.33206344395876e-3, -0.16666653752326965)
_COSINE = (2.4418128305114806e-5, -1.3887184904888272e-3, 0.04166664183139801)
# On the square of a number up to one: atan(x) / x.
_ATAN = (
    -0.001753930700942874,
    0.010726947337388992,
    -0.030804606154561043,
    0.05755211412906647,
    -0.0837731659412384,
    0.10942031443119049,
    -0.142619326710701,
    0.1999826580286026,
    -0.3333328366279602,
    1.0,
)
# On a number f, where 1 + f is between the square roots of a half and of two: (log(1 + f) - f + f^2 / 2) / f^3.
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
# On the square of a number x: (f(x) / x - 1) / x^2. The numbers go up to a half, of tan to pi/4, of sinh to 1.
_ASIN = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
_TAN = (
    9.38540185543e-3,
    3.11992232697e-3,
    2.44301354525e-2,
    5.34112807005e-2,
    1.33387994085e-1,
    3.33331568548e-1,
)
_SINH = (2.03721912945e-4, 8.33028376239e-3, 1.66667160211e-1)
_ASINH = (2.0122003309e-2, -4.2699340972e-2, 7.4847586088e-2, -1.6666288134e-1)
_ATANH = (1.81740078349e-1, 8.24370301058e-2, 1.46691431730e-1, 1.99782164500e-1, 3.33337300303e-1)
# On a number x up to a half: acosh(1 + x) / sqrt(x).
_ACOSH = (1.7596881071e-3, -7.5272886713e-3, 2.6454905019e-2, -1.1784741703e-1, 1.4142135263)
# The natural logarithm of two in two numbers, the first of few bits, so that its product with an exponent is exact.
_LOG_2 = (0.693359375, -2.12194440e-4)
# Where x^2 + 1 and x^2 are equal, the logarithm of two, and half of pi.
_LARGE, _OF_TWO, _HALF_PI = 1e4, 0.69314718055994531, 1.5707963267948966
# Half of pi: its first 30 bits, so that the product with the number of quarters of a turn is exact, and the next ones.
_QUARTER = (1.570796325802803, 9.920935796805404e-10)

# By type of floating-point numbers: the integers of the same size, and the bits of infinity.
_INFINITY = {"float16": ("int16", 0x7C00), "float32": ("int32", 0x7F800000), "float64": ("int64", 0x7FF0000000000000)}


def is_nan(x: Any, dtype: str) -> Any:
    """Return an expression that tells from the bits of `x` whether it is NaN; TVM assumes that a number equals itself.

    `dtype` is float16, float32 or float64.
    """
    return _size_bits(x, dtype) > _infinity_bits(dtype)


def is_infinite(x: Any, dtype: str) -> Any:
    """Return an expression that tells from the bits of `x` whether it is an infinity.

    `dtype` is float16, float32 or float64.
    """
    return tirx.EQ(_size_bits(x, dtype), _infinity_bits(dtype))


def is_finite(x: Any, dtype: str) -> Any:
    """Return an expression that tells from the bits of `x` whether it is finite.

    `dtype` is float16, float32 or float64.
    """
    return _size_bits(x, dtype) < _infinity_bits(dtype)


def _size_bits(x: Any, dtype: str) -> Any:
    """The bits of a number without its sign, as an integer."""
    integer, _ = _INFINITY[dtype]
    return tirx.reinterpret(integer, x) & tirx.const(tirx.max_value(integer).value, integer)


def _infinity_bits(dtype: str) -> Any:
    integer, infinity = _INFINITY[dtype]
    return tirx.const(infinity, integer)


def let(value: Any, function: Callable[[Any], Any], dtype: str = "float32") -> Any:
    """Return `function` of a variable that holds the expression `value` of type `dtype`.

    Without the variable each use repeats the whole expression: TVM's passes visit it once for each use, and nesting
    multiplies the uses.
    """
    variable = tirx.Var("x", dtype)
    return tirx.Let(variable, value, function(variable))


def rounded(value: Any) -> Any:
    """Return a float `value` that is rounded before a sum takes it: LLVM makes one operation of a product in a sum."""
    return tirx.call_llvm_pure_intrin(value.ty.dtype, "llvm.arithmetic.fence", value)


def _bound(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a function bind its argument to a variable."""

    @wraps(function)
    def apply(x: Any) -> Any:
        return let(x, function)

    return apply


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    value = tirx.const(coefficients[0], "float32")
    for coefficient in coefficients[1:]:
        value = value * x + tirx.const(coefficient, "float32")
    return value


# The first and the last float32 whose exponential is a normal float32.
_SMALLEST_EXP, _LARGEST_EXP = -87.3365, 88.72283
# The logarithm to base two of e.
_IN_POWERS = 1.44269504088896341
# Added to a number up to 2^22, it leaves the nearest whole number in the lowest bits.
_ROUNDING = 12582912.0
# What a float's exponent has more than the power of two, and the place of its lowest bit.
_BIAS, _EXPONENT = 127, 23


def _clamp(x: Any, lowest: float, highest: float) -> Any:
    """Clamp to [lowest, highest]; NaN stays NaN. Each choice is one instruction: a minimum or maximum."""
    high, low = tirx.const(highest, "float32"), tirx.const(lowest, "float32")
    return let(tirx.Select(x < low, low, x), lambda y: tirx.Select(y > high, high, y))


def _split(x: Any, combine: Callable[[Any, Any], Any], halvings: int = 0) -> Any:
    """Return `combine(p, power)` of a number p near one and a power of two.

    Their product is e to the x, halved so many times. The power is wrong where it is no normal float32, and infinity
    at 2^128. Of NaN, p is NaN.
    """
    shift = _ROUNDING + (_BIAS - halvings)

    def parts(shifted: Any) -> Any:
        near_one = let(shifted - shift, lambda n: _near_one(x, n))
        return combine(near_one, tirx.reinterpret("float32", tirx.reinterpret("int32", shifted) << _EXPONENT))

    return let(x * _IN_POWERS + shift, parts)


def _near_one(x: Any, n: Any) -> Any:
    """e to the x over two to the n, for the whole number n that is nearest to the logarithm to base two."""
    first, second = _LOG_2
    return let(x - n * first - n * second, lambda r: _polynomial(r, _EXP))


@_bound
def exp(x: Any) -> Any:
    """Return e to the float32 expression x; results below the smallest normal number are zero."""
    small, large = tirx.const(_SMALLEST_EXP, "float32"), tirx.const(_LARGEST_EXP, "float32")
    zero, infinity = tirx.const(0.0, "float32"), tirx.const(float("inf"), "float32")

    def finite(shifted: Any) -> Any:
        # The result is normal: its exponent is a sum.
        near_one = let(shifted - _ROUNDING, lambda n: _near_one(x, n))
        power = tirx.reinterpret("int32", shifted) << _EXPONENT
        return tirx.reinterpret("float32", tirx.reinterpret("int32", near_one) + power)

    value = let(x * _IN_POWERS + _ROUNDING, finite)
    # NaN stays NaN.
    return tirx.Select(x <= large, tirx.Select(x < small, zero, value), x + infinity)


@_bound
def exp_of_negative(x: Any) -> Any:
    """Return e to the x, in fewer steps than `exp`, for a float32 expression that is never above zero, as in softmax.

    A result that is subnormal is zero.
    """
    small = tirx.const(_SMALLEST_EXP, "float32")
    return tirx.Select(x < small, tirx.const(0.0, "float32"), _split(x, lambda p, power: p * power))


@_bound
def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of a float32 expression."""
    clamped = _clamp(x, -7.90531110763549805, 7.90531110763549805)
    return tirx.Select(tirx.abs(x) < tirx.const(0.0004, "float32"), x, _odd_quotient(clamped, _TANH_P, _TANH_Q))


@_bound
def erf(x: Any) -> Any:
    """Return the error function of a float32 expression."""
    return _odd_quotient(_clamp(x, -4.0, 4.0), _ERF_P, _ERF_Q)


def _odd_quotient(x: Any, above: Sequence[float], below: Sequence[float]) -> Any:
    """Return x times the quotient of two polynomials of the square of x."""
    return let(x, lambda y: let(y * y, lambda square: y * _polynomial(square, above) / _polynomial(square, below)))


def _one_and_exp(x: Any) -> Any:
    """1 + e to the -x; infinity where the sum comes near the largest float32."""
    clamped = _clamp(0.0 - x, -87.0, 89.0)
    return let(clamped, lambda y: _split(y, lambda p, power: p * power + tirx.const(1.0, "float32")))


@_bound
def sigmoid(x: Any) -> Any:
    """Return the logistic function of a float32 expression, 1 / (1 + e to the -x)."""
    return 1.0 / _one_and_exp(x)


@_bound
def silu(x: Any) -> Any:
    """Return a float32 expression times its sigmoid."""
    return x / _one_and_exp(x)


@_bound
def gelu(x: Any) -> Any:
    """Return the Gaussian error linear unit of a float32 expression, x / 2 * (1 + erf(x / sqrt(2)))."""
    return 0.5 * x * (1.0 + erf(x * 0.70710678118654752))


@_bound
def gelu_tanh(x: Any) -> Any:
    """Return the approximation of `gelu` by tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))."""
    # Half of one and a hyperbolic tangent is the sigmoid of twice the argument.
    return x / _one_and_exp(x * (1.59576912160573 + 0.0713548162726 * x * x))


@_bound
def sin(x: Any) -> Any:
    """Return the sine of a float32 expression, to within 1e-7 for an x up to 1e7 and 4e-7 up to 1e9.

    The sine of a number beyond that, whose neighbours are more than a turn away, is one between -1 and 1.
    """
    # The polynomial adds a positive zero to a negative one.
    return tirx.Select(tirx.EQ(x, tirx.const(0.0, "float32")), x, _sine(x, 0))


@_bound
def cos(x: Any) -> Any:
    """Return the cosine of a float32 expression, to within 1e-7 for an x up to 1e7 and 4e-7 up to 1e9.

    The cosine of a number beyond that, whose neighbours are more than a turn away, is one between -1 and 1.
    """
    return _sine(x, 1)


def _sine(x: Any, quarters: int) -> Any:
    """The sine of x and a number of quarters of a turn.

    The whole quarters of a turn are subtracted in float64, and the sine or the cosine of the rest is a polynomial.
    """
    double = tirx.Cast("float64", x)

    def evaluate(turns: Any) -> Any:
        rest = _rest_of_quarters(double, turns)
        shifted = turns + tirx.const(quarters, "float64")
        quadrant = tirx.Cast("float32", shifted - 4.0 * tirx.floor(shifted * 0.25))
        # At most a quarter of pi, 0.785, is left, but of angles beyond 1e16.
        return let(_clamp(rest, -0.8, 0.8), lambda r: let(quadrant, lambda q: _of_quadrant(r, q)))

    return let(_quarters(double), evaluate, "float64")


@_bound
def tan(x: Any) -> Any:
    """Return the tangent of a float32 expression.

    That of a number beyond 1e9 is one of some angle, as for `sin`.
    """
    double = tirx.Cast("float64", x)

    def evaluate(turns: Any) -> Any:
        is_odd = turns - 2.0 * tirx.floor(turns * 0.5) == tirx.const(1.0, "float64")
        rest = _clamp(_rest_of_quarters(double, turns), -0.8, 0.8)
        tangent = let(rest, lambda r: _odd(r, _TAN))
        return let(tangent, lambda value: tirx.Select(is_odd, -1.0 / value, value))

    return let(_quarters(double), evaluate, "float64")


def _quarters(x: Any) -> Any:
    """The whole number of quarters of a turn that is nearest to a float64 angle; zero of negative zero."""
    return tirx.floor(x * 0.63661977236758134 + 0.5)


def _rest_of_quarters(x: Any, quarters: Any) -> Any:
    """What a number of quarters of a turn leaves of a float64 angle, as float32."""
    first, second = (tirx.const(part, "float64") for part in _QUARTER)
    return tirx.Cast("float32", x - quarters * first - quarters * second)


def _odd(x: Any, coefficients: Sequence[float]) -> Any:
    """Return x + x^3 times a polynomial of the square of the variable x."""
    return let(x * x, lambda square: x + x * square * _polynomial(square, coefficients))


def _of_quadrant(rest: Any, quadrant: Any) -> Any:
    """The sine of an angle up to a quarter of pi and a number of quarters of a turn, from 0 to 3."""

    def evaluate(square: Any) -> Any:
        sine = rest + rest * square * _polynomial(square, _SINE)
        cosine = 1.0 - 0.5 * square + square * square * _polynomial(square, _COSINE)
        is_odd = tirx.abs(quadrant - 2.0) == tirx.const(1.0, "float32")
        is_below = quadrant >= tirx.const(2.0, "float32")
        return let(tirx.Select(is_odd, cosine, sine), lambda value: tirx.Select(is_below, 0.0 - value, value))

    return let(rest * rest, evaluate)


@_bound
def atan(x: Any) -> Any:
    """Return the arctangent of a float32 expression."""
    one = tirx.const(1.0, "float32")

    def evaluate(size: Any) -> Any:
        small = let(
            tirx.Select(size > one, 1.0 / size, size), lambda u: let(u * u, lambda s: u * _polynomial(s, _ATAN))
        )
        return let(small, lambda v: _with_sign(tirx.Select(size > one, _HALF_PI - v, v), x))

    return let(tirx.abs(x), evaluate)


@_bound
def asin(x: Any) -> Any:
    """Return the arcsine of a float32 expression; NaN beyond one."""

    def evaluate(size: Any) -> Any:
        # Near one, it is a quarter of a turn less twice the arcsine of a small number.
        is_large = size > tirx.const(0.5, "float32")
        half = let(_asin_argument(size, is_large), lambda root: _odd(root, _ASIN))
        return let(half, lambda value: _with_sign(tirx.Select(is_large, _HALF_PI - 2.0 * value, value), x))

    return let(tirx.abs(x), evaluate)


@_bound
def acos(x: Any) -> Any:
    """Return the arccosine of a float32 expression; NaN beyond one."""
    zero = tirx.const(0.0, "float32")

    def evaluate(size: Any) -> Any:
        is_large = size > tirx.const(0.5, "float32")

        def combine(value: Any) -> Any:
            twice = tirx.Select(x < zero, 2.0 * _HALF_PI - 2.0 * value, 2.0 * value)
            return tirx.Select(is_large, twice, _HALF_PI - _with_sign(value, x))

        half = let(_asin_argument(size, is_large), lambda root: _odd(root, _ASIN))
        return let(half, combine)

    return let(tirx.abs(x), evaluate)


def _asin_argument(size: Any, is_large: Any) -> Any:
    """The number up to a half whose arcsine tells that of `size`."""
    return tirx.Select(is_large, tirx.sqrt(0.5 - 0.5 * size), size)


def _with_sign(size: Any, x: Any) -> Any:
    """A number of the `size`, an expression without sign, that has the sign of x."""
    bits = tirx.reinterpret("int32", size) | (tirx.reinterpret("int32", x) & tirx.const(-0x80000000, "int32"))
    return tirx.reinterpret("float32", bits)


@_bound
def log(x: Any) -> Any:
    """Return the natural logarithm of a float32 expression; NaN of one below zero."""
    smallest, shift = tirx.const(1.17549435e-38, "float32"), 23
    zero, infinity, nan = (tirx.const(value, "float32") for value in (0.0, float("inf"), float("nan")))
    is_subnormal = x < smallest

    def evaluate(bits: Any) -> Any:
        # Mantissas are between the square roots of a half, of which these are the bits, and of two.
        exponent = (bits - tirx.const(0x3F3504F3, "int32")) >> shift

        def of_exponent(e: Any) -> Any:
            mantissa = tirx.reinterpret("float32", bits - (e << shift))
            whole = tirx.Cast("float32", e) - tirx.Select(is_subnormal, tirx.const(shift, "float32"), zero)
            return let(whole, lambda n: let(mantissa - 1.0, lambda f: _log_of(f, n)))

        return let(exponent, of_exponent, "int32")

    normal = tirx.Select(is_subnormal, x * tirx.const(float(1 << shift), "float32"), x)
    value = let(tirx.reinterpret("int32", normal), evaluate, "int32")
    # Of NaN, both comparisons are false.
    special = tirx.Select(tirx.EQ(x, zero), 0.0 - infinity, nan)
    return tirx.Select(x > zero, tirx.Select(x < infinity, value, x), special)


def _log_of(f: Any, exponent: Any) -> Any:
    """The logarithm of 1 + f, times two to the `exponent`."""
    first, second = _LOG_2

    def evaluate(square: Any) -> Any:
        rest = f * square * _polynomial(f, _LOG) + exponent * second - 0.5 * square
        return f + rest + exponent * first

    return let(f * f, evaluate)


def _half_exp(x: Any) -> Any:
    """Half of e to the x, for a float32 expression from zero on; infinity where that is beyond float32."""
    # The power itself is out of range for the largest results.
    return let(_clamp(x, 0.0, 90.0), lambda y: _split(y, lambda p, power: p * power * 2.0, halvings=2))


@_bound
def sinh(x: Any) -> Any:
    """Return the hyperbolic sine of a float32 expression."""

    def evaluate(size: Any) -> Any:
        large = let(_half_exp(size), lambda half: _with_sign(half - 0.25 / half, x))
        return tirx.Select(size > tirx.const(1.0, "float32"), large, _odd(x, _SINH))

    return let(tirx.abs(x), evaluate)


@_bound
def cosh(x: Any) -> Any:
    """Return the hyperbolic cosine of a float32 expression."""
    return let(_half_exp(tirx.abs(x)), lambda half: half + 0.25 / half)


@_bound
def asinh(x: Any) -> Any:
    """Return the inverse hyperbolic sine of a float32 expression."""

    def evaluate(size: Any) -> Any:
        large = _log_of_sum(size, lambda: size * size + 1.0)
        return _with_sign(tirx.Select(size > tirx.const(0.5, "float32"), large, _odd(size, _ASINH)), x)

    return let(tirx.abs(x), evaluate)


@_bound
def acosh(x: Any) -> Any:
    """Return the inverse hyperbolic cosine of a float32 expression; NaN below one."""

    def evaluate(rest: Any) -> Any:
        near_one = tirx.sqrt(rest) * _polynomial(rest, _ACOSH)
        return tirx.Select(rest < tirx.const(0.5, "float32"), near_one, _log_of_sum(x, lambda: rest * (x + 1.0)))

    return let(x - 1.0, evaluate)


def _log_of_sum(x: Any, square: Callable[[], Any]) -> Any:
    """The logarithm of x and the root of a number that is about its square; of a large x, that of twice x."""
    is_large = x > tirx.const(_LARGE, "float32")
    zero = tirx.const(0.0, "float32")
    value = log(x + tirx.Select(is_large, zero, tirx.sqrt(square())))
    return value + tirx.Select(is_large, tirx.const(_OF_TWO, "float32"), zero)


@_bound
def atanh(x: Any) -> Any:
    """Return the inverse hyperbolic tangent of a float32 expression; NaN beyond one."""
    large = 0.5 * log((1.0 + x) / (1.0 - x))
    return tirx.Select(tirx.abs(x) < tirx.const(0.5, "float32"), _odd(x, _ATANH), large)
