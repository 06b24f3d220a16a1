"""The recorded times of tests: what a merge keeps of a record before."""

import pytest

from support import durations


def test_times_of_files_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cost: durations.Cost = {"seconds": 1.0, "cpu": 1.0, "needs": []}
    kept, gone = "tests/core/test_core_durations.py", "tests/core/test_core_gone.py"
    old: durations.Record = {
        "files": {kept: 1.0, gone: 1.0},
        "tests": {f"{kept}::test_a": cost, f"{gone}::test_a": cost},
        "fixtures": {},
    }
    monkeypatch.setattr(durations, "recorded", lambda: old)
    merged = durations.merge([])
    assert merged["files"] == {kept: 1.0}
    assert merged["tests"] == {f"{kept}::test_a": cost}
