"""Approval: a promotion that a person must agree to waits, shows what was found, and goes on from the answer."""

import getpass
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import requests
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types.entrypoint import EntrypointType

from support import scale
from support.reports import data_of


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, machine: Any, make: Any) -> Any:
    """A machine that released a model with two channels that need a person, and the deployment that asks for one.

    The module of the function that shows the model's samples ends the process that imports it.
    """
    from flows.promote import promote

    folder = tmp_path_factory.mktemp("model")
    make.onnx(folder)
    (folder / "words.py").write_text("import os\n\nos._exit(3)\n")
    rebuild = scale.choose(normal={}, long={"rebuild": "required"})
    channels = {"yes": {"approval": "required", **rebuild}, "no": {"approval": "required"}}
    result = machine.release(make.file(folder, channels=channels, validate={"show": "words:show"}))
    assert result.code == 0, result.stderr
    with temporary_settings({PREFECT_API_URL: _api(machine)}):
        promote.to_deployment("tiny", entrypoint_type=EntrypointType.MODULE_PATH).apply()
    return machine


def _api(machine: Any) -> str:
    return str(machine.settings["TVMFLOW_PREFECT_API_URL"])


def _work(machine: Any, flow_run: str) -> str:
    """Do what a worker does with a flow run that is due; return the type of the state that the run is in then."""
    machine.run("-m", "prefect.engine", flow_run)
    return str(requests.get(f"{_api(machine)}/flow_runs/{flow_run}", timeout=30).json()["state_type"])


def _ask(machine: Any, channel: str) -> dict[str, Any]:
    """Ask for a promotion, and wait until it waits for an answer."""
    machine.mlflow.set_registered_model_alias("tiny", channel, "1")
    result = machine.run("promote", "tiny", "1", "--channel", channel, "--why", "please", "--json")
    assert result.code == 0, result.stderr
    assert (result.document["status"], result.document["moved"]) == ("waiting", False)
    assert _work(machine, result.document["flow_run_id"]) == "PAUSED"
    requests = _waiting(machine, channel)
    assert requests is not None
    assert requests["run"] == result.document["flow_run_id"]
    return requests


def _waiting(machine: Any, channel: str) -> dict[str, Any] | None:
    listing = machine.run("approve", "--json")
    assert listing.code == 0, listing.stderr
    return next((item for item in listing.document if item["channel"] == channel), None)


def _held(machine: Any, channel: str) -> tuple[str | None, str | None]:
    """The versions of pointer and alias."""
    requests = machine.channel("tiny", channel)
    pointer = None if requests is None else requests.version
    alias = machine.mlflow.get_registered_model("tiny").aliases.get(channel)
    return pointer, None if alias is None else str(alias)


def _page(machine: Any) -> str:
    """The page of the release as `tvmflow report` writes it now."""
    file = machine.home.parent / "page.html"
    written = machine.run("report", "tiny", "1", "-o", file)
    assert written.code == 0, written.stderr
    return str(file.read_text())


def _section(page: str, name: str) -> str:
    """The text of a section, whose heading has the id `name`."""
    return html.unescape(page.partition(f'<h2 id="{name}">')[2].partition("</section>")[0])


def _verdict(machine: Any, flow_run: str) -> tuple[Any, dict[str, Any], str]:
    """The one run in MLflow of a flow run, its verdict and its report."""
    client = machine.mlflow
    experiment = client.get_experiment_by_name("tvmflow").experiment_id
    (run,) = client.search_runs([experiment], f"tags.`tvmflow.flow_run` = '{flow_run}'")
    files = [Path(client.download_artifacts(run.info.run_id, name)) for name in ("verdict.json", "report.md")]
    return run, json.loads(files[0].read_text()), files[1].read_text()


def test_an_approved_promotion_goes_on_and_moves_the_channel(released: Any) -> None:
    waits = _ask(released, "yes")
    assert "yes from nothing to 1" in waits["report"]
    assert "gives the original's outputs within" in waits["report"]
    assert _held(released, "yes")[0] is None
    run, verdict, report = _verdict(released, waits["run"])
    assert (run.data.tags["tvmflow.verdict"], verdict["verdict"], report) == ("waiting", "waiting", waits["report"])
    assert waits["run"][:8] in released.run("approve").stdout

    approved = released.run("approve", waits["run"][:13], "--why", "fine", "--json")
    assert approved.code == 0, approved.stderr
    assert _work(released, waits["run"]) == "COMPLETED"
    assert _held(released, "yes") == ("1", "1")
    (move,) = released.channel("tiny", "yes").moves
    assert move.why.startswith("please; approved by ")
    assert move.why.endswith("; fine")
    run, verdict, _ = _verdict(released, waits["run"])
    assert run.info.status == "FINISHED"
    assert (run.data.tags["tvmflow.verdict"], verdict["approval"]["approve"]) == ("passed", True)

    page = _page(released)
    trust = _section(page, "trust")
    assert f"approved by {verdict['approval']['who']} (fine)" in trust
    assert verdict["approval"]["who"].startswith(f"{getpass.getuser()}@")
    (promotion,) = data_of(page)["standing"]["promotions"]
    assert (promotion["channel"], promotion["approval"]["approve"]) == ("yes", True)
    if scale.is_long():
        assert re.search(r"<li>target 'native' is the same when built again: ONNX file, .*mod\.so", trust)
        assert [check["passed"] for check in promotion["checks"] if check["name"] == "rebuild"] == [True]

    again = released.run("approve", waits["run"])
    assert again.code == 1
    assert "no promotion" in again.sentence


def test_a_function_that_ends_its_process_costs_the_samples_their_texts_and_not_the_release(released: Any) -> None:
    page = _page(released)
    what = "function that shows a sample 'words:show' ended with exit code 3"
    assert f"The samples are not shown as text: {what}." in _section(page, "worst-samples")
    (insight,) = data_of(page)["insights"].values()
    assert len(insight["worst"]) > 0
    assert {sample["text"] for sample in insight["worst"]} == {None}


@pytest.mark.long
def test_a_rejected_promotion_leaves_the_channel_and_puts_the_alias_back(released: Any) -> None:
    waits = _ask(released, "no")
    rejected = released.run("approve", waits["run"], "--reject", "--why", "not on a Friday", "--json")
    assert rejected.code == 0, rejected.stderr
    assert _work(released, waits["run"]) == "FAILED"
    assert _held(released, "no") == (None, None)
    run, verdict, _ = _verdict(released, waits["run"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["tvmflow.verdict"] == "refused"
    assert "rejected it (not on a Friday)" in verdict["reasons"][0]
    tags = released.mlflow.get_model_version("tiny", "1").tags
    assert "rejected it (not on a Friday)" in tags["tvmflow.refused.no"]
