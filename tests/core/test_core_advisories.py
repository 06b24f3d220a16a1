"""Advisories: which versions one affects, and files that cannot be used."""

import json
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tvmflow.advisories import Advisories, list_installed, list_packages
from tvmflow.errors import SettingsError

NOW = datetime.now(UTC)
VERSIONS = ["0.9", "1.0", "1.4.9", "1.5", "1.7", "2.0", "2.1.dev1", "2.1"]


def advisory(*events: dict[str, str], **fields: Any) -> dict[str, Any]:
    """An advisory on the versions of NumPy within a range."""
    affected = {
        "package": {"ecosystem": "PyPI", "name": "NumPy"},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
        **fields.pop("affected", {}),
    }
    document = {"id": "PYSEC-1", "modified": NOW.isoformat(), "summary": "reads past the end", "affected": [affected]}
    return {**document, **fields}


def read(path: Path, *documents: dict[str, Any], days: float = 1) -> Advisories:
    path.write_text(json.dumps(documents))
    return Advisories.read(path, days)


@pytest.mark.parametrize(
    ("events", "affected"),
    [
        ([{"introduced": "0"}], VERSIONS),
        ([{"introduced": "1.0"}, {"fixed": "1.5"}], ["1.0", "1.4.9"]),
        ([{"introduced": "1.0"}, {"last_affected": "1.5"}], ["1.0", "1.4.9", "1.5"]),
        # The order of events says nothing.
        (
            [{"fixed": "2.1"}, {"introduced": "2.0"}, {"fixed": "1.5"}, {"introduced": "0"}],
            ["0.9", "1.0", "1.4.9", "2.0", "2.1.dev1"],
        ),
        ([{"introduced": "0"}, {"fixed": "what is this"}], VERSIONS),
        ([], []),
    ],
)
def test_a_range_affects_the_versions_between_its_events(
    tmp_path: Path, events: list[dict[str, str]], affected: list[str]
) -> None:
    advisories = read(tmp_path / "osv.json", advisory(*events))
    assert [version for version in VERSIONS if advisories.find({"numpy": version})] == affected


def test_versions_that_are_listed_are_affected_however_they_are_written(tmp_path: Path) -> None:
    advisories = read(tmp_path / "osv.json", advisory(affected={"versions": ["1.0.0"]}))
    assert [version for version in VERSIONS if advisories.find({"numpy": version})] == ["1.0"]


@pytest.mark.parametrize(
    "change",
    [
        {"withdrawn": NOW.isoformat()},
        {"affected": {"package": {"ecosystem": "Debian:12", "name": "numpy"}}},
        {"affected": {"package": {"ecosystem": "PyPI", "name": "numpy-stl"}}},
        {"affected": {"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}},
    ],
)
def test_what_is_withdrawn_or_about_something_else_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    assert len(read(tmp_path / "osv.json", advisory({"introduced": "0"})).find({"numpy": "1.0"})) == 1
    assert read(tmp_path / "osv.json", advisory({"introduced": "0"}, **change)).find({"numpy": "1.0"}) == ()


def test_two_databases_name_one_vulnerability_once(tmp_path: Path) -> None:
    entries = [
        advisory({"introduced": "0"}),
        advisory({"introduced": "0"}, id="GHSA-1", aliases=["PYSEC-1", "CVE-1"]),
        advisory({"introduced": "0"}, id="GHSA-2", summary=""),
    ]
    assert [str(each) for each in read(tmp_path / "osv.json", *entries).find({"numpy": "1.0"})] == [
        "numpy 1.0 has PYSEC-1 (reads past the end)",
        "numpy 1.0 has GHSA-2",
    ]


def test_an_archive_a_folder_and_an_answer_of_the_service_are_read(tmp_path: Path) -> None:
    entry = advisory({"introduced": "0"})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "PYSEC-1.json").write_text(json.dumps(entry))
    (tmp_path / "answer.json").write_text(json.dumps({"vulns": [entry]}))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "folder" / "PYSEC-1.json", "PYSEC-1.json")
    for name in ("folder", "folder/PYSEC-1.json", "answer.json", "all.zip"):
        assert len(Advisories.read(tmp_path / name, 1).find({"numpy": "1.0"})) == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "3", "{}", "[3]", '[{"id": "PYSEC-1"}]', '[{"id": "PYSEC-1", "modified": "2026-01-01"}]']
)
def test_a_file_without_advisories_is_refused(tmp_path: Path, content: str) -> None:
    for name in ("osv.json", "osv.zip"):
        (tmp_path / name).write_text(content)
        with pytest.raises(SettingsError, match=name):
            Advisories.read(tmp_path / name, 1)


def test_a_file_that_is_missing_or_old_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="missing"):
        Advisories.read(tmp_path / "missing.json", 1)
    old = advisory({"introduced": "0"}, modified=(NOW - timedelta(days=3)).isoformat())
    assert len(read(tmp_path / "osv.json", old, days=4).entries) == 1
    with pytest.raises(SettingsError, match=f"{NOW - timedelta(days=3):%Y-%m-%d}, more than 2 days ago"):
        read(tmp_path / "osv.json", old, days=2)


def test_of_all_packages_the_damaged_are_left_out_and_the_first_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name, text in (
        ("first", "Some.Thing-2.0", "Metadata-Version: 2.1\nName: Some.Thing\nVersion: 2.0\n"),
        ("first", "damaged-1.0", None),
        ("first", "unversioned-1.0", "Metadata-Version: 2.1\nName: unversioned\n"),
        ("second", "Some.Thing-1.0", "Metadata-Version: 2.1\nName: Some.Thing\nVersion: 1.0\n"),
    ):
        place = tmp_path / folder / f"{name}.dist-info"
        place.mkdir(parents=True)
        if text is not None:
            (place / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "second"))
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    packages = list_installed()
    assert packages["some-thing"] == "2.0"
    assert packages.keys().isdisjoint({"damaged", "unversioned"})
    assert list(packages) == sorted(packages)
    assert packages.items() >= list_packages().items()


def test_the_packages_are_those_that_a_device_installs() -> None:
    packages = list_packages()
    assert {"tvmflow", "apache-tvm", "apache-tvm-ffi", "numpy", "ml-dtypes"} <= packages.keys()
    # The pipeline's, and those of TVM's extras.
    assert packages.keys().isdisjoint({"mlflow", "prefect", "torch", "pytest"})
