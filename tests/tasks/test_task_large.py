"""Models above the size that protobuf writes: their weights stay in files of their own, here from a small limit on."""

from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from support.models import make_model
from support.steps import compile_by_steps, steps_in_this_process
from tasks.rebuild import rebuild
from tvmflow import runtime
from tvmflow.bisection import bisect
from tvmflow.bundle import read_manifest
from tvmflow.errors import ExportError
from tvmflow.hardware.target import resolve
from tvmflow.onnx_model import external_data
from tvmflow.onnx_model.reading import read_onnx
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.tolerance import Bounds

_INPUT = np.linspace(-1, 1, 2 * 64, dtype="float32").reshape(2, 64)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of two products whose weights are in two files, one of them in a folder of its own."""
    monkeypatch.setattr(external_data, "LARGEST_FILE", 20_000)
    monkeypatch.setattr(external_data, "_MOST_READ", 20_000)
    monkeypatch.setattr(import_module("tvmflow.compiler.build"), "_MOST_WEIGHTS_INSIDE", 20_000)
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "state"))
    random = np.random.default_rng(0)
    weights = {"v": random.normal(size=(64, 64)), "w": random.normal(size=(64, 32))}
    nodes = [helper.make_node("MatMul", ["x", "v"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["b"])]
    nodes.append(helper.make_node("Reshape", ["b", "shape"], ["y"]))
    values = {name: value.astype("float32") / 8 for name, value in weights.items()} | {"shape": np.array([-1, 2, 16])}
    model = make_model(nodes, [("x", ["n", 64])], ["y"], values)
    path = tmp_path / "user" / "model.onnx"
    (path.parent / "more").mkdir(parents=True)
    for tensor, location in zip(model.graph.initializer, ("v.bin", "more/w.bin"), strict=False):
        onnx.external_data_helper.set_external_data(tensor, location)
    onnx.save_model(model, path)
    return path


def test_a_large_model_gives_a_bundle_with_its_weights_apart(large: Path, tmp_path: Path) -> None:
    expected = run_session(open_session(large), {"x": _INPUT})
    document = {"name": "large", "model": {"onnx": str(large)}, "targets": ["native"]}
    bundle = compile_by_steps(document, large.parent, tmp_path / "state")
    assert read_manifest(bundle).weights == "shared"
    with runtime.load(bundle) as model:
        np.testing.assert_allclose(model(x=_INPUT)["y"], expected["y"], rtol=1e-4, atol=1e-5)
    with steps_in_this_process():
        assert {"ONNX file", "weights", "mod.params"} <= set(rebuild(bundle, large, ()))
    elsewhere = compile_by_steps(document | {"targets": ["x86-64-v2"]}, large.parent, tmp_path / "state")
    weights = {read_manifest(item).files["mod.params"].sha256 for item in (bundle, elsewhere)}
    assert len(weights) == 1


def test_a_large_model_is_written_with_one_file_beside_it(large: Path, tmp_path: Path) -> None:
    files = []
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        data = external_data.save(read_onnx(large), folder / "model.onnx")
        assert data is not None
        assert external_data.data_digests(folder / "model.onnx") == {data.name: data.name}
        files.append([data.read_bytes(), (folder / "model.onnx").read_bytes()])
        again = external_data.load(folder / "model.onnx")
        for tensor, original in zip(again.graph.initializer, onnx.load(large).graph.initializer, strict=True):
            np.testing.assert_array_equal(external_data.array_of(tensor), onnx.numpy_helper.to_array(original))
        onnx.checker.check_model(external_data.without_weights(again), full_check=True)
    assert files[0] == files[1]


def test_the_search_for_a_wrong_node_takes_large_models(large: Path, tmp_path: Path) -> None:
    result = bisect(read_onnx(large), [{"x": _INPUT}], resolve("native"), Bounds(0.0, None, -1.0))
    assert result is not None
    result.save(tmp_path / "shown")
    values = run_session(open_session(tmp_path / "shown" / "model.onnx"), dict(result.inputs))
    np.testing.assert_array_equal(values[result.output], result.expected[result.output])


def test_a_large_model_without_one_of_its_files_is_refused(large: Path) -> None:
    (large.parent / "more" / "w.bin").unlink()
    with pytest.raises(ExportError, match=r"'more/w.bin' with its weight 'w' is missing beside the model"):
        read_onnx(large)


def test_the_weights_of_a_large_model_stay_in_their_files(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that protobuf could write: each of ONNX's functions would copy them."""
    monkeypatch.undo()
    whole = external_data.load(large)
    monkeypatch.setattr(external_data, "_MOST_READ", 20_000)
    apart = external_data.load(large)
    assert apart.ByteSize() * 10 < whole.ByteSize()
    for tensor, original in zip(apart.graph.initializer, whole.graph.initializer, strict=True):
        np.testing.assert_array_equal(external_data.array_of(tensor), external_data.array_of(original))
    assert external_data.save(apart, large.parent / "one.onnx") is None
    assert (large.parent / "one.onnx").read_bytes() == whole.SerializeToString(deterministic=True)
