"""The C++ runner, built by CMake, and a small model compiled by the real steps for it to run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from support import cpp
from support.archives import unpack
from support.cpp import Runner
from support.models import save_convolution, save_model
from support.steps import compile_by_steps
from tvmflow import runtime
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import read_manifest

Compile = Callable[..., Path]
MakeInputs = Callable[[int], NamedArrays]


@pytest.fixture(scope="session")
def runner() -> Runner:
    """The runner for this machine, with the sanitisers."""
    return cpp.build_runner()


@pytest.fixture(scope="session")
def program() -> Runner:
    """A program that is linked with the installed library."""
    return cpp.build_program()


@pytest.fixture(scope="session")
def aarch64_runner() -> Runner:
    """The runner for 64-bit ARM, cross-built and emulated."""
    return cpp.build_aarch64_runner()


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small convolutional network: image -> pooled; logits = (pooled @ dense) * scale + bias; above = logits > 0."""
    generator = np.random.default_rng(0)
    weights = {
        "kernel": generator.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "dense": generator.normal(size=(8, 5)).astype(np.float32),
        "zero": np.zeros((), np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv"], ["relu"]),
        helper.make_node("GlobalAveragePool", ["relu"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["pooled"]),
        helper.make_node("MatMul", ["pooled", "dense"], ["product"]),
        helper.make_node("Mul", ["product", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["logits"]),
        helper.make_node("Greater", ["logits", "zero"], ["above"]),
    ]
    return save_model(
        tmp_path_factory.mktemp("model") / "small.onnx",
        nodes,
        [("image", ["batch", 3, 8, 8]), ("bias", ["batch", 5]), ("scale", [])],
        [("logits", ["batch", 5]), ("above", ["batch", 5], TensorProto.BOOL)],
        weights,
    )


@pytest.fixture(scope="session")
def compile_small(tmp_path_factory: pytest.TempPathFactory, onnx_file: Path) -> Compile:
    """Compile the model for a target, with its weights `inside` or `apart`, in a precision.

    Batch 4 has a function of its own.
    """
    state = tmp_path_factory.mktemp("state")

    def compile_model(target: str = "native", weights: str = "inside", precision: str = "fp32") -> Path:
        document = {
            "name": "small",
            "model": {"onnx": str(onnx_file)},
            "dimensions": {"batch": {"min": 1, "max": 8, "tune": 4}},
            "build": {"weights": weights, "precision": precision},
            "targets": [target],
        }
        return compile_by_steps(document, onnx_file.parent, state)

    return compile_model


@pytest.fixture(scope="session")
def bundle(compile_small: Compile) -> Path:
    return compile_small()


@pytest.fixture(scope="session")
def bundle_apart(compile_small: Compile) -> Path:
    return compile_small(weights="apart")


@pytest.fixture(scope="session")
def compile_convolution(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile a convolution for a target, whose weights, `inside` or `apart`, the library packs when it is loaded."""
    state = tmp_path_factory.mktemp("state")
    model = save_convolution(tmp_path_factory.mktemp("model") / "convolution.onnx")

    def compile_model(target: str, weights: str = "inside") -> Path:
        document = {
            "name": "convolution",
            "model": {"onnx": str(model)},
            "build": {"weights": weights},
            "targets": [target],
        }
        bundle = compile_by_steps(document, model.parent, state)
        assert read_manifest(bundle).packs_at_load
        assert read_manifest(bundle).has_weights_file == (weights == "apart")
        return bundle

    return compile_model


@pytest.fixture
def unpacked(bundle: Path, tmp_path: Path) -> Path:
    """The bundle, unpacked into a folder."""
    folder = tmp_path / "unpacked"
    unpack(bundle, folder)
    return folder


@pytest.fixture
def make_inputs() -> MakeInputs:
    """Make inputs of a batch size, different for each."""

    def make(batch: int) -> NamedArrays:
        generator = np.random.default_rng(batch)
        return {
            "image": generator.normal(size=(batch, 3, 8, 8)).astype(np.float32),
            "bias": generator.normal(size=(batch, 5)).astype(np.float32),
            "scale": np.array(0.5, np.float32),
        }

    return make


@pytest.fixture
def run_in_python() -> Callable[[Path, NamedArrays], NamedArrays]:
    """Compute the outputs of a bundle by the runtime in Python."""

    def run(bundle: Path, arrays: NamedArrays) -> NamedArrays:
        with runtime.load(bundle) as model:
            return model(**arrays)

    return run
