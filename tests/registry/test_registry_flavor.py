"""The flavor `tvm` through MLflow's own loader, with bundles that really run."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest

from tvmflow.bundle import TensorSpec
from tvmflow.errors import BundleError, InputError
from tvmflow.hardware.target import host
from tvmflow.registry import Registry

BuildBundle = Callable[..., Path]
OTHER_ARCH = "aarch64" if host().arch == "x86_64" else "x86_64"
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_a_registered_model_loads_and_answers(
    registry: Registry, build_bundle: BuildBundle, fields: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.pyfunc

    run_id = registry.start_run("demo", {}, {})
    bundles = {"other": build_bundle(arch=OTHER_ARCH), "native": build_bundle()}
    ref = registry.log_model(run_id, "model", bundles, fields.inputs, fields.outputs, {"x": X})
    version = registry.register("answers", ref, run_id, {})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.config.tracking_uri)

    model = mlflow.pyfunc.load_model(f"models:/answers/{version}")
    assert np.array_equal(model.predict({"x": X}), 2 * X)
    assert np.array_equal(model.predict(X), 2 * X)
    assert np.array_equal(model.predict(pd.DataFrame({"x": [row.tolist() for row in X]})), 2 * X)
    assert np.array_equal(model.predict(model.input_example), 2 * X)


def test_a_model_of_two_outputs_returns_them_by_name(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    flavor.save_model({"native": build_bundle(outputs=2)}, tmp_path / "model")
    outputs = flavor._load_pyfunc(str(tmp_path / "model")).predict(X)
    assert isinstance(outputs, dict)
    assert {name: array.tolist() for name, array in outputs.items()} == {
        "double": (2 * X).tolist(),
        "square": (X * X).tolist(),
    }


def test_a_frame_without_a_signature_is_shaped_by_the_bundle(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    flavor.save_model({"native": build_bundle()}, tmp_path / "model")
    model = flavor._load_pyfunc(str(tmp_path / "model"))
    doubled = model.predict(pd.DataFrame({"x": [row.tolist() for row in X]}))
    assert isinstance(doubled, np.ndarray)
    assert np.array_equal(doubled, 2 * X)


def test_the_bundle_that_asks_most_of_the_host_is_taken_unless_one_is_named(
    build_bundle: BuildBundle, tmp_path: Path
) -> None:
    from tvmflow.registry import flavor

    feature = sorted(host().features)[0]
    bundles = {
        "plain": build_bundle(),
        "better": build_bundle(cpu_features=(feature,)),
        "foreign": build_bundle(cpu_features=(feature, "a-feature-of-tomorrow")),
    }
    flavor.save_model(bundles, tmp_path / "model")
    assert flavor._load_pyfunc(str(tmp_path / "model")).target == "better"
    assert flavor._load_pyfunc(str(tmp_path / "model"), {"target": "plain"}).target == "plain"


def test_a_model_without_a_bundle_for_this_host_says_what_it_lacks(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    flavor.save_model({"other": build_bundle(arch=OTHER_ARCH)}, tmp_path / "model")
    with pytest.raises(BundleError, match=f"no bundle of the model runs on this machine: .*built for {OTHER_ARCH}"):
        flavor._load_pyfunc(str(tmp_path / "model"))


def test_a_bundle_that_was_exchanged_is_not_loaded(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    flavor.save_model({"native": build_bundle()}, tmp_path / "model")
    (tmp_path / "model" / "bundles" / "native.tar.gz").write_bytes(build_bundle(outputs=2).read_bytes())
    with pytest.raises(BundleError, match="is not the file that was logged for 'native'"):
        flavor._load_pyfunc(str(tmp_path / "model"))


def test_targets_named_by_tvm_options_get_file_names(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    target = '{"kind": "llvm", "mcpu": "a/b"}'
    flavor.save_model({target: build_bundle()}, tmp_path / "model")
    assert flavor._load_pyfunc(str(tmp_path / "model")).target == target
    with pytest.raises(BundleError, match="share the file name"):
        flavor.save_model({"a b": build_bundle(), "a/b": build_bundle()}, tmp_path / "second")


def test_an_example_too_large_for_text_is_left_out(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    for name, rows in (("small", 1 << 16), ("large", (1 << 16) + 1)):
        example = {"x": np.zeros((rows, 4), np.float32)}
        flavor.save_model({"native": build_bundle()}, tmp_path / name, input_example=example)
    stored = [path.parent.name for path in sorted(tmp_path.glob("*/input_example.json"))]
    assert stored == ["small"]


def test_an_input_of_the_wrong_name_is_refused(build_bundle: BuildBundle, tmp_path: Path) -> None:
    from tvmflow.registry import flavor

    flavor.save_model({"native": build_bundle()}, tmp_path / "model")
    with pytest.raises(InputError, match="no input 'y'"):
        flavor._load_pyfunc(str(tmp_path / "model")).predict({"y": X})


def test_a_host_is_told_to_install_the_versions_that_built_the_model(build_bundle: BuildBundle, tmp_path: Path) -> None:
    import tvmflow
    from tvmflow.bundle import installed_versions
    from tvmflow.registry import flavor

    flavor.save_model({"native": build_bundle()}, tmp_path / "model")
    requirements = (tmp_path / "model" / "requirements.txt").read_text().splitlines()
    versions = installed_versions()
    assert {
        f"tvmflow=={tvmflow.__version__}",
        f"apache-tvm=={versions.tvm}",
        f"apache-tvm-ffi=={versions.tvm_ffi}",
        f"numpy=={np.__version__}",
    } <= set(requirements)


def test_a_signature_of_an_unknown_dtype_is_refused(embedded: Registry, build_bundle: BuildBundle) -> None:
    from tvmflow.errors import RegistryError

    run_id = embedded.start_run("demo", {}, {})
    field = TensorSpec("x", (1,), "float99")
    with pytest.raises(RegistryError, match="float99"):
        embedded.log_model(run_id, "model", {"native": build_bundle()}, [field], [field])
