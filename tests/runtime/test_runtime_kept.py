"""The memory that the runtime keeps for later calls has a limit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import helper

from support.models import save_model
from support.steps import compile_by_steps
from tvmflow import runtime
from tvmflow.runtime import CompiledModel, kept

_MIB = 1 << 20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shares of a product's elements in its rows, whose number is free; a row is a KiB."""
    folder = tmp_path_factory.mktemp("shares")
    weights = {"w": np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["y"])]
    model = save_model(folder / "shares.onnx", nodes, [("x", ["rows", 8])], ["y"], weights)
    return compile_by_steps({"name": "shares", "model": {"onnx": str(model)}}, folder, folder / "state")


@pytest.fixture
def model(bundle: Path) -> Iterator[CompiledModel]:
    with runtime.load(bundle) as loaded:
        yield loaded


def _grown(model: CompiledModel) -> int:
    """The bytes by which the process grows with calls at 60 sizes of about 8 MiB each."""
    process = psutil.Process()
    before = process.memory_info().rss
    for rows in range(8000, 8060):
        result = model(np.ones((rows, 8), np.float32))["y"]
        np.testing.assert_allclose(result[-1].sum(), 1, rtol=1e-5)
    return int(process.memory_info().rss) - before


def test_calls_at_many_sizes_keep_no_memory_for_each(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_LEAST", 32 * _MIB)
    monkeypatch.setattr(kept, "_INTERVAL", 0.0)
    monkeypatch.setattr(kept, "limit", kept._Limit())
    assert _grown(model) < 150 * _MIB
    monkeypatch.setattr(kept, "_LEAST", 1 << 40)
    monkeypatch.setattr(kept, "limit", kept._Limit())
    # What the limit is for.
    assert _grown(model) > 300 * _MIB


def test_a_model_that_is_closed_gives_its_memory_back(bundle: Path) -> None:
    process = psutil.Process()
    with runtime.load(bundle) as model:
        model(np.ones((100_000, 8), np.float32))
        before = process.memory_info().rss
    assert process.memory_info().rss < before - 60 * _MIB
