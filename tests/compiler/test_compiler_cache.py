"""The cache of generated code: equal functions are compiled once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tvmflow.compiler import BuildOptions, CompiledModel, build, import_onnx
from tvmflow.target import Target


@pytest.fixture
def make(make_model: Any) -> Any:
    """A small convolutional model with weights of a seed."""

    def model(seed: int, channels: int = 8, name: str = "model.onnx") -> Path:
        rng = np.random.default_rng(seed)
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Flatten", ["b"], ["c"]),
            helper.make_node("MatMul", ["c", "dense"], ["y"]),
        ]
        weights = {
            "w": rng.standard_normal((channels, 3, 3, 3), "float32"),
            "dense": rng.standard_normal((channels * 36, 5), "float32"),
        }
        path: Path = make_model(nodes, [("x", ["batch", 3, 6, 6])], ["y"], weights, name=name)
        return path

    return model


def exported(built: CompiledModel, folder: Path) -> bytes:
    built.export(folder / "exported.so")
    return (folder / "exported.so").read_bytes()


@pytest.mark.parametrize(
    "options",
    [BuildOptions(), BuildOptions(exec_mode="compiled"), BuildOptions(weights="apart", variants=({"batch": 1},))],
    ids=["bytecode", "compiled", "apart"],
)
def test_the_library_is_the_same_with_and_without_the_cache(
    make: Any, native: Target, tmp_path: Path, options: BuildOptions
) -> None:
    imported = import_onnx(make(0))
    plain = exported(build(imported, native, options), tmp_path)
    for _ in range(2):  # the first fills the cache, the second reads it
        assert exported(build(imported, native, options, cache=tmp_path / "cache"), tmp_path) == plain


def test_other_weights_take_the_same_code_and_give_their_own_results(
    make: Any, native: Target, tmp_path: Path, run_built: Any
) -> None:
    x = np.random.default_rng(9).standard_normal((2, 3, 6, 6), "float32")
    for seed in (0, 1):
        imported = import_onnx(make(seed))
        cached = run_built(build(imported, native, cache=tmp_path / "cache"), x)[0]
        np.testing.assert_array_equal(cached, run_built(build(imported, native), x)[0])
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("change", ["shapes", "target", "level", "schedule"])
def test_other_functions_targets_options_or_schedules_are_compiled_anew(
    make: Any, native: Target, tmp_path: Path, change: str
) -> None:
    from dataclasses import replace

    from tvm.s_tir import Schedule

    imported, cache = import_onnx(make(0)), tmp_path / "cache"
    build(imported, native, cache=cache)
    match change:
        case "shapes":
            build(import_onnx(make(0, channels=16, name="wide.onnx")), native, cache=cache)
        case "target":
            build(imported, replace(native, tvm={**native.tvm, "mcpu": "x86-64"}), cache=cache)
        case "level":
            build(imported, native, BuildOptions(opt_level=2), cache=cache)
        case "schedule":
            build(imported, native, tuned=lambda func: Schedule(func).mod["main"], cache=cache)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: content[:-1] + b"\0", lambda _: b""])
def test_a_damaged_entry_is_made_again(make: Any, native: Target, tmp_path: Path, damage: Any) -> None:
    imported, cache = import_onnx(make(0)), tmp_path / "cache"
    plain = exported(build(imported, native, cache=cache), tmp_path)
    (entry,) = cache.iterdir()
    intact = entry.read_bytes()
    entry.write_bytes(damage(intact))
    assert exported(build(imported, native, cache=cache), tmp_path) == plain
    assert entry.read_bytes() == intact


_BUILD = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from tvmflow.compiler import build, import_onnx
from tvmflow.target import resolve
build(import_onnx(Path(sys.argv[1])), resolve("native"), cache=Path(sys.argv[2]))
"""


def test_another_process_uses_the_entry_of_the_first(make: Any, native: Target, tmp_path: Path) -> None:
    model, cache = make(0), tmp_path / "cache"
    build(import_onnx(model), native, cache=cache)
    (entry,) = cache.iterdir()
    modified_ns = entry.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", _BUILD, str(model), str(cache)], check=True, timeout=300)
    assert [item.stat().st_mtime_ns for item in cache.iterdir()] == [modified_ns]


def test_a_model_without_functions_needs_no_code(make_model: Any, native: Target, tmp_path: Path) -> None:
    path = make_model([helper.make_node("Identity", ["x"], ["y"])], [("x", [2, 3])], ["y"])
    assert exported(build(import_onnx(path), native, cache=tmp_path / "cache"), tmp_path)
