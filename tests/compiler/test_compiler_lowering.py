"""Lowering keeps expressions short, so that TVM's passes are quick."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from onnx import helper
from tvm import s_tir, te, tirx
from tvm.tirx.build import codegen_build

from tvmflow.compiler import build, import_onnx, vectormath
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.lowering import FixBufferSizes, TakeKnownBranches, lower_functions
from tvmflow.compiler.statements import replace_variables
from tvmflow.hardware.target import resolve


def _count(node: Any, kind: Any) -> int:
    """The number of expressions of a kind; what is repeated counts each time."""
    found: list[Any] = []
    tvm_ffi.structural_walk(node, (kind, found.append))
    return len(found)


@pytest.mark.parametrize(
    "name",
    [
        *("exp", "exp_of_negative", "tanh", "erf", "sigmoid", "silu", "gelu", "gelu_tanh", "log"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    ],
)
def test_an_activation_does_not_repeat_parts_of_its_expression(name: str) -> None:
    assert _count(getattr(vectormath, name)(tirx.Var("x", "float32")), tvm.ir.Expr) < 220


def _unrolled(size: int, choose: Callable[[Any, te.Tensor], Any]) -> tvm.IRModule:
    """A function of a vector and a loop over `size` elements, which are `choose(index, vector)`, after unrolling."""
    x = te.placeholder((size,), "float32", name="x")
    sch = s_tir.Schedule(te.create_prim_func([x, te.compute((size,), lambda i: choose(i, x), name="y")]))
    sch.unroll(sch.get_loops(sch.get_sblock("y"))[0])
    flat = [s_tir.transform.ConvertBlocksToOpaque(), s_tir.transform.LowerOpaqueBlock()]
    return tvm.transform.Sequential([*flat, tirx.transform.UnrollLoop()])(sch.mod)


def test_a_choice_by_the_index_of_an_unrolled_loop_is_taken() -> None:
    before = _unrolled(4, lambda i, x: tirx.Select(i == 1, x[0], tirx.if_then_else(i == 2, x[1], x[2])))
    after = TakeKnownBranches()(before)
    assert (_count(before["main"].body, tirx.Select), _count(before["main"].body, tvm.ir.Call)) == (4, 4)
    assert (_count(after["main"].body, tirx.Select), _count(after["main"].body, tvm.ir.Call)) == (0, 0)
    values = [store.value.indices[0] for store in after["main"].body.seq]
    assert [int(value) for value in values] == [2, 0, 1, 2]


def test_a_choice_by_a_number_that_is_read_stays() -> None:
    before = _unrolled(4, lambda i, x: tirx.Select(x[i] == 1.0, x[0], x[1]))
    assert tvm_ffi.structural_equal(TakeKnownBranches()(before), before)


def test_the_part_of_a_tensor_of_free_size_that_a_tile_needs_has_a_fixed_size() -> None:
    n = tirx.Var("n", "int64")
    x = te.placeholder((n,), "float32", name="x")
    tiles = (n - 1) // 16 + 1
    pad = te.compute((tiles * 16 + 2,), lambda i: tirx.if_then_else(i < n, x[i], 0.0), name="pad")
    y = te.compute((tiles, 16), lambda i, j: pad[i * 16 + j] + pad[i * 16 + j + 2], name="y")
    sch = s_tir.Schedule(te.create_prim_func([x, y]))
    sch.compute_at(sch.get_sblock("pad"), sch.get_loops(sch.get_sblock("y"))[0])
    transform = s_tir.transform
    passes = [transform.PlanAndUpdateBufferAllocationLocation(), transform.ConvertBlocksToOpaque()]
    before = tvm.transform.Sequential([*passes, transform.CompactBufferAllocation()])(sch.mod)
    after = FixBufferSizes()(before)
    assert not isinstance(_allocated(before)[0].shape[0], tirx.IntImm)
    (buffer,) = _allocated(after)
    assert int(buffer.shape[0]) == 18
    loads: list[Any] = []
    tvm_ffi.structural_walk(after["main"].body, (tvm.ir.TensorLoad, loads.append))
    assert sum(load.source.same_as(buffer) for load in loads) == 2


@pytest.mark.parametrize(("factor", "number"), [(2, 4), (4, 3), (3, 7)])
def test_a_dimension_may_have_any_size_that_is_a_multiple_less_a_number(factor: int, number: int) -> None:
    n = tirx.Var("n", "int64")
    size = n * factor - number
    x = te.placeholder((size,), "float32", name="x")
    y = te.compute((size,), lambda i: tirx.if_then_else(size >= 4, x[i], -x[i]), name="y")
    function = te.create_prim_func([x, n, y]).with_attr("global_symbol", "choose")
    target = tvm.target.Target("llvm")
    choose = codegen_build(lower_functions(tvm.IRModule({"main": function}), target), target).get_function("choose")
    for small in range(number // factor + 1, number // factor + 5):
        data = np.arange(1, small * factor - number + 1, dtype="float32")
        result = tvm.runtime.empty(data.shape)
        choose(tvm.runtime.tensor(data), small, result)
        np.testing.assert_array_equal(result.numpy(), data if data.size >= 4 else -data)


@pytest.mark.parametrize(("is_shared", "is_aligned"), [(True, False), (True, True), (False, False)])
def test_a_tensor_that_all_loops_share_has_its_own_size(is_shared: bool, is_aligned: bool) -> None:
    n, m = (tirx.Var(name, "int64") for name in "nm")
    x = te.placeholder((n, m), "float32", name="x")
    sums = te.compute((n, m), lambda i, j: x[i, j] + 1.0, name="sums")
    sch = s_tir.Schedule(te.create_prim_func([x, te.compute((n, m), lambda i, j: sums[i, j] * 2.0, name="y")]))
    if not is_shared:
        sch.compute_at(sch.get_sblock("sums"), sch.get_loops(sch.get_sblock("y"))[0])
    passes = s_tir.transform.PlanAndUpdateBufferAllocationLocation(), s_tir.transform.ConvertBlocksToOpaque()
    function = tvm.transform.Sequential(passes)(sch.mod)["main"]
    (whole,) = _allocated(tvm.IRModule({"main": function}))
    # What TVM writes where it cannot prove that all of the tensor is used.
    proven = [tirx.min(size, tirx.max(size - 5, n * m // 3)) for size in (n, m)]
    strides = [(proven[1] + 7) // 8 * 8, tirx.IntImm("int64", 1)] if is_aligned else None
    buffer = tirx.decl_buffer(proven, "float32", "sums", strides=strides)
    before = tvm.IRModule({"main": function.with_body(replace_variables(function.body, {whole: buffer}))})
    (after,) = _allocated(FixBufferSizes()(before))
    assert tvm_ffi.structural_equal(list(after.shape), [n, m] if is_shared else proven)
    assert tvm_ffi.structural_equal(list(after.strides), [(m + 7) // 8 * 8, strides[1]] if strides else [])


def _allocated(mod: tvm.IRModule) -> list[tirx.Var]:
    buffers: list[tirx.Var] = []
    tvm_ffi.structural_walk(mod["main"].body, (s_tir.SBlock, lambda block: buffers.extend(block.alloc_buffers)))
    return buffers


def test_the_results_of_a_large_tile_are_not_in_memory_of_the_runtime(make_model: Any) -> None:
    # Of AVX-512's 32 registers a tile has more than 16, which are 1 KiB.
    weight = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")
    path = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", [96, 64])], ["y"], {"w": weight})
    model = build(import_onnx(path), resolve("x86-64-v4"), inspect=Inspection(code=("asm",)))
    assert "zmm16" in model.inspected.code["asm"]
    assert "BackendAllocWorkspace" not in model.inspected.code["asm"]
