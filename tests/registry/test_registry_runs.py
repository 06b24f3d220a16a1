"""Runs, metrics, artifacts and versions, in a SQLite file and behind a server."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.reports import read_table
from tvmflow.errors import RegistryError
from tvmflow.registry import LoggedModelRef, Registry, RegistryConfig


def _log(registry: Registry, run_id: str, bundle: Path, fields: SimpleNamespace, **more: Any) -> LoggedModelRef:
    return registry.log_model(run_id, "model", {"native": bundle}, fields.inputs, fields.outputs, **more)


def test_a_release_is_a_run_with_a_nested_run_per_target(registry: Registry, client: Any) -> None:
    release = registry.start_run("demo", {"trials": 8}, {"model": "demo"})
    target = registry.start_target_run(release, "x86-64-v4", {"threads": 2}, {"target": "x86-64-v4"})
    registry.log_metrics(target, {"p50_ms": 1.5})
    registry.finish_run(target, "FINISHED")
    registry.finish_run(release, "FAILED")

    parent, nested = client.get_run(release), client.get_run(target)
    assert (parent.info.run_name, parent.info.status, parent.data.params) == ("demo", "FAILED", {"trials": "8"})
    assert (nested.info.run_name, nested.info.status) == ("x86-64-v4", "FINISHED")
    assert nested.data.tags["mlflow.parentRunId"] == release
    assert nested.data.metrics == {"p50_ms": 1.5}
    assert nested.info.end_time is not None


def test_a_step_that_runs_again_goes_on_with_its_run_and_ends_those_of_others(registry: Registry, client: Any) -> None:
    tags = {"tvmflow.name": "again"}
    first = registry.start_run("again", {"trials": 8}, tags, key="one")
    nested = registry.start_target_run(first, "native", {}, {}, key="one/native")
    without_key = registry.start_run("verdict", {}, tags)
    verdict = registry.start_run("retrain again", {}, {**tags, "tvmflow.kind": "retrain"})
    promotion = registry.open_promotion_run(first, "promote", {**tags, "tvmflow.kind": "promotion"})
    waiting = registry.open_promotion_run("0" * 32, "promote", {**tags, "tvmflow.kind": "promotion"}, "a flow run")
    tuning = registry.start_run("tune again", {}, {**tags, "tvmflow.kind": "tune"})
    assert set(registry.end_abandoned_runs(tags)) == {first, verdict, promotion}
    ended, others = (first, nested, verdict, promotion), (without_key, waiting, tuning)
    assert {client.get_run(run).info.status for run in ended} == {"KILLED"}
    assert {client.get_run(run).info.status for run in others} == {"RUNNING"}
    began = registry.read_start(first)

    assert registry.start_run("again", {"trials": 8}, tags, key="one") == first
    assert registry.start_target_run(first, "native", {}, {}, key="one/native") == nested
    assert client.get_run(first).info.status == client.get_run(nested).info.status == "RUNNING"
    assert registry.read_start(first) == began
    assert registry.start_run("again", {}, tags, key="two") != first
    client.delete_run(first)
    assert registry.start_run("again", {}, tags, key="one") != first


def test_a_curve_has_its_steps_and_a_gap_where_a_value_is_not_finite(registry: Registry, client: Any) -> None:
    run_id = registry.start_run("demo", {}, {})
    registry.log_curve(run_id, "trial_ms", [(0, 3.0), (1, float("inf")), (2, float("nan")), (8, 2.0)])
    assert [(p.step, p.value) for p in client.get_metric_history(run_id, "trial_ms")] == [(0, 3.0), (8, 2.0)]


def test_artifacts_are_stored_under_their_paths(registry: Registry, client: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    run_id = registry.start_run("demo", {}, {})
    registry.log_artifacts(run_id, {"a.txt": tmp_path / "a.txt", "reports/b.txt": tmp_path / "a.txt"})
    assert [item.path for item in client.list_artifacts(run_id)] == ["a.txt", "reports"]
    assert [item.path for item in client.list_artifacts(run_id, "reports")] == ["reports/b.txt"]


def test_a_table_is_one_of_mlflow_with_exact_numbers(registry: Registry, client: Any) -> None:
    run_id = registry.start_run("demo", {}, {})
    first = [{"layer": "conv", "error": 1.2345678901234e-12}, {"layer": "relu", "error": float("inf")}]
    second = [{"layer": "add", "ms": 0.1}]
    registry.log_tables(run_id, {"native/operators.json": second, "x86-64-v4/operators.json": second})
    registry.log_tables(run_id, {"native/operators.json": first})
    assert read_table(client, run_id, "native/operators.json") == [first[0], {"layer": "relu", "error": None}]
    assert read_table(client, run_id, "x86-64-v4/operators.json") == second
    assert client.get_run(run_id).data.tags["mlflow.loggedArtifacts"].count("table") == 2


def test_mlflow_itself_reads_a_table(registry: Registry, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = registry.start_run("demo", {}, {})
    registry.log_tables(run_id, {"native/operators.json": [{"layer": "conv", "ms": 0.25}]})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)
    table = client.load_table(client.get_run(run_id).info.experiment_id, "native/operators.json", [run_id])
    assert table.to_dict("records") == [{"layer": "conv", "ms": 0.25}]


def test_a_missing_artifact_is_named_before_anything_is_stored(embedded: Registry, tmp_path: Path) -> None:
    run_id = embedded.start_run("demo", {}, {})
    with pytest.raises(RegistryError, match=r"gone\.txt' is not a file"):
        embedded.log_artifacts(run_id, {"gone.txt": tmp_path / "gone.txt"})


def test_a_model_carries_metrics_params_signature_and_example(
    registry: Registry, client: Any, build_bundle: Callable[..., Path], fields: SimpleNamespace, tmp_path: Path
) -> None:
    run_id = registry.start_run("demo", {}, {})
    example = {"x": np.ones((1, 4), np.float32)}
    ref = _log(
        registry, run_id, build_bundle(), fields, input_example=example, metrics={"p50": 2}, params={"opset": 20}
    )

    logged = client.get_logged_model(ref.model_id)
    assert str(logged.status) == "READY"
    assert logged.source_run_id == run_id
    assert logged.params == {"opset": "20"}
    assert [(m.key, m.value) for m in logged.metrics] == [("p50", 2.0)]
    run = client.get_run(run_id)
    assert run.data.metrics == {"p50": 2.0}
    assert [output.model_id for output in run.outputs.model_outputs] == [ref.model_id]

    version = registry.register("carries", ref, run_id, {})
    from mlflow.models import Model

    folder = registry.download_source(f"models:/carries/{version}", tmp_path)
    model = Model.load(str(folder))
    assert [(spec.name, spec.shape, spec.type) for spec in model.get_input_schema().inputs] == [
        ("x", (-1, 4), np.dtype("float32"))
    ]
    assert model.model_id == ref.model_id
    assert np.array_equal(model.load_input_example(str(folder))["x"], example["x"])


def test_a_bundle_that_is_none_leaves_a_model_marked_as_failed(
    embedded: Registry, fields: SimpleNamespace, tmp_path: Path
) -> None:
    from mlflow import MlflowClient
    from tvmflow.errors import BundleError

    (tmp_path / "bundle").write_text("no bundle")
    run_id = embedded.start_run("demo", {}, {})
    with pytest.raises(BundleError):
        _log(embedded, run_id, tmp_path / "bundle", fields)
    client = MlflowClient(embedded.config.tracking_uri, registry_uri=embedded.config.tracking_uri)
    experiment = client.get_experiment_by_name("tvmflow").experiment_id
    failed = client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'")
    assert [str(model.status) for model in failed] == ["FAILED"]


def test_registering_a_run_twice_gives_one_version(
    registry: Registry, build_bundle: Callable[..., Path], fields: SimpleNamespace
) -> None:
    run_id = registry.start_run("demo", {}, {})
    ref = _log(registry, run_id, build_bundle(), fields)
    first = registry.register("twice", ref, run_id, {"release": "1"})
    second = registry.register("twice", ref, run_id, {"release": "2"})
    assert registry.find_version("twice", run_id) == first
    assert registry.find_version("another", run_id) is None
    assert registry.find_tagged_version("twice", "release", "2") == first
    assert registry.find_tagged_version("twice", "release", "1") is None

    assert first == second
    (only,) = registry.list_versions("twice")
    assert (only.version, only.run_id, only.tags["release"], only.aliases) == (first, run_id, "2", ())


def test_an_alias_moves_between_versions_and_goes(
    registry: Registry, build_bundle: Callable[..., Path], fields: SimpleNamespace
) -> None:
    versions = []
    for _ in range(2):
        run_id = registry.start_run("demo", {}, {})
        versions.append(registry.register("moves", _log(registry, run_id, build_bundle(), fields), run_id, {}))
    assert [v.version for v in registry.list_versions("moves")] == versions[::-1]
    for version in versions:
        registry.set_alias("moves", "production", version)
        assert registry.get_alias_version("moves", "production") == version
    assert [v.aliases for v in registry.list_versions("moves")] == [("production",), ()]
    registry.delete_alias("moves", "production")
    assert registry.get_alias_version("moves", "production") is None
    registry.set_version_tag("moves", versions[0], "verdict", "refused")
    assert registry.list_versions("moves")[1].tags["verdict"] == "refused"
    assert [registry.version_exists("moves", version) for version in (*versions, "3")] == [True, True, False]


def test_what_is_not_there_is_no_error(registry: Registry) -> None:
    assert registry.list_versions("nothing") == []
    assert registry.get_alias_version("nothing", "production") is None
    assert not registry.version_exists("nothing", "1")
    assert not registry.run_exists("0" * 32)
    assert registry.run_exists(registry.start_run("demo", {}, {}))


def test_threads_that_log_to_two_runs_do_not_mix(registry: Registry, client: Any) -> None:
    release = registry.start_run("demo", {}, {})
    runs = {name: registry.start_target_run(release, name, {}, {}) for name in ("a", "b")}
    start = threading.Barrier(len(runs))
    failures: list[BaseException] = []

    def log(name: str, run_id: str) -> None:
        try:
            start.wait(30)
            for step in range(10):
                registry.log_curve(run_id, name, [(step, float(step))])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=log, args=item) for item in runs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for name, run_id in runs.items():
        assert client.get_run(run_id).data.metrics == {name: 9.0}
        assert [point.step for point in client.get_metric_history(run_id, name)] == list(range(10))
    assert client.get_run(release).data.metrics == {}


def test_a_database_without_an_artifact_folder_keeps_artifacts_beside_itself(tmp_path: Path) -> None:
    registry = Registry(RegistryConfig(f"sqlite:///{tmp_path / 'runs.db'}"))
    (tmp_path / "a.txt").write_text("a")
    run_id = registry.start_run("demo", {}, {})
    registry.log_artifacts(run_id, {"a.txt": tmp_path / "a.txt"})
    assert (tmp_path / "artifacts" / run_id / "artifacts" / "a.txt").is_file()
