"""Checks of arguments: those of a model's inputs and outputs stay, and others are left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from onnx import helper
from tvm import te, tirx

from support import builds
from support.arrays import normal
from tvmflow.compiler import CompiledModel, build, import_onnx
from tvmflow.compiler.annotations import CHECKED
from tvmflow.compiler.lowering import lower_functions
from tvmflow.hardware.target import Target

MakeModel = Callable[..., Path]


@pytest.fixture
def model(make_model: MakeModel, target: Target) -> CompiledModel:
    """Two dense layers and a softmax of a free number of rows."""
    nodes = [
        helper.make_node("MatMul", ["x", "u"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "v"], ["c"]),
        helper.make_node("Softmax", ["c"], ["y"]),
    ]
    weights = {"u": normal(24, 40) / 5, "v": normal(40, 16) / 5}
    return build(import_onnx(make_model(nodes, [("x", ["rows", 24])], ["y"], weights)), target)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (tvm.runtime.tensor(np.zeros((3, 23), "float32")), "shape|match_cast"),
        (tvm.runtime.tensor(np.zeros((3, 24), "float64")), "dtype|check_tensor_info"),
        (tvm.runtime.tensor(np.zeros(24, "float32")), "ndim|check_tensor_info"),
    ],
    ids=["shape", "type", "dimensions"],
)
def test_a_wrong_input_is_refused_by_the_library_itself(x: Any, message: str, model: CompiledModel) -> None:
    loaded = model.load()
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        loaded.machine["main"](x)
    direct = loaded.library.get_function("direct_main", query_imports=True)
    constants = loaded.machine["main_constants"]()
    with pytest.raises((RuntimeError, ValueError, TypeError), match="direct_main"):
        direct(x, *loaded.weights, *constants, tvm.runtime.tensor(np.zeros((3, 16), "float32")))


@pytest.mark.parametrize("shape", [(3, 15), (2, 16)])
def test_memory_of_another_size_than_the_outputs_is_refused(shape: tuple[int, int], model: CompiledModel) -> None:
    loaded = model.load()
    x = normal(3, 24)
    (expected,) = loaded.run(x)
    (result,) = builds.run_directly(loaded, [x], [expected])
    np.testing.assert_array_equal(result, expected)
    with pytest.raises(ValueError, match=r"gv\.(shape|strides)"):
        builds.run_directly(loaded, [x], [np.zeros(shape, "float32")])


def test_a_function_checks_only_the_arguments_that_it_is_marked_for(target: Target) -> None:
    rows = tirx.Var("rows", "int64")
    left, right = (te.placeholder((rows, 8), "float32", name=name) for name in ("left", "right"))
    result = te.compute((rows, 8), lambda i, j: left[i, j] + right[i, j], name="total")
    function = te.create_prim_func([left, right, result]).with_attr({"global_symbol": "add", "tirx.noalias": True})
    texts = {}
    for places in ([], [1], [0, 1, 2]):
        marked = function.with_attr(CHECKED, places) if places else function
        lowered = lower_functions(tvm.IRModule({"add": marked}), tvm.target.Target(target.tvm))
        texts[len(places)] = lowered["add"].script()
    assert "assert" not in texts[0]
    assert [f"{name}.ndim" in texts[1].replace('", "', "") for name in ("left", "right", "total")] == [
        False,
        True,
        False,
    ]
    assert texts[3].count("assert") > 2 * texts[1].count("assert") > 0


def test_a_function_may_have_very_many_arguments(target: Target) -> None:
    """Concat of many tensors is such a function."""
    parts = [te.placeholder((1,), "float32", name=f"part{place}") for place in range(600)]
    total = te.compute((1,), lambda i: sum(part[i] for part in parts), name="total")
    function = te.create_prim_func([*parts, total]).with_attr({"global_symbol": "sum", "tirx.noalias": True})
    lowered = lower_functions(tvm.IRModule({"sum": function}), tvm.target.Target(target.tvm))
    checks: list[tirx.AssertStmt] = []
    tvm_ffi.structural_walk(lowered["sum"].body, (tirx.AssertStmt, checks.append))
    assert not checks
