"""Generating code: all cores share the work on a library's functions."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support.arrays import normal
from tvmflow import cores
from tvmflow.compiler import BuildOptions, Inspection, build, codegen, import_onnx
from tvmflow.target import Target


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
    import tvm
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
