"""Exponentials and related functions as polynomials, which vectorise. LLVM would call the C library for each lane.

All functions take float32 and are accurate to within a few units in the last place. The ranges and coefficients are
those of the Cephes library (exp) and of Eigen's rational approximations (tanh, erf); those of sine, cosine and
arctangent are least-squares fits, weighted until the largest relative error was smallest.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from tvm import tirx

_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
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


# The smallest number whose exponential is a normal float32.
_SMALLEST_EXP = -87.3365


def _clamp(x: Any, lowest: float, highest: float) -> Any:
    """Clamp to [lowest, highest]; NaN stays NaN."""
    high, low = tirx.const(highest, "float32"), tirx.const(lowest, "float32")
    return tirx.Select(x > high, high, tirx.Select(x < low, low, x))


def _reduced(x: Any, lowest: float, combine: Callable[[Any, Any], Any]) -> Any:
    """Split e to the x as `_split` does, with x clamped to between `lowest` and 89."""
    return _split(_clamp(x, lowest, 89.0), combine)


def _split(x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return `combine(p, n)` of a number p near one and an integer n, where e to the x is p times two to the n.

    e to the x must be neither subnormal nor zero.
    """

    def scale(y: Any, n: Any) -> Any:
        rest = y - n * 0.693359375 + n * 2.12194440e-4
        near_one = let(rest, lambda r: _polynomial(r, _EXP) * (r * r) + r + 1.0)
        return combine(near_one, tirx.Cast("int32", n))

    return let(x, lambda y: let(tirx.floor(y * 1.44269504088896341 + 0.5), lambda n: scale(y, n)))


def _power(n: Any) -> Any:
    """Two to the n, for n from -126 to 128. Two to the 128 is infinity."""
    return tirx.reinterpret("float32", (n + 127) << 23)


@_bound
def exp(x: Any) -> Any:
    """Return e to the float32 expression x; results below the smallest normal number are zero."""
    # Two to the n in two factors: n itself is out of range for the largest results.
    finite = _reduced(x, -89.0, lambda p, n: p * 2.0 * _power(n - 1))
    small, large = tirx.const(_SMALLEST_EXP, "float32"), tirx.const(88.72284, "float32")
    infinite = tirx.const(float("inf"), "float32")
    return tirx.Select(x < small, tirx.const(0.0, "float32"), tirx.Select(x > large, infinite, finite))


@_bound
def exp_of_negative(x: Any) -> Any:
    """Return e to the x, in fewer steps than `exp`, for a float32 expression that is never above zero, as in softmax.

    A result that is subnormal is zero.
    """
    small = tirx.const(_SMALLEST_EXP, "float32")
    normal = _split(tirx.Select(x < small, small, x), lambda p, n: p * _power(n))
    return tirx.Select(x < small, tirx.const(0.0, "float32"), normal)


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
    return _reduced(0.0 - x, -87.0, lambda p, n: p * _power(n) + 1.0)


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
    return 0.5 * x * (1.0 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)))


@_bound
def sin(x: Any) -> Any:
    """Return the sine of a float32 expression, to within 1e-7 for an x up to 1e7 and 4e-7 up to 1e9.

    The sine of a number beyond that, whose neighbours are more than a turn away, is one between -1 and 1.
    """
    return _sine(x, 0)


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
        first, second = (tirx.const(part, "float64") for part in _QUARTER)
        rest = tirx.Cast("float32", double - turns * first - turns * second)
        shifted = turns + tirx.const(quarters, "float64")
        quadrant = tirx.Cast("float32", shifted - 4.0 * tirx.floor(shifted * 0.25))
        # At most a quarter of pi, 0.785, is left, but of angles beyond 1e16.
        return let(_clamp(rest, -0.8, 0.8), lambda r: let(quadrant, lambda q: _of_quadrant(r, q)))

    return let(tirx.round(double * 0.63661977236758134), evaluate, "float64")


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
        whole = let(small, lambda v: tirx.Select(size > one, 1.5707963267948966 - v, v))
        return let(whole, lambda v: tirx.Select(x < tirx.const(0.0, "float32"), 0.0 - v, v))

    return let(tirx.abs(x), evaluate)
