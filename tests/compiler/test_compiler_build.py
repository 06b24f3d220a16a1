import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from tvmflow.compiler import BuildOptions, CompiledModel, build, can_build, import_onnx, ir_text, lower, workloads
from tvmflow.compiler.schedules import ScheduleWarning
from tvmflow.errors import BuildError, TargetError
from tvmflow.hardware import cores
from tvmflow.hardware.target import Target, resolve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w2"], ["e"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["e"], ["f"]),
        helper.make_node("Flatten", ["f"], ["g"]),
        helper.make_node("MatMul", ["g", "dense"], ["y"]),
    ]
    weights = {
        "w": rng.standard_normal((8, 3, 3, 3), "float32"),
        "v": rng.standard_normal((8, 8, 3, 3), "float32"),
        "w2": rng.standard_normal((8, 8, 3, 3), "float32"),
        "dense": rng.standard_normal((8 * 36, 5), "float32"),
    }
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    return save_model(path, nodes, [("x", ["batch", 3, 6, 6])], ["y"], weights)


@pytest.fixture(scope="module")
def usual(model: Path, native: Target) -> CompiledModel:
    """The model, built without options."""
    return build(import_onnx(model), native)


_EXPORT = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from tvmflow.compiler import build, import_onnx
from tvmflow.hardware.target import resolve
build(import_onnx(Path(sys.argv[1])), resolve("native")).export(Path(sys.argv[2]))
"""


@pytest.mark.long
def test_libraries_of_different_processes_and_folders_are_identical(
    model: Path, tmp_path: Path, native: Target
) -> None:
    libraries = [tmp_path / "one" / "a.so", tmp_path / "another" / "b.so"]
    for library in libraries:
        library.parent.mkdir()
    build(import_onnx(model), native).export(libraries[0])
    subprocess.run([sys.executable, "-c", _EXPORT, str(model), str(libraries[1])], check=True, timeout=300)
    assert libraries[0].read_bytes() == libraries[1].read_bytes()
    assert [entry.name for entry in libraries[0].parent.iterdir()] == ["a.so"]


def test_a_library_holds_nothing_for_debuggers(usual: CompiledModel, tmp_path: Path) -> None:
    usual.export(tmp_path / "mod.so")
    library = (tmp_path / "mod.so").read_bytes()
    assert b".symtab" in library
    assert b".debug_" not in library


def test_lowering_is_deterministic(model: Path, native: Target) -> None:
    imported = import_onnx(model)
    assert ir_text(lower(imported, native)) == ir_text(lower(imported, native))


@pytest.mark.parametrize(
    "options",
    [BuildOptions(required_passes=("FuseOp",)), BuildOptions(disabled_passes=("FuseOp",))],
    ids=["required", "disabled"],
)
def test_an_unknown_pass_is_refused_with_the_close_ones(options: BuildOptions, model: Path, native: Target) -> None:
    with pytest.raises(BuildError, match=r"'FuseOp' is unknown.*'FuseOps'"):
        build(import_onnx(model), native, options)


def test_an_unknown_pass_option_is_refused(model: Path, native: Target) -> None:
    with pytest.raises(BuildError, match=r"'tirx\.UnrolLoop' is unknown.*'tirx\.UnrollLoop'"):
        build(import_onnx(model), native, BuildOptions(config={"tirx.UnrolLoop": {}}))


def test_functions_of_symbolic_shapes_may_keep_sums_in_registers(make_model: Any, native: Target) -> None:
    weights = {"w": np.ones((256, 512), "float32")}
    path = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", ["rows", 256])], ["y"], weights)
    code = str(build(import_onnx(path), native).executable.mod.imports[0].inspect_source("ll"))
    # LLVM reloads buffers that may overlap at every step.
    (parameters,) = re.findall(r"^define .* @dense_compute_\((.*?)\)", code, re.MULTILINE)
    assert parameters.count("ptr noalias") == 3


def test_disabling_fusion_leaves_more_functions(model: Path, native: Target) -> None:
    imported = import_onnx(model)
    fused = workloads(lower(imported, native))
    apart = workloads(lower(imported, native, BuildOptions(disabled_passes=("FuseOps",))))
    assert len(apart) > len(fused)


def test_a_disabled_pass_that_the_build_needs_is_one_sentence(model: Path, native: Target) -> None:
    with pytest.raises(BuildError, match=r"without the passes VMShapeLower"):
        build(import_onnx(model), native, BuildOptions(disabled_passes=("VMShapeLower",)))


def test_equal_functions_are_one_workload(model: Path, native: Target) -> None:
    calls = sorted(item.calls for item in workloads(lower(import_onnx(model), native)) if "conv2d" in item.name)
    assert calls == [1, 2]


def test_flops_are_those_of_the_product(make_model: Any, native: Target) -> None:
    weights = {"w": np.ones((64, 32), "float32")}
    path = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [8, 64])], ["y"], weights)
    (product,) = workloads(lower(import_onnx(path), native))
    assert product.flops == pytest.approx(2 * 8 * 64 * 32, rel=0.1)


def test_a_tuned_schedule_takes_the_place_of_the_rule(
    model: Path, native: Target, usual: CompiledModel, run_built: Any
) -> None:
    from tvm.s_tir import Schedule

    functions: list[Any] = []

    def tuned(func: Any) -> Any:
        functions.append(func)
        return Schedule(func).mod["main"] if len(functions) == 1 else None

    imported = import_onnx(model)
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6), "float32")
    compiled_model = build(imported, native, tuned=tuned)
    assert [rule for _, rule in compiled_model.schedules].count("tuned") == 1
    expected = run_built(usual, x)[0]
    np.testing.assert_allclose(run_built(compiled_model, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_the_readable_ir_holds_no_weights(usual: CompiledModel) -> None:
    assert "fused_conv2d" in usual.ir_text
    assert "weight_0" in usual.ir_text
    assert len(usual.ir_json) < 200_000


def test_pass_timings_name_the_passes_that_ran(model: Path, native: Target) -> None:
    started = time.perf_counter()
    timings = dict(build(import_onnx(model), native).pass_timings)
    elapsed = time.perf_counter() - started
    assert timings.keys() >= {"FuseOps", "ChannelsLast", "tirx.UnrollLoop"}
    # The seconds of a nested pass are counted once, and those of all cores are added up.
    assert 0 < sum(timings.values()) <= elapsed * cores.count()


def test_a_missing_cross_compiler_is_named() -> None:
    target = Target("far", {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}, "aarch64", (), "no-such-linux-gnu-g++")
    with pytest.raises(TargetError, match=r"'no-such-linux-gnu-g\+\+'"):
        can_build(target)


def test_a_target_kind_this_tvm_lacks_is_refused() -> None:
    with pytest.raises(TargetError, match="'odd'"):
        can_build(Target("odd", {"kind": "no-such-kind"}, "x86_64"))


def test_an_architecture_llvm_does_not_know_is_refused() -> None:
    with pytest.raises(TargetError, match="'odd'"):
        can_build(Target("odd", {"kind": "llvm", "mtriple": "pdp11-unknown-linux"}, "x86_64"))


def test_the_native_target_can_be_built(native: Target) -> None:
    can_build(native)


def test_a_linker_that_fails_is_one_sentence(usual: CompiledModel, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"mod\.so.*could not be linked with 'false'"):
        replace(usual, cross_compiler="false").export(tmp_path / "mod.so")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "aarch64-cortex-a72"])
def test_other_processors_get_the_same_rules(name: str, model: Path) -> None:
    compiled_model = build(import_onnx(model), resolve(name))
    rules = {rule for function, rule in compiled_model.schedules if "conv2d" in function}
    assert rules in ({"conv2d"}, {"conv2d", "winograd"})


@pytest.mark.long  # A library for a GPU, some functions of which dlight schedules, is in test_compiler_gpu.py.
def test_a_gpu_library_builds_with_the_schedules_of_dlight(model: Path, tmp_path: Path) -> None:
    target = resolve("cuda-sm90")
    try:
        can_build(target)
    except TargetError as error:
        pytest.skip(str(error))
    compiled_model = build(import_onnx(model), target)
    compiled_model.export(tmp_path / "mod.so")
    assert (tmp_path / "mod.so").stat().st_size > 0


def test_a_tuned_schedule_that_does_not_compile_gives_way_to_the_rule(
    model: Path, native: Target, usual: CompiledModel, run_built: Any
) -> None:
    from tvm.s_tir import Schedule

    def tuned(func: Any) -> Any:
        schedule = Schedule(func)
        block = schedule.get_child_blocks(schedule.get_sblock("root"))[-1]
        schedule.bind(schedule.get_loops(block)[0], "threadIdx.x")  # no CPU has these
        return schedule.mod["main"]

    with pytest.warns(ScheduleWarning, match="no code for function .* as rule 'tuned' schedules it"):
        compiled_model = build(import_onnx(model), native, tuned=tuned)
    assert "conv2d" in {rule for _, rule in compiled_model.schedules}
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6), "float32")
    expected = run_built(usual, x)[0]
    np.testing.assert_allclose(run_built(compiled_model, x)[0], expected, rtol=1e-4, atol=1e-4)
