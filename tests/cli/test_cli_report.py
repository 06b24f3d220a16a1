"""`tvmflow diff`: what differs between two releases, and a place where its page cannot be written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes import CommandResult
from support.releases import make_release
from tvmflow import settings as machine
from tvmflow.release import Provenance
from tvmflow.services import open_store

Command = Callable[..., CommandResult]


@pytest.fixture(autouse=True)
def _releases(tvmflow: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two releases without targets in a store of their own, which differ in their operator set."""
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "state"))
    with open_store(machine.load()) as store:
        for version, opset in (("1", 17), ("2", 18)):
            provenance = Provenance(onnx="sha256:" + "0" * 64, opset=opset)
            store.publish(make_release("net", version, provenance=provenance), ())


def _diff(tvmflow: Command, *options: object) -> CommandResult:
    return tvmflow("diff", "net", "1", "2", *options)


def test_what_differs_is_printed_and_written(tvmflow: Command) -> None:
    result = _diff(tvmflow, "--json", "--html", "diff.html")
    (row_of_change,) = [row for row in result.document["changes"] if row["now"] != row["before"]]
    assert (row_of_change["name"], row_of_change["before"], row_of_change["now"]) == ("operator set", "17", "18")
    assert "operator set" in Path("diff.html").read_text()


def test_a_page_that_cannot_be_written_is_one_sentence(tvmflow: Command) -> None:
    result = _diff(tvmflow, "--html", "absent/diff.html")
    assert (result.code, result.sentence) == (
        1,
        "'absent/diff.html' cannot be written (No such file or directory); choose another place",
    )
