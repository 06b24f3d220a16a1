"""Approval: a promotion that a person must agree to waits, shows what was found, and goes on from the answer."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from support.waits import wait_until

# What a worker does: it takes the runs of the deployment promote/tiny from the server, each into a process of its own.
_RUNNER = """
import asyncio
from prefect.runner import Runner
from flows.promote import promote

async def main():
    runner = Runner(name="tiny", query_seconds=1)
    await runner.add_deployment(await promote.ato_deployment("tiny"))
    await runner.start()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, machine: Any, make: Any) -> Any:
    """A machine that released a model with two channels that need a person."""
    folder = tmp_path_factory.mktemp("model")
    make.onnx(folder)
    channels = {"yes": {"approval": "required"}, "no": {"approval": "required"}}
    result = machine.release(make.file(folder, channels=channels))
    assert result.code == 0, result.stderr
    return machine


@pytest.fixture(scope="module")
def runner(released: Any, make: Any) -> Iterator[Any]:
    with (released.home / "runner.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUNNER],
            env={**released.environment, "PREFECT_API_URL": released.settings["TVMFLOW_PREFECT_API_URL"]},
            cwd=released.home.parent,
            stdout=log,
            stderr=log,
            text=True,
        )
    try:
        wait_until(lambda: _deployed(released), message="the deployment is there", process=process)
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _deployed(machine: Any) -> bool:
    return requests.get(f"{_api(machine)}/deployments/name/promote/tiny", timeout=30).ok


def _api(machine: Any) -> str:
    return str(machine.settings["TVMFLOW_PREFECT_API_URL"])


def _is_in(machine: Any, flow_run: str, *states: str) -> Callable[[], bool]:
    """Whether a flow run is in one of these states, by types of Prefect's: asking a command would start a process."""
    address = f"{_api(machine)}/flow_runs/{flow_run}"
    return lambda: requests.get(address, timeout=30).json()["state_type"] in states


def _ask(machine: Any, runner: Any, make: Any, channel: str) -> dict[str, Any]:
    """Ask for a promotion, and wait until it waits for an answer."""
    machine.mlflow.set_registered_model_alias("tiny", channel, "1")
    result = machine.run("promote", "tiny", "1", "--channel", channel, "--why", "please", "--json")
    assert result.code == 0, result.stderr
    assert (result.document["status"], result.document["moved"]) == ("waiting", False)
    waits = _is_in(machine, result.document["flow_run_id"], "PAUSED")
    wait_until(waits, message="it waits", process=runner)
    found = _waiting(machine, channel)
    assert found is not None
    assert found["run"] == result.document["flow_run_id"]
    return found


def _waiting(machine: Any, channel: str) -> dict[str, Any] | None:
    listing = machine.run("approve", "--json")
    assert listing.code == 0, listing.stderr
    return next((item for item in listing.document if item["channel"] == channel), None)


def _held(machine: Any, channel: str) -> tuple[str | None, str | None]:
    """The versions of pointer and alias."""
    found = machine.channel("tiny", channel)
    pointer = None if found is None else found.version
    alias = machine.mlflow.get_registered_model("tiny").aliases.get(channel)
    return pointer, None if alias is None else str(alias)


def _verdict(machine: Any, flow_run: str) -> tuple[Any, dict[str, Any], str]:
    """The one run in MLflow of a flow run, its verdict and its report."""
    client = machine.mlflow
    experiment = client.get_experiment_by_name("tvmflow").experiment_id
    (run,) = client.search_runs([experiment], f"tags.`tvmflow.flow_run` = '{flow_run}'")
    files = [Path(client.download_artifacts(run.info.run_id, name)) for name in ("verdict.json", "report.md")]
    return run, json.loads(files[0].read_text()), files[1].read_text()


def test_an_approved_promotion_goes_on_and_moves_the_channel(released: Any, runner: Any, make: Any) -> None:
    waits = _ask(released, runner, make, "yes")
    assert "yes from nothing to 1" in waits["report"]
    assert "gives the original's outputs within" in waits["report"]
    assert _held(released, "yes")[0] is None
    run, verdict, report = _verdict(released, waits["run"])
    assert (run.data.tags["tvmflow.verdict"], verdict["verdict"], report) == ("waiting", "waiting", waits["report"])
    assert waits["run"][:8] in released.run("approve").stdout

    approved = released.run("approve", waits["run"][:13], "--why", "fine", "--json")
    assert approved.code == 0, approved.stderr
    wait_until(_is_in(released, waits["run"], "COMPLETED", "FAILED"), message="the run goes on", process=runner)
    assert _held(released, "yes") == ("1", "1")
    (move,) = released.channel("tiny", "yes").history
    assert move.why.startswith("please; approved by ")
    assert move.why.endswith("; fine")
    run, verdict, _ = _verdict(released, waits["run"])
    assert run.info.status == "FINISHED"
    assert (run.data.tags["tvmflow.verdict"], verdict["approval"]["approve"]) == ("passed", True)

    again = released.run("approve", waits["run"])
    assert again.code == 1
    assert "no promotion" in again.sentence


def test_a_rejected_promotion_leaves_the_channel_and_puts_the_alias_back(released: Any, runner: Any, make: Any) -> None:
    waits = _ask(released, runner, make, "no")
    rejected = released.run("approve", waits["run"], "--reject", "--why", "not on a Friday", "--json")
    assert rejected.code == 0, rejected.stderr
    wait_until(_is_in(released, waits["run"], "COMPLETED", "FAILED"), message="the run goes on", process=runner)
    assert _held(released, "no") == (None, None)
    run, verdict, _ = _verdict(released, waits["run"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["tvmflow.verdict"] == "refused"
    assert "rejected it (not on a Friday)" in verdict["reasons"][0]
    tags = released.mlflow.get_model_version("tiny", "1").tags
    assert "rejected it (not on a Friday)" in tags["tvmflow.refused.no"]
