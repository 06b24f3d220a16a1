"""The trace of a release's steps."""

import json
import time
from pathlib import Path

import pytest

from tvmflow.cli.release import tracing
from tvmflow.progress import Status, reporter, reporting_to


class _Events:
    """A reporter that keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def started(self, step: str, target: str | None) -> None:
        """Keep the event."""
        self.events.append((step, target))

    def progressed(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Keep the event."""
        self.events.append((step, target, done, total, message))

    def ended(self, step: str, target: str | None, status: Status, seconds: float) -> None:
        """Keep the event."""
        self.events.append((step, target, status, seconds))


def _slices(path: Path) -> dict[str, dict[str, object]]:
    """The slices of a trace by name, each with the name of its thread."""
    events = json.loads(path.read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return {event["name"]: {**event, "thread": threads[event["tid"]]} for event in events if event["ph"] == "X"}


def test_a_trace_has_the_steps_by_target_and_the_reporter_all_events(tmp_path: Path) -> None:
    watcher, before = _Events(), time.perf_counter()
    with tracing(tmp_path / "steps.json", "digits", watcher):
        reporter().started("export", None)
        reporter().progressed("export", None, 1, 2, "half")
        reporter().ended("export", None, "ran", 2.5)
        reporter().ended("build", "native", "cached", 0.0)
    slices = _slices(tmp_path / "steps.json")
    assert {name: (item["thread"], item["dur"]) for name, item in slices.items()} == {
        "export": ("release", 2.5e6),
        "build": ("native", 0.0),
    }
    assert slices["build"]["args"] == {"status": "cached"}
    assert before - 2.5 <= float(str(slices["export"]["ts"])) / 1e6 <= time.perf_counter() - 2.5
    assert watcher.events == [
        ("export", None),
        ("export", None, 1, 2, "half"),
        ("export", None, "ran", 2.5),
        ("build", "native", "cached", 0.0),
    ]


def test_a_release_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    def fail() -> None:
        with tracing(tmp_path / "steps.json", "digits", _Events()):
            reporter().ended("export", None, "failed", 1.0)
            raise ValueError("it failed")

    with pytest.raises(ValueError, match="it failed"):
        fail()
    assert _slices(tmp_path / "steps.json")["export"]["args"] == {"status": "failed"}


def test_without_a_file_nothing_is_traced() -> None:
    watcher = _Events()
    with reporting_to(watcher), tracing(None, "digits", watcher):
        assert reporter() is watcher
