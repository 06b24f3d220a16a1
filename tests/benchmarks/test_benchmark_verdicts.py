"""`benchmarks/verdicts.py`: its table, its goals and its picture."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

Import = Callable[[str], ModuleType]


def _outcomes(module: ModuleType, slowdown: float, **verdicts: int) -> list[object]:
    """So many outcomes of each verdict."""
    return [
        module.Outcome(slowdown=slowdown, verdict=verdict, ratio=1.0, pairs=20, seconds=10.0)
        for verdict, number in verdicts.items()
        for _ in range(number)
    ]


def test_the_goal_is_that_the_bundle_itself_passes_and_slower_ones_are_caught(module: Import) -> None:
    verdicts = module("verdicts")
    passed = _outcomes(verdicts, 0.0, **{"pass": 50})
    caught = [*_outcomes(verdicts, 2.0, fail=45, undecided=5), *_outcomes(verdicts, 10.0, fail=50)]
    at_the_bound = _outcomes(verdicts, 1.0, undecided=40, fail=10)
    assert verdicts.misses(verdicts.summarise([*passed, *caught, *at_the_bound])) == []
    undecided = _outcomes(verdicts, 0.0, undecided=1)
    misses = _outcomes(verdicts, 5.0, fail=49, undecided=1)
    assert verdicts.misses(verdicts.summarise([*passed, *undecided, *misses])) == [
        "slower by 0 %: pass in 98%, the goal is 100%",
        "slower by 5 %: fail in 98%, the goal is 100%",
    ]


def test_the_picture_has_the_shares_in_words_as_well(module: Import) -> None:
    verdicts = module("verdicts")
    rows = verdicts.summarise(_outcomes(verdicts, 2.0, fail=9, undecided=1))
    chart = ET.fromstring(verdicts.picture(rows, 1.01))  # noqa: S314
    description = chart.find("{http://www.w3.org/2000/svg}desc")
    assert description is not None
    assert description.text == "slower by 2 %: pass 0%, undecided 10%, fail 90%"


@pytest.mark.long
def test_verdicts_are_made_and_kept(command: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    figures, chart = tmp_path / "figures.json", tmp_path / "verdicts.svg"
    options = (
        "--model",
        "digits",
        "--slowdowns",
        "100",
        "--verdicts",
        "1",
        "--json",
        str(figures),
        "--svg",
        str(chart),
    )
    process = command("verdicts", *options)
    assert process.returncode == 0, process.stderr
    (row,) = json.loads(figures.read_text())["rows"]
    assert row["shares"] == {"pass": 0.0, "undecided": 0.0, "fail": 1.0}
    assert row["ratio"] > 1.5
    assert "slower by 100 %" in chart.read_text()
    again = command("verdicts", *options)
    assert "100 %: fail" in process.stderr
    assert "100 %: fail" not in again.stderr
