"""Small ONNX models, and the comparison of what we build with ONNX Runtime."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "2")

import numpy as np
import onnx
import pytest

from support import builds
from support.models import save_model
from tvmflow.compiler import BuildOptions, Built
from tvmflow.target import Target, resolve

Array = np.ndarray[Any, Any]
MakeModel = Callable[..., Path]
RunBuilt = Callable[..., list[Array]]


@pytest.fixture(scope="session")
def native() -> Target:
    return resolve("native")


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Write an ONNX model of the given nodes; initializers by name, inputs as (name, shape[, dtype])."""

    def make(
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[tuple[Any, ...]],
        outputs: Sequence[str],
        weights: dict[str, Array] | None = None,
        name: str = "model.onnx",
        opset: int = 18,
    ) -> Path:
        return save_model(tmp_path / name, nodes, inputs, outputs, weights, opset=opset)

    return make


@pytest.fixture
def run_built(tmp_path: Path) -> RunBuilt:
    """Export a built model, load the library and run it on arrays."""

    def run(built: Built, *arrays: Array) -> list[Array]:
        import tvm
        from tvm import relax

        library = tmp_path / "mod.so"
        library.unlink(missing_ok=True)
        built.export(library)
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        result = machine["main"](*(tvm.runtime.tensor(array) for array in (*arrays, *built.params.values())))
        return [item.numpy() for item in ([result] if hasattr(result, "numpy") else result)]

    return run


@pytest.fixture
def assert_same_as_onnxruntime(native: Target) -> Callable[..., Built]:
    """Build the model for this machine, run it and ONNX Runtime on the same inputs, and compare."""

    def check(path: Path, *feeds: dict[str, Array], options: BuildOptions | None = None, rtol: float = 1e-4) -> Built:
        return builds.assert_same_as_onnxruntime(path, feeds, native, options, rtol)

    return check
