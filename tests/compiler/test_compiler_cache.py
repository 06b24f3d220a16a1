"""The cache of generated code: equal functions are compiled once."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support import scale
from support.models import save_model
from tvmflow.compiler import BuildOptions, CompiledModel, Imported, build, import_onnx
from tvmflow.hardware.target import Target

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A small convolutional model with weights of a seed."""

    def model(seed: int, channels: int = 8) -> Path:
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
        path = tmp_path_factory.mktemp("model") / "model.onnx"
        return save_model(path, nodes, [("x", ["batch", 3, 6, 6])], ["y"], weights)

    return model


@pytest.fixture(scope="module")
def model(make: Make) -> Imported:
    return import_onnx(make(0))


@pytest.fixture(scope="module")
def uncached(model: Imported, native: Target) -> CompiledModel:
    """The model, built without a cache."""
    return build(model, native)


@pytest.fixture(scope="module")
def plain(model: Imported, native: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The library of the model, built without a cache."""
    return exported(build(model, native), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def filled(model: Imported, native: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the code of the model."""
    folder = tmp_path_factory.mktemp("filled")
    build(model, native, cache=folder)
    return folder


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    """A cache of a test's own that has the code of the model."""
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def exported(model: CompiledModel, folder: Path) -> bytes:
    model.export(folder / "exported.so")
    return (folder / "exported.so").read_bytes()


@pytest.mark.parametrize(
    "options",
    scale.choose(
        normal=[BuildOptions(weights="apart", variants=({"batch": 1},))],
        long=[
            BuildOptions(),
            BuildOptions(exec_mode="compiled"),
            BuildOptions(weights="apart", variants=({"batch": 1},)),
        ],
    ),
    ids=str,
)
def test_the_library_is_the_same_with_and_without_the_cache(
    model: Imported, native: Target, tmp_path: Path, options: BuildOptions
) -> None:
    plain = exported(build(model, native, options), tmp_path)
    for _ in range(2):  # the first fills the cache, the second reads it
        assert exported(build(model, native, options, cache=tmp_path / "cache"), tmp_path) == plain


@pytest.mark.long
def test_each_part_of_a_library_is_an_entry_of_the_cache(
    model: Imported, uncached: CompiledModel, native: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmflow.compiler.codegen.PART", 1)
    cache = tmp_path / "cache"
    plain, filled = (build(model, native, cache=place) for place in (None, cache))
    entries = sorted(cache.iterdir())
    assert len(entries) >= len(filled.schedules) > 1
    library = exported(plain, tmp_path)
    assert exported(filled, tmp_path) == library
    times = [entry.stat().st_mtime_ns for entry in entries]
    entries[0].unlink()
    assert exported(build(model, native, cache=cache), tmp_path) == library
    changed = [entry.stat().st_mtime_ns != time for entry, time in zip(entries, times, strict=True)]
    assert changed == [True, *[False] * (len(entries) - 1)]
    x = np.random.default_rng(9).standard_normal((2, 3, 6, 6), "float32")
    np.testing.assert_array_equal(plain.load().run(x)[0], uncached.load().run(x)[0])


def test_other_weights_take_the_same_code_and_give_their_own_results(
    make: Make, uncached: CompiledModel, native: Target, cache: Path, run_built: Any
) -> None:
    x = np.random.default_rng(9).standard_normal((2, 3, 6, 6), "float32")
    other = import_onnx(make(1))
    results = [run_built(item, x)[0] for item in (build(other, native, cache=cache), build(other, native), uncached)]
    np.testing.assert_array_equal(results[0], results[1])
    assert np.abs(results[0] - results[2]).max() > 0.1
    assert len(list(cache.iterdir())) == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("change", ["shapes", "target", "level", "code", "schedule"])
def test_other_functions_targets_options_or_schedules_are_compiled_anew(
    make: Make, model: Imported, native: Target, cache: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.s_tir import Schedule

    match change:
        case "shapes":
            build(import_onnx(make(0, channels=16)), native, cache=cache)
        case "target":
            build(model, replace(native, tvm={**native.tvm, "mcpu": "x86-64"}), cache=cache)
        case "level":
            build(model, native, BuildOptions(opt_level=2), cache=cache)
        case "code":
            monkeypatch.setattr("tvmflow.compiler.codegen.code_digest", lambda _: "another version")
            build(model, native, cache=cache)
        case "schedule":
            build(model, native, tuned=lambda func: Schedule(func).mod["main"], cache=cache)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.few(2)
@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: content[:-1] + b"\0", lambda _: b""])
def test_a_damaged_entry_is_made_again(
    model: Imported, plain: bytes, native: Target, cache: Path, tmp_path: Path, damage: Any
) -> None:
    (entry,) = cache.iterdir()
    intact = entry.read_bytes()
    entry.write_bytes(damage(intact))
    assert exported(build(model, native, cache=cache), tmp_path) == plain
    assert entry.read_bytes() == intact


_BUILD = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from tvmflow.compiler import build, import_onnx
from tvmflow.hardware.target import resolve
build(import_onnx(Path(sys.argv[1])), resolve("native"), cache=Path(sys.argv[2]))
"""


def test_another_process_uses_the_entry_of_the_first(make: Make, cache: Path) -> None:
    (entry,) = cache.iterdir()
    modified_ns = entry.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", _BUILD, str(make(0)), str(cache)], check=True, timeout=300)
    assert [item.stat().st_mtime_ns for item in cache.iterdir()] == [modified_ns]


def test_a_model_without_functions_needs_no_code(make_model: Any, native: Target, tmp_path: Path) -> None:
    path = make_model([helper.make_node("Identity", ["x"], ["y"])], [("x", [2, 3])], ["y"])
    assert exported(build(import_onnx(path), native, cache=tmp_path / "cache"), tmp_path)
