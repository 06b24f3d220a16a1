"""A small model with two outputs and a symbolic batch, compiled once by the real steps."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmflow import runtime
from tvmflow.bundle import extract, pack
from tvmflow.runtime import CompiledModel

Arrays = dict[str, npt.NDArray[Any]]
MakeInputs = Callable[[int], Arrays]
Repack = Callable[..., Path]


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sum` = (x @ weights) * scale + y, `positive` = relu(sum)."""
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "weights"], ["product"]),
            helper.make_node("Mul", ["product", "scale"], ["scaled"]),
            helper.make_node("Add", ["scaled", "y"], ["sum"]),
            helper.make_node("Relu", ["sum"], ["positive"]),
        ],
        "small",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, []),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("sum", "positive")],
        [numpy_helper.from_array(weights, "weights")],
    )
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, onnx_file: Path) -> Callable[[str], Path]:
    """Compile the model with its weights `inside` or `apart`."""
    from tasks import build, export, package, relax_import, tune
    from tasks.step import Context
    from tvmflow import spec
    from tvmflow.settings import Settings
    from tvmflow.workspace import Workspace

    workspace = Workspace(tmp_path_factory.mktemp("state"))

    def compile_model(weights: str) -> Path:
        document = {
            "name": "small",
            "model": {"onnx": str(onnx_file)},
            "dimensions": {"batch": {"min": 1, "max": 8}},
            "build": {"weights": weights},
        }
        context = Context(spec.parse(document, onnx_file.parent), Settings(), workspace)
        (target,) = context.spec.resolve_targets()
        exported = export.export.fn(context)
        imported = relax_import.relax_import.fn(context, exported)
        tuned = tune.tune.fn(context, imported, target)
        built = build.build.fn(context, imported, tuned, target)
        return context.file(package.package.fn(context, exported, imported, tuned, built, target).result.bundle)

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

    def make(batch: int) -> Arrays:
        generator = np.random.default_rng(batch)
        return {
            "x": generator.normal(size=(batch, 8)).astype(np.float32),
            "y": generator.normal(size=(batch, 4)).astype(np.float32),
            "scale": np.array(0.5, np.float32),
        }

    return make


@pytest.fixture(scope="session")
def reference(onnx_file: Path) -> Callable[[Arrays], Arrays]:
    """ONNX Runtime's outputs by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(onnx_file), providers=["CPUExecutionProvider"])

    def run(arrays: Arrays) -> Arrays:
        return dict(zip(("sum", "positive"), session.run(["sum", "positive"], arrays), strict=True))

    return run


@pytest.fixture
def repack(bundle: Path, tmp_path: Path) -> Repack:
    """The bundle with other values in its manifest, or other bytes for its library."""

    def change(library: bytes | None = None, **values: object) -> Path:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        manifest = extract(bundle, folder)
        if library is not None:
            (folder / "mod.so").write_bytes(library)
        path = folder.with_suffix(".tar.gz")
        pack(path, dataclasses.replace(manifest, **values), {item.name: item for item in folder.iterdir()})  # type: ignore[arg-type]
        return path

    return change
