"""Divisions of sizes and indices round to zero; those of numbers that may be negative still round down."""

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.tirx.build import codegen_build

from tvmflow.compiler.divisions import lower_divisions

_TARGET = tvm.target.Target("llvm")
_PIPELINE, _FINALIZE, _ = tirx.get_default_tir_pipeline(_TARGET)


def _lowered(function: tirx.PrimFunc) -> tvm.IRModule:
    named = function.with_attr("global_symbol", "main")
    return _PIPELINE(tirx.transform.BindTarget(_TARGET.with_host(_TARGET))(tvm.IRModule({"main": named})))


def _divisions(mod: tvm.IRModule) -> list[Any]:
    result: list[Any] = []
    for function in mod.functions.values():
        tvm_ffi.structural_walk(function.body, [(kind, result.append) for kind in (tirx.FloorDiv, tirx.FloorMod)])
    return result


def test_divisions_of_a_loop_by_free_sizes_round_to_zero() -> None:
    n, h, w = (tirx.Var(name, "int64") for name in "nhw")
    x = te.placeholder((w, h, n), "float32", name="x")
    schedule = Schedule(te.create_prim_func([x, te.compute((n, h, w), lambda i, j, k: x[k, j, i], name="y")]))
    schedule.parallel(schedule.fuse(*schedule.get_loops(schedule.get_sblock("y"))))
    before = _lowered(schedule.mod["main"])
    assert _divisions(before)
    assert not _divisions(lower_divisions(before))


@pytest.mark.parametrize("divisor", [1, 3, 8])
def test_a_negative_number_by_a_constant_rounds_down(divisor: int) -> None:
    n = tirx.Var("n", "int64")
    x = te.placeholder((n,), "int64", name="x")
    quotient = te.compute((n,), lambda i: tirx.floordiv(x[i], tirx.const(divisor, "int64")))
    remainder = te.compute((n,), lambda i: tirx.floormod(x[i], tirx.const(divisor, "int64")))
    lowered = lower_divisions(_lowered(te.create_prim_func([x, quotient, remainder])))
    assert not _divisions(lowered)
    library = codegen_build(_FINALIZE()(lowered), _TARGET)
    values = np.arange(-20, 21, dtype="int64")
    buffers = [tvm.runtime.tensor(np.zeros_like(values)) for _ in range(2)]
    library["main"](tvm.runtime.tensor(values), *buffers)
    np.testing.assert_array_equal(buffers[0].numpy(), values // divisor)
    np.testing.assert_array_equal(buffers[1].numpy(), values % divisor)


def test_a_function_whose_indices_become_floats_stays() -> None:
    n, m = (tirx.Var(name, "int64") for name in "nm")
    x = te.placeholder((m,), "float32", name="x")
    scaled = te.compute((n,), lambda i: tirx.floormod(i, m).astype("float32") * x[tirx.floormod(i, m)])
    assert _divisions(lower_divisions(_lowered(te.create_prim_func([x, scaled]))))


def test_a_number_that_may_be_negative_by_another_stays() -> None:
    x, y = (te.placeholder((tirx.Var("n", "int64"),), "int64", name=name) for name in "xy")
    quotient = te.compute(x.shape, lambda i: tirx.floordiv(x[i], y[i]))
    assert len(_divisions(lower_divisions(_lowered(te.create_prim_func([x, y, quotient]))))) == 1
