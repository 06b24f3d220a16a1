"""The rule by which two outputs count as equal."""

import numpy as np
import pytest

from tvmflow.tolerance import absolute_tolerance, are_close, describe_bounds, largest_error

_NAN, _INF = float("nan"), float("inf")


def test_an_element_near_zero_of_a_large_output_may_have_the_rounding_error_of_the_large_ones() -> None:
    expected = np.array([300.0, -250.0, 0.001], "float32")
    actual = expected + np.array([0, 0, 0.001], "float32")
    assert are_close(actual, expected, rtol=1e-3)
    assert not are_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert not are_close(expected + np.float32(0.1), expected, rtol=0)


def test_a_small_output_has_the_absolute_tolerance_itself() -> None:
    expected = np.array([0.01, 0.0], "float32")
    assert absolute_tolerance(expected) == 1e-4
    assert not are_close(expected + np.float32(2e-4), expected, rtol=1e-3)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e30, 1e300])
def test_the_tolerance_is_finite_at_every_scale(scale: float) -> None:
    expected = np.array([scale, -scale, _NAN, _INF])
    assert absolute_tolerance(expected) == pytest.approx(1e-4 * max(1.0, scale))


def test_an_output_without_finite_elements_has_the_absolute_tolerance_itself() -> None:
    assert absolute_tolerance(np.array([_NAN, _INF])) == 1e-4
    assert absolute_tolerance(np.zeros((0, 3))) == 1e-4


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_integers_are_equal_or_not(dtype: str) -> None:
    expected = np.array([100, 25], dtype) * np.array(1 if dtype == "uint8" else 1000, dtype)
    assert are_close(expected.copy(), expected, rtol=1e-3)
    assert not are_close(expected + np.array(1, dtype), expected, rtol=1e-3)
    assert are_close(expected + np.array(1, dtype), expected, rtol=0, atol=1)


def test_large_integers_are_compared_exactly() -> None:
    expected = np.array([2**60], "int64")
    assert not are_close(expected + 1, expected, rtol=0)


def test_another_shape_is_not_close_and_infinitely_far() -> None:
    one, other = np.zeros((2, 1)), np.zeros((1, 2))
    assert not are_close(one, other, rtol=1.0)
    assert largest_error(one, other) == _INF


def test_nan_equals_nan_and_an_infinity_itself() -> None:
    values = np.array([_NAN, _INF, -_INF])
    assert are_close(values, values.copy(), rtol=0)
    assert largest_error(values, values.copy()) == 0.0
    assert largest_error(values, -values) == _INF


def test_a_message_has_the_tolerance_that_applied() -> None:
    assert describe_bounds(np.array([100.0, -100.0]), 1e-3, None) == "rtol 0.001 and atol 0.01"
    assert describe_bounds(np.array([100.0]), 1e-3, 1e-4) == "rtol 0.001 and atol 0.0001"
    assert "integers" in describe_bounds(np.array([1]), 1e-3, None)
