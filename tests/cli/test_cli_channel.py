"""`tvmflow channel`: a name without channels is refused."""

from collections.abc import Callable
from typing import Any

import pytest

Command = Callable[..., Any]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_name_without_channels_is_refused_with_the_names_that_are_released(
    tvmflow: Command, options: tuple[str, ...]
) -> None:
    result = tvmflow("channel", "show", "smal", *options)
    assert result.code == 1
    assert result.sentence.startswith("there is no channel of 'smal' in s3://tvmflow; released are: ")
