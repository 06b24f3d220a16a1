"""The C++ runner, built by CMake, and a small model compiled by the real steps for it to run."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from support.skips import require
from tvmflow import npz, runtime
from tvmflow.target import Target, host

CPP = Path(__file__).parents[2] / "cpp"
# The wheels of other platforms, kept for all checkouts of this user.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmflow"
CROSS = ("aarch64-linux-gnu-g++", "qemu-aarch64")

Arrays = dict[str, npt.NDArray[Any]]
Compile = Callable[..., Path]
MakeInputs = Callable[[int], Arrays]


@dataclass(frozen=True)
class Runner:
    """The command `tvmflow-run`: how it is started, and in which environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]

    def __call__(self, *arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *map(str, arguments)],
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def outputs(self, bundle: Path, inputs: Arrays, folder: Path) -> Arrays:
        """What the bundle computes."""
        npz.write(folder / "in.npz", inputs)
        done = self(bundle, "--inputs", folder / "in.npz", "--output", folder / "out.npz")
        assert done.returncode == 0, done.stderr
        return npz.read(folder / "out.npz")

    def refusal(self, *arguments: object, code: int = 1, env: Mapping[str, str] | None = None) -> str:
        """The one sentence with which the command refuses; it must have ended by itself, with that code."""
        done = self(*arguments, env=env)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr[-2000:])
        assert done.stdout == ""
        assert done.stderr.startswith("tvmflow-run: ")
        assert done.stderr.count("\n") == 1
        return done.stderr.removeprefix("tvmflow-run: ").rstrip("\n")


def _configure_and_build(folder: Path, *options: str) -> Path:
    """Build the runner and return the command."""
    for arguments in (
        ["cmake", "-S", str(CPP), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}", *options],
        ["cmake", "--build", str(folder), "--parallel", str(host().cores)],
    ):
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "tvmflow-run"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("TVM_", "TVMFLOW_"))}


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """The runner for this machine, with the sanitisers: whatever a damaged file makes it read or write is seen."""
    require("cmake", "c++")
    command = _configure_and_build(
        tmp_path_factory.mktemp("runner"), "-DTVMFLOW_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug"
    )
    if "ZLIB_INCLUDE_DIR-NOTFOUND" in (command.parent / "CMakeCache.txt").read_text():
        pytest.skip("zlib's headers (zlib1g-dev) not installed: the C++ runner reads no archives")
    # TVM keeps what it registers until the process has ended.
    return Runner((str(command),), {**_environment(), "ASAN_OPTIONS": "detect_leaks=0"})


@pytest.fixture(scope="session")
def aarch64_runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """The runner for 64-bit ARM, cross-built and emulated."""
    require("cmake", *CROSS)
    wheels = CACHE / f"aarch64-tvm-{version('apache-tvm')}-ffi-{version('apache-tvm-ffi')}"
    if not wheels.is_dir():
        arguments = [sys.executable, str(CPP / "wheels.py"), "--platform", "manylinux_2_28_aarch64", str(wheels)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
        if done.returncode != 0 and not wheels.is_dir():
            pytest.skip("the wheels of TVM for ARM cannot be fetched here")
    command = _configure_and_build(
        tmp_path_factory.mktemp("runner-aarch64"),
        f"-DCMAKE_TOOLCHAIN_FILE={CPP / 'aarch64-linux-gnu.cmake'}",
        f"-DTVMFLOW_WHEELS={wheels}",
    )
    return Runner(("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", str(command)), _environment())


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small convolutional network: image -> pooled; logits = (pooled @ dense) * scale + bias; above = logits > 0."""
    generator = np.random.default_rng(0)
    weights = {
        "kernel": generator.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "dense": generator.normal(size=(8, 5)).astype(np.float32),
        "zero": np.zeros((), np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "kernel"], ["conv"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["conv"], ["relu"]),
            helper.make_node("GlobalAveragePool", ["relu"], ["mean"]),
            helper.make_node("Flatten", ["mean"], ["pooled"]),
            helper.make_node("MatMul", ["pooled", "dense"], ["product"]),
            helper.make_node("Mul", ["product", "scale"], ["scaled"]),
            helper.make_node("Add", ["scaled", "bias"], ["logits"]),
            helper.make_node("Greater", ["logits", "zero"], ["above"]),
        ],
        "small",
        [
            helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 8, 8]),
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, ["batch", 5]),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5]),
            helper.make_tensor_value_info("above", TensorProto.BOOL, ["batch", 5]),
        ],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, onnx_file: Path) -> Compile:
    """Compile the model for a target, with its weights `inside` or `apart`, in a precision.

    Batch 4 has a function of its own.
    """
    from tasks import build, export, package, relax_import, tune
    from tasks.step import Context
    from tvmflow import spec
    from tvmflow.settings import Settings
    from tvmflow.workspace import Workspace

    workspace = Workspace(tmp_path_factory.mktemp("state"))

    def compile_model(target: str = "native", weights: str = "inside", precision: str = "fp32") -> Path:
        document = {
            "name": "small",
            "model": {"onnx": str(onnx_file)},
            "dimensions": {"batch": {"min": 1, "max": 8, "tune": 4}},
            "build": {"weights": weights, "precision": precision},
            "targets": [target],
        }
        context = Context(spec.parse(document, onnx_file.parent), Settings(), workspace)
        resolved: Target = context.spec.resolve_targets()[0]
        exported = export.export.fn(context)
        imported = relax_import.relax_import.fn(context, exported)
        tuned = tune.tune.fn(context, imported, resolved)
        built = build.build.fn(context, imported, tuned, resolved)
        return context.file(package.package.fn(context, exported, imported, tuned, built, resolved).result.bundle)

    return compile_model


@pytest.fixture(scope="session")
def bundle(compiled: Compile) -> Path:
    return compiled()


@pytest.fixture(scope="session")
def bundle_apart(compiled: Compile) -> Path:
    return compiled(weights="apart")


@pytest.fixture
def inputs() -> MakeInputs:
    """Inputs of a batch size, different for each."""

    def make(batch: int) -> Arrays:
        generator = np.random.default_rng(batch)
        return {
            "image": generator.normal(size=(batch, 3, 8, 8)).astype(np.float32),
            "bias": generator.normal(size=(batch, 5)).astype(np.float32),
            "scale": np.array(0.5, np.float32),
        }

    return make


@pytest.fixture
def computed_by_python() -> Callable[[Path, Arrays], Arrays]:
    """What the runtime in Python computes."""

    def run(bundle: Path, arrays: Arrays) -> Arrays:
        with runtime.load(bundle) as model:
            return model(**arrays)

    return run
