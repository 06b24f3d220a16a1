"""The digits example released by the command line, and what a second release makes anew."""

import hashlib
import importlib.metadata
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from mlflow.entities import ViewType

from support.reports import data_of, read_table, unexplained_figures
from tvmflow.documents.figures import Measurements
from tvmflow.documents.release import Blob
from tvmflow.report.pictures import draw_png, find_charts
from tvmflow.services import open_store
from tvmflow.settings import Settings

STEPS = [
    *("train", "export", "relax_import", "reference", "tune", "build"),
    *("package", "validate", "benchmark", "track", "publish"),
]

# Loads what was released as its users do: by MLflow's name, and the bundle by itself.
_USERS = """
import sys

import mlflow.pyfunc
import numpy as np
import torch

folder, weights, bundle, output = sys.argv[1:]
sys.path.insert(0, folder)
from data import held_out
from model import create

from tvmflow import runtime

inputs, labels = held_out()
network = create()
network.load_state_dict(torch.load(weights, weights_only=True))
with torch.inference_mode():
    pytorch = network.eval()(torch.from_numpy(inputs["image"])).numpy()
registered, loaded = mlflow.pyfunc.load_model("models:/digits/1"), runtime.load(bundle)
chunks = np.split(inputs["image"], range(64, len(labels), 64))
np.savez(
    output,
    pytorch=pytorch,
    registered=np.concatenate([registered.predict({"image": chunk}) for chunk in chunks]),
    bundle=np.concatenate([loaded(image=chunk)["logits"] for chunk in chunks]),
)
"""


@pytest.fixture(scope="module")
def target(digits: Any) -> dict[str, Any]:
    """The one target of the first release."""
    (entry,) = digits.first.document["targets"]
    return dict(entry)


@pytest.fixture(scope="module")
def predictions(digits: Any, target: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The logits [360, 10] of the held-out digits by PyTorch, by the registered model and by the bundle."""
    folder = tmp_path_factory.mktemp("predictions")
    output = folder / "predictions.npz"
    (folder / "users.py").write_text(_USERS)
    weights, bundle = (
        digits.artifact(digits.made("train")["weights"]),
        digits.artifact(digits.made("package")["bundle"]),
    )
    address = f"sqlite:///{digits.machine.home}/mlflow/mlflow.db"
    environment = {"MLFLOW_TRACKING_URI": address, "PYTHONPATH": str(folder)}
    user = replace(digits.machine, settings={**digits.machine.settings, **environment})
    result = user.run("-m", "users", digits.folder, weights, bundle, output)
    assert result.code == 0, result.stderr
    with np.load(output) as archive:
        return dict(archive)


def test_the_document_says_what_was_released(digits: Any) -> None:
    document = digits.first.document
    assert (document["name"], document["version"]) == ("digits", "1")
    assert document["release_uri"] == "s3://tvmflow/releases/digits/1/release.json"
    assert document["mlflow_model"] == "models:/digits/1"


def test_the_document_has_the_figures_of_the_target(target: dict[str, Any]) -> None:
    assert target["target"] == "native"
    assert 0 < target["max_abs_error"] < 1e-3
    assert target["top1_agreement"] == 1.0
    assert target["metric"]["bundle"] == target["metric"]["original"] > 0.5
    latency = target["latency_ms"]
    assert 0 < latency["min"] <= latency["p50"]
    # Ten runs have neither.
    assert (latency["p90"], latency["p99"]) == (None, None)
    assert latency["min"] <= latency["mean"]
    assert set(target["ratio"]) == {"onnxruntime", "pytorch"}
    assert target["runs"] == 10


def test_the_document_has_every_step_with_its_seconds(target: dict[str, Any]) -> None:
    assert list(target["steps"]) == STEPS
    assert all(step["status"] == "ran" and step["seconds"] > 0 for step in target["steps"].values())


def test_the_trace_has_every_step_with_its_seconds(digits: Any, target: dict[str, Any]) -> None:
    events = json.loads((digits.machine.home.parent / "steps.json").read_text())["traceEvents"]
    seconds = {event["name"]: event["dur"] / 1e6 for event in events if event["ph"] == "X"}
    assert [name for name in seconds if name in STEPS] == STEPS
    assert all(abs(seconds[name] - step["seconds"]) < 0.01 for name, step in target["steps"].items())


def test_the_store_holds_the_release_and_its_bundle(digits: Any, target: dict[str, Any]) -> None:
    with open_store(Settings(home=digits.machine.home)) as store:
        release = store.verify_release("digits", "1")
        assert target["bundle_uri"] == f"{store.config.uri}/blobs/sha256/{target['bundle_sha256']}"
    (released,) = release.targets
    assert (released.bundle.sha256, released.bundle.size) == (target["bundle_sha256"], target["bundle_size"])
    assert released.verdict.passed
    assert release.mlflow_run_id == digits.first.document["mlflow_run_id"]


def test_the_bundle_path_leads_to_the_bundle(digits: Any, target: dict[str, Any]) -> None:
    bundle = digits.machine.home.parent / target["bundle_path"]
    assert hashlib.sha256(bundle.read_bytes()).hexdigest() == target["bundle_sha256"]


def test_mlflow_has_a_run_with_a_nested_run_per_target(digits: Any, target: dict[str, Any]) -> None:
    client, run_id = digits.machine.mlflow, digits.first.document["mlflow_run_id"]
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["tvmflow.verdict"]) == ("FINISHED", "passed")
    (nested,) = client.search_runs(
        [run.info.experiment_id],
        f"tags.mlflow.parentRunId = '{run_id}' and attributes.run_name = 'native'",
        ViewType.ACTIVE_ONLY,
    )
    assert nested.data.metrics["tvm_latency_ms_p50"] == target["latency_ms"]["p50"]
    assert nested.data.metrics["ratio_onnxruntime"] == target["ratio"]["onnxruntime"]
    assert nested.data.metrics["max_abs_error"] == target["max_abs_error"]
    assert nested.data.metrics["tvm_first_seconds"] > 0
    description = run.data.tags["mlflow.note.content"]
    assert description.startswith("Passed; `report.html` says more.\n\n- native: p50 ")
    assert (
        f"{target['latency_ms']['p50']:.4g} ms, {target['ratio']['onnxruntime']:.3g} of the latency of ONNX"
        in description
    )
    assert (target["busyness"] or "") in description
    # Whether the machine is busy is for the machine to say; all places say the same.
    measurements = digits.machine.releases("digits")[0]["targets"][0]["measurements"]
    measured = Measurements.model_validate(measurements)
    (together,) = measured.concurrency
    assert (together.callers, together.runs) == (3, 2 * 5 * 3)
    assert together.runners.keys() == {"tvm", "onnxruntime", "pytorch"}
    assert nested.data.metrics["tvm_throughput_callers3"] == together.runners["tvm"].throughput
    assert nested.data.metrics["noise"] == measured.noise
    assert nested.data.metrics["unevenness"] == measured.unevenness
    assert nested.data.tags.get("tvmflow.machine") == target["busyness"] == measured.describe_busyness()


def test_mlflow_has_the_files_of_the_run(digits: Any) -> None:
    client, run_id = digits.machine.mlflow, digits.first.document["mlflow_run_id"]
    files = {item.path for folder in ("", "relax", "native") for item in client.list_artifacts(run_id, folder)}
    assert files >= {"model.onnx", "release.json", "verdict.json", "relax/imported.txt", "native/lowered.txt"}


def test_the_report_is_published_and_logged(digits: Any) -> None:
    machine, page = digits.machine, digits.machine.home.parent / "page.html"
    written = machine.run("report", "digits", "1", "-o", page)
    assert written.code == 0, written.stderr
    with open_store(Settings(home=machine.home)) as store:
        blob = store.get_release("digits", "1").report
    content = Path(
        machine.mlflow.download_artifacts(digits.first.document["mlflow_run_id"], "report.html")
    ).read_bytes()
    assert blob == Blob(sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    # The command writes the published page with what channels did since.
    text = page.read_text()
    assert text.partition('id="trust"')[0] == content.decode().partition('id="trust"')[0]
    standing = data_of(text)["standing"]
    assert [(event["channel"], event["what"]) for event in standing["events"]] == [
        ("production", "moved from nothing to 1"),
        ("staging", "moved from nothing to 1"),
    ]
    assert [(item["channel"], item["verdict"], item["approval"]) for item in standing["promotions"]] == [
        ("production", "passed", None),
        ("staging", "passed", None),
    ]
    assert standing["faults"] == []
    assert unexplained_figures(text) == []
    # The layers are timed on as many threads as the bundle was measured with.
    assert data_of(text)["insights"]["native"]["peaks"]["threads"] == 1
    (insight,) = data_of(content.decode())["insights"].values()
    assert (insight["samples"], len(insight["worst"])) == (360, 10)
    assert insight["functions"][0]["ms"] > 0
    assert all(sample["inputs"][0]["image"] for sample in insight["worst"])
    assert all(re.fullmatch(r"brightest [01]\.\d\d", sample["text"]) for sample in insight["worst"])
    assert digits.made("texts")["sources"]["files"].keys() == {"shown.py"}


def test_the_release_names_its_data_its_code_its_packages_and_its_compiler(digits: Any) -> None:
    with open_store(Settings(home=digits.machine.home)) as store:
        release = store.get_release("digits", "1")
    origin, (released,) = release.provenance, release.targets
    assert origin.training is not None
    assert (origin.training.function, origin.training.files) == ("train:train", {})
    assert origin.training.arguments["seed"] == 0
    assert origin.code is not None
    assert origin.code.keys() == {"data.py", "model.py", "train.py"}
    assert origin.packages is not None
    assert origin.packages["apache-tvm"] == importlib.metadata.version("apache-tvm")
    assert released.verdict.answers is not None
    assert origin.held_out == released.verdict.answers.data
    assert released.making is not None
    assert released.making.compiler["apache-tvm"] == origin.packages["apache-tvm"]
    assert released.making.records == digits.made("tune")["records"]["sha256"]
    assert released.making.signer is None
    measured = released.measurements
    assert measured is not None
    assert len(measured.typical.bundle.loads) == len(measured.typical.bundle.peaks) > 0


def test_mlflow_shows_the_charts_and_the_operators_of_the_report(digits: Any) -> None:
    client, run_id = digits.machine.mlflow, digits.first.document["mlflow_run_id"]
    page = Path(client.download_artifacts(run_id, "report.html")).read_text()
    charts = find_charts(page)
    pictures = sorted(item.path for item in client.list_artifacts(run_id, "figures"))
    assert len(charts) >= 4
    contents = [Path(client.download_artifacts(run_id, picture)).read_bytes() for picture in pictures]
    assert contents == [draw_png(chart) for chart in charts.values()]
    assert any(picture.endswith("milliseconds_of_a_run_by_function.png") for picture in pictures)

    table = read_table(client, run_id, "native/operators.json")
    data = data_of(page)
    layers, rows = data["insights"]["native"]["layers"], data["layers"]["native"]
    assert [row["ms"] for row in table] == [layer["ms"] for layer in layers]
    assert [row["share"] for row in table] == [row["share"] for row in rows]
    assert [row["operators"] for row in table] == [", ".join(layer["operators"]) for layer in layers]
    assert "Conv" in " ".join(row["operators"] for row in table)


def test_the_model_version_says_where_the_release_is(digits: Any) -> None:
    version = digits.machine.mlflow.get_model_version("digits", "1")
    assert version.run_id == digits.first.document["mlflow_run_id"]
    assert version.tags["tvmflow.status"] == "published"
    assert version.tags["tvmflow.release_uri"] == digits.first.document["release_uri"]


def test_mlflow_has_the_metrics_on_the_model_too(digits: Any, target: dict[str, Any]) -> None:
    client = digits.machine.mlflow
    (logged,) = client.get_run(digits.first.document["mlflow_run_id"]).outputs.model_outputs
    metrics = {metric.key: metric.value for metric in client.get_logged_model(logged.model_id).metrics}
    assert metrics["native.tvm_latency_ms_p50"] == target["latency_ms"]["p50"]


def test_the_registered_model_predicts_what_pytorch_predicts(predictions: dict[str, Any]) -> None:
    assert predictions["pytorch"].shape == (360, 10)
    np.testing.assert_allclose(predictions["registered"], predictions["pytorch"], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(predictions["registered"].argmax(-1), predictions["pytorch"].argmax(-1))


def test_the_bundle_predicts_what_the_registered_model_predicts(predictions: dict[str, Any]) -> None:
    np.testing.assert_array_equal(predictions["bundle"], predictions["registered"])


def test_releasing_again_finds_every_step_done(digits: Any) -> None:
    again = digits.machine.release(digits.file)
    assert again.code == 0, again.stderr
    assert again.steps == dict.fromkeys(STEPS, "cached")
    timeless = [
        {key: value for key, value in result.document.items() if key not in ("targets", "promotions")}
        for result in (digits.first, again)
    ]
    assert timeless[0] == timeless[1]
    assert [(item["channel"], item["status"]) for item in again.document["promotions"]] == [
        ("staging", "unchanged"),
        ("production", "unchanged"),
    ]
    assert len(digits.machine.releases("digits")) == len(digits.machine.versions("digits")) == 1
    # Prefect's UI shows a table and the way to the report.
    api = digits.machine.settings["TVMFLOW_PREFECT_API_URL"]
    query = {"artifacts": {"key": {"any_": ["release"]}}, "sort": "CREATED_DESC"}
    artifacts = requests.post(f"{api}/artifacts/filter", json=query, timeout=60).json()
    artifact = next(item for item in artifacts if item["description"] == "digits 1")
    (entry,) = digits.first.document["targets"]
    assert f"| native | {entry['latency_ms']['p50']:.4g} | {entry['ratio']['onnxruntime']:.4g} |" in artifact["data"]
    assert "`tvmflow report digits 1 --open`" in artifact["data"]
    assert (entry["busyness"] or "") in artifact["data"]


def test_a_lost_artifact_is_made_again_and_nothing_else(digits: Any) -> None:
    digits.artifact(digits.made("build")["library"]).unlink()
    again = digits.machine.release(digits.file)
    assert again.code == 0, again.stderr
    # The library comes out the same, so that nothing after the build has anything to do.
    assert [name for name, status in again.steps.items() if status == "ran"] == ["build"]
    assert again.document["version"] == "1"


@pytest.mark.long
def test_a_comment_in_the_model_s_source_makes_no_new_version(digits: Any) -> None:
    source = digits.folder / "model.py"
    content = source.read_text()
    try:
        source.write_text(f"{content}# A comment.\n")
        again = digits.machine.release(digits.file)
    finally:
        source.write_text(content)
    assert again.code == 0, again.stderr
    assert again.steps["export"] == "ran"
    assert again.document["version"] == "1"


def test_an_input_of_the_wrong_shape_or_dtype_is_refused_at_run(digits: Any, target: dict[str, Any]) -> None:
    bundle = digits.machine.home.parent / target["bundle_path"]
    for name, array in (("shape", np.zeros((1, 1, 9, 9), np.float32)), ("dtype", np.zeros((1, 1, 8, 8), np.int64))):
        np.savez(digits.folder / f"{name}.npz", image=array)
        result = digits.machine.run("run", bundle, "--inputs", digits.folder / f"{name}.npz")
        assert result.code == 1
        assert "input 'image'" in result.sentence


def test_the_list_shows_the_release(digits: Any) -> None:
    result = digits.machine.run("list", "digits", "--json")
    assert result.code == 0, result.stderr
    first, *_ = json.loads(result.stdout)
    assert (first["name"], first["version"]) == ("digits", "1")
    assert "digits" in digits.machine.run("list").stdout


def test_the_list_refuses_a_name_that_was_never_released(digits: Any) -> None:
    result = digits.machine.run("list", "digit")
    assert result.code == 1
    assert "'digit'" in result.sentence
    assert "digits" in result.sentence


@pytest.mark.long
def test_a_changed_training_source_makes_a_new_version(digits: Any) -> None:
    source = digits.folder / "train.py"
    source.write_text(source.read_text().replace("learning_rate: float = 3e-3", "learning_rate: float = 1e-3"))
    changed = digits.machine.release(digits.file)
    assert changed.code == 0, changed.stderr
    assert changed.steps == dict.fromkeys(STEPS, "ran")
    assert changed.document["version"] == "2"
    assert [release["version"] for release in digits.machine.releases("digits")] == ["1", "2"]
    old, new = digits.first.document["targets"][0], changed.document["targets"][0]
    assert old["bundle_sha256"] != new["bundle_sha256"]
