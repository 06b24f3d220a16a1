"""Quotients of free sizes: they have one form, and loops over tiles have no conditions because of them."""

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from onnx import helper
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from support.arrays import normal
from tvmflow.compiler import import_onnx, lower
from tvmflow.compiler.machine import machine
from tvmflow.compiler.quotients import unify_quotients
from tvmflow.compiler.schedules import schedule
from tvmflow.hardware.target import Target

TILE, LINES = 16, 3


def tiled(times: int = 1) -> tvm.IRModule:
    """A function of lines of a free size: the tiles of a line's sums after the tiles of its operand.

    A line has `times` as many elements as the size.
    """
    size = te.var("size", "int64") * times
    tiles = (size - 1) // TILE + 1
    x = te.placeholder((LINES, size), "float32", name="x")
    padded = te.compute(
        (LINES, tiles, TILE),
        lambda n, i, j: tirx.if_then_else(i * TILE + j < size, x[n, i * TILE + j], tirx.const(0, "float32")),
        name="padded",
    )
    y = te.compute((LINES, size), lambda n, i: padded[n, i // TILE, i % TILE] + 1.0, name="y")
    sch = Schedule(te.create_prim_func([x, y]))
    line, along = sch.get_loops(sch.get_sblock("y"))
    sch.split(along, [None, TILE])
    sch.compute_at(sch.get_sblock("padded"), line)
    return tvm.IRModule({"main": sch.mod["main"].with_attr("global_symbol", "main")})


def kinds(function: PrimFunc, *types: type) -> list[Any]:
    """The expressions of some types in a function."""
    found: list[Any] = []
    tvm_ffi.structural_walk(function.body, [(kind, found.append) for kind in types])
    return found


def quotients_of_sizes(function: PrimFunc) -> list[Any]:
    """The quotients that a function computes from its sizes alone."""
    sizes = {size for param in function.params for dim in param.shape for size in tirx.analysis.undefined_vars(dim)}
    return [item for item in kinds(function, tirx.FloorDiv) if sizes.issuperset(tirx.analysis.undefined_vars(item.a))]


@pytest.mark.parametrize("times", [1, 2])
def test_a_quotient_in_several_forms_gets_one(times: int) -> None:
    before, after = tiled(times), unify_quotients(tiled(times))
    assert [len({str(item) for item in quotients_of_sizes(mod["main"])}) for mod in (before, after)] == [2, 1]
    assert [bool(kinds(mod["main"], tirx.Max, tirx.Min)) for mod in (before, after)] == [True, False]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 100])
def test_functions_with_unified_quotients_compute_the_same(size: int) -> None:
    main = tvm.tirx.build(unify_quotients(tiled()), target=tvm.target.Target("llvm"))["main"]
    x, y = normal(LINES, size), tvm.runtime.tensor(np.zeros((LINES, size), "float32"))
    main(tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), x + 1)


def test_a_shape_of_a_parameter_keeps_its_quotient() -> None:
    size = te.var("size", "int64")
    x = te.placeholder(((size + 1) // 2,), "float32", name="x")
    function = te.create_prim_func([te.placeholder((size,), name="w"), x, te.compute(x.shape, lambda i: x[i] + 1.0)])
    mod = tvm.IRModule({"main": function})
    assert tvm_ffi.structural_equal(unify_quotients(mod), mod)


@pytest.mark.long
def test_loops_of_a_winograd_convolution_of_free_sizes_have_no_bounds_to_choose(
    make_model: Any, target: Target, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    path = make_model(nodes, [("x", [1, 32, "height", "width"])], ["y"], {"w": normal(32, 32, 3, 3)})
    functions = [func for _, func in lower(import_onnx(path), target).functions_items() if isinstance(func, PrimFunc)]
    scheduled = [func for func, rule in (schedule(func, machine(target)) for func in functions) if rule == "winograd"]
    assert [bool(kinds(func, tirx.Max)) for func in scheduled] == [True]
    unified = [func for _, func in unify_quotients(tvm.IRModule({"main": scheduled[0]})).functions_items()]
    assert [bool(kinds(func, tirx.Max)) for func in unified] == [False]
    feeds = [{"x": normal(1, 32, height, width)} for height, width in ((1, 1), (5, 18), (33, 7))]
    for feed in feeds:
        assert_same_as_onnxruntime(path, feed, rtol=1e-3)
