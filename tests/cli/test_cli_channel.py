"""`tvmflow channel`: a name without channels and a key that no policy has are refused."""

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


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("max_latency_ms=3", "did you mean 'gates.max_latency_ms'?"),
        ("aproval=required", "did you mean 'approval'?"),
        ("xyz=1", "with a key of approval, "),
        ("approval", "write KEY=VALUE"),
        ("keep=2024-13-45", "not YAML"),
    ],
)
def test_what_sets_nothing_of_a_policy_is_answered_with_advice(tvmflow: Command, words: str, advice: str) -> None:
    result = tvmflow("channel", "set", "small", "production", words)
    assert result.code == 2
    assert repr(words) in result.sentence
    assert advice in result.sentence


@pytest.mark.parametrize("channel", ["rel.1", "LATEST", "v1", "production-wanted"])
def test_a_channel_whose_alias_mlflow_does_not_take_is_refused(tvmflow: Command, channel: str) -> None:
    result = tvmflow("channel", "set", "small", channel, "approval=required")
    assert result.code == 2
    assert result.sentence.startswith(f"channel {channel!r} ")


def test_a_name_without_releases_gets_no_channel(tvmflow: Command) -> None:
    result = tvmflow("channel", "set", "smal", "production", "approval=required")
    assert result.code == 1
    assert result.sentence.startswith("there is no release of 'smal'")
