"""`tvmflow report` and `tvmflow diff`: a release's page with what became of it, and what differs between two."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.channels import move_channel
from support.processes import CommandResult
from support.releases import make_compared, make_release
from support.reports import data_of, unexplained_figures
from tvmflow.bundle import keygen, public_key, sha256_file
from tvmflow.documents.release import Blob, Provenance
from tvmflow.report.page import write
from tvmflow.report.release import write_page
from tvmflow.report.release_data import make_data
from tvmflow.services import open_store
from tvmflow.settings import Settings
from tvmflow.store.keys import release_key, statement_key

Command = Callable[..., CommandResult]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _releases(tvmflow: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two releases without targets in a store of their own, which differ in their operator set."""
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "state"))
    with open_store(Settings.load()) as store:
        for version, opset in (("1", 17), ("2", 18)):
            provenance = Provenance(onnx="sha256:" + "0" * 64, opset=opset)
            store.publish(make_release("net", version, provenance=provenance), ())


def _diff(tvmflow: Command, *options: object) -> CommandResult:
    return tvmflow("diff", "net", "1", "2", *options)


def test_the_page_says_who_signed_and_moved_the_release_though_mlflow_is_away(
    tvmflow: Command, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFLOW_SIGNING_KEY", str(key))
    monkeypatch.setenv("TVMFLOW_MLFLOW_TRACKING_URI", NOBODY)
    file = tmp_path / "page.html"
    with open_store(Settings.load()) as store:
        release = make_release("signed")
        file.write_text(write_page(make_data(release, "production", None, (), {}, ())))
        blob = Blob(sha256=sha256_file(file), size=file.stat().st_size)
        store.publish(release.model_copy(update={"report": blob}), [(file, blob.sha256)])
        move_channel(store, "signed", "production", "1")
    keygen(tmp_path / "other")
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", str(tmp_path / "other.pub"))
    result = tvmflow("report", "signed", "1", "-o", "report.html")
    assert result.code == 0, result.stderr
    standing = data_of(Path("report.html").read_text())["standing"]
    assert (standing["signer"], standing["is_checked"]) == (public_key(key), True)
    (event,) = standing["events"]
    assert (event["channel"], event["what"]) == ("production", "moved from nothing to 1")
    *distrust, silence = standing["faults"]
    assert [fault.partition(" is signed with the key")[0] for fault in distrust] == [
        "The release signed 1",
        "The channel signed@production",
    ]
    assert NOBODY in silence
    with open_store(Settings.load()) as store:
        store.objects.put(statement_key("signed", "1"), b"no statement", "damage it")
    assert tvmflow("report", "signed", "1", "-o", "report.html").code == 0
    standing = data_of(Path("report.html").read_text())["standing"]
    assert standing["signer"] is None
    assert len(standing["faults"]) >= 2


def test_what_differs_is_printed_and_written(tvmflow: Command) -> None:
    result = _diff(tvmflow, "--json", "--html", "diff.html")
    (row_of_change,) = [row for row in result.document["changes"] if row["same"] is False]
    assert (row_of_change["name"], row_of_change["before"], row_of_change["now"]) == ("operator set", "17", "18")
    assert "operator set" in Path("diff.html").read_text()


def test_releases_that_do_not_differ_are_said_not_to(tvmflow: Command) -> None:
    with open_store(Settings.load()) as store:
        provenance = Provenance(onnx="sha256:" + "0" * 64, opset=18, code={"model.py": "0" * 64}, packages={})
        for version in ("3", "4"):
            store.publish(make_release("net", version, provenance=provenance), ())
    assert tvmflow("diff", "net", "3", "4").stdout == "net 3 and 4 do not differ\n"


@pytest.mark.parametrize(("newer", "code"), [("2", "not recorded"), ("3", "recorded")])
def test_what_a_release_of_format_2_does_not_record_is_not_called_the_same(
    tvmflow: Command, newer: str, code: str
) -> None:
    with open_store(Settings.load()) as store:
        provenance = Provenance(onnx="sha256:" + "0" * 64, opset=18, code={"model.py": "0" * 64}, packages={})
        store.publish(make_release("net", "3", provenance=provenance), ())
        for version in ("1", "2"):
            # As an older tvmflow wrote it.
            document = json.loads(store.objects.get(release_key("net", version)) or b"")
            for name in ("training", "held_out", "code", "packages"):
                del document["provenance"][name]
            store.objects.put(release_key("net", version), json.dumps({**document, "format": 2}).encode(), "write it")
    result = tvmflow("diff", "net", "1", newer, "--json", "--html", "diff.html")
    rows = {row["name"]: (row["before"], row["now"], row["same"]) for row in result.document["changes"]}
    assert rows["code files"] == rows["packages"] == ("not recorded", code, None)
    assert rows["training function"] == ("not recorded", "-" if newer == "3" else code, None)
    assert re.search(f">code files</t[dh]><td>not recorded</td><td>{code}</td>", Path("diff.html").read_text())
    lines = tvmflow("diff", "net", "1", newer).stdout.splitlines()
    assert ["all", "code files", "not recorded", code] in [re.split(" {2,}", line.strip()) for line in lines]


def test_the_layers_that_lost_time_are_named(tvmflow: Command, tmp_path: Path) -> None:
    with open_store(Settings.load()) as store:
        for version, ms in (("3", 1.5), ("4", 4.0)):
            file = tmp_path / f"{version}.html"
            layers = [{"scope": ["stem"], "ms": 0.25}, {"scope": ["block", "block.conv"], "ms": ms}]
            file.write_text(write("page", {}, {"insights": {"native": {"layers": layers}}}))
            blob = Blob(sha256=sha256_file(file), size=file.stat().st_size)
            store.publish(make_release("net", version, report=blob), [(file, blob.sha256)])
    result = tvmflow("diff", "net", "3", "4", "--json", "--html", "diff.html")
    slower = {row["name"]: (row["before"], row["ms"]) for row in result.document["slower"]["native"]}
    assert slower == {"block.conv": (1.5, 4.0), "stem": (0.25, 0.25)}
    page = Path("diff.html").read_text()
    assert "the layers that lost most since net 3" in page
    assert unexplained_figures(page) == []
    lines = tvmflow("diff", "net", "3", "4").stdout.splitlines()
    assert [line.split() for line in lines if "layer" in line] == [["native", "layer", "block.conv,", "ms", "1.5", "4"]]


def test_a_slower_machine_is_told_from_a_slower_build(tvmflow: Command, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345678")
    digest = sha256_file(tmp_path / "blob")
    with open_store(Settings.load()) as store:
        for version, seconds in (("3", 1.0), ("4", 1.5)):
            release = make_compared(version, seconds, reference=seconds, peer=seconds, sha256=digest)
            store.publish(release, [(tmp_path / "blob", digest)])
    (slowdown,) = tvmflow("diff", "net", "3", "4", "--json").document["slowdowns"]
    assert (slowdown["target"], slowdown["before"], slowdown["slower"]) == (
        "native",
        "3",
        ["reference kernel, us", "onnxruntime"],
    )
    sentence = "native takes 1.50 times as long as in 3. The machine was slower:"
    assert sentence in tvmflow("diff", "net", "3", "4").stdout
