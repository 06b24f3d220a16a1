"""The rule by which the outputs of two programs for one model count as equal: they may differ by rounding."""

from dataclasses import dataclass

import numpy as np

from tvmflow.arrays import Array

_ATOL = 1e-4
# Two decimal fractions may differ by less than either has digits.
_FRACTION = 1e-9
# The kinds of integers and bools among NumPy's types.
_WHOLE = "biu"


def is_at_least(figure: float, bound: float) -> bool:
    """Whether a figure is `bound` or more, up to rounding errors of decimal fractions; NaN is not."""
    return figure >= bound - _FRACTION


def absolute_tolerance(expected: Array, atol: float = _ATOL) -> float:
    """Return the absolute tolerance of an output's elements: `atol`, times the output's scale where that is above 1.

    The scale is the root mean square of the finite elements: where an output has elements of hundreds, one that is near
    0 is a difference of terms of hundreds, and its rounding error is in proportion to these. For integers and bools the
    tolerance is 0.
    """
    if expected.dtype.kind in _WHOLE:
        return 0.0
    wide = expected.astype(np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    largest = float(finite.max(initial=0.0))
    if largest <= 1.0:
        return atol
    # The elements are divided first, so that no square overflows.
    return atol * max(1.0, largest * float(np.sqrt(np.mean(np.square(finite / largest)))))


def are_close(actual: Array, expected: Array, *, rtol: float, atol: float | None = None) -> bool:
    """Whether arrays of one shape differ in no element by more than `atol` plus `rtol` times the expected element.

    Arrays of different shapes are not close. Where `atol` is None it is `absolute_tolerance`. `rtol` does not apply to
    integers and bools: an index of a class is right or wrong. NaN equals NaN, and an infinity the same infinity.
    """
    if actual.shape != expected.shape:
        return False
    if expected.dtype.kind in _WHOLE:
        if not atol:
            return np.array_equal(actual, expected)
        rtol = 0.0
    tolerance = absolute_tolerance(expected) if atol is None else atol
    wide, reference = actual.astype(np.float64), expected.astype(np.float64)
    return bool(np.allclose(wide, reference, rtol=rtol, atol=tolerance, equal_nan=True))


@dataclass(frozen=True)
class Bounds:
    """The errors that a result may have, as in the section `validate` of a release file.

    Without `atol` it follows the scale of the expected values, as `absolute_tolerance` says. With `max_relative_error`,
    a bound relative to the largest expected value replaces `rtol` and `atol`.
    """

    rtol: float
    atol: float | None
    max_relative_error: float | None = None

    def is_met(self, expected: Array, actual: Array) -> bool:
        """Whether `actual` has the shape of `expected` and differs from it by no more than the bounds."""
        if self.max_relative_error is None:
            return are_close(actual, expected, rtol=self.rtol, atol=self.atol)
        return largest_error(expected, actual) <= self.max_relative_error * _largest(expected)

    def describe(self, expected: Array) -> str:
        """Return the bounds of an output for a message."""
        if self.max_relative_error is None:
            return describe_bounds(expected, self.rtol, self.atol)
        return f"{self.max_relative_error:g} of its largest number"

    def tolerance(self, values: Array, whole: Array) -> Array:
        """Return the largest error of each of `values`, which are elements of the tensor `whole` of floats."""
        if self.max_relative_error is not None:
            return np.full(values.shape, self.max_relative_error * _largest(whole))
        atol = absolute_tolerance(whole) if self.atol is None else self.atol
        return np.asarray(atol + self.rtol * np.abs(values.astype(np.float64)))


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array.astype(np.float64)), initial=0.0))


def largest_error(expected: Array, actual: Array) -> float:
    """Return the largest absolute difference of two arrays' elements; 0 for empty arrays of one shape.

    It is infinite for arrays of different shapes, and where two elements are not both finite, unless they are the same
    infinity or both NaN, which differ by 0.
    """
    if expected.shape != actual.shape:
        return float("inf")
    one, other = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
    return float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0))


def describe_bounds(expected: Array, rtol: float, atol: float | None) -> str:
    """Return the bounds of an output for a message, as `are_close` applies them; `atol` may be None, as there."""
    if expected.dtype.kind in _WHOLE:
        return f"atol {atol:g} for integers" if atol else "equality, which integers have"
    return f"rtol {rtol:g} and atol {absolute_tolerance(expected) if atol is None else atol:.3g}"
