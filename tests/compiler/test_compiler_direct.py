"""The direct form of `main`, and parallel loops of free length; every comparison with ONNX Runtime runs the former."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from support import builds
from support.models import save_model
from tvmflow.bundle import DIRECT_MAIN
from tvmflow.compiler import CompiledModel, build, direct, import_onnx, lower
from tvmflow.compiler.codegen import code_target
from tvmflow.compiler.direct import add_direct_main
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.machine import machine
from tvmflow.compiler.operators.common import buffer
from tvmflow.compiler.schedules import schedule
from tvmflow.compiler.schedules.common import substitute
from tvmflow.compiler.short_loops import PARALLEL_CYCLES, run_short_loops_alone
from tvmflow.hardware.target import Target

Check = Callable[..., CompiledModel]

# One vector: on the stack, TVM would give it half of the alignment that its kernels rely on.
_VECTOR = 16


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def chain(count: int) -> list[Any]:
    """Nodes from x to y that no fusion joins: a softmax and a cumulated sum in turn."""
    names = ["x", *(f"t{place}" for place in range(count - 1)), "y"]
    return [
        node("CumSum", f"{before} axis", after) if place % 2 else node("Softmax", before, after, axis=1)
        for place, (before, after) in enumerate(pairwise(names))
    ]


AXIS = {"axis": np.array(1, "int64")}


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [[1], ["rows"], [3]], ids=str)
def test_results_in_between_have_memory_of_their_own(rows: list[Any], assert_all_same: Check) -> None:
    several = [
        node("Softmax", "x", "a", axis=1),
        node("CumSum", "a axis", "y"),
        node("ReduceMax", "y axes", "z", keepdims=0),
        node("ArgMax", "y", "label", axis=1, keepdims=0),
        node("Greater", "z limit", "above"),
    ]
    outputs = [("y", [*rows, _VECTOR]), ("label", rows, TensorProto.INT64), ("above", rows, TensorProto.BOOL)]
    feeds = [
        {"x": np.random.default_rng(count).standard_normal((count, _VECTOR), "float32")}
        for count in ((1, 2, 40) if rows == ["rows"] else rows)
    ]
    model = assert_all_same(
        [
            (
                (
                    several,
                    [("x", [*rows, _VECTOR])],
                    outputs,
                    {**AXIS, "axes": np.array([1], "int64"), "limit": np.array(0.7, "float32")},
                ),
                *feeds,
            ),
            ((chain(4), [("x", [*rows, _VECTOR])], [("y", [*rows, _VECTOR])], AXIS), *feeds),
        ]
    )
    assert builds.has_direct_main(model.load().library)


def test_memory_that_no_later_function_reads_is_used_again(tmp_path: Path, native: Target) -> None:
    path = save_model(tmp_path / "model.onnx", chain(7), [("x", ["rows", _VECTOR])], [("y", ["rows", _VECTOR])], AXIS)
    direct = add_direct_main(lower(import_onnx(path), native), 1)[DIRECT_MAIN]
    calls = [item for item in direct.body.block.body.seq if isinstance(item, tirx.Evaluate)]
    allocations = [item for item in direct.body.block.body.seq if isinstance(item, tirx.AllocBuffer)]
    assert (len(calls), len(allocations)) == (7, 2)


def test_a_reshape_between_functions_is_a_view(assert_all_same: Check, tmp_path: Path, native: Target) -> None:
    nodes = [
        node("Softmax", "x", "a", axis=1),
        node("Reshape", "a flat", "b"),
        node("CumSum", "b axis", "c"),
        node("Reshape", "c flat", "d"),
        node("Reshape", "d apart", "e"),
        # The first result is read again after its view.
        node("CumSum", "a axis", "f"),
        node("Add", "e f", "g"),
        node("Softmax", "g", "h", axis=1),
        node("Reshape", "h flat", "y"),
    ]
    weights = {**AXIS, "flat": np.array([1, -1], "int64"), "apart": np.array([-1, _VECTOR], "int64")}
    signature = ([("x", ["rows", _VECTOR])], [("y", [1, "all"])])
    feeds = [{"x": np.random.default_rng(count).standard_normal((count, _VECTOR), "float32")} for count in (1, 3)]
    assert builds.has_direct_main(assert_all_same([((nodes, *signature, weights), *feeds)]).load().library)
    path = save_model(tmp_path / "model.onnx", nodes, *signature, weights)
    direct = add_direct_main(lower(import_onnx(path), native), 1)[DIRECT_MAIN]
    names = [str(item.value.args[0].value) for item in direct.body.block.body.seq if isinstance(item, tirx.Evaluate)]
    assert not [name for name in names if "reshape" in name]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("nodes", "outputs", "copies"),
    [
        ([node("Softmax", "x", "a", axis=1), node("Reshape", "a flat", "y")], ["y"], 0),
        (
            [node("Softmax", "x", "a", axis=1), node("Reshape", "a flat", "b"), node("Reshape", "b turned", "y")],
            ["y"],
            0,
        ),
        ([node("Reshape", "x flat", "y")], ["y"], 1),
        (
            [node("Softmax", "x", "a", axis=1), node("Reshape", "a flat", "y"), node("CumSum", "a axis", "z")],
            ["y", "z"],
            1,
        ),
        ([node("Softmax", "x", "y", axis=1), node("Reshape", "y flat", "z")], ["y", "z"], 1),
        ([node("Softmax", "x", "a", axis=1), *(node("Reshape", "a flat", name) for name in "yz")], ["y", "z"], 1),
    ],
    ids=["written", "view of a view", "input", "read again", "output", "twice"],
)
def test_an_output_is_a_view_of_what_nothing_else_reads(
    nodes: list[Any], outputs: list[str], copies: int, assert_all_same: Check, tmp_path: Path, native: Target
) -> None:
    weights = {**AXIS, "flat": np.array([-1], "int64"), "turned": np.array([_VECTOR, -1], "int64")}
    x = np.random.default_rng(0).standard_normal((3, _VECTOR), "float32")
    signature = ([("x", ["rows", _VECTOR])], outputs, weights)
    loaded = assert_all_same([((nodes, *signature), {"x": x})]).load()
    first = loaded.run(x)
    second = loaded.run(np.ones_like(x))
    # A later call writes to other memory.
    for one, other, again in zip(first, second, loaded.run(x), strict=True):
        assert not np.shares_memory(one, other)
        np.testing.assert_array_equal(one, again)
    direct = add_direct_main(lower(import_onnx(save_model(tmp_path / "model.onnx", nodes, *signature)), native), 1)
    names = re.findall(r'call_cpacked\("(\w+)"', str(direct[DIRECT_MAIN])) if DIRECT_MAIN in direct else ["reshape"]
    assert sum("reshape" in name for name in names) == copies


def test_an_output_that_is_the_beginning_of_a_tensor_is_copied(
    assert_all_same: Check, tmp_path: Path, native: Target
) -> None:
    nodes = [node("Softmax", "x", "a", axis=1), node("Slice", "a from to zero", "y")]
    numbers = {"from": np.array([0]), "to": np.array([4]), "zero": np.array([0])}
    signature = ([("x", [5, _VECTOR])], [("y", [4, _VECTOR])], numbers)
    assert_all_same([((nodes, *signature), {"x": np.ones((5, _VECTOR), "float32")})])
    path = save_model(tmp_path / "model.onnx", nodes, *signature)
    # The caller's memory for the output does not hold the whole tensor.
    assert len(re.findall("call_cpacked", str(add_direct_main(lower(import_onnx(path), native), 1)[DIRECT_MAIN]))) == 2


def test_a_reshape_of_sizes_that_cannot_be_compared_is_a_view(tmp_path: Path, native: Target) -> None:
    nodes = [node("Softmax", "x", "a", axis=1), node("Reshape", "a square", "b"), node("CumSum", "b axis", "y")]
    weights = {**AXIS, "square": np.array([4, 4], "int64")}
    path = save_model(tmp_path / "model.onnx", nodes, [("x", ["rows", "columns"])], [("y", [4, 4])], weights)
    model = builds.assert_same_as_onnxruntime(
        path,
        [{"x": np.random.default_rng(rows).standard_normal((rows, 16 // rows), "float32")} for rows in (1, 2, 8)],
        native,
        inspect=Inspection(after=("CallTIRRewrite",)),
    )
    (lowered,) = model.inspected.passes
    assert "R.reshape(" in lowered.text
    assert "cls.reshape(" not in lowered.text
    direct = add_direct_main(lower(import_onnx(path), native), 1)[DIRECT_MAIN]
    assert "reshape" not in str(direct.body)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("nodes", "inputs", "outputs"),
    [
        ([node("NonZero", "x", "y")], ["x"], [("y", [2, None], TensorProto.INT64)]),
        ([node("Relu", "x", "y"), node("Identity", "x", "z")], ["x"], ["y", "z"]),
        ([node("ReduceSum", "x", "sum"), node("Expand", "sum shape", "y")], ["x"], [("y", [1 << 13, 2])]),
    ],
    ids=["sizes of data", "an input as an output", "a large output"],
)
def test_a_main_that_only_the_virtual_machine_can_run_has_no_direct_form(
    nodes: Sequence[Any], inputs: Sequence[str], outputs: list[Any], tmp_path: Path, native: Target
) -> None:
    shapes = [(name, ["rows", 2 + place]) for place, name in enumerate(inputs)]
    results = outputs or [item.output[0] for item in nodes]
    shape = {"shape": np.array([1 << 13, 2], "int64")}
    path = save_model(
        tmp_path / "model.onnx", nodes, shapes, results, shape if any("shape" in item.input for item in nodes) else {}
    )
    loaded = build(import_onnx(path), native).load()
    assert not builds.has_direct_main(loaded.library)
    feed = [np.ones((2, size), "float32") for _, (_, size) in shapes]
    assert len(loaded.run(*feed)) == len(results)


def test_the_direct_form_calls_functions_of_other_parts_of_the_library(
    tmp_path: Path, native: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmflow.compiler.codegen.PART", 2)
    # Sizes that differ, so that no two of the functions are equal.
    sizes = range(2, 5)
    nodes = [node("Softmax", f"x{size}", f"y{size}") for size in sizes]
    shapes = [(f"x{size}", ["rows", size]) for size in sizes]
    path = save_model(tmp_path / "model.onnx", nodes, shapes, [f"y{size}" for size in sizes])
    feed = [np.random.default_rng(size).standard_normal((3, size), "float32") for size in sizes]
    for cache in (None, tmp_path / "cache"):
        model = build(import_onnx(path), native, cache=cache)
        loaded = model.load()
        outputs = loaded.run(*feed)
        assert builds.has_direct_main(loaded.library)
        for result, output in zip(builds.run_directly(loaded, feed, outputs), outputs, strict=True):
            np.testing.assert_array_equal(result, output)


def test_the_direct_form_refuses_sizes_that_contradict_each_other(tmp_path: Path, native: Target) -> None:
    nodes = [node("Concat", "a b", "c", axis=1), node("CumSum", "c axis", "y")]
    path = save_model(tmp_path / "model.onnx", nodes, [("a", ["n", 4]), ("b", ["m", 4])], [("y", ["n", 8])], AXIS)
    loaded = build(import_onnx(path), native).load()
    assert builds.has_direct_main(loaded.library)
    a, b = (np.random.default_rng(seed).standard_normal((3, 4), "float32") for seed in range(2))
    (direct,) = builds.run_directly(loaded, [a, b], [np.empty((3, 8), "float32")])
    np.testing.assert_allclose(direct, np.hstack([a, b]).cumsum(axis=1), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="match_cast"):
        builds.run_directly(loaded, [a, b[:2]], [np.empty((3, 8), "float32")])


def test_the_direct_form_says_which_size_a_free_one_must_have(tmp_path: Path, native: Target) -> None:
    nodes = [node("Reshape", "x shape", "r"), node("Softmax", "r", "y")]
    weights = {"shape": np.array([1, 24])}
    path = save_model(tmp_path / "model.onnx", nodes, [("x", ["batch", 4, 6])], ["y"], weights)
    loaded = build(import_onnx(path), native).load()
    with pytest.raises(RuntimeError, match=r"match_cast error: batch must be 1$"):
        builds.run_directly(loaded, [np.zeros((2, 4, 6), "float32")], [np.empty((1, 24), "float32")])


def loops(length: Any, inner: Callable[[Any], Any] | None = None) -> tirx.PrimFunc:
    """A function whose parallel loop of `length` adds 1 to x, perhaps in an inner loop of `inner(index)`."""
    size = tirx.Var("size", "int64") if length is None else length
    x, y = buffer("x", (size,)), buffer("y", (size,))
    with IRBuilder() as builder, T.seq_scope(), T.parallel(0, size) as index:
        if inner is None:
            T.buffer_store(y, x[index] + tirx.const(1, "float32"), [index])
        else:
            with T.serial(0, inner(index)) as place:
                T.buffer_store(y, x[place] + tirx.const(1, "float32"), [place])
    attributes = {"global_symbol": "main", PARALLEL_CYCLES: 1000}
    return tirx.PrimFunc([x, y], builder.get().body).with_attr(attributes)


def forms(function: tirx.PrimFunc) -> Any:
    """The statement that a function consists of, after `run_short_loops_alone`."""
    body = run_short_loops_alone(tvm.IRModule({"main": function}))["main"].body
    return body.seq[0] if isinstance(body, tirx.SeqStmt) else body


def test_a_loop_of_free_length_is_parallel_where_it_is_long() -> None:
    function = loops(None)
    branch = forms(function)
    kinds = [int(case.kind) for case in (branch.then_case, branch.else_case)]
    assert kinds == [tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL]
    size = function.params[0].shape[0]
    for length, is_short in ((0, True), (3, True), (10**6, False)):
        assert bool(substitute(branch.condition, {size: tirx.const(length, "int64")})) == is_short
    changed = run_short_loops_alone(tvm.IRModule({"main": function}))
    main = tvm.tirx.build(changed, target=tvm.target.Target("llvm"))["main"]
    for length in (0, 3, 10**5):
        x, y = np.arange(length, dtype="float32"), tvm.runtime.tensor(np.zeros(length, "float32"))
        main(tvm.runtime.tensor(x), y)
        np.testing.assert_array_equal(y.numpy(), x + 1)


def test_a_loop_that_stands_for_a_branch_counts_once() -> None:
    branch = forms(loops(None, lambda index: (index > 3).astype("int64")))
    assert isinstance(branch, tirx.IfThenElse)


def test_a_main_of_very_many_calls_has_no_direct_form(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path / "chain.onnx", [helper.make_node("Softmax", ["x"], ["y"])], [("x", [2, 3])], ["y"])
    assert build(import_onnx(path), target).has_direct_main
    # One call of two tensors of two dimensions.
    monkeypatch.setattr(direct, "_MOST_SIZES", 3)
    assert not build(import_onnx(path), target).has_direct_main


@pytest.mark.parametrize(
    "function",
    [loops(64), loops(None, lambda index: index + 1), loops(None).without_attr(PARALLEL_CYCLES)],
    ids=["fixed length", "lengths that change", "no number of cycles"],
)
def test_other_loops_stay_as_they_are(function: tirx.PrimFunc) -> None:
    assert isinstance(forms(function), tirx.For)


def test_only_functions_of_free_sizes_ask_for_both_forms(native: Target, tmp_path: Path) -> None:
    cpu = replace(machine(native), cores=2)
    for rows, has_both in ((["rows"], True), ([4096], False)):
        path = save_model(tmp_path / "model.onnx", [node("Relu", "x", "y")], [("x", [*rows, 64])], ["y"])
        lowered = lower(import_onnx(path), native)
        functions = [item for _, item in lowered.functions_items() if isinstance(item, tirx.PrimFunc)]
        assert [PARALLEL_CYCLES in schedule(item, cpu)[0].attrs for item in functions] == [has_both]


def test_code_for_x86_keeps_single_loads_unless_the_target_says_otherwise() -> None:
    x86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}
    assert list(code_target({**x86, "mattr": ["+avx512vnni"]}).attrs["mattr"]) == ["+avx512vnni", "+prefer-no-gather"]
    assert list(code_target({**x86, "mattr": ["-prefer-no-gather"]}).attrs["mattr"]) == ["-prefer-no-gather"]
    assert "mattr" not in code_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}).attrs
