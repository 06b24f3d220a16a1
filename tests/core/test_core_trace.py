"""The trace of a release's steps, and its two formats."""

import json
import sys
import time
from pathlib import Path

import click.testing
import pytest

from support.traces import read_perfetto
from tvmflow.cli.release import release_command, tracing
from tvmflow.cli.run import run_command
from tvmflow.errors import BuildError, InputError
from tvmflow.progress import Status, reporter, reporting_to
from tvmflow.trace import Trace


class _Events:
    """A reporter that keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def begin(self, step: str, target: str | None) -> None:
        """Keep the event."""
        self.events.append((step, target))

    def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
        """Keep the event."""
        self.events.append((step, target, done, total, message))

    def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
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
        reporter().begin("export", None)
        reporter().advance("export", None, 1, 2, "half")
        reporter().end("export", None, "ran", 2.5)
        reporter().end("build", "native", "cached", 0.0)
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
            reporter().end("export", None, "failed", 1.0)
            raise ValueError("it failed")

    with pytest.raises(ValueError, match="it failed"):
        fail()
    assert _slices(tmp_path / "steps.json")["export"]["args"] == {"status": "failed"}


@pytest.mark.parametrize("fails", [True, False])
def test_a_trace_that_cannot_be_written_does_not_replace_the_error_of_the_steps(tmp_path: Path, fails: bool) -> None:
    place = tmp_path / "absent" / "steps.json"

    def run() -> None:
        with tracing(place, "digits", _Events()):
            if fails:
                raise BuildError("it failed")

    with pytest.raises(BuildError if fails else InputError) as raised:
        run()
    sentences = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    expected = f"{str(place)!r} cannot be written"
    assert [sentence for sentence in sentences if expected in sentence] == sentences[-1:]
    assert (sentences[0] == "it failed") is fails


@pytest.mark.parametrize("suffix", [".pftrace", ".perfetto-trace"])
def test_both_formats_hold_the_same(tmp_path: Path, suffix: str) -> None:
    trace = Trace("digits")
    # A call within another one that begins with it, neighbours, a slice without length, and another thread.
    trace.add_slice("one", "inner", 1.0, 0.25)
    trace.add_slice("one", "outer", 1.0, 0.5, shapes="2x3", status="ran")
    trace.add_slice("one", "next", 1.5, 0.25)
    trace.add_slice("one", "cached", 1.75, 0.0)
    trace.add_slice("two", "worker", 1.125, 0.5)
    for time_, value in ((1.0, 4096), (1.5, 8192)):
        trace.add_count("allocated bytes", time_, value)
    trace.write(tmp_path / "trace.json")
    trace.write(tmp_path / f"trace{suffix}")
    perfetto = read_perfetto(tmp_path / f"trace{suffix}")
    assert perfetto.process == "digits"
    assert {
        item.name: {"thread": item.thread, "ts": item.start / 1e3, "dur": item.length / 1e3, "args": item.details}
        for item in perfetto.slices
    } == {
        name: {key: item[key] for key in ("thread", "ts", "dur", "args")}
        for name, item in _slices(tmp_path / "trace.json").items()
    }
    assert perfetto.curves == {"allocated bytes": [(10**9, 4096.0), (1_500_000_000, 8192.0)]}


def test_a_slice_ends_with_the_one_around_it(tmp_path: Path) -> None:
    trace = Trace("digits")
    trace.add_slice("one", "outer", 1.0, 0.5)
    trace.add_slice("one", "inner", 1.25, 0.5)
    trace.write(tmp_path / "trace.pftrace")
    lengths = {item.name: item.length for item in read_perfetto(tmp_path / "trace.pftrace").slices}
    assert lengths == {"outer": 500_000_000, "inner": 250_000_000}


def test_steps_are_traced_in_the_format_of_perfetto(tmp_path: Path) -> None:
    with tracing(tmp_path / "steps.pftrace", "digits", _Events()):
        reporter().end("export", None, "ran", 2.5)
        reporter().end("build", "native", "failed", 0.5)
    slices = read_perfetto(tmp_path / "steps.pftrace").slices
    assert {(item.thread, item.name, item.details["status"]) for item in slices} == {
        ("release", "export", "ran"),
        ("native", "build", "failed"),
    }


@pytest.mark.parametrize("command", [run_command, release_command])
def test_a_format_that_cannot_be_written_is_refused_before_anything_runs(
    command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "perfetto"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    result = click.testing.CliRunner().invoke(command, ["absent", "--trace", "out.pftrace"])
    assert result.exit_code == 2
    assert ".pftrace needs the package perfetto" in result.output


def test_without_a_file_nothing_is_traced() -> None:
    watcher = _Events()
    with reporting_to(watcher), tracing(None, "digits", watcher):
        assert reporter() is watcher
