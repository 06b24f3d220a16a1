"""Every option of the cost model's decisions gives other functions with the same results."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from onnx import helper

from support import scale
from tvmflow.compiler import build, import_onnx, ir_text, lower, workloads
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import complete, schedule, variants
from tvmflow.hardware.target import Target
from tvmflow.tuning.traces import normalize, replay, trace_of


@pytest.fixture
def model(make_model: Any) -> Path:
    """A convolution that Winograd's algorithm fits, two of single pixels, a block, and a dense layer."""
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray[Any, Any]:
        return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("float32")

    nodes = [
        helper.make_node("Conv", ["x", "w3"], ["a"], pads=[1] * 4),
        helper.make_node("Conv", ["a", "w1"], ["b"]),
        helper.make_node("Conv", ["b", "wd"], ["c"], pads=[1] * 4, group=64),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w2"], ["e"]),
        helper.make_node("Conv", ["x", "w4"], ["h"]),
        helper.make_node("Concat", ["e", "h"], ["i"], axis=1),
        helper.make_node("GlobalAveragePool", ["i"], ["f"]),
        helper.make_node("Flatten", ["f"], ["g"]),
        helper.make_node("MatMul", ["g", "m"], ["y"]),
    ]
    arrays = {
        "w3": weights(32, 16, 3, 3),
        "w1": weights(64, 32, 1, 1),
        "wd": weights(64, 1, 3, 3),
        "w2": weights(32, 64, 1, 1),
        "w4": weights(64, 16, 1, 1),
        "m": weights(96, 48),
    }
    return Path(make_model(nodes, [("x", [1, 16, 28, 28])], ["y"], arrays))


def _run(model: Any, run_built: Any) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(1).standard_normal((1, 16, 28, 28)).astype("float32")
    return np.asarray(run_built(model, x)[0])


def test_every_decision_made_otherwise_gives_the_same_results(model: Path, target: Target, run_built: Any) -> None:
    imported, choices = import_onnx(model), Choices()
    usual = build(imported, target, choices=choices)
    expected = _run(usual, run_built)
    open_sites = [site for site in choices.sites.values() if len(site.options) > 1]
    assert {site.kind for site in open_sites} >= {"algorithm", "block", "lines", "last", "rows"}
    for place in scale.choose(normal=(2,), long=(1, 2)):
        other = Choices({site.key: site.options[min(place, len(site.options) - 1)] for site in open_sites})
        compiled_model = build(imported, target, choices=other)
        assert compiled_model.ir_text != usual.ir_text
        np.testing.assert_allclose(_run(compiled_model, run_built), expected, rtol=1e-4, atol=1e-5)


def test_every_schedule_that_the_rules_can_make_of_a_function_gives_the_same_results(
    model: Path, target: Target
) -> None:
    inputs = np.random.default_rng(2)
    for workload in workloads(lower(import_onnx(model), target)):
        func = normalize(workload.func)
        usual, *alternatives = variants(func, machine(target), scale.count(normal=6, long=48))
        assert tvm_ffi.structural_equal(complete(usual.mod["main"]).body, schedule(func, machine(target))[0].body)
        arrays = [inputs.standard_normal([int(size) for size in item.shape]).astype(item.dtype) for item in func.params]
        expected = _called(usual.mod["main"], target, arrays)
        for other in alternatives:
            assert not tvm_ffi.structural_equal(other.mod["main"].body, usual.mod["main"].body)
            replayed = replay(trace_of(other), func)
            assert tvm_ffi.structural_equal(replayed.body, complete(other.mod["main"]).body)
        for other in [*scale.choose(normal=[], long=alternatives[:1]), *alternatives[-1:]]:
            np.testing.assert_allclose(_called(other.mod["main"], target, arrays), expected, rtol=1e-4, atol=1e-4)


def _called(func: Any, target: Target, arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Call a scheduled function, whose last parameter is its result, with arrays; return the result."""
    marked = func.with_attr("global_symbol", "main").with_attr("tirx.is_scheduled", True)
    library = tvm.compile(tvm.IRModule({"main": marked}), tvm.target.Target(target.tvm))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    library["main"](*tensors)
    return np.asarray(tensors[-1].numpy())


def test_a_machine_of_one_core_gets_no_parallel_loops(model: Path, target: Target) -> None:
    one = replace(machine(target), cores=1)
    for workload in workloads(lower(import_onnx(model), target)):
        assert "parallel" not in schedule(workload.func, one)[0].script()


def test_a_decision_is_met_under_the_same_name_in_every_build(model: Path, target: Target) -> None:
    imported, first, second = import_onnx(model), Choices(), Choices()
    lower(imported, target, choices=first)
    build(imported, target, choices=second)
    assert first.sites == second.sites


def test_the_first_option_is_what_is_built_without_choices_or_with_one_that_the_decision_lacks(
    model: Path, target: Target
) -> None:
    imported, choices = import_onnx(model), Choices()
    usual = ir_text(lower(imported, target, choices=choices))
    first_options = Choices({site.key: site.options[0] for site in choices.sites.values()})
    unknown_options = Choices(dict.fromkeys(choices.sites, "no such option"))
    assert ir_text(lower(imported, target, choices=first_options)) == usual
    assert ir_text(lower(imported, target, choices=unknown_options)) == usual


def test_prefetching_weights_that_the_cache_cannot_hold_is_a_choice_with_the_same_results(
    make_model: Any, target: Target
) -> None:
    weight = np.random.default_rng(3).standard_normal((48, 256, 3, 3)).astype("float32")
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4, strides=[2, 2])
    model = make_model([node], [("x", [1, 256, 9, 9])], ["y"], {"w": weight})
    (func,) = (normalize(item.func) for item in workloads(lower(import_onnx(model), target)) if "conv" in item.name)
    usual_cache = machine(target).second
    # A cache holds what fills three quarters of it.
    fitting = math.ceil(4 * weight.size / 0.75)
    small, large = (replace(machine(target), second=replace(usual_cache, size=size)) for size in (fitting - 1, fitting))
    assert not any("prefetch" in str(item.trace) for item in variants(func, large))
    usual, *alternatives = variants(func, small)
    fetching = [replay(trace_of(other), func) for other in alternatives if "prefetch" in str(other.trace)]
    assert fetching
    inputs = np.random.default_rng(4)
    arrays = [inputs.standard_normal([int(size) for size in item.shape]).astype("float32") for item in func.params]
    expected = _called(usual.mod["main"], target, arrays)
    for scheduled in [*scale.choose(normal=[], long=fetching[:1]), fetching[-1]]:
        assert "T.prefetch" in scheduled.script()
        np.testing.assert_allclose(_called(scheduled, target, arrays), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [11, 12])
def test_a_residual_that_the_cache_cannot_hold_is_fetched_before_its_tile_is_computed(
    width: int, make_model: Any, target: Target
) -> None:
    weight = (np.random.default_rng(3).standard_normal((64, 32, 1, 1)) / 6).astype("float32")
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Add", ["c", "r"], ["y"])]
    shapes = [("x", [1, 32, 5, width]), ("r", [1, 64, 5, width])]
    lowered = lower(import_onnx(make_model(nodes, shapes, ["y"], {"w": weight})), target)
    (func,) = (normalize(item.func) for item in workloads(lowered) if "conv" in item.name)
    usual = machine(target)
    # The residual and the result, a half of each on one of two cores, fill three quarters of the cache.
    enough = -(-4 * 64 * 5 * width * 4 // 3)
    large, small = (
        replace(usual, cores=2, second=replace(usual.second, size=size, cores=1)) for size in (enough, enough - 64)
    )
    random = np.random.default_rng(4)
    arrays = [random.standard_normal([int(size) for size in item.shape]).astype("float32") for item in func.params]
    results = []
    for cache, reads, writes in ((large, 0, 0), (small, 1, 1)):
        scheduled, rule = schedule(func, cache)
        lines = [line.strip() for line in scheduled.script().splitlines() if "T.prefetch" in line]
        assert rule == "rows"
        # The second argument of the intrinsic is 1 for a line that will be written.
        assert [sum(line.endswith(f", {how}, 3, 1)") for line in lines) for how in (0, 1)] == [reads, writes], lines
        results.append(_called(scheduled, target, arrays))
    np.testing.assert_array_equal(*results)
    fetching = [item for item in variants(func, large) if "T.prefetch" in complete(item.mod["main"]).script()]
    assert fetching


@pytest.mark.few(1)
@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_share_a_set_of_the_cache_may_be_packed_first(
    batch: int, make_model: Any, target: Target, run_built: Any
) -> None:
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal((40, 1024, 1, 1)) / 32).astype("float32")
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    imported = import_onnx(make_model(nodes, [("x", [batch, 1024, 7, 6])], ["y"], {"w": weight}))
    choices = Choices()
    usual = build(imported, target, choices=choices)
    (panel,) = (site for site in choices.sites.values() if site.kind == "panel")
    other = build(imported, target, choices=Choices({panel.key: panel.options[1]}))
    assert panel.options == ("in place", "packed")
    assert "packed_rows" in other.ir_text
    assert "packed_rows" not in usual.ir_text
    assert sorted(dict(other.schedules).values()) == sorted(dict(usual.schedules).values())
    x = rng.standard_normal((batch, 1024, 7, 6)).astype("float32")
    np.testing.assert_allclose(run_built(other, x)[0], run_built(usual, x)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", scale.choose(normal=[3], long=[1, 3]))
def test_the_last_convolution_may_write_the_output_as_it_leaves(
    kernel: int, make_model: Any, target: Target, run_built: Any
) -> None:
    rng = np.random.default_rng(7)
    weights = {
        "v": rng.standard_normal((32, 3, 3, 3)).astype("float32"),
        "w": rng.standard_normal((21, 32, kernel, kernel)).astype("float32"),
        "b": rng.standard_normal(21).astype("float32"),
    }
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], strides=[2, 2]),
        helper.make_node("Conv", ["a", "w", "b"], ["c"], strides=[kernel, kernel]),
        helper.make_node("Sigmoid", ["c"], ["y"]),
    ]
    imported = import_onnx(make_model(nodes, [("x", [2, 3, 39, 35])], ["y"], weights))
    choices = Choices()
    usual = build(imported, target, choices=choices)
    (output,) = (site for site in choices.sites.values() if site.kind == "output")
    other = build(imported, target, choices=Choices({output.key: output.options[1]}))
    assert len(usual.schedules) - len(other.schedules) == 1
    assert "fallback" not in dict(other.schedules)["fused_conv2d1_add_sigmoid_transpose1"]
    x = rng.standard_normal((2, 3, 39, 35)).astype("float32")
    np.testing.assert_allclose(run_built(other, x)[0], run_built(usual, x)[0], rtol=1e-6)


def test_the_first_convolution_may_read_the_input_as_it_comes(make_model: Any, target: Target, run_built: Any) -> None:
    weight = np.random.default_rng(5).standard_normal((24, 3, 5, 5)).astype("float32")
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[2] * 4), helper.make_node("Relu", ["c"], ["y"])]
    imported = import_onnx(make_model(nodes, [("x", [1, 3, 17, 19])], ["y"], {"w": weight}))
    choices = Choices()
    usual = build(imported, target, choices=choices)
    (edge,) = (site for site in choices.sites.values() if site.kind == "edge")
    other = build(imported, target, choices=Choices({edge.key: edge.options[1]}))
    assert [name for name, _ in usual.schedules if name not in dict(other.schedules)] == ["transpose"]
    x = np.random.default_rng(6).standard_normal((1, 3, 17, 19)).astype("float32")
    np.testing.assert_array_equal(run_built(other, x)[0], run_built(usual, x)[0])
