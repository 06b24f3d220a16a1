"""Where the time of a run goes: seconds, processor seconds, child processes and sockets of every test and fixture.

`pytest --record FILE` writes a record of the run to FILE and prints its most expensive files and fixtures. `python
tests/support/durations.py FILE...` merges such records into tests/durations.json, by which `--quick` selects tests and
`make test` orders them.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

# By name: a test may put another clock into the module `time`.
from time import perf_counter
from typing import Any, TypedDict

import pytest

ROOT = Path(__file__).parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
# What costs less than this, in seconds, and starts nothing is not worth a line.
_NOTEWORTHY = 0.1
# What a test and a fixture may cost in `--quick`, in seconds of a processor; waiting may take five times as long.
_QUICK_TEST, _QUICK_FIXTURE = 0.15, 1.5
_EVENTS = {"subprocess.Popen": "process", "os.fork": "process", "os.posix_spawn": "process", "socket.bind": "socket"}


class Record(TypedDict):
    """The content of tests/durations.json: costs of test functions and fixtures, and seconds of whole files."""

    files: dict[str, float]
    tests: dict[str, "Cost"]
    fixtures: dict[str, "Cost"]


class Cost(TypedDict):
    """What a test function or a fixture takes: seconds, processor seconds with those of ended children, and needs.

    `needs` has `process` when it starts one and `socket` when it listens at a socket.
    """

    seconds: float
    cpu: float
    needs: list[str]


@dataclass
class _Meter:
    """Measures a piece of work in this process."""

    start: float = field(default_factory=perf_counter)
    cpu: float = field(default_factory=lambda: sum(os.times()[:4]))
    events: int = field(default_factory=lambda: len(_seen))

    def cost(self) -> Cost:
        return {
            "seconds": round(perf_counter() - self.start, 3),
            "cpu": round(sum(os.times()[:4]) - self.cpu, 3),
            "needs": sorted(set(_seen[self.events :])),
        }


_seen: list[str] = []


def _listen(event: str, arguments: Any) -> None:
    if event in _EVENTS:
        _seen.append(_EVENTS[event])


class Recorder:
    """The plugin behind `--record`; in a process that runs tests it measures, in the one that reports it collects."""

    def __init__(self, path: Path, is_worker: bool) -> None:
        self.path, self.is_worker = path, is_worker
        self.phases: list[dict[str, Any]] = []
        self.fixtures: list[dict[str, Any]] = []
        self._pending: list[dict[str, Any]] = []
        self._costs: dict[str, Cost] = {}
        sys.addaudithook(_listen)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        meter = _Meter()
        try:
            return (yield)
        finally:
            self._costs["setup"] = meter.cost()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        meter = _Meter()
        try:
            return (yield)
        finally:
            self._costs["call"] = meter.cost()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        meter = _Meter()
        try:
            return (yield)
        finally:
            self._costs["teardown"] = meter.cost()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        meter = _Meter()
        try:
            return (yield)
        finally:
            cost = meter.cost()
            if fixturedef.scope != "function" and (cost["seconds"] > _NOTEWORTHY or cost["needs"]):
                self._pending.append({"fixture": f"{fixturedef.baseid}::{fixturedef.argname}", **cost})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any) -> Iterator[Any]:
        report: Any = yield
        # Also those that a fixture asked for by name while the test ran.
        definitions = item._request._fixture_defs.values() if report.when == "call" else ()
        report.tvmflow_used = [f"{definition.baseid}::{definition.argname}" for definition in definitions]
        cost = self._costs.pop(report.when, None)
        report.tvmflow_fixtures, self._pending = self._pending, []
        report.tvmflow_cost = cost
        # What a fixture of a wider scope takes is its own cost, not that of the first test that uses it.
        shared = report.tvmflow_fixtures
        report.tvmflow_own = cost and {
            "seconds": round(cost["seconds"] - sum(fixture["seconds"] for fixture in shared), 3),
            "cpu": round(cost["cpu"] - sum(fixture["cpu"] for fixture in shared), 3),
            "needs": [] if any(fixture["needs"] for fixture in shared) else cost["needs"],
        }
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not self.is_worker and getattr(report, "tvmflow_cost", None):
            worker = report.node.gateway.id if hasattr(report, "node") else "main"
            line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "worker": worker}
            self.phases.append({**line, **report.tvmflow_cost, "own": report.tvmflow_own, "used": report.tvmflow_used})
            self.fixtures.extend(report.tvmflow_fixtures)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.is_worker:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"phases": self.phases, "fixtures": self.fixtures}))
        for title, rows in _tables(self.phases, self.fixtures):
            terminalreporter.section(title)
            for row in rows:
                terminalreporter.write_line(row)


def _tables(phases: list[dict[str, Any]], fixtures: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for phase in phases:
        totals = files[phase["test"].partition("::")[0]]
        totals[0] += phase["seconds"]
        totals[1] += phase["cpu"]
        totals[2] += phase["when"] == "call"
    total = [sum(column) for column in zip(*files.values(), strict=True)] if files else [0, 0, 0]
    rows = sorted(([name, *values] for name, values in files.items()), key=lambda row: -row[1])
    line = "{:9.1f} s {:9.1f} s of processors {:5.0f} tests  {}".format
    yield "test files by time", [line(*total, "all"), *(line(*row[1:], row[0]) for row in rows[:30])]
    dear = sorted(fixtures, key=lambda item: -item["seconds"])[:20]
    yield "fixtures by time", [f"{item['seconds']:9.1f} s {item['cpu']:9.1f} s  {item['fixture']}" for item in dear]


def merge(records: Iterable[Path]) -> Record:
    """The costs of test functions (the mean over their parameters) and of fixtures, from records of whole files.

    A file that no record has keeps what tests/durations.json says of it, if it still exists.
    """
    tests: dict[str, list[Cost]] = defaultdict(list)
    fixtures: dict[str, list[Cost]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for path in records:
        record = json.loads(path.read_text())
        listening = {item["fixture"] for item in record["fixtures"] if "socket" in item["needs"]}
        cases: dict[str, list[Cost]] = defaultdict(list)
        for phase in record["phases"]:
            needs = ["socket"] if listening & set(phase.get("used", ())) else []
            cases[phase["test"]].append(phase["own"] | {"needs": [*phase["own"]["needs"], *needs]})
            seconds[file_of(phase["test"])] += phase["seconds"]
        for case, phases in cases.items():
            tests[function_of(case)].append(_sum(phases))
        for item in record["fixtures"]:
            fixtures[item["fixture"]].append(item)
    old = recorded()
    others = {
        name: cost
        for name, cost in old["tests"].items()
        if file_of(name) not in seconds and (ROOT / file_of(name)).exists()
    }
    files = {**old["files"], **{name: round(value, 1) for name, value in seconds.items()}}
    return {
        "files": {name: files[name] for name in sorted(files) if (ROOT / name).exists()},
        "tests": dict(sorted({**others, **_noteworthy(tests)}.items())),
        "fixtures": dict(sorted({**old["fixtures"], **_noteworthy(fixtures)}.items())),
    }


def _sum(costs: list[Cost]) -> Cost:
    return Cost(
        seconds=sum(cost["seconds"] for cost in costs),
        cpu=sum(cost["cpu"] for cost in costs),
        needs=sorted({need for cost in costs for need in cost["needs"]}),
    )


def _noteworthy(costs: dict[str, list[Cost]]) -> dict[str, Cost]:
    means = {
        name: Cost(
            seconds=round(sum(cost["seconds"] for cost in each) / len(each), 1),
            cpu=round(sum(cost["cpu"] for cost in each) / len(each), 1),
            needs=sorted({need for cost in each for need in cost["needs"]}),
        )
        for name, each in costs.items()
    }
    return {name: cost for name, cost in means.items() if cost["seconds"] >= _NOTEWORTHY or cost["needs"]}


def function_of(nodeid: str) -> str:
    """A test's address without its parameters."""
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    """The file of a test's address."""
    return nodeid.partition("::")[0]


@cache
def recorded() -> Record:
    """The content of tests/durations.json."""
    content: Record = {"files": {}, "tests": {}, "fixtures": {}}
    if DURATIONS.exists():
        content.update(json.loads(DURATIONS.read_text()))
    return content


def seconds_of_files() -> dict[str, float]:
    """How long each test file takes, as recorded."""
    return recorded()["files"]


def is_quick(item: pytest.Item) -> bool:
    """Whether `--quick` runs a test: neither it nor a fixture of its closure is recorded to listen or to be slow.

    A test that is new in a recorded file runs, until the next record knows better; those of a new file wait for it.
    """
    record = recorded()
    if file_of(item.nodeid) not in record["files"] or _exceeds(
        record["tests"].get(function_of(item.nodeid)), _QUICK_TEST
    ):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    return not any(
        _exceeds(record["fixtures"].get(f"{definition.baseid}::{definition.argname}"), _QUICK_FIXTURE)
        for definitions in fixtures.values()
        for definition in definitions[-1:]
    )


def _exceeds(cost: Cost | None, limit: float) -> bool:
    return cost is not None and ("socket" in cost["needs"] or cost["cpu"] > limit or cost["seconds"] > 5 * limit)


def _write(content: Record) -> None:
    """Write tests/durations.json with one line for each file, test and fixture."""
    sections = []
    for name, costs in content.items():
        assert isinstance(costs, dict)
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(cost)}" for key, cost in costs.items())
        sections.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    DURATIONS.write_text("{\n" + ",\n".join(sections) + "\n}\n")


if __name__ == "__main__":
    _write(merge(Path(name) for name in sys.argv[1:]))
