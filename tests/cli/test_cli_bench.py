"""`tvmflow bench`: a build beside other runtimes, with intervals, percentiles that have enough runs, and a page."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from support.models import save_dense
from support.processes import CommandResult
from support.reports import figures_of, unexplained_figures
from tasks.peers import Figures
from tvmflow.bundle import TensorSpec
from tvmflow.cli.bench import describe_sizes, sizes_of
from tvmflow.report.bench import write_page

Command = Callable[..., CommandResult]


@pytest.mark.long
def test_a_build_is_measured_beside_onnx_runtime(tvmflow: Command, models: Path) -> None:
    options = ("--against", "onnxruntime", "--seconds", "0", "--threads", "1", "--json", "--html", "bench.html")
    result = tvmflow("bench", models / "small.onnx", *options)
    assert result.code == 0, result.stderr
    document = result.document
    ratio, comparison = document["ratios"]["onnxruntime"], document["comparisons"]["onnxruntime"]
    assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert comparison["conditions"]["threads"] == [1, 1]
    assert len(comparison["pairs"]) == comparison["plan"]["looks"][-1] == 8
    ours = document["figures"]["tvmflow"]
    assert ours["runs"] >= 8 * 5 * 3
    assert ours["error"] < 1e-5
    assert (ours["load_ms"] > 0, ours["peak_memory"] > 1e6) == (True, True)
    page = Path("bench.html").read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])
    assert data.pop("missing_runs").keys() == document["figures"].keys()
    assert data == document
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.long
def test_the_sizes_that_free_dimensions_were_measured_at_are_said(tvmflow: Command) -> None:
    save_dense(Path("dense.onnx"))
    result = tvmflow("bench", "dense.onnx", "--seconds", "0", "--threads", "1")
    assert "at which the model runs: batch 1; --input-shapes fixes others" in result.stdout
    result = tvmflow("bench", "dense.onnx", "--seconds", "0", "--threads", "1", "--input-shapes", "x:[3,4]", "--json")
    assert result.document["sizes"] == {}


def test_sizes_of_free_dimensions_are_those_of_the_inputs() -> None:
    inputs = {"x": np.zeros((2, 7))}
    manifest = SimpleNamespace(inputs=[TensorSpec(name="x", dtype="float32", shape=("batch", "length"))])
    assert sizes_of(manifest, inputs) == {"batch": 2, "length": 7}  # type: ignore[arg-type]
    (sentence,) = describe_sizes({"batch": 2, "length": 7})
    assert "batch 2, length 7" in sentence
    assert describe_sizes({}) == []


def test_a_percentile_without_enough_runs_says_how_many_lack() -> None:
    figures = Figures(
        runs=600,
        percentiles_ms={50: 1.0, 90: 2.0, 99: None},
        throughput=1000.0,
        load_ms=1.0,
        first_ms=1.0,
        peak_memory=1,
        joules=None,
        error=0.0,
    )
    assert [figures.percentile(which) for which in (50, 90, 99)] == ["1.000", "2.000", "- (62 runs more)"]


@pytest.mark.parametrize("against", ["tensorrt", "onnxruntime,tensorrt"])
def test_a_peer_that_does_not_exist_is_one_sentence(tvmflow: Command, models: Path, against: str) -> None:
    result = tvmflow("bench", models / "small.onnx", "--against", against)
    assert result.code == 2
    assert "'tensorrt' is not one of onnxruntime, openvino, torch, torch.compile" in result.stderr


def test_a_file_that_is_no_model_is_one_sentence(tvmflow: Command) -> None:
    Path("text.onnx").write_text("no model")
    assert "text.onnx" in tvmflow("bench", "text.onnx").sentence


def test_every_figure_of_the_page_is_in_its_data() -> None:
    figures = {
        "runs": 100,
        "percentiles_ms": {"50": 1.23456, "90": 2.5, "99": None},
        "throughput": 810.2,
        "load_ms": 20.25,
        "first_ms": 5.125,
        "peak_memory": 123456789,
        "joules": None,
        "error": 0.0,
    }
    ratio = {"ratio": 0.75, "low": 0.7, "high": 0.8}
    document = {"figures": {"tvmflow": figures, "openvino": figures}, "ratios": {"openvino": ratio}}
    page = write_page("a <b>.onnx", document, ["our latency is 0.75 of openvino's"])
    assert unexplained_figures(page) == []
    assert len(figures_of(page)) == 2 * 8 + 1  # those of two runtimes, and the bar of one ratio
    assert '-, runs missing: <data value="562">562</data>' in page
    assert "a &lt;b&gt;.onnx" in page
    assert "openvino 0.750, between 0.700 and 0.800" in page
