"""Scheduling and generating code: all cores share the work on a library's functions."""

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm.tirx import PrimFunc

from support.arrays import normal
from tvmflow.compiler import BuildOptions, Inspection, build, codegen, import_onnx, lower, schedules
from tvmflow.errors import BuildError
from tvmflow.hardware import cores
from tvmflow.hardware.target import Target

# The package has a function of this name, which hides the module.
building = import_module("tvmflow.compiler.build")


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    """Four functions, so that a library without the direct form of `main` has one part."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Softmax", ["a"], ["b"], axis=1),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2]),
        helper.make_node("Softmax", ["c"], ["y"], axis=3),
    ]
    return make_model(nodes, [("x", ["batch", 3, 12, 12])], ["y"], {"w": normal(8, 3, 3, 3)})


@pytest.mark.long
def test_functions_of_one_part_are_lowered_side_by_side(
    model: Path, native: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One function after the other, the first would wait for the second in vain.
    both, lower = threading.Barrier(2, timeout=60), codegen._lower
    functions: list[int] = []

    def meet(part: Any, target: Any) -> Any:
        functions.append(len(part.functions))
        if len(functions) <= 2:
            both.wait()
        return lower(part, target)

    monkeypatch.setattr(codegen, "_lower", meet)
    monkeypatch.setattr(cores, "count", lambda: 2)
    built = build(import_onnx(model), native)
    assert len(functions) > 2
    assert set(functions) == {1}
    x = np.ones((1, 3, 12, 12), "float32")
    monkeypatch.setattr(codegen, "_lower", lower)
    monkeypatch.setattr(cores, "count", lambda: 1)
    np.testing.assert_array_equal(built.load().run(x)[0], build(import_onnx(model), native).load().run(x)[0])


def _record_scheduling(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], Any]) -> list[PrimFunc]:
    """Have `act` called with 0, 1, ... before a function is scheduled; return the list to which functions are added."""
    begun: list[PrimFunc] = []

    def schedule(function: PrimFunc, *arguments: Any, **options: Any) -> Any:
        begun.append(function)
        act(len(begun) - 1)
        return schedules.schedule(function, *arguments, **options)

    monkeypatch.setattr(building, "schedule", schedule)
    return begun


def test_functions_scheduled_side_by_side_are_those_of_one_thread(
    model: Path, native: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = lower(import_onnx(model), native)
    monkeypatch.setattr(cores, "count", lambda: 1)
    serial, rules = building._schedule(lowered, native, None)
    # One function after the other, the first would wait for the second in vain.
    both = threading.Barrier(2, timeout=60)
    begun = _record_scheduling(monkeypatch, lambda place: both.wait() if place < 2 else None)
    monkeypatch.setattr(cores, "count", lambda: 2)
    parallel, parallel_rules = building._schedule(lowered, native, None)
    assert len(begun) == len(rules) > 2
    assert parallel_rules == rules
    tvm.ir.assert_structural_equal(serial, parallel)


@pytest.mark.parametrize("count", [1, 2])
def test_a_function_that_cannot_be_scheduled_is_named(
    model: Path, native: Target, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(cores, "count", lambda: count)
    lowered = lower(import_onnx(model), native)

    def fail(place: int) -> None:
        if place == 1:
            raise RuntimeError("no such loop")

    begun = _record_scheduling(monkeypatch, fail)
    with pytest.raises(BuildError, match="no such loop") as caught:
        building._schedule(lowered, native, None)
    (name,) = (variable.name_hint for variable, function in lowered.functions_items() if begun[1].same_as(function))
    assert str(caught.value) == f"function {name!r} cannot be scheduled for target 'native': no such loop"


def test_an_interrupt_ends_scheduling_after_the_functions_that_have_begun(
    model: Path, native: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = threading.main_thread().ident
    assert caller == threading.get_ident()
    monkeypatch.setattr(cores, "count", lambda: 1)

    def interrupt(_: int) -> None:
        signal.pthread_kill(caller, signal.SIGINT)
        # The caller then waits for this function alone.
        while not any(frame.name == "shutdown" for frame in traceback.extract_stack(sys._current_frames()[caller])):
            pass

    begun = _record_scheduling(monkeypatch, interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build(import_onnx(model), native)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(begun) == 1


def test_every_thread_leaves_out_the_disabled_passes(
    model: Path, native: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "count", lambda: 2)
    disabled = BuildOptions(disabled_passes=("tirx.CommonSubexprElim",), config={"tirx.disable_vectorize": True})
    built = build(import_onnx(model), native, disabled)
    assert "tirx.UnrollLoop" in dict(built.pass_timings)
    assert "tirx.CommonSubexprElim" not in dict(built.pass_timings)


def test_a_pass_is_inspected_once_for_each_part(model: Path, native: Target) -> None:
    inspected = build(import_onnx(model), native, inspect=Inspection(after=("tirx.UnrollLoop",))).inspected
    assert [item.name for item in inspected.passes] == ["tirx.UnrollLoop"]


def test_functions_of_one_kind_go_to_different_parts(model: Path, native: Target) -> None:
    from tvm import te

    x = te.placeholder((4,), name="x")
    function = te.create_prim_func([x, te.compute((4,), lambda i: x[i] + 1.0)])
    names = [f"{kind}{number}" for kind in ("product", "winograd") for number in range(10)]
    parts = codegen._parts(tvm.IRModule(dict.fromkeys(names, function)), 16)
    counts = [
        [sum(name in str(variable) for variable in part.functions) for name in ("product", "winograd")]
        for part in parts
    ]
    assert counts == [[5, 5], [5, 5]]
