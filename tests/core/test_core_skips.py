"""With `--no-skips` a skip fails the run unless tests/skips.toml permits its reason."""

from types import SimpleNamespace
from typing import Any

import pytest

from support.machines import require_level
from support.skips import is_permitted, packages_to_install, refuse_skip
from tvmflow.hardware.target import Host


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


def test_a_level_that_this_machine_lacks_is_a_permitted_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvmflow.hardware.target.host", lambda: Host("x86_64", frozenset(), 2))
    with pytest.raises(pytest.skip.Exception) as skip:
        require_level("x86-64-v4-bf16")
    assert is_permitted(str(skip.value))


def test_the_packages_that_skipped_tests_lack_are_listed_once() -> None:
    reasons = ["a, b not installed: `apt-get install one two`", "b not installed: `apt-get install two`", "no time"]
    assert packages_to_install(map(_skip, reasons)) == ["one", "two"]
