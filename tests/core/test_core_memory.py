"""Limits of the memory that this process may take: `tvmflow.hardware.memory`."""

from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import helper

from support.models import make_model
from tvmflow.cli.sizes import find_inputs
from tvmflow.errors import ExportError
from tvmflow.hardware import memory
from tvmflow.onnx_model.session import open_session, run_session


@pytest.fixture
def products(tmp_path: Path) -> Path:
    """The products of all elements of four equal vectors: of 64 elements 64 MiB, of 128 elements 1 GiB."""
    nodes = [
        helper.make_node("Mul", ["rows", "columns"], ["table"]),
        helper.make_node("Unsqueeze", ["table", "axes"], ["tables"]),
        helper.make_node("Mul", ["table", "tables"], ["all"]),
        helper.make_node("ReduceMax", ["all"], ["y"], keepdims=0),
    ]
    reshapes = [helper.make_node("Reshape", ["x", shape], [shape[:-6]]) for shape in ("rows_shape", "columns_shape")]
    weights = {"rows_shape": np.array([-1, 1]), "columns_shape": np.array([1, -1]), "axes": np.array([2, 3])}
    onnx.save(make_model([*reshapes, *nodes], [("x", [1, "n"])], ["y"], weights), tmp_path / "products.onnx")
    return tmp_path / "products.onnx"


def test_memory_beyond_the_limit_is_refused_and_there_again_afterwards() -> None:
    # More than earlier tests may have left free among the addresses that this process has.
    size = 1 << 31
    with memory.limit(1 << 26), pytest.raises(MemoryError):
        np.empty(size, np.uint8)
    assert np.empty(size, np.uint8).nbytes == size


def test_a_model_that_needs_more_memory_than_it_may_take_is_refused(products: Path) -> None:
    session = open_session(products, prints_errors=False)
    inputs = {"x": np.ones((1, 128), np.float32)}
    with pytest.raises(ExportError, match="ONNX Runtime cannot run the model"):
        run_session(session, inputs, 1 << 28)
    assert run_session(session, {"x": inputs["x"][:, :64]}, 1 << 28)["y"] == 1


def test_trials_keep_no_memory(products: Path) -> None:
    session = open_session(products, prints_errors=False)
    before = psutil.Process().memory_info().rss
    for size in (60, 61, 62, 63, 64):
        run_session(session, {"x": np.ones((1, size), np.float32)}, 1 << 28)
    assert psutil.Process().memory_info().rss - before < 1 << 26


def test_sizes_to_measure_grow_as_long_as_the_model_takes_little_memory(
    products: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LIGHT_BYTES", 1 << 28)
    result = find_inputs(products, onnx.load(products))
    assert result is not None
    assert result[1]["n"].measure == (64,)
