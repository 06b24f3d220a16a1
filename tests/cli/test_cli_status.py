"""`tvmflow status`: what it reads of the store, and what it says where MLflow does not answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.channels import move_channel
from support.databases import Databases
from support.processes import CommandResult
from support.releases import make_measurements, make_release, make_target
from support.reports import data_of, unexplained_figures
from tvmflow.bundle import keygen, public_key, sha256_file
from tvmflow.documents.verdict import Verdict
from tvmflow.promotion.verdicts import log_verdict
from tvmflow.services import open_services, open_store, record_sections
from tvmflow.settings import Settings
from tvmflow.spec import Policy, parse
from tvmflow.store import channels

Command = Callable[..., CommandResult]

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    keygen(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture(autouse=True)
def _house(tvmflow: Command, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that signs for ten days, with seven releases of "net" that get slower, and one of "other"."""
    for name, value in {
        "TVMFLOW_HOME": str(tmp_path / "state"),
        "TVMFLOW_MLFLOW_TRACKING_URI": NOBODY,
        "TVMFLOW_SIGNING_KEY": str(key),
        "TVMFLOW_STATEMENT_DAYS": "10",
    }.items():
        monkeypatch.setenv(name, value)
    blob = tmp_path / "blob"
    blob.write_bytes(b"12345678")
    with open_store(Settings.load()) as store:
        for version in range(1, 8):
            target = make_target(sha256=sha256_file(blob), size=8, measurements=make_measurements(1 + version / 100))
            store.publish(make_release("net", str(version), target), [(blob, target.bundle.sha256)])
        store.publish(make_release("other"), ())
        move_channel(store, "net", "production", "6")
        channels.wish(store, "net", "production", "7", who="bob@desk", why="it is <new>")


def test_models_wishes_signatures_and_drifts_are_shown_though_mlflow_is_away(tvmflow: Command, key: Path) -> None:
    result = tvmflow("status", "--json", "--html", "status.html")
    assert result.code == 0, result.stderr
    document = result.document
    net, other = document["channels"]
    assert (net["name"], net["channel"], net["version"], net["newer"]) == ("net", "production", "6", ["7"])
    assert (net["p50_ms"], net["wish"]["version"], net["wish"]["who"]) == (1.06, "7", "bob@desk")
    assert (net["signature"]["key"], net["signature"]["fault"]) == (public_key(key), None)
    assert 9.9 < net["signature"]["days"] <= 10
    assert (other["name"], other["channel"], other["newer"]) == ("other", None, ["1"])
    assert {drift["figure"] for drift in document["drifts"]} >= {"p50 latency, ms"}
    (fault,) = document["faults"]
    assert NOBODY in fault
    page = Path("status.html").read_text()
    assert data_of(page)["channels"] == document["channels"]
    assert unexplained_figures(page) == []
    table = tvmflow("status").stdout
    assert "tvmflow history net --figures" in table
    assert "bob@desk asked for 7 on net@production" in table


def test_a_step_is_named_with_its_release_and_its_date(tvmflow: Command, tmp_path: Path) -> None:
    with open_store(Settings.load()) as store:
        for version in range(1, 14):
            p50 = (1.0 if version < 11 else 1.25) + version % 3 / 1000
            target = make_target(sha256=sha256_file(tmp_path / "blob"), size=8, measurements=make_measurements(p50))
            release = make_release("stepped", str(version), target, created_at=f"2026-11-{version:02}T10:00:00+00:00")
            store.publish(release, [(tmp_path / "blob", target.bundle.sha256)])
    sentence = "native: p50 latency, ms stepped from 1.001 to 1.251 at release 11 of 2026-11-11"
    assert sentence in tvmflow("history", "stepped", "--figures").stdout
    steps = tvmflow("history", "stepped", "--figures", "--json").document["steps"]
    assert {(step["figure"], step["version"]) for step in steps} >= {("p50 latency, ms", "11")}
    status = tvmflow("status", "--json", "--html", "status.html").document
    assert {(step["name"], step["figure"]) for step in status["steps"]} >= {("stepped", "p50 latency, ms")}
    assert any(task["sentence"].startswith(f"stepped, {sentence}") for task in status["tasks"])
    assert unexplained_figures(Path("status.html").read_text()) == []


def test_a_statement_that_does_not_hold_is_a_fault_of_its_channel(
    tvmflow: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keygen(tmp_path / "other-key")
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", str(tmp_path / "other-key.pub"))
    document = tvmflow("status", "--json").document
    assert "is not trusted" in document["channels"][0]["signature"]["fault"]
    assert "tvmflow verify release://net@production" in [task["command"] for task in document["tasks"]]


def test_a_statement_counts_as_late_when_half_of_its_days_are_over(
    tvmflow: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not tvmflow("status", "--json").document["channels"][0]["signature"]["is_late"]
    monkeypatch.setenv("TVMFLOW_STATEMENT_DAYS", "30")
    assert tvmflow("status", "--json").document["channels"][0]["signature"]["is_late"]


def test_a_prefect_server_that_is_away_is_a_fault(tvmflow: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFLOW_PREFECT_API_URL", f"{NOBODY}/api")
    result = tvmflow("status", "--json")
    assert result.code == 0, result.stderr
    assert [f"{NOBODY}/api" in fault for fault in result.document["faults"]] == [True, False]


def test_a_model_with_a_store_and_an_experiment_of_its_own_is_shown(
    tvmflow: Command, tmp_path: Path, databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TVMFLOW_MLFLOW_TRACKING_URI")
    databases.mlflow(tmp_path / "state" / "mlflow" / "mlflow.db")
    (tmp_path / "model.onnx").touch()
    sections: dict[str, Any] = {"store": {"prefix": "apart"}, "registry": {"experiment": "other"}}
    inputs = [{"name": "x", "shape": [1]}]
    spec = parse({"name": "apart", "model": {"onnx": "model.onnx"}, "inputs": inputs, **sections}, tmp_path)
    settings = Settings.load()
    record_sections(settings, spec)
    verdict = Verdict(
        name="apart", version="1", channel="staging", from_version=None, verdict="passed", reasons=(), checks=(),
        policy=Policy(), approval=None, who="ann", why="", flow_run="first",
    )  # fmt: skip
    with open_services(settings, spec.store, spec.registry) as services:
        release = make_release("apart", mlflow_run_id=services.registry.start_run("apart", {}, {}))
        services.store.publish(release, ())
        move_channel(services.store, "apart", "staging", "1")
        log_verdict(services, release, verdict, report="", files={})
    assert tvmflow("verdict", "apart", "1", "--channel", "staging", "--json").document["verdict"] == "passed"
    shown = {item["name"]: item for item in tvmflow("status", "--json").document["channels"]}
    assert list(shown) == ["net", "other", "apart"]
    assert shown["apart"]["verdict"] == {"version": "1", "verdict": "passed", "reasons": []}
    assert [item["name"] for item in tvmflow("list", "--json").document][-2:] == ["other", "apart"]
    assert tvmflow("history", "apart", "--figures", "--json").code == 0


def test_a_page_that_cannot_be_written_is_one_sentence(tvmflow: Command) -> None:
    result = tvmflow("status", "--html", "absent/status.html")
    assert (result.code, "absent/status.html" in result.sentence) == (1, True)
