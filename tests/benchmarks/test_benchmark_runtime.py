"""`benchmarks/runtime.py`: start, calls and memory of the runtime, compared with ONNX Runtime."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from support.processes import refusal

Command = Callable[..., subprocess.CompletedProcess[str]]
Import = Callable[[str], ModuleType]


@pytest.mark.long
@pytest.mark.parametrize("weights", ["inside", "apart"])
def test_a_model_is_measured_in_processes_of_its_own(weights: str, command: Command, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ("--threads", "1", "--rounds", "1", "--calls", "5", "--weights", weights)
    process = command("runtime", *options, "--json", str(figures))
    assert process.returncode == 0, process.stderr
    document = json.loads(figures.read_text())
    for cost in document["costs"].values():
        assert 0 < cost["steady"] <= cost["first"]
        assert min(cost["imported"], cost["load"]) > 0
        assert cost["memory"] > 1 << 20
    tvmflow_cost, peer_cost = document["costs"]["tvmflow"], document["costs"]["onnxruntime"]
    assert document["ratios"]["load"] == pytest.approx(tvmflow_cost["load"] / peer_cost["load"])
    assert "steady call" in process.stdout


def test_a_process_that_fails_says_why(module: Import, tmp_path: Path) -> None:
    runtime = module("runtime")
    from tvmflow.errors import StepError

    with pytest.raises(StepError, match=r"measures tvmflow failed: .*there is no bundle"):
        runtime.measure("tvmflow", tmp_path / "none.tar.gz", tmp_path / "none.npz", 1, 1)


def test_medians_are_compared(module: Import) -> None:
    runtime = module("runtime")

    def cost(load: float) -> object:
        return runtime.Cost(imported=1, load=load, first=1, steady=1, memory=1)

    document = runtime.summary(
        "m", 1, {"tvmflow": [cost(1), cost(9), cost(3)], "onnxruntime": [cost(2), cost(1), cost(90)]}
    )
    assert (document.costs["tvmflow"].load, document.ratios.load) == (3, 1.5)


def test_a_bundle_with_its_weights_apart_is_measured(module: Import, tmp_path: Path) -> None:
    from tvmflow.bundle import read_manifest

    prepare = module("prepare")
    weights = {"w": np.random.default_rng(0).normal(size=(64, 64)).astype("float32")}
    onnx = save_model(
        tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [1, 64])], ["y"], weights
    )
    sample = prepare.save(tmp_path / "sample.npz", {"x": np.ones((1, 64), "float32")})
    job = prepare.BuildJob(
        name="m",
        onnx=onnx,
        sample=sample,
        target=prepare.native(1),
        weights="apart",
        state=tmp_path,
        output=tmp_path / "m.tar.gz",
    )
    prepare.build_bundle(job)
    assert read_manifest(job.output).weights == "shared"
    assert module("runtime").measure("tvmflow", job.output, sample, 1, 1).load > 0


def test_a_model_that_is_unknown_is_one_sentence(call: Command) -> None:
    process = call("runtime", "digts")
    assert "'digits'" in refusal(process)
