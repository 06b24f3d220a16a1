"""A small model with two outputs and a symbolic batch, compiled once by the real steps."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from support.steps import compile_by_steps
from tvmflow import runtime
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import extract, pack
from tvmflow.runtime import CompiledModel

MakeInputs = Callable[[int], NamedArrays]
Repack = Callable[..., Path]


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sum` = (x @ weights) * scale + y, `positive` = relu(sum)."""
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["product"]),
        helper.make_node("Mul", ["product", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "y"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["positive"]),
    ]
    inputs = [("x", ["batch", 8]), ("y", ["batch", 4]), ("scale", [])]
    outputs = [(name, ["batch", 4]) for name in ("sum", "positive")]
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    return save_model(path, nodes, inputs, outputs, {"weights": weights})


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, onnx_file: Path) -> Callable[[str], Path]:
    """Compile the model with its weights `inside` or `apart`."""
    state = tmp_path_factory.mktemp("state")

    def compile_model(weights: str) -> Path:
        document = {
            "name": "small",
            "model": {"onnx": str(onnx_file)},
            "dimensions": {"batch": {"min": 1, "max": 8}},
            "build": {"weights": weights},
        }
        return compile_by_steps(document, onnx_file.parent, state)

    return compile_model


@pytest.fixture(scope="session")
def bundle(compiled: Callable[[str], Path]) -> Path:
    return compiled("inside")


@pytest.fixture(scope="session")
def bundle_apart(compiled: Callable[[str], Path]) -> Path:
    return compiled("apart")


@pytest.fixture(scope="session")
def model(bundle: Path) -> Iterator[CompiledModel]:
    with runtime.load(bundle) as loaded:
        yield loaded


@pytest.fixture
def inputs() -> MakeInputs:
    """Inputs of a batch size, different for each."""

    def make(batch: int) -> NamedArrays:
        generator = np.random.default_rng(batch)
        return {
            "x": generator.normal(size=(batch, 8)).astype(np.float32),
            "y": generator.normal(size=(batch, 4)).astype(np.float32),
            "scale": np.array(0.5, np.float32),
        }

    return make


@pytest.fixture(scope="session")
def reference(onnx_file: Path) -> Callable[[NamedArrays], NamedArrays]:
    """ONNX Runtime's outputs by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(onnx_file), providers=["CPUExecutionProvider"])

    def run(arrays: NamedArrays) -> NamedArrays:
        return dict(zip(("sum", "positive"), session.run(["sum", "positive"], arrays), strict=True))

    return run


@pytest.fixture
def repack(bundle: Path, tmp_path: Path) -> Repack:
    """The bundle with other values in its manifest, or other bytes for its library or its golden sample."""

    def change(library: bytes | None = None, sample: bytes | None = None, **values: object) -> Path:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        manifest = extract(bundle, folder)
        for name, data in {"mod.so": library, "sample.npz": sample}.items():
            if data is not None:
                (folder / name).write_bytes(data)
        path = folder.with_suffix(".tar.gz")
        pack(path, dataclasses.replace(manifest, **values), {item.name: item for item in folder.iterdir()})  # type: ignore[arg-type]
        return path

    return change
