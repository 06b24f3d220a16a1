"""Small ONNX models, and comparisons of built models with ONNX Runtime."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "2")
# Idle threads of the pool would spin, and take the time of the compiler.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
# On one core TVM's pool would take the limit of the cores from the process, and its children would count more cores.
os.environ.setdefault("TVM_BIND_THREADS", "0")

import onnx
import pytest

from support import builds, scale
from support.machines import best_target, on_two_cores, require_level
from support.models import save_model
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, Choices, CompiledModel, amx
from tvmflow.compiler.inspection import Inspection
from tvmflow.hardware.profiles import Tiles
from tvmflow.hardware.target import Target, host, resolve

# Files whose tests are about what operators and passes mean: how well LLVM optimises the code is nothing to them, and
# takes a quarter of their time. Those about kernels, precisions, instructions and schedules are not among them.
_MEANINGS = {
    "bisection",
    "classical",
    "complaints",
    "contributed",
    "control",
    "deformed",
    "einsum",
    "features",
    "float16",
    "forms",
    "free",
    "labels",
    "loops",
    "movement",
    "norms",
    "operands",
    "parts",
    "passes",
    "pooling",
    "rare",
    "recurrence",
    "reductions",
    "sampling",
    "sequences",
    "signals",
    "sizes",
    "transposed",
    "trees",
    "variants",
}

MakeModel = Callable[..., Path]
RunBuilt = Callable[..., list[Array]]


@pytest.fixture(scope="session")
def native() -> Target:
    """The target of this machine, for tests that hold for every target."""
    return resolve("native")


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> Target:
    """The best level of x86-64 that this machine runs, on two cores, so that equal tests build equal code.

    In a normal run LLVM optimises less for the files of `_MEANINGS`.
    """
    best = best_target()
    is_less_optimised = request.path.stem.removeprefix("test_compiler_") in _MEANINGS and not scale.is_long()
    return resolve({**best.tvm, "opt-level": 1}) if is_less_optimised else best


@pytest.fixture(scope="session")
def bf16() -> Target:
    """AVX-512 with dot products of bfloat16, without AMX, which `test_compiler_amx.py` is about."""
    return _or_skip("x86-64-v4-bf16")


@pytest.fixture(scope="session")
def amx_target() -> Target:
    """This machine with AMX, but with no instruction beside it that it lacks."""
    if "avx512f" not in host().features:
        pytest.skip("this CPU has no AVX-512")
    mine = [name for name in ("avx512_vnni", "avx512_bf16") if name in host().features]
    attributes = ["+amx-tile", "+amx-bf16", "+amx-int8", *(f"+{name.replace('_', '')}" for name in mine)]
    return resolve({"kind": "llvm", "mcpu": "x86-64-v4", "mattr": attributes, "num-cores": 2})


@pytest.fixture(scope="session")
def amx_software(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose functions do what AMX's instructions do."""
    library = tmp_path_factory.mktemp("amx") / "amx.so"
    source = Path(__file__).with_name("amx.cc")
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)  # noqa: S607
    return library


@pytest.fixture
def emulated_amx(amx_software: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """AMX's kernels call the functions of this library, which libraries that are loaded from now on find."""
    ctypes.CDLL(str(amx_software), ctypes.RTLD_GLOBAL)
    monkeypatch.setattr(amx, "INTRINSICS", "emulated_")
    monkeypatch.setattr(amx, "PREFETCH", "emulated_prefetch")
    return amx_software


@pytest.fixture
def cheap_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model takes AMX for every product that its kernels can compute."""
    monkeypatch.setattr(amx, "_costs", lambda _: Tiles(multiply=1, load_first=0, load_second=0, start=0, configure=0))


@pytest.fixture(scope="session")
def int8() -> Target:
    """The best target with dot products of 8-bit integers that this machine runs, without AMX."""
    if "avx512_vnni" in host().features:
        return on_two_cores("x86-64-v4-vnni")
    return on_two_cores("llvm -mcpu=x86-64-v3 -mattr=+avxvnni") if "avx_vnni" in host().features else best_target()


def _or_skip(name: str) -> Target:
    require_level(name)
    return on_two_cores(name)


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
def run_built() -> RunBuilt:
    """Run a built model on arrays."""

    def run(model: CompiledModel, *arrays: Array) -> list[Array]:
        return builds.run_in_memory(model, [arrays])[0]

    return run


@pytest.fixture
def assert_same_as_onnxruntime(target: Target) -> Callable[..., CompiledModel]:
    """Build the model for `target`, run it and ONNX Runtime on the same inputs, and compare."""

    def check(
        path: Path,
        *feeds: dict[str, Array],
        options: BuildOptions | None = None,
        rtol: float = 1e-4,
        inspect: Inspection | None = None,
    ) -> CompiledModel:
        return builds.assert_same_as_onnxruntime(path, feeds, target, options, rtol, inspect=inspect)

    return check


@pytest.fixture
def assert_all_same(tmp_path: Path, target: Target) -> Callable[..., CompiledModel]:
    """Build several models for `target` as one, run them and ONNX Runtime on the same inputs, and compare.

    A case is the arguments of `save_model` that follow the path, and the feeds to run the model on.
    """

    def check(
        cases: Iterable[tuple[Any, ...]], options: BuildOptions | None = None, choices: Choices | None = None
    ) -> CompiledModel:
        saved = []
        for place, (arguments, *feeds) in enumerate(cases):
            saved.append((save_model(tmp_path / f"case{place}.onnx", *arguments), feeds))
        return builds.assert_all_same_as_onnxruntime(saved, target, options, choices)

    return check
