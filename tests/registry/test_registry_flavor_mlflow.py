"""The flavor as MLflow's users know flavors: log, load, evaluate and serve, through MLflow's own commands."""

import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest
import requests

from support.servers import free_port, serving
from tvmflow.bundle import TensorSpec, extract, pack
from tvmflow.errors import BundleError, InputError
from tvmflow.hardware.target import host
from tvmflow.registry import Registry, RegistryConfig
from tvmflow.runtime import CompiledModel

BuildBundle = Callable[..., Path]
OTHER_ARCH = "aarch64" if host().arch == "x86_64" else "x86_64"
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def experiment(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> str:
    """An experiment of the registry that MLflow's fluent functions use while the test runs."""
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.config.tracking_uri)
    experiment_id: str = mlflow.create_experiment(f"experiment-{uuid.uuid4()}")
    return experiment_id


def test_a_model_is_logged_registered_and_loaded_by_alias(
    experiment: str, build_bundle: BuildBundle, request: pytest.FixtureRequest
) -> None:
    import mlflow
    from mlflow import MlflowClient, types
    from tvmflow.registry import flavor

    name = f"logged-{request.node.callspec.id}"
    feature = sorted(host().features)[0]
    bundles = {
        "plain": build_bundle(),
        "best": build_bundle(cpu_features=(feature,)),
        "other": build_bundle(arch=OTHER_ARCH),
    }
    with mlflow.start_run(experiment_id=experiment) as run:
        info = flavor.log_model(
            bundles,
            "model",
            registered_model_name=name,
            metadata={"made": "here"},
            tags={"kind": "tiny"},
            extra_pip_requirements=["pandas"],
        )
    MlflowClient().set_registered_model_alias(name, "production", info.registered_model_version)

    model = mlflow.pyfunc.load_model(f"models:/{name}@production")
    assert model.metadata.run_id == run.info.run_id
    assert model.metadata.metadata == {"made": "here"}
    assert model.metadata.signature.inputs.inputs == [types.TensorSpec(np.dtype("float32"), (-1, 4), "x")]
    assert model.metadata.signature.outputs.inputs == [types.TensorSpec(np.dtype("float32"), (-1, 4), "double")]
    assert model._model_impl.target == "best"
    assert np.array_equal(model.predict({"x": X}), 2 * X)
    assert np.array_equal(model.predict(model.input_example), 2 * X)
    plain = mlflow.pyfunc.load_model(f"models:/{name}@production", model_config={"target": "plain"})
    assert plain._model_impl.target == "plain"

    loaded = flavor.load_model(f"models:/{name}/{info.registered_model_version}", target="plain", threads=1)
    assert isinstance(loaded, CompiledModel)
    assert np.array_equal(loaded(X)["double"], 2 * X)
    requirements = mlflow.pyfunc.get_model_dependencies(f"models:/{name}@production")
    assert {"pandas", f"numpy=={np.__version__}"} <= set(Path(requirements).read_text().split())


def test_one_bundle_needs_no_target(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    flavor.save_model(build_bundle(), tmp_path / "model")
    assert flavor._load_pyfunc(str(tmp_path / "model")).target == "native"


def test_bundles_of_different_models_are_refused(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    with pytest.raises(BundleError, match="the bundles of 'a' and 'b' have different inputs or outputs"):
        flavor.save_model({"a": build_bundle(), "b": build_bundle(outputs=2)}, tmp_path / "model")


def test_weights_beside_a_bundle_are_logged_with_it(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    (tmp_path / "files").mkdir()
    manifest = replace(extract(build_bundle(), tmp_path / "files"), weights="apart")
    with (tmp_path / "files" / "mod.params").open("wb") as stream:
        np.savez(stream, w=X)
    files = {path.name: path for path in (tmp_path / "files").iterdir()}
    complete = pack(tmp_path / "shared.tar.gz", manifest, files, leave_weights_out=True)
    (tmp_path / complete.files["mod.params"].sha256).write_bytes(files["mod.params"].read_bytes())

    flavor.save_model(tmp_path / "shared.tar.gz", tmp_path / "model")
    (tmp_path / "again").mkdir()
    assert extract(tmp_path / "model" / "bundles" / "native.tar.gz", tmp_path / "again") == complete


def test_a_key_that_model_config_does_not_have_is_refused(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    flavor.save_model(build_bundle(), tmp_path / "model")
    with pytest.raises(InputError, match=r"'device'; .*target, threads, spin"):
        flavor._load_pyfunc(str(tmp_path / "model"), {"device": "gpu"})
    with pytest.raises(BundleError, match="no bundle for the target 'gpu'; it has 'native'"):
        flavor.load_model(str(tmp_path / "model"), target="gpu")


def test_code_and_a_conda_environment_travel_with_the_model(build_bundle: BuildBundle, tmp_path: Path) -> None:
    import yaml

    import mlflow
    from tvmflow.registry import flavor

    (tmp_path / "beside_the_model.py").write_text("ANSWER = 42\n")
    environment = {"name": "mine", "dependencies": ["python=3.11", {"pip": ["tvmflow"]}]}
    flavor.save_model(
        build_bundle(),
        tmp_path / "model",
        code_paths=[str(tmp_path / "beside_the_model.py")],
        conda_env=environment,
        input_example=False,
    )
    assert yaml.safe_load((tmp_path / "model" / "conda.yaml").read_text())["name"] == "mine"
    assert not (tmp_path / "model" / "input_example.json").exists()
    mlflow.pyfunc.load_model(str(tmp_path / "model"))
    import beside_the_model  # type: ignore[import-not-found]

    assert beside_the_model.ANSWER == 42


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(X, id="array"),
        pytest.param({"x": X}, id="by name"),
        pytest.param({"x": X.tolist()}, id="lists"),
        pytest.param(X.tolist(), id="list"),
        pytest.param(pd.DataFrame({"x": [row.tolist() for row in X]}), id="a column of rows"),
        pytest.param(pd.DataFrame(X.astype(np.float64), columns=list("abcd")), id="a column per value"),
    ],
)
def test_inputs_of_many_kinds_give_the_same(build_bundle: BuildBundle, tmp_path: Path, inputs: Any) -> None:
    from mlflow.pyfunc import load_model

    from tvmflow.registry import flavor

    flavor.save_model(build_bundle(), tmp_path / "model", input_example=False)
    impl = flavor._load_pyfunc(str(tmp_path / "model"))
    if isinstance(inputs, list | dict):
        inputs = (
            np.asarray(inputs, np.float32) if isinstance(inputs, list) else {"x": np.asarray(inputs["x"], np.float32)}
        )
    outputs = impl.predict(inputs)
    assert isinstance(outputs, np.ndarray)
    assert np.array_equal(outputs, 2 * X)
    if not isinstance(inputs, pd.DataFrame) or "x" in inputs:
        assert np.array_equal(load_model(str(tmp_path / "model")).predict(inputs), 2 * X)


def test_a_torch_tensor_is_taken(build_bundle: BuildBundle, tmp_path: Path) -> None:
    import torch

    from tvmflow.registry import flavor

    flavor.save_model(build_bundle(), tmp_path / "model", input_example=False)
    impl = flavor._load_pyfunc(str(tmp_path / "model"))
    assert np.array_equal(impl.predict(torch.from_numpy(X.copy())), 2 * X)
    assert np.array_equal(impl.predict({"x": torch.from_numpy(X.copy())}), 2 * X)


def test_rows_of_different_sizes_are_refused(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    flavor.save_model(build_bundle(), tmp_path / "model")
    impl = flavor._load_pyfunc(str(tmp_path / "model"))
    with pytest.raises(InputError, match="column 'x' has rows of different sizes"):
        impl.predict(pd.DataFrame({"x": [[1.0] * 4, [1.0] * 3]}))
    with pytest.raises(InputError, match=r"input 'x': rows of \[4\] are expected"):
        impl.predict(pd.DataFrame({"x": [[1.0] * 3, [1.0] * 3]}))


@pytest.mark.long
@pytest.mark.parametrize("registry", ["embedded"], indirect=True)
def test_evaluate_measures_the_model(experiment: str, build_bundle: BuildBundle, tmp_path: Path) -> None:
    import mlflow
    from tvmflow.registry import flavor

    flavor.save_model(build_bundle(), tmp_path / "model")
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    rows = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    labels = rows.argmax(axis=1)
    labels[:10] = (labels[:10] + 1) % 4
    data = pd.DataFrame({"x": [row.tolist() for row in rows], "label": labels})
    with mlflow.start_run(experiment_id=experiment):
        result = mlflow.models.evaluate(
            lambda frame: model.predict(frame).argmax(axis=1),
            data,
            targets="label",
            model_type="classifier",
            evaluator_config={"log_explainer": False},
        )
    assert result.metrics["accuracy_score"] == 0.75


@pytest.mark.long
def test_mlflow_serves_the_model(server: str, build_bundle: BuildBundle, tmp_path: Path) -> None:
    registry = Registry(RegistryConfig(server))
    run_id = registry.start_run("demo", {}, {})
    bundles = {"other": build_bundle(arch=OTHER_ARCH, outputs=2), "native": build_bundle(outputs=2)}
    fields = [TensorSpec("x", ("n", 4), "float32")]
    outputs = [TensorSpec(name, ("n", 4), "float32") for name in ("double", "square")]
    ref = registry.log_model(run_id, "model", bundles, fields, outputs, {"x": X})
    registry.set_alias("served", "production", registry.register("served", ref, run_id, {}))
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/served@production"]
    command += ["--env-manager", "local", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"MLFLOW_TRACKING_URI": server}
    with serving(command, port, "/ping", tmp_path / "serve.log", settings) as address:
        frame = {"columns": ["x"], "data": [[row] for row in X.tolist()]}
        for body in ({"inputs": {"x": X.tolist()}}, {"dataframe_split": frame}):
            answer = requests.post(f"{address}/invocations", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["predictions"] == {"double": (2 * X).tolist(), "square": (X * X).tolist()}
        refusal = requests.post(f"{address}/invocations", json={"inputs": {"x": [[1.0, 2.0]]}}, timeout=60)
        assert refusal.status_code == 400
