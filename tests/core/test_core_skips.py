"""With `--no-skips` a skip fails the run unless tests/skips.toml permits its reason."""

from types import SimpleNamespace
from typing import Any

import pytest

from support.skips import packages_to_install, refuse_skip


def _skip(reason: str) -> Any:
    return SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test_file.py", 1, f"Skipped: {reason}"))


@pytest.mark.parametrize("reason", ["qemu-aarch64 not installed: `apt-get install qemu-user`", "no time today"])
def test_a_skip_that_is_not_permitted_becomes_a_failure_that_names_its_reason(reason: str) -> None:
    report = _skip(reason)
    refuse_skip(report)
    assert report.outcome == "failed"
    assert reason in report.longrepr


def test_a_skip_for_the_want_of_an_instruction_stays_a_skip() -> None:
    report = _skip("this CPU has no avx512_bf16")
    refuse_skip(report)
    assert report.outcome == "skipped"


def test_the_packages_that_skipped_tests_lack_are_listed_once() -> None:
    reasons = ["a, b not installed: `apt-get install one two`", "b not installed: `apt-get install two`", "no time"]
    assert packages_to_install(map(_skip, reasons)) == ["one", "two"]
