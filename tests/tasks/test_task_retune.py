"""Retuning: the functions of a profile that are worth tuning."""

import pytest

from tasks.retune import Profile


@pytest.mark.parametrize(
    ("seconds", "costliest"),
    [
        ({"first": 6.0, "second": 3.0, "third": 1.0}, ("first", "second")),
        ({"first": 6.0, "second": 2.5, "third": 1.0, "fourth": 0.5}, ("first", "second", "third")),
        ({"only": 1.0}, ("only",)),
        ({}, ()),
    ],
)
def test_the_costliest_functions_take_nine_tenths_of_the_time(
    seconds: dict[str, float], costliest: tuple[str, ...]
) -> None:
    assert Profile(functions=seconds).costliest() == costliest
