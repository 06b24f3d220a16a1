import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from tvm import relax

from support.models import save_dense, save_model
from tvmflow.compiler.onnx import CONVERTERS

from .conftest import Command


def test_a_model_within_the_bounds_has_nothing_to_find(tvmflow: Command, tmp_path: Path) -> None:
    result = tvmflow("bisect", save_dense(tmp_path / "dense.onnx"), "--json")
    assert result.code == 0, result.stderr
    assert json.loads(result.stdout) == {"within_bounds": True}
    assert not (tmp_path / "dense.bisect").exists()


def test_the_wrong_node_is_named_and_a_small_model_is_written(
    tvmflow: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONVERTERS, "Tanh", lambda node: relax.op.sigmoid(node.inputs[0]))
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Tanh", ["a"], ["y"], name="squash")]
    path = save_model(tmp_path / "model.onnx", nodes, [("x", ["batch", 8])], ["y"])
    small = tmp_path / "small"
    result = tvmflow("bisect", path, "--output", small)
    assert result.code == 3
    for words in ("model.onnx", "Tanh", "'squash'", "'y'", "1 node", "beside a computation in float64"):
        assert words in result.stdout
    assert [node.op_type for node in onnx.load(small / "model.onnx").graph.node] == ["Tanh"]
    again = tvmflow(
        "bisect", tmp_path / "small" / "model.onnx", "--inputs", tmp_path / "small" / "inputs.npz", "--json"
    )
    assert again.code == 3
    document = json.loads(again.stdout)
    assert document["node"] == "squash"
    assert document["max_abs_error_beside_float64"]["compiled"] > 0.1
    assert document["max_abs_error_beside_float64"]["onnxruntime"] < 1e-6


def test_a_model_that_cannot_be_imported_is_one_sentence(tvmflow: Command, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    result = tvmflow("bisect", path)
    assert result.code == 1
    assert "model.onnx" in result.sentence


def test_inputs_that_cannot_be_read_are_named(tvmflow: Command, tmp_path: Path) -> None:
    result = tvmflow("bisect", save_dense(tmp_path / "dense.onnx"), "--inputs", tmp_path / "absent.npz")
    assert result.code == 1
    assert "absent.npz" in result.sentence


def test_samples_are_of_a_kind_on_which_the_model_runs(tvmflow: Command, tmp_path: Path) -> None:
    # A table of four rows, looked up by floats from 0 to 1.
    nodes = [
        helper.make_node("Mul", ["x", "rows"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["places"], to=onnx.TensorProto.INT64),
        helper.make_node("Gather", ["table", "places"], ["y"]),
    ]
    weights = {"rows": np.float32(3.5), "table": np.arange(4, dtype="float32")}
    path = save_model(tmp_path / "model.onnx", nodes, [("x", ["batch", 50])], ["y"], weights)
    result = tvmflow("bisect", path)
    assert result.code == 0, result.stderr
    assert "all outputs are within the bounds" in result.stdout
